package call_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// answer is an error reply, as a server sends it.
type answer string

func (a answer) Error() string { return string(a) }
func (answer) RedisError()     {}

func TestErrorClasses(t *testing.T) {
	opError := func(op string, err error) error { return &net.OpError{Op: op, Net: "tcp", Err: err} }
	for name, test := range map[string]struct {
		err         error
		unavailable bool
		neverSent   bool
	}{
		"nil":                       {},
		"nil reply":                 {err: redis.Nil},
		"cancelled":                 {err: context.Canceled},
		"closed client":             {err: redis.ErrClosed},
		"plain":                     {err: errors.New("LOADING by a stranger")},
		"deadline":                  {err: context.DeadlineExceeded, unavailable: true},
		"read timeout":              {err: opError("read", os.ErrDeadlineExceeded), unavailable: true},
		"reset":                     {err: opError("read", syscall.ECONNRESET), unavailable: true},
		"broken pipe":               {err: opError("write", syscall.EPIPE), unavailable: true},
		"eof":                       {err: io.EOF, unavailable: true},
		"unexpected eof":            {err: io.ErrUnexpectedEOF, unavailable: true},
		"closed under us":           {err: net.ErrClosed, unavailable: true},
		"refused":                   {err: opError("dial", syscall.ECONNREFUSED), unavailable: true, neverSent: true},
		"unknown host":              {err: opError("dial", &net.DNSError{}), unavailable: true, neverSent: true},
		"pool timeout":              {err: redis.ErrPoolTimeout, unavailable: true, neverSent: true},
		"pool exhausted":            {err: redis.ErrPoolExhausted, unavailable: true, neverSent: true},
		"loading":                   {err: answer("LOADING Redis is loading the dataset in memory"), unavailable: true},
		"cluster down":              {err: answer("CLUSTERDOWN The cluster is down"), unavailable: true},
		"try again":                 {err: answer("TRYAGAIN Multiple keys request during rehashing of slot"), unavailable: true},
		"master down":               {err: answer("MASTERDOWN Link with MASTER is down"), unavailable: true},
		"read only":                 {err: answer("READONLY You can't write against a read only replica."), unavailable: true},
		"no replicas":               {err: answer("NOREPLICAS Not enough good replicas to write."), unavailable: true},
		"disk":                      {err: answer("MISCONF Redis is configured to save RDB snapshots"), unavailable: true},
		"busy":                      {err: answer("BUSY Redis is busy running a script."), unavailable: true},
		"too many":                  {err: answer("ERR max number of clients reached"), unavailable: true},
		"oom":                       {err: answer("OOM command not allowed when used memory > 'maxmemory'.")},
		"wrong type":                {err: answer("WRONGTYPE Operation against a key holding the wrong kind of value")},
		"busy group":                {err: answer("BUSYGROUP Consumer Group name already exists")},
		"read only, Redis 6 script": {err: answer("ERR Error running script (call to f_1): @user_script:1: @user_script: 1: -READONLY You can't write against a read only replica."), unavailable: true},
		"error":                     {err: answer("ERR syntax error")},
	} {
		t.Run(name, func(t *testing.T) {
			for _, err := range []error{test.err, wrap(test.err)} {
				require.Equal(t, test.unavailable, call.IsUnavailable(err))
				require.Equal(t, test.neverSent, call.NeverSent(err))
			}
		})
	}
}

func wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("admit partition 3: %w", errors.Join(errors.New("first"), err))
}

func TestErrorCodes(t *testing.T) {
	require.True(t, call.IsNoGroup(answer("UNBLOCKED the stream key no longer exists")))
	require.True(t, call.IsMigrating(answer("ASK 7 127.0.0.1:1")))
	codes := map[string]func(error) bool{
		"OOM command not allowed": call.IsOOM, "NOGROUP No such key": call.IsNoGroup,
		"NOSCRIPT No matching script": call.IsNoScript, "BUSYGROUP Consumer Group name": call.IsBusyGroup,
		"TRYAGAIN Multiple keys request during rehashing of slot": call.IsMigrating, "MOVED 7 127.0.0.1:1": call.IsMoved,
		"NOPERM this user has no permissions to run the 'xack' command": call.IsNoPermission,
	}
	for text := range codes {
		for other, is := range codes {
			require.Equal(t, text == other, is(answer(text)), "%s is %s", text, other)
			require.Equal(t, text == other, is(wrap(answer(text))), "wrapped %s is %s", text, other)
		}
	}
}

// TestErrorCodesOfServers: IsNoScript and IsNoGroup recognize the errors of Redis and of miniredis,
// and IsNoGroup an error NOGROUP that a script has got.
func TestErrorCodesOfServers(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		require.NoError(t, c.Cmd.Set(ctx, "string", "x", 0).Err())

		require.True(t, call.IsNoScript(c.Cmd.EvalSha(ctx, "0000000000000000000000000000000000000000", nil).Err()))
		require.True(t, call.IsNoGroup(c.Cmd.XReadGroup(ctx, &redis.XReadGroupArgs{
			Group: "g", Consumer: "c", Streams: []string{"none", ">"}, Block: -1,
		}).Err()))

		script := func(src string) error {
			_, err := call.NewScript("test", src).Run(ctx, c.Cmd, []string{"string"}, nil)
			return err
		}
		require.True(t, call.IsNoGroup(script(`return redis.call('XPENDING', 'none', 'g', '-', '+', 1)`)))
	})
}

func TestOutOfMemoryIsOOM(t *testing.T) {
	t.Parallel()
	c := connect(t, redistest.Server(t, redistest.MaxMemory(1<<20)).URL())
	require.Eventually(t, func() bool {
		return call.IsOOM(c.Cmd.XAdd(context.Background(), &redis.XAddArgs{Stream: "s", Values: []string{"k", string(make([]byte, 100_000))}}).Err())
	}, patience, time.Millisecond)
}

const (
	patience = 30 * time.Second // limit for events that must happen; a healthy run needs a fraction of it
	glance   = 10 * time.Millisecond
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func connect(t testing.TB, url string) *redisx.Conn {
	t.Helper()
	c, err := redisx.Connect(context.Background(), redisx.Config{URL: url, PoolMaxActive: 20, DialTimeout: patience, CommandTimeout: patience})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

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
