package redisx_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// reply is an error reply, as a server sends it.
type reply string

func (r reply) Error() string { return string(r) }
func (reply) RedisError()     {}

// TestLoopsLogAnOutageOnce: an outage is logged once. The move of a hash slot is a warning, any
// other reason an error.
func TestLoopsLogAnOutageOnce(t *testing.T) {
	t.Parallel()
	const moved, failed, works = "level=WARN msg=moved\n", "level=ERROR msg=failed\n", "level=INFO msg=works\n"
	tryAgain, ask, down := reply("TRYAGAIN Multiple keys request during rehashing of slot"), reply("ASK 7 127.0.0.1:1"), errors.New("refused")
	for name, test := range map[string]struct {
		errs []error // of consecutive steps
		want string
	}{
		"nothing":                     {[]error{nil, nil}, ""},
		"an outage":                   {[]error{down, down, nil}, failed + works},
		"two outages":                 {[]error{down, nil, down, nil}, failed + works + failed + works},
		"a move":                      {[]error{tryAgain, ask, tryAgain, nil}, moved + works},
		"an outage during a move":     {[]error{tryAgain, down, tryAgain, down, nil}, moved + failed + works},
		"a move during an outage":     {[]error{down, tryAgain, nil}, failed + works},
		"an outage later than a move": {[]error{tryAgain, nil, down, nil}, moved + works + failed + works},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log bytes.Buffer
			words := map[string]string{
				"a hash slot is being moved to another redis node, trying again until it is there": "moved",
				"step failed, trying again until it works":                                         "failed",
				"step works again": "works",
			}
			loops := redisx.Loops{Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
				switch a.Key {
				case slog.LevelKey:
					return a
				case slog.MessageKey:
					return slog.String(a.Key, words[a.Value.String()])
				}
				return slog.Attr{}
			}}))}
			ctx, stop := context.WithCancel(t.Context())
			steps := test.errs
			loops.Run(ctx, "loop", redisx.Backoff{Min: time.Nanosecond, Max: time.Nanosecond}, func(context.Context) (time.Duration, error) {
				err := steps[0]
				if steps = steps[1:]; len(steps) == 0 {
					stop() // after this step
				}
				return 0, err
			}, nil)
			require.Equal(t, test.want, log.String())
		})
	}
}

// TestLoopLogsHowLongItFailed: the time of an outage is logged as a text that people can read.
func TestLoopLogsHowLongItFailed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		loops := redisx.Loops{Log: slog.New(slog.NewJSONHandler(&log, nil))}
		ctx, stop := context.WithCancel(t.Context())
		failing := true
		loops.Run(ctx, "loop", redisx.Backoff{Min: 26796 * time.Millisecond, Max: 26796 * time.Millisecond},
			func(context.Context) (time.Duration, error) {
				if failing {
					failing = false
					return 0, errors.New("refused")
				}
				stop()
				return 0, nil
			}, nil)
		require.Regexp(t, `"msg":"step works again","loop":"loop","after":"[0-9.]+s"`, log.String())
	})
}

// TestServeInMemory: a server inside the process is reached by its registered address until it is
// removed.
func TestServeInMemory(t *testing.T) {
	t.Parallel()
	mini := miniredis.NewMiniRedis()
	t.Cleanup(mini.Close)
	dial := func(context.Context, string, string) (net.Conn, error) { return mini.Dial() }
	ping := func() error {
		conn, err := redisx.Connect(t.Context(), redisx.Config{URL: "redis://in-memory.invalid:6379"})
		require.NoError(t, err)
		defer conn.Close()
		return conn.Ping(t.Context())
	}
	remove := redisx.ServeInMemory("in-memory.invalid:6379", dial)
	require.NoError(t, ping())
	remove()
	require.True(t, call.IsUnavailable(ping()))
}
