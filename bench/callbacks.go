package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/calls/webhook"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

var callbacksBenchmark = benchmark{
	"callbacks",
	"Callbacks: watchers, Redis and the endpoint are killed; a dead or slow endpoint beside another; 100,000 groups for a dead endpoint",
	func(f *flags) runner {
		var groups, rate, seconds, dead int
		f.int(&groups, "groups", 10_000, 100, 0, "groups of a")
		f.int(&rate, "rate", 20, 1, 0, "groups a second of each tenant of b")
		f.int(&seconds, "seconds", 30, 5, 0, "length of each phase of b")
		f.int(&dead, "dead", 100_000, 100, 0, "groups of c")
		var o options
		chosen := f.parts(
			part{"a", func(ctx context.Context) values { return values{"a": callbackFaults(ctx, o, groups)} }},
			part{"b", func(ctx context.Context) values { return values{"b": callbackNeighbours(ctx, o, rate, seconds)} }},
			part{"c", func(ctx context.Context) values { return values{"c": callbackBounds(ctx, o, dead)} }},
		)
		return func(ctx context.Context, given options) (any, error) {
			o = given
			return runParts(ctx, o, chosen(), false)
		}
	},
}

// hookReceiver is the endpoint of a tenant.
type hookReceiver struct {
	addr   string
	server *http.Server
	hold   time.Duration // before it answers

	mu      sync.Mutex
	first   map[string]time.Time // by the id of the event
	calls   int
	invalid int
	secret  string
}

func startReceiver(hold time.Duration) *hookReceiver {
	h := &hookReceiver{addr: "127.0.0.1:0", hold: hold, first: map[string]time.Time{}}
	h.start()
	return h
}

func (h *hookReceiver) start() {
	l := must(net.Listen("tcp", h.addr))
	h.addr, h.server = l.Addr().String(), &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	go func() { _ = h.server.Serve(l) }()
}

func (h *hookReceiver) url() string { return "http://" + h.addr + "/hook" }
func (h *hookReceiver) close()      { _ = h.server.Close() }

func (h *hookReceiver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	select {
	case <-time.After(h.hold):
	case <-r.Context().Done():
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls++
	if err := webhook.Verify(h.secret, r.Header, body, time.Now()); err != nil {
		h.invalid++
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if id := r.Header.Get(webhook.HeaderID); h.first[id].IsZero() {
		h.first[id] = time.Now()
	}
}

func (h *hookReceiver) got() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.first)
}

// callbackRun starts processes with a master key.
func callbackRun(ctx context.Context, o options, env ...string) (x *run, end func()) {
	folder := must(os.MkdirTemp("", "bulkaction-callbacks-"))
	key := filepath.Join(folder, "key")
	check(os.WriteFile(key, []byte(strings.Repeat("k", 64)), 0o600))
	x = startWithAPI(ctx, o, false, nil, append(env, noGlobalLimit, "BULKACTION_CALLBACK_MASTER_KEY_FILE="+key,
		"BULKACTION_CALLBACK_ALLOW_HTTP=true", "BULKACTION_CALLBACK_ALLOWED_CIDRS=127.0.0.0/8")...)
	return x, func() { x.close(); _ = os.RemoveAll(folder) }
}

// tells lets a tenant's endpoint be told.
func (r *run) tells(ctx context.Context, tenant string, h *hookReceiver) {
	must(r.api.SetCallback(ctx, tenant, api.CallbackSettings{URL: h.url()}))
	h.secret = must(r.api.CallbackSecret(ctx, tenant)).Secret
}

// callbackFaults lets groups end while a watcher, Redis and the endpoint are killed in turn.
func callbackFaults(ctx context.Context, o options, n int) values {
	o.aof, o.replicas = true, map[string]int{"watcher": 2}
	x, end := callbackRun(ctx, o)
	defer end()
	always := func() { check(x.conn.Cmd.ConfigSet(ctx, "appendfsync", "always").Err()) }
	always()
	h := startReceiver(0)
	defer h.close()
	x.tells(ctx, "acme", h)
	groups := smallGroups(x.name, n, 1, named("acme"), nil)
	working, stop := context.WithCancel(ctx)
	faults, killing := 0, make(chan error, 1)
	go func() {
		killing <- attempt("kill", func() {
			for i := 0; redisx.Sleep(working, 2*time.Second) == nil; i++ {
				faults++
				switch i % 3 {
				case 0:
					x.kill(func(p process) bool { return p.role == "watcher" })
					x.startRole(o, "watcher", i, x.overrides, "")
				case 1:
					x.server.Kill()
					check(x.server.Restart(ctx))
					always()
				case 2:
					h.close()
					check(redisx.Sleep(ctx, 500*time.Millisecond))
					h.start()
				}
			}
		})
	}()
	for chunk := range slices.Chunk(groups, max(1, n/20)) {
		for redisx.RetryWhile(ctx, time.Minute, func(error) bool { return true }, func(ctx context.Context) error {
			return x.submit(ctx, chunk...)
		}) != nil {
		}
		check(redisx.Sleep(ctx, time.Second))
	}
	stop()
	check(<-killing)
	check(x.awaitEnded(ctx, groups))
	// A callback waits up to five minutes after it has failed twice: an operator sends it at once.
	check(x.await(ctx, "callbacks", time.Second, func() (int, error) {
		pending := 0
		for c, err := range x.api.Callbacks(ctx, client.CallbackFilter{State: api.CallbackPending}) {
			if err != nil {
				return 1, err
			}
			pending++
			_, _ = x.api.Redeliver(ctx, c.ID)
		}
		return n - h.got() + pending, nil
	}))
	report := must(audit.Run(ctx, x.conn, x.space, audit.Options{}))
	missing := 0
	for _, g := range groups {
		if h.first[g.id+".1.completed"].IsZero() {
			missing++
		}
	}
	return values{
		"groups": n, "faults": faults, "ids": len(h.first), "missing": missing, "calls": h.calls, "invalid": h.invalid,
		"audit_ok": report.OK, "overrides": x.overrides,
	}
}

