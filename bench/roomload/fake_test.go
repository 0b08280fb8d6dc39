package roomload

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/stretchr/testify/require"
)

// fakeBroker is a fake of a broker. Each test says what its streams contain.
type fakeBroker struct {
	*httptest.Server
	key   ed25519.PrivateKey
	fence atomic.Int64

	// stream is called for each stream that a user opens, and writes its frames. s.n is the number
	// of the user's earlier streams.
	stream func(s *fakeStream)

	mu      sync.Mutex
	streams map[string]int
	left    []string
}

type fakeStream struct {
	*fakeBroker
	http.ResponseWriter
	ctx         context.Context //nolint:containedctx // of the request
	user, event string
	n           int
}

func newFakeBroker(t *testing.T, stream func(*fakeStream)) *fakeBroker {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	b := &fakeBroker{key: key, stream: stream, streams: map[string]int{}}
	b.fence.Store(time.Now().UnixMicro())
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/jwks.json", func(w http.ResponseWriter, _ *http.Request) {
		x := base64.RawURLEncoding.EncodeToString(key.Public().(ed25519.PublicKey))
		_ = json.NewEncoder(w).Encode(map[string]any{"keys": []any{map[string]string{"kty": "OKP", "crv": "Ed25519", "kid": "k1", "x": x}}})
	})
	mux.HandleFunc("GET /events/{event}/tickets/waiting", func(w http.ResponseWriter, r *http.Request) {
		user := r.Header.Get("X-User")
		b.mu.Lock()
		n := b.streams[user]
		b.streams[user]++
		b.mu.Unlock()
		w.Header().Set("Content-Type", "text/event-stream")
		b.stream(&fakeStream{b, w, r.Context(), user, r.PathValue("event"), n})
	})
	mux.HandleFunc("DELETE /events/{event}/ticket", func(w http.ResponseWriter, r *http.Request) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.left = append(b.left, r.Header.Get("X-User"))
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("POST /events/{event}/ticket", func(w http.ResponseWriter, r *http.Request) {
		b.mu.Lock()
		defer b.mu.Unlock()
		status := http.StatusCreated
		if user := r.Header.Get("X-User"); b.streams[user] > 0 {
			status = http.StatusOK
		}
		b.streams[r.Header.Get("X-User")]++
		w.WriteHeader(status)
		_, _ = w.Write([]byte(`{"state":"IN_ENTRY"}`))
	})
	mux.HandleFunc("POST /v1/entry-tokens/complete", func(w http.ResponseWriter, r *http.Request) {
		var body struct{ Token string }
		_ = json.NewDecoder(r.Body).Decode(&body)
		_, _ = fmt.Fprintf(w, `{"done":%t}`, body.Token != "")
	})
	b.Server = httptest.NewServer(mux)
	t.Cleanup(b.Close)
	return b
}

func (s *fakeStream) send(frames ...string) {
	for _, f := range frames {
		_, _ = io.WriteString(s, f)
		_ = http.NewResponseController(s.ResponseWriter).Flush()
	}
}

func (s *fakeStream) state() {
	s.send("retry: 1\n\nevent: state\ndata: {\"state\":\"IN_ENTRY\",\"mode\":\"open\"}\n\n")
}

func (s *fakeStream) position(n int) {
	s.send(fmt.Sprintf("event: position\ndata: {\"position\":%d,\"total\":100,\"eta_seconds\":null,\"at\":%q}\n\n",
		n, time.Now().Format(time.RFC3339Nano)))
}

// admitted sends a token that change may change.
func (s *fakeStream) admitted(change func(jwt.MapClaims, *jwt.Token)) {
	exp := time.Now().Add(time.Minute)
	c := jwt.MapClaims{
		"iss": "http://room", "aud": s.event, "evt": s.event, "sub": s.user, "iat": time.Now().Unix(),
		"exp": exp.Unix(), "jti": strconv.FormatInt(s.fence.Add(1), 10),
	}
	token := jwt.NewWithClaims(jwt.SigningMethodEdDSA, c)
	token.Header["kid"] = "k1"
	if change != nil {
		change(c, token)
	}
	text, err := token.SignedString(s.key)
	if err != nil {
		panic(err)
	}
	s.send(fmt.Sprintf("event: admitted\ndata: {\"token\":%q,\"expires_at\":%q,\"return_url\":\"\"}\n\n", text, exp.Format(time.RFC3339Nano)))
}

// open waits until the user ends the stream.
func (s *fakeStream) open() { <-s.ctx.Done() }

// driver gives a task to Serve and asks for answers.
type driver struct {
	t       *testing.T
	in      *io.PipeWriter
	send    *json.Encoder
	answers *json.Decoder
}

// drive starts a task of the load generator against a fake broker. Of the task it sets the brokers,
// keys, header, issuer, events and prefix, and the kind Streams if it has none.
func drive(t *testing.T, b *fakeBroker, task Task) *driver {
	t.Helper()
	tasksOut, tasksIn := io.Pipe()
	answersOut, answersIn := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := Serve(context.WithoutCancel(t.Context()), tasksOut, answersIn)
		_ = answersIn.CloseWithError(io.EOF)
		done <- err
	}()
	t.Cleanup(func() {
		_ = tasksIn.Close()
		_ = answersOut.Close()
		if err := <-done; err != nil {
			t.Log(err)
		}
	})
	if task.Kind == "" {
		task.Kind = Streams
	}
	task.Brokers, task.Keys = []string{b.Listener.Addr().String()}, b.URL+"/.well-known/jwks.json"
	task.Header, task.Issuer, task.Events, task.Prefix = "X-User", "http://room", []string{"e"}, "u"
	d := &driver{t, tasksIn, json.NewEncoder(tasksIn), json.NewDecoder(answersOut)}
	require.NoError(t, d.send.Encode(task))
	require.Empty(t, d.answer().Error)
	d.step(Begin)
	return d
}

func (d *driver) answer() (a Answer) {
	d.t.Helper()
	require.NoError(d.t, d.answers.Decode(&a))
	return a
}

func (d *driver) step(do string) Answer {
	d.t.Helper()
	require.NoError(d.t, d.send.Encode(Step{Do: do}))
	return d.answer()
}

// await asks for answers until reached returns true, and returns the last one. After 20 s the test
// fails.
func (d *driver) await(reached func(Answer) bool) Answer {
	d.t.Helper()
	for end := time.Now().Add(20 * time.Second); ; <-time.After(time.Millisecond) {
		a := d.step(Look)
		if reached(a) {
			return a
		}
		require.True(d.t, time.Now().Before(end), "not reached: %+v", a)
	}
}
