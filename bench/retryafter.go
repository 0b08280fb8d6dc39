package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

// RetryAfter shows whether a client that is refused with 429, and waits exactly as long as
// Retry-After says, is accepted on its next try.
type RetryAfter struct {
	RetryAccepted     float64 `json:"retry_after_accepted_ratio"` // accepted tries / all tries after such a wait
	RetryTries        int     `json:"retry_after_tries"`
	RetryFirstRefused int     `json:"retry_after_first_tries_refused"`
	RetryFirstTries   int     `json:"retry_after_first_tries"`
	RetryWaitP50      float64 `json:"retry_after_p50_seconds"` // of all waits that were asked for
	RetryWaitMax      float64 `json:"retry_after_max_seconds"`
	RetryMaxBacklog   int     `json:"retry_after_max_backlog"` // the limit of the backlog, in jobs
	// jobs a second of the workers: waits that are too long would leave them idle
	RetryPerSecond float64 `json:"retry_after_jobs_per_second"`
}

const (
	retryClientCount = 40
	retryBatches     = 6
	retryBacklog     = 2000
)

// tryResult is the answer to one try of a client.
type tryResult struct {
	afterWait  bool // the client has waited as a refusal asked
	accepted   bool
	retryAfter time.Duration
}

func runRetryAfter(ctx context.Context, o FairnessOptions, out *Fairness) (map[string]string, error) {
	addr, err := freeAddr(ctx)
	if err != nil {
		return nil, err
	}
	x, err := startExperiment(ctx, o.Options, setup{env: map[string]string{
		"BULKACTION_API_ADDR":           addr,
		"BULKACTION_INGEST_MAX_BACKLOG": strconv.Itoa(retryBacklog),
	}})
	if err != nil {
		return nil, err
	}
	defer x.close()
	if err := x.fleet.awaitAPI(ctx, addr); err != nil {
		return nil, err
	}
	// Ingest learns how fast the workers are only when they have run jobs.
	if _, err := x.runOneByOne(ctx, "retry-after", []group{x.smallGroup("warm", 0, "warm")}); err != nil {
		return nil, err
	}
	c := &retryingClients{x: x, url: "http://" + addr + "/v1/groups"}
	if err := c.run(ctx, o.Seed); err != nil {
		return nil, err
	}
	ended, _, err := x.finish(ctx, "retry-after")
	if err != nil {
		return nil, err
	}
	r := countTries(c.tries)
	if r.RetryTries == 0 {
		return nil, errors.New("no client was refused: the backlog was never full")
	}
	r.RetryMaxBacklog = retryBacklog
	jobs := 0
	for _, g := range c.groups {
		jobs += g.jobs
	}
	r.RetryPerSecond = round2(float64(jobs) / makespan(ended[1:]))
	out.RetryAfter = &r
	return x.overrides, nil
}

// retryingClients submit groups over HTTP. When a client is refused, it waits as long as
// Retry-After says and tries again.
type retryingClients struct {
	x   *experiment
	url string

	mu     sync.Mutex
	tries  []tryResult
	groups []group
}

func (c *retryingClients) run(ctx context.Context, seed uint64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	errs := make([]error, retryClientCount)
	for i := range errs {
		wg.Go(func() {
			if errs[i] = c.runClient(ctx, i, rand.New(rand.NewPCG(seed, uint64(i)))); errs[i] != nil {
				cancel()
			}
		})
	}
	wg.Wait()
	c.x.groups = append(c.x.groups, c.groups...)
	return firstCause(errs)
}

func (c *retryingClients) runClient(ctx context.Context, i int, random *rand.Rand) error {
	for b := range retryBatches {
		if err := redisx.Sleep(ctx, time.Duration(random.IntN(1000))*time.Millisecond); err != nil {
			return err
		}
		g := group{
			id:      fmt.Sprintf("%s-client-%d-%d", c.x.name, i, b),
			tenant:  fmt.Sprintf("client-%d", i),
			jobs:    50 + random.IntN(100),
			payload: sleeping(smallSleepMS),
		}
		for after := false; ; after = true {
			p, err := c.post(ctx, g)
			if err != nil {
				return err
			}
			p.afterWait = after
			c.record(p, g)
			if p.accepted {
				break
			}
			if err := redisx.Sleep(ctx, p.retryAfter); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *retryingClients) record(p tryResult, g group) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tries = append(c.tries, p)
	if p.accepted {
		c.groups = append(c.groups, g)
	}
	c.x.progress("retry-after", int64(len(c.groups)), retryClientCount*retryBatches)
}

func (c *retryingClients) post(ctx context.Context, g group) (tryResult, error) {
	body, err := json.Marshal(map[string]any{
		"id":     g.id,
		"tenant": g.tenant,
		"type":   "NOOP",
		"jobs":   g.jobsOfMessage(0),
		"seal":   true,
	})
	if err != nil {
		return tryResult{}, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return tryResult{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return tryResult{}, fmt.Errorf("post group %s: %w", g.id, err)
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
	if err != nil {
		return tryResult{}, fmt.Errorf("post group %s: %w", g.id, err)
	}
	switch resp.StatusCode {
	case http.StatusAccepted:
		return tryResult{accepted: true}, nil
	case http.StatusTooManyRequests:
		seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
		if err != nil || seconds < 1 {
			return tryResult{}, fmt.Errorf("post group %s: refused with Retry-After %q, which is not a "+
				"number of seconds",
				g.id, resp.Header.Get("Retry-After"))
		}
		return tryResult{retryAfter: time.Duration(seconds) * time.Second}, nil
	}
	return tryResult{}, fmt.Errorf("post group %s: %s: %s", g.id, resp.Status, said)
}

func countTries(posts []tryResult) RetryAfter {
	var r RetryAfter
	accepted := 0
	var waits []float64
	for _, p := range posts {
		if !p.accepted {
			waits = append(waits, p.retryAfter.Seconds())
		}
		switch {
		case p.afterWait:
			r.RetryTries++
			if p.accepted {
				accepted++
			}
		default:
			r.RetryFirstTries++
			if !p.accepted {
				r.RetryFirstRefused++
			}
		}
	}
	r.RetryAccepted, r.RetryWaitP50 = ratio(float64(accepted), float64(r.RetryTries)), percentile(waits, 50)
	if len(waits) > 0 {
		r.RetryWaitMax = slices.Max(waits)
	}
	return r
}

// freeAddr returns a loopback address on which no process listens now.
func freeAddr(ctx context.Context) (string, error) {
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	defer listener.Close()
	return listener.Addr().String(), nil
}

// awaitAPI waits until the API of ingest answers, with any status. It is an error if a process of
// the fleet has ended.
func (f *Fleet) awaitAPI(ctx context.Context, addr string) error {
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/v1/stats", http.NoBody)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err == nil {
			resp.Body.Close()
			return nil
		}
		if err := f.Check(); err != nil {
			return err
		}
		if err := redisx.Sleep(ctx, pollInterval); err != nil {
			return err
		}
	}
}
