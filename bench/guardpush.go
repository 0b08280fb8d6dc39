package bench

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/processor/push"
)

// GuardPush has the figures of the part push: push messages sent by an account without a rate, with
// any number of calls at once. Of 100 pushes, one gets 429 at first, one 500, one 503, and one 410
// always.
type GuardPush struct {
	Push PushFigures `json:"push"`
}

// PushFigures are the figures of one worker process with the default number of slots, which sends
// to a fake APNs server in this process.
type PushFigures struct {
	Pushes    int     `json:"pushes"`
	PerSecond float64 `json:"per_second"` // from the first call to the last one, by the server's clock
	// Wrong is the number of pushes that were not accepted exactly once, or, if always answered
	// with 410, were not sent exactly once.
	Wrong       int `json:"wrong"`
	Connections int `json:"connections"`

	overrides map[string]string // settings of the worker's fleet
}

// pushServer is a fake APNs server. The number of a push, which decides its answer, is the end of
// its device token.
type pushServer struct {
	*httptest.Server
	calls, accepted   []atomic.Int32 // by push
	connections       atomic.Int64
	firstNano, latest atomic.Int64
}

const benchToken = "be7c4-"

func startPushServer(pushes int) *pushServer {
	s := &pushServer{calls: make([]atomic.Int32, pushes), accepted: make([]atomic.Int32, pushes)}
	s.Server = httptest.NewUnstartedServer(s)
	s.EnableHTTP2 = true
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			s.connections.Add(1)
		}
	}
	s.StartTLS()
	return s
}

func (s *pushServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	now := time.Now().UnixNano()
	s.firstNano.CompareAndSwap(0, now)
	s.latest.Store(now)
	i, err := strconv.Atoi(strings.TrimPrefix(r.URL.Path, "/3/device/"+benchToken))
	if err != nil || i >= len(s.calls) {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	first := s.calls[i].Add(1) == 1
	switch kind := i % 100; {
	case kind == 1 && first:
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
		fmt.Fprint(w, `{"reason":"TooManyRequests"}`)
	case kind == 34 && first:
		w.WriteHeader(http.StatusInternalServerError)
	case kind == 67 && first:
		w.WriteHeader(http.StatusServiceUnavailable)
	case kind == 99:
		w.WriteHeader(http.StatusGone)
		fmt.Fprint(w, `{"reason":"Unregistered"}`)
	default:
		s.accepted[i].Add(1)
	}
}

// wrong returns how many pushes were not accepted exactly once, or, where the answer is 410, not
// called exactly once.
func (s *pushServer) wrong() (n int) {
	for i := range s.calls {
		if gone := i%100 == 99; gone && s.calls[i].Load() != 1 || !gone && s.accepted[i].Load() != 1 {
			n++
		}
	}
	return n
}

// accountsFile writes a file with one account of the server, the account's signing key, and the
// server's certificate. It returns the paths of the first and the last.
func (s *pushServer) accountsFile(folder string) (file, authority string, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", "", err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return "", "", err
	}
	file, authority = filepath.Join(folder, "push.yaml"), filepath.Join(folder, "ca.pem")
	entry := fmt.Sprintf("{id: shop, key_file: key.p8, key_id: K, team_id: T, topic: org.example, url: %q, %s}",
		s.URL, "rate: none, concurrency: unbounded")
	certificate := &pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}
	for name, content := range map[string][]byte{
		filepath.Join(folder, "key.p8"): pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}),
		authority:                       pem.EncodeToMemory(certificate),
		file:                            []byte("apns: [" + entry + "]\n"),
	} {
		if err := os.WriteFile(name, content, 0o600); err != nil {
			return "", "", fmt.Errorf("write the account: %w", err)
		}
	}
	return file, authority, nil
}

// push sends push messages through the roles.
func (o GuardsOptions) push(ctx context.Context) (out GuardPush, err error) {
	pushes := 100_000
	if o.Quick {
		pushes = 10_000
	}
	server := startPushServer(pushes)
	defer server.Close()
	folder, err := os.MkdirTemp("", "bulkaction-push-")
	if err != nil {
		return out, fmt.Errorf("make a folder for accounts: %w", err)
	}
	defer func() { _ = os.RemoveAll(folder) }()
	file, authority, err := server.accountsFile(folder)
	if err != nil {
		return out, err
	}
	roles := o.Options
	roles.RedisURL = "" // the roles have a Redis of their own
	x, err := roles.experiment(ctx, "push", func(x *run) error {
		g := group{id: x.name + "-push", tenant: "shop", jobs: pushes, fails: pushes / 100}
		g.fields = map[string]any{"type": push.Type}
		g.job = func(i int) []byte {
			return fmt.Appendf(nil, `{"payload":{"to":{"apns":"%s%d"},"title":"Sale"}}`, benchToken, i)
		}
		return x.submit(ctx, g)
	}, noGlobalLimit, "BULKACTION_WORKER_TYPES="+push.Type, "BULKACTION_PUSH_ACCOUNTS_FILE="+file,
		"BULKACTION_PUSH_TLS_CA_FILE="+authority, "BULKACTION_PUSH_ACCOUNT_BREAKER=20/1s/3",
		"BULKACTION_BACKPRESSURE_DEFAULT_BACKOFF=100ms", "BULKACTION_CONGESTION_BASE_BACKOFF=100ms")
	if err != nil {
		return out, err
	}
	took := time.Duration(server.latest.Load() - server.firstNano.Load())
	if took <= 0 {
		return out, errors.New("the push server was called once or never")
	}
	out.Push = PushFigures{
		Pushes: pushes, PerSecond: measure.Round4(float64(pushes) / took.Seconds()),
		Wrong: server.wrong(), Connections: int(server.connections.Load()), overrides: x.overrides,
	}
	return out, nil
}
