package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// payload is the payload of a job: it tells the processor of the tests' worker what to do. The
// worker's package has a copy of this type.
type payload struct {
	N            int   `json:"n"` // index in group.jobs; ordinals differ from it, because pieces of a group may arrive in any order
	MS           int   `json:"ms,omitempty"`
	FailTimes    int   `json:"fail_times,omitempty"`
	Permanent    bool  `json:"permanent,omitempty"`
	Crash        bool  `json:"crash,omitempty"`
	IgnoreCancel bool  `json:"ignore_cancel,omitempty"`
	Value        int64 `json:"value"`
}

// group is a planned group: its jobs with their expected outcomes, and how and when it is
// submitted.
type group struct {
	id, tenant string
	jobs       []payload
	after      time.Duration // submission time, from the start of the phase
	stream     bool          // submit through the ingest stream, not over HTTP
	pieces     int           // number of appends, at most; 0: the submission contains all jobs
}

// done returns true if the job is expected to succeed.
func (p payload) done() bool { return !p.Permanent && !p.Crash }

// mix describes a workload.
type mix struct {
	jobs, crashes, tenants int
	least, most            int           // number of jobs of a group
	during                 time.Duration // the time over which the groups are submitted
	quick                  bool          // no job takes time, and none fails
	ignoreCancel           bool          // jobs ignore the end of their context
	pieces                 bool          // all groups are submitted in pieces, through the stream
	ms                     int           // how long each job takes; 0: random, up to seconds
}

// plan makes random groups from a seed.
func plan(rng *rand.Rand, name string, m mix) []*group {
	var groups []*group
	for left := m.jobs; left > 0; {
		n := min(left, m.least+rng.IntN(m.most-m.least+1))
		left -= n
		i := len(groups)
		g := &group{id: fmt.Sprintf("%s-%d", name, i), tenant: fmt.Sprintf("%s-tenant-%d", name, rng.IntN(m.tenants))}
		g.stream = rng.IntN(2) == 0 || m.pieces
		if rng.IntN(3) == 0 || m.pieces {
			g.pieces = 1 + rng.IntN(4)
		}
		for n := range n {
			job := newJob(rng, m)
			job.N = n
			g.jobs = append(g.jobs, job)
		}
		groups = append(groups, g)
	}
	for i, g := range groups {
		g.after = time.Duration(float64(m.during) * float64(i) / float64(len(groups)))
	}
	for range m.crashes { // in the first half, because a crasher needs several leases until it fails
		g := groups[rng.IntN(max(1, len(groups)/2))]
		n := rng.IntN(len(g.jobs))
		g.jobs[n] = payload{N: n, MS: rng.IntN(50), Crash: true}
	}
	return groups
}

func newJob(rng *rand.Rand, m mix) payload {
	p := payload{Value: 1 + rng.Int64N(1000), MS: m.ms, IgnoreCancel: m.ignoreCancel}
	if m.quick {
		return p
	}
	switch rng.IntN(20) {
	case 0:
		p.Permanent = true
	case 1:
		p.FailTimes = 1 + rng.IntN(2)
	}
	if m.ms > 0 {
		return p
	}
	switch n := rng.IntN(100); {
	case n < 80:
		p.MS = 5 + rng.IntN(95)
	case n < 98:
		p.MS = 100 + rng.IntN(700)
	default:
		p.MS = 1000 + rng.IntN(4000)
	}
	return p
}

// receipt records that a producer was told that a group was accepted with this number of jobs.
type receipt struct {
	Group    string `json:"group"`
	Accepted int    `json:"accepted"`
}

// producers submit each planned group at its time, and repeat the submission until it is accepted.
type producers struct {
	fleet  *fleet
	stream *producer.Producer

	mu       sync.Mutex
	receipts map[string]int
}

// producing is the number of groups that producers submit at the same time.
const producing = 6

