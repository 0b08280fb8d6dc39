package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

// RetryAfter shows whether a client that was refused with 429 is accepted on its next try if it
// waits exactly as long as Retry-After says.
type RetryAfter struct {
	RetryAccepted     float64 `json:"retry_after_accepted_ratio"` // accepted tries / all tries after such a wait
	RetryTries        int     `json:"retry_after_tries"`
	RetryFirstRefused int     `json:"retry_after_first_tries_refused"`
	RetryFirstTries   int     `json:"retry_after_first_tries"`
	RetryWaitP50      float64 `json:"retry_after_p50_seconds"` // of all waits that were asked for
	RetryWaitMax      float64 `json:"retry_after_max_seconds"`
	RetryMaxBacklog   int     `json:"retry_after_max_backlog"` // the limit of the backlog, in jobs
	// RetryPerSecond is the jobs a second of the workers. It falls if clients are told to wait too
	// long, because workers are idle then.
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
	addr := childproc.FreeAddr()
	var c *retryingClients
	x, err := o.experiment(ctx, "retry-after", func(x *run) error {
		if err := x.awaitAPI(ctx, addr); err != nil {
			return err
		}
		// A small group runs first: ingest computes Retry-After from the speed of the workers,
		// which it knows only after they have run jobs.
		if _, err := x.runOneByOne(ctx, "retry-after", x.smallGroup("warm", 0, "warm")); err != nil {
			return err
		}
		c = &retryingClients{x: x, url: "http://" + addr + "/v1/groups"}
		clients, ctx := errgroup.WithContext(ctx)
		for i := range retryClientCount {
			clients.Go(func() error { return c.runClient(ctx, i, rand.New(rand.NewPCG(o.Seed, uint64(i)))) })
		}
		return clients.Wait()
	}, "BULKACTION_API_ADDR="+addr, "BULKACTION_INGEST_MAX_BACKLOG="+strconv.Itoa(retryBacklog))
	if err != nil {
		return nil, err
	}
	r := countTries(c.tries)
	if r.RetryTries == 0 {
		return nil, errors.New("no client was refused: the backlog was never full")
	}
	r.RetryMaxBacklog = retryBacklog
	jobs := 0
	for _, g := range x.groups[1:] {
		jobs += g.jobs
	}
	r.RetryPerSecond = measure.Round2(float64(jobs) / makespan(x.ended[1:]))
	out.RetryAfter = &r
	return x.overrides, nil
}

// retryingClients submit groups over HTTP. When a client is refused, it waits as long as
// Retry-After says and tries again.
type retryingClients struct {
	x   *run
	url string

	mu    sync.Mutex // of tries and x.groups
	tries []tryResult
}

func (c *retryingClients) runClient(ctx context.Context, i int, random *rand.Rand) error {
	for b := range retryBatches {
		if err := redisx.Sleep(ctx, time.Duration(random.IntN(1000))*time.Millisecond); err != nil {
			return err
		}
		g := group{
			id:     fmt.Sprintf("%s-client-%d-%d", c.x.name, i, b),
			tenant: fmt.Sprintf("client-%d", i),
			jobs:   50 + random.IntN(100),
			job:    sleeping(smallSleepMS),
		}
		for after := false; ; after = true {
			p, err := c.post(ctx, g)
			if err != nil {
				return fmt.Errorf("post group %s: %w", g.id, err)
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
		c.x.groups = append(c.x.groups, g)
	}
	c.x.options.progress("retry-after", len(c.x.groups)-1, retryClientCount*retryBatches)
}

// post submits a group over HTTP, without an idempotency key: the group id is enough for ingest to
// recognize a repeated request.
func (c *retryingClients) post(ctx context.Context, g group) (tryResult, error) {
	body, err := g.complete(0)
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
		return tryResult{}, err
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
	if err != nil || resp.StatusCode == http.StatusAccepted {
		return tryResult{accepted: true}, err
	}
	if resp.StatusCode != http.StatusTooManyRequests {
		return tryResult{}, fmt.Errorf("%s: %s", resp.Status, said)
	}
	seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	if err != nil || seconds < 1 {
		return tryResult{}, fmt.Errorf("refused with Retry-After %q, which is not a number of seconds",
			resp.Header.Get("Retry-After"))
	}
	return tryResult{retryAfter: time.Duration(seconds) * time.Second}, nil
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
		case p.afterWait && p.accepted:
			r.RetryTries++
			accepted++
		case p.afterWait:
			r.RetryTries++
		default:
			r.RetryFirstTries++
			if !p.accepted {
				r.RetryFirstRefused++
			}
		}
	}
	r.RetryAccepted = measure.Ratio(float64(accepted), float64(r.RetryTries))
	r.RetryWaitP50, r.RetryWaitMax = measure.Percentile(waits, 50), measure.Percentile(waits, 100)
	return r
}
