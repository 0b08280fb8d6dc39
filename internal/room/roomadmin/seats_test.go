package roomadmin

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// patience is the longest time that a client waits for an answer that must come.
const patience = 30 * time.Second

// service starts a seat service for the time of the test. The handler answer answers its calls.
func service(t *testing.T, answer http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(answer)
	t.Cleanup(s.Close)
	return s
}

func newClient(t *testing.T, template string, timeout time.Duration) *SeatService {
	t.Helper()
	c, err := NewSeatService(template, timeout)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

func TestSeats(t *testing.T) {
	t.Parallel()
	s := service(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RequestURI() != "/e/concert-7/seats?again=concert-7" || r.Method != http.MethodGet {
			w.WriteHeader(http.StatusTeapot)
			return
		}
		_, _ = fmt.Fprint(w, `{"seats": 1200, "hall": "A"}`)
	})
	c := newClient(t, s.URL+"/e/{event}/seats?again={event}", patience)
	n, err := c.Seats(t.Context(), "concert-7")
	require.NoError(t, err)
	require.EqualValues(t, 1200, n)
}

func TestSeatsOfAnUnknownEvent(t *testing.T) {
	t.Parallel()
	for _, status := range []int{http.StatusNotFound, http.StatusGone} {
		s := service(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) })
		_, err := newClient(t, s.URL+"/{event}", patience).Seats(t.Context(), "x")
		require.ErrorIs(t, err, waitingroom.ErrUnknown)
		require.NotErrorIs(t, err, errNoAnswer)
	}
}

func TestUnusableAnswers(t *testing.T) {
	t.Parallel()
	elsewhere := service(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, `{"seats": 1}`) })
	text := func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, body) }
	}
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		want   string
	}{
		"error":      {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, "status 500"},
		"redirect":   {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, elsewhere.URL, http.StatusFound) }, "status 302"},
		"no content": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) }, "status 204"},
		"empty":      {text(""), `not {"seats": n}`},
		"list":       {text("[1]"), `not {"seats": n}`},
		"no seats":   {text("{}"), "from 0 to 10,000,000"},
		"negative":   {text(`{"seats":-1}`), "from 0 to 10,000,000"},
		"fraction":   {text(`{"seats":1.5}`), "from 0 to 10,000,000"},
		"text":       {text(`{"seats":"5"}`), "from 0 to 10,000,000"},
		"too many":   {text(`{"seats":10000001}`), "from 0 to 10,000,000"},
		"huge":       {text(`{"seats":1e300}`), "from 0 to 10,000,000"},
		"endless":    {text(`{"seats":1,"x":"` + strings.Repeat("x", 1<<20) + `"}`), "more than 65536 bytes"},
		"long head": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X", strings.Repeat("x", 1<<20))
		}, "gave no usable answer"},
		"cut": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			_, _ = fmt.Fprint(w, `{"seats": 1`)
		}, "unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := service(t, c.answer)
			_, err := newClient(t, strings.Replace(s.URL, "//", "//u:secret@", 1)+"/{event}", patience).Seats(t.Context(), "e")
			require.ErrorIs(t, err, errNoAnswer)
			require.ErrorContains(t, err, c.want)
			require.ErrorContains(t, err, "event e")
			require.NotContains(t, err.Error(), "secret")
			require.NotContains(t, err.Error(), s.URL)
		})
	}
}

func TestSilentServices(t *testing.T) {
	t.Parallel()
	end := make(chan struct{})
	s := service(t, func(w http.ResponseWriter, _ *http.Request) {
		w.(http.Flusher).Flush()
		<-end
	})
	defer close(end)
	_, err := newClient(t, s.URL+"/{event}", time.Millisecond).Seats(t.Context(), "e")
	require.ErrorIs(t, err, errNoAnswer)
	require.ErrorContains(t, err, "nothing came within 1ms")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = newClient(t, s.URL+"/{event}", patience).Seats(ctx, "e")
	require.ErrorIs(t, err, errNoAnswer)
	require.ErrorIs(t, err, context.Canceled)

	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	_, err = newClient(t, gone.URL+"/{event}", patience).Seats(t.Context(), "e")
	require.ErrorIs(t, err, errNoAnswer)
	require.ErrorContains(t, err, "connection refused")
}

func TestTemplates(t *testing.T) {
	t.Parallel()
	for template, want := range map[string]string{
		"http://h/{event}":                   "",
		"https://u:p@h:8443/a?event={event}": "",
		"http://h/seats":                     "must contain {event}",
		"http://{event}.h/seats":             "only after the host",
		"http://{event}/seats":               "only after the host",
		"http://{event}:pass@h/{event}":      "only after the host",
		"ftp://h/{event}":                    "must be an address",
		"h/{event}":                          "must be an address",
		"":                                   "must be an address",
		"http://secret@[::1/{event}":         "must be an address",
	} {
		err := checkTemplate(template)
		if want == "" {
			require.NoError(t, err, template)
			continue
		}
		require.ErrorContains(t, err, want, template)
		require.NotContains(t, err.Error(), "secret")
		_, err = NewSeatService(template, time.Second)
		require.Error(t, err)
	}
}