// callbackNeighbours compares how long tenant b waits for its callbacks: beside tenant a without an
// endpoint, with one that is dead, and with one that answers after 14 seconds.
func callbackNeighbours(ctx context.Context, o options, rate, lasts int) values {
	x, end := callbackRun(ctx, o)
	defer end()
	b, slow := startReceiver(0), startReceiver(14*time.Second)
	defer b.close()
	defer slow.close()
	x.tells(ctx, "b", b)
	phase := func(name string) (ended, told []float64) {
		var groups []group
		began := time.Now()
		for i := range rate * lasts {
			g := group{id: fmt.Sprintf("%s-%s-%d", x.name, name, i), tenant: "b", jobs: 1}
			check(x.publishSingle(ctx, g, 0))
			groups = append(groups, g)
			check(x.publishSingle(ctx, group{id: g.id + "-a", tenant: "a", jobs: 1}, 0))
			check(redisx.Sleep(ctx, time.Until(began.Add(time.Duration(i+1)*time.Second/time.Duration(rate)))))
		}
		check(x.awaitEnded(ctx, groups))
		check(x.await(ctx, "callbacks of b", 100*time.Millisecond, func() (int, error) {
			b.mu.Lock()
			defer b.mu.Unlock()
			left := 0
			for _, g := range groups {
				if b.first[g.id+".1.completed"].IsZero() {
					left++
				}
			}
			return left, nil
		}))
		for chunk := range slices.Chunk(groups, 500) {
			for _, g := range must(x.states(ctx, chunk)) {
				ended = append(ended, g.seconds()*1000)
				told = append(told, millis(b.first[g.id+".1.completed"].Sub(g.Completed)))
			}
		}
		return ended, told
	}
	out := values{"rate": rate, "seconds": lasts, "overrides": x.overrides}
	_, _ = phase("warm")
	phases := []struct {
		name, url string
	}{{"alone", ""}, {"dead", "http://127.0.0.1:9/"}, {"alone_again", ""}, {"slow", slow.url()}}
	for _, p := range phases {
		if p.url != "" {
			must(x.api.SetCallback(ctx, "a", api.CallbackSettings{URL: p.url}))
		} else {
			_, _ = x.api.DeleteCallback(ctx, "a")
		}
		ended, told := phase(p.name)
		out[p.name] = values{"ended": quantilesOf(ended), "told": quantilesOf(told)}
	}
	return out
}

// callbackBounds lets groups end for an endpoint that is dead, and then sends all again.
func callbackBounds(ctx context.Context, o options, n int) values {
	x, end := callbackRun(ctx, o)
	defer end()
	h := startReceiver(0)
	x.tells(ctx, "acme", h)
	h.close() // nobody listens there
	memory := func() any { return readInfo(must(x.conn.Cmd.Info(ctx, "memory").Result())).memory }
	groups := smallGroups(x.name, n, 1, named("acme"), nil)
	samples := []values{}
	for chunk := range slices.Chunk(groups, max(1, n/10)) {
		check(x.submit(ctx, chunk...))
		check(x.awaitEnded(ctx, chunk))
		p := x.space.OfTenant("acme")
		pending := must(x.conn.Cmd.ZCard(ctx, p.CallbackQueue("acme")).Result())
		dead := must(x.conn.Cmd.ZCard(ctx, p.DeadCallbacks()).Result())
		bodies := must(x.conn.Cmd.HGet(ctx, p.CallbackBytes(), "acme").Result())
		samples = append(samples, values{"pending": pending, "dead": dead, "body_bytes": bodies, "memory": memory()})
	}
	h.start()
	defer h.close()
	began := time.Now()
	redelivered := int64(0)
	check(x.await(ctx, "all callbacks", 100*time.Millisecond, func() (int, error) {
		sent, err := x.api.RedeliverDead(ctx, "acme")
		if errors.Is(err, api.ErrUnavailable) {
			err = nil
		}
		redelivered += sent.Redelivered
		return n - h.got(), err
	}))
	return values{
		"groups": n, "samples": samples, "redelivered": redelivered, "told": h.got(), "redelivery_seconds": round2(time.Since(began).Seconds()),
		"invalid": h.invalid, "overrides": x.overrides,
	}
}
