package roomapi

import (
	"math"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

var noon = time.Date(2026, 11, 23, 12, 0, 0, 5_999_999, time.UTC)

// frames returns what the stream would write now.
func frames(s *Stream) string {
	b, _ := s.append(nil)
	return string(b)
}

func TestFrames(t *testing.T) {
	t.Parallel()
	s := NewStream()
	s.State(api.TicketInEntry, api.ModeOpen)
	require.Equal(t, "event: state\ndata: {\"state\":\"IN_ENTRY\",\"mode\":\"open\"}\n\n", frames(s))
	s.Position(Position{Position: 3, Total: 1000, ETASeconds: -1, At: noon})
	require.Equal(t, "event: position\ndata: {\"position\":3,\"total\":1000,\"eta_seconds\":null,\"at\":\"2026-11-23T12:00:00.005Z\"}\n\n", frames(s))
	s.Position(Position{Position: 3, Total: 1000, ETASeconds: 12.3456, At: noon.In(time.FixedZone("KST", 9*3600))})
	require.Equal(t, "event: position\ndata: {\"position\":3,\"total\":1000,\"eta_seconds\":12.3,\"at\":\"2026-11-23T12:00:00.005Z\"}\n\n", frames(s))
	s.Admitted(api.EntryToken{Token: "a.b.c", ExpiresAt: noon.Truncate(time.Second)}, "https://shop.example/?a=1&b=2")
	require.Equal(t, "event: admitted\ndata: {\"token\":\"a.b.c\",\"expires_at\":\"2026-11-23T12:00:00Z\",\"return_url\":\"https://shop.example/?a=1\\u0026b=2\"}\n\n", frames(s))
	s.Ended(EndedLeft)
	require.Equal(t, "id: ended\nevent: ended\ndata: {\"reason\":\"left\"}\n\n", frames(s))

	s = NewStream()
	s.Reconnect(ReconnectDraining)
	require.Regexp(t, "^retry: ([3-9][0-9]{3}|10000)\nevent: reconnect\ndata: {\"reason\":\"draining\"}\n\n$", frames(s))
}

func TestOrderOfFrames(t *testing.T) {
	t.Parallel()
	token := api.EntryToken{Token: "a", ExpiresAt: noon}
	at := func(n int64) Position { return Position{Position: n, Total: 9, ETASeconds: -1, At: noon} }
	for name, c := range map[string]struct {
		do   func(s *Stream)
		want []string // the beginnings of the frames
		end  bool
	}{
		"nothing":                            {func(*Stream) {}, nil, false},
		"a position waits for the state":     {func(s *Stream) { s.Position(at(2)) }, nil, false},
		"the state first":                    {func(s *Stream) { s.Position(at(2)); s.State("a", "b") }, []string{"state", `position {"position":2`}, false},
		"a newer position replaces":          {func(s *Stream) { s.State("a", "b"); s.Position(at(2)); s.Position(at(1)) }, []string{"state", `position {"position":1`}, false},
		"a newer state replaces":             {func(s *Stream) { s.State("a", "b"); s.State("c", "d") }, []string{`state {"state":"c","mode":"d"}`}, false},
		"a position replaces nothing else":   {func(s *Stream) { s.State("a", "b"); s.Admitted(token, ""); s.Position(at(1)) }, []string{"state", "admitted"}, false},
		"no position beside the token":       {func(s *Stream) { s.State("a", "b"); s.Position(at(1)); s.Admitted(token, "") }, []string{"state", "admitted"}, false},
		"the token before the end":           {func(s *Stream) { s.State("a", "b"); s.Admitted(token, ""); s.Ended("gone") }, []string{"state", "admitted", `ended {"reason":"gone"}`}, true},
		"the first end counts":               {func(s *Stream) { s.Ended("left"); s.Reconnect("busy"); s.Ended("gone"); s.State("a", "b") }, []string{`ended {"reason":"left"}`}, true},
		"no position before the end":         {func(s *Stream) { s.State("a", "b"); s.Position(at(1)); s.Ended("closed") }, []string{"state", "ended"}, true},
		"the token before reconnect":         {func(s *Stream) { s.Admitted(token, ""); s.Reconnect("draining") }, []string{"admitted", "reconnect"}, true},
		"reconnect is not replaced by ended": {func(s *Stream) { s.Reconnect("draining"); s.Ended("gone") }, []string{"reconnect"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := NewStream()
			c.do(s)
			b, end := s.append(nil)
			require.Equal(t, c.end, end)
			var got []string
			for _, frame := range strings.SplitAfter(string(b), "\n\n") {
				if _, event, ok := strings.Cut(strings.TrimSpace(frame), "event: "); ok {
					got = append(got, strings.Replace(event, "\ndata: ", " ", 1))
				}
			}
			require.Len(t, got, len(c.want), "%q", b)
			for i, want := range c.want {
				require.True(t, strings.HasPrefix(got[i], want), "%q: %s", got[i], want)
			}
			require.Empty(t, frames(s), "each frame is written once")
		})
	}
}

func TestUnchangedFramesAreNotSent(t *testing.T) {
	t.Parallel()
	s := NewStream()
	s.State("a", "b")
	s.Position(Position{Position: 2, Total: 9, ETASeconds: 10, At: noon})
	require.NotEmpty(t, frames(s))
	s.State("a", "b")
	s.Position(Position{Position: 2, Total: 9, ETASeconds: 10.04, At: noon.Add(time.Second)})
	require.Empty(t, frames(s))
	s.Position(Position{Position: 2, Total: 8, ETASeconds: 10, At: noon})
	require.NotEmpty(t, frames(s))
}

func TestETAOfAnyNumber(t *testing.T) {
	t.Parallel()
	for eta, want := range map[float64]string{
		0: "0", 0.04: "0", 59.95: "60", 1e9: "1000000000", -0.1: "null", math.Inf(1): "null", math.Inf(-1): "null", math.NaN(): "null",
	} {
		s := NewStream()
		s.State("a", "b")
		_ = frames(s)
		s.Position(Position{Position: 1, Total: 1, ETASeconds: eta, At: noon})
		require.Contains(t, frames(s), `"eta_seconds":`+want+`,`, "%v", eta)
	}
}

func TestRetryIsRandom(t *testing.T) {
	t.Parallel()
	seen, a := map[string]bool{}, New(options(newFakeRoom()))
	for range 50 {
		s := NewStream()
		s.State("a", "b")
		s.Ended(EndedLeft)
		rec := httptest.NewRecorder()
		require.NoError(t, a.pump(rec, httptest.NewRequestWithContext(t.Context(), "GET", "/", nil), s))
		first, _, _ := strings.Cut(rec.Body.String(), "\n")
		require.Regexp(t, "^retry: ([1-4][0-9]{3}|5000)$", first)
		seen[first] = true
	}
	require.Greater(t, len(seen), 10)
}

// BenchmarkPositionFrame makes position frames in one buffer, which should cost no allocation.
func BenchmarkPositionFrame(b *testing.B) {
	s := NewStream()
	s.State("IN_ENTRY", "open")
	buf, _ := s.append(make([]byte, 0, 512))
	b.ReportAllocs()
	for n := int64(0); b.Loop(); n++ {
		s.Position(Position{Position: n, Total: 123456, ETASeconds: float64(n), At: noon})
		buf, _ = s.append(buf[:0])
	}
}