// submit submits groups at their times and waits until all are accepted or given up. Called again
// with groups that Redis has lost, it submits them again.
func (p *producers) submit(ctx context.Context, groups []*group) error {
	began := time.Now()
	work := make(chan *group)
	errs := make(chan error, producing)
	for range producing {
		go func() {
			var failed error
			for g := range work {
				if failed == nil {
					failed = p.until(ctx, g)
				}
			}
			errs <- failed
		}()
	}
	for _, g := range groups {
		if wait := g.after - time.Since(began); wait > 0 {
			_ = redisx.Sleep(ctx, wait) // the producers return the error when ctx has ended
		}
		work <- g
	}
	close(work)
	var all []error
	for range producing {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}

// until repeats the submission of a group until it is accepted, and stores the receipt. It gives up
// when ingest refuses the group for good, or ctx ends.
func (p *producers) until(ctx context.Context, g *group) error {
	for i := 0; ; i++ {
		err := p.once(ctx, g, p.fleet.apis[i%len(p.fleet.apis)])
		if err == nil {
			p.mu.Lock()
			p.receipts[g.id] = len(g.jobs)
			p.mu.Unlock()
			return nil
		}
		if refused(err) {
			return fmt.Errorf("submit group %s: %w", g.id, err)
		}
		if redisx.Sleep(ctx, 100*time.Millisecond) != nil {
			return fmt.Errorf("submit group %s: given up: %w", g.id, err)
		}
	}
}

// refused returns true if repeating a request is useless.
func refused(err error) bool {
	e, ok := errors.AsType[*client.Error](err)
	return ok && e.Status >= 400 && e.Status < 500 && e.Status != http.StatusTooManyRequests && e.Status != http.StatusRequestTimeout
}

// attemptTimeout is the longest time for one try to submit a group.
const attemptTimeout = 20 * time.Second

func (p *producers) once(ctx context.Context, g *group, api *client.API) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	whole := client.Submission{
		ID: g.id, Tenant: g.tenant, Type: "CHAOS", Aggregate: []client.Aggregate{{As: "n", Op: "count"}, {As: "sum", Op: "sum", Field: "data.value"}},
	}
	jobs := make([]client.NewJob, len(g.jobs))
	for i, j := range g.jobs {
		jobs[i].Payload = j
	}
	if g.pieces == 0 {
		whole.Jobs, whole.Seal = jobs, true
	}
	if g.stream {
		if _, err := p.stream.Submit(ctx, whole); err != nil || g.pieces == 0 {
			return err
		}
		for key, piece := range cut(jobs, g.pieces) {
			if _, err := p.stream.AppendJobs(ctx, g.id, piece, producer.WithDedupKey(fmt.Sprint(key))); err != nil {
				return err
			}
		}
		total := int64(len(jobs))
		return p.stream.Seal(ctx, g.id, &total)
	}
	if _, err := api.Submit(ctx, whole); err != nil || g.pieces == 0 {
		return err
	}
	for key, piece := range cut(jobs, g.pieces) {
		if _, err := api.Append(ctx, g.id, slices.Values(piece), client.WithIdempotencyKey(fmt.Sprint(g.id, "-", key))); err != nil {
			return err
		}
	}
	total := int64(len(jobs))
	_, err := api.Seal(ctx, g.id, &total)
	return err
}

func cut(jobs []client.NewJob, pieces int) [][]client.NewJob {
	var all [][]client.NewJob
	for piece := range slices.Chunk(jobs, (len(jobs)+pieces-1)/pieces) {
		all = append(all, piece)
	}
	return all
}

// write writes the receipts to a file, in the format that `bulkaction audit --receipts` reads.
func (p *producers) write(path string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var b []byte
	for id, n := range p.receipts {
		line, err := json.Marshal(receipt{id, n})
		if err != nil {
			return err
		}
		b = append(append(b, line...), '\n')
	}
	return os.WriteFile(path, b, 0o600)
}
