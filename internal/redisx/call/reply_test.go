package call_test

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

var echo = call.NewScript("echo", `return {'a', 7, '8', '1.7e+12', {'b', {}}, -5, 0}`)

type echoed struct {
	text           string
	number, digits int64
	at             time.Time
	inner          []string
	innermost      []int64
	wait           time.Duration
	never          time.Time
}

func readEchoed(r *call.Reply) (echoed, error) {
	e := echoed{text: r.Code("z", "a"), number: r.Number(), digits: r.Number(), at: r.Time()}
	list := r.List()
	e.inner, e.innermost = append(e.inner, list.Text()), list.List().Numbers()
	e.wait, e.never = r.Duration(), r.Time()
	return call.Done(r, e)
}

func TestReplyOfServers(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		got, err := readEchoed(echo.Read(context.Background(), c.Cmd, nil, nil))
		require.NoError(t, err)
		require.Equal(t, echoed{
			text: "a", number: 7, digits: 8, at: time.UnixMilli(1_700_000_000_000), inner: []string{"b"},
			innermost: []int64{}, wait: -5 * time.Millisecond,
		}, got)

		require.NoError(t, c.Close())
		_, err = readEchoed(echo.Read(context.Background(), c.Cmd, nil, nil))
		require.ErrorIs(t, err, redis.ErrClosed)
	})
}

// TestUnexpectedReplies: a reply that lacks a value, has one too many or one of another type,
// anywhere, is an error that names the script.
func TestUnexpectedReplies(t *testing.T) {
	good := func() []any { return []any{"a", int64(7), "8", "1", []any{"b", []any{int64(1)}}, int64(1), int64(0)} }
	_, err := readEchoed(echo.Reply(good()))
	require.NoError(t, err)
	for name, reply := range map[string]any{
		"2 values too many":             append(good(), "x", int64(1)),
		"too short":                     good()[:6],
		"[]interface {} instead of a":   append(good()[:6], []any{}),
		"int64 instead of a list":       append(good()[:4], int64(1), int64(1), int64(0)),
		"<nil> instead of a list":       append(good()[:4], nil, int64(1), int64(0)),
		`"b" instead of a number`:       append(good()[:1], "b", "8"),
		`"" instead of a number`:        append(good()[:1], "", "8"),
		`"c" instead of z or a`:         []any{"c"},
		"1 values too many":             append(good()[:4], []any{"b", []any{}, "c"}, int64(1), int64(0)),
		"<nil> instead of a number":     append(good()[:4], []any{"b", []any{nil}}, int64(1), int64(0)),
		"int64 instead of z or a":       int64(0),
		"float64 instead of a text":     []any{1.5},
		"script echo: unexpected reply": nil,
	} {
		if name == "int64 instead of z or a" {
			name = `"0" instead of z or a` // a reply that is no list is a list of one value
		}
		got, err := readEchoed(echo.Reply(reply))
		require.ErrorContains(t, err, name)
		require.ErrorContains(t, err, "script echo: unexpected reply: ")
		require.Zero(t, got)
	}
	// What follows the first fault reads as nothing, and the first fault stays.
	r := echo.Reply([]any{"x", "y"})
	require.Zero(t, r.Number())
	require.Empty(t, r.Text())
	require.Nil(t, r.Peek())
	require.False(t, r.More())
	require.ErrorContains(t, r.Err(), `"x" instead of a number`)
}
