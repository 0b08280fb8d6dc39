package client

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
)

// WithSleep replaces the function that waits between retries, so that tests record the waits and
// take no time.
func WithSleep(sleep func(context.Context, time.Duration) error) Option {
	return func(a *API) { a.sleep = sleep }
}

// WithSilence sets how long a stream of events may be silent before the client connects again.
func WithSilence(d time.Duration) Option {
	return func(a *API) { a.silenceTimeout = d }
}

// WithOutage sets for how long the client tries to continue a broken stream of events.
func WithOutage(d time.Duration) Option {
	return func(a *API) { a.outageTimeout = d }
}

// OriginOf is originOf.
var OriginOf = originOf

// FuzzMessages checks that a stream of events holds the same messages whether it is read at once or
// byte by byte, and that no id has a line break or a NUL.
func FuzzMessages(f *testing.F) {
	for _, seed := range []string{
		"id: 1.2\nevent: group.running\ndata: {}\n\n", "data:a\ndata: b\n\nretry: 5\n\n: ping\n\n", "id\n\ndata\n\n", "id: a\x00b\ndata: x\r\n\r\n", "data: cut off", "retry: -1\nretry: 99999999999\n\n",
	} {
		f.Add([]byte(seed))
	}
	all := func(t *testing.T, r io.Reader) (found []sseMessage, wait time.Duration) {
		m := newMessageReader(r)
		for {
			msg, err := m.next()
			if err != nil {
				require.ErrorIs(t, err, io.EOF)
				return found, m.retry
			}
			found = append(found, msg)
		}
	}
	f.Fuzz(func(t *testing.T, stream []byte) {
		whole, wait := all(t, bytes.NewReader(stream))
		bits, again := all(t, iotest.OneByteReader(bytes.NewReader(stream)))
		require.Equal(t, whole, bits)
		require.Equal(t, wait, again)
		require.GreaterOrEqual(t, wait, time.Duration(0))
		for _, m := range whole {
			require.False(t, strings.ContainsAny(m.id, "\n\x00"), "%q", m.id)
		}
	})
}

func TestRetryAfter(t *testing.T) {
	for header, want := range map[string]time.Duration{
		"": 0, "7": 7 * time.Second, " 1.5 ": 1500 * time.Millisecond, "18446744073709551616": 24 * time.Hour,
		strings.Repeat("9", 400): 24 * time.Hour, "-1": 0, "-1e999": 0, "NaN": 0, "soon": 0, "1.5.0": 0,
	} {
		require.Equal(t, want, retryAfter(header, time.Now()), header)
	}
}

func FuzzRetryAfter(f *testing.F) {
	for _, seed := range []string{"", "0", "120", "-1", " 5 ", "99999999999999999999", "2147483647", "Fri, 31 Dec 9999 23:59:59 GMT", "Mon, 01 Jan 0001 00:00:00 GMT", "soon"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, header string) {
		require.GreaterOrEqual(t, retryAfter(header, time.Now()), time.Duration(0))
	})
}
