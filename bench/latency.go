package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/journal"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// LatencyOptions say how many single jobs are sent at which rate.
type LatencyOptions struct {
	FleetOptions
	Rate     int            // jobs a second
	Seconds  int            // how long they are sent
	Progress func(done int) // called with the number of jobs sent; may be nil
}

// Latency shows how long a job waits on a system with little load. Each job is a group of its own.
// A group is accepted when the script creates it. Redis stores this time in ms and rounds it down,
// so the real wait is up to 1 ms shorter. All other times are in µs.
type Latency struct {
	P50MS    float64 `json:"p50_ms"` // from accepted to started; P99MS and MaxMS too
	P99MS    float64 `json:"p99_ms"`
	MaxMS    float64 `json:"max_ms"`
	Rate     int     `json:"rate"`
	Jobs     int     `json:"jobs"`
	Workload string  `json:"workload"`

	// from the time at which the job was due to be published: a delay in the producer counts
	PublishedStarted Quantiles `json:"published_to_started"`
	// from the same time until a producer has read the event that the group is COMPLETED
	PublishedFinished Quantiles `json:"published_to_finished"`

	Overrides map[string]string `json:"overrides"`
}

// Quantiles has quantiles of waiting times.
type Quantiles struct {
	P50MS float64 `json:"p50_ms"`
	P99MS float64 `json:"p99_ms"`
	MaxMS float64 `json:"max_ms"`
}

func quantilesOf(ms []float64) Quantiles {
	if len(ms) == 0 {
		return Quantiles{}
	}
	return Quantiles{round2(percentile(ms, 50)), round2(percentile(ms, 99)), round2(slices.Max(ms))}
}

// singleJob is the group of one job, and the time at which the job was due to be published, in µs
// by Redis's clock.
type singleJob struct {
	id  string
	due int64
}

// RunLatency sends single jobs at a steady rate, which does not fall when earlier jobs are slow,
// waits for their end, and stops the fleet.
func RunLatency(ctx context.Context, o LatencyOptions) (Latency, error) {
	out := Latency{Rate: o.Rate, Workload: "groups of one job, a message each, of one tenant"}
	journals, err := os.MkdirTemp("", "bulkaction-journals-")
	if err != nil {
		return out, fmt.Errorf("make a folder for journals: %w", err)
	}
	defer os.RemoveAll(journals) //nolint:errcheck // a temporary folder
	o.Journal = journals
	r, err := startFleetRun(ctx, &o.FleetOptions, []string{noGlobalLimit}, 1)
	if err != nil {
		return out, err
	}
	defer r.close()
	out.Overrides = o.Overrides()
	warm, err := r.sendSingles(ctx, o.Rate, min(o.Rate, warmJobs))
	if err != nil {
		return out, fmt.Errorf("warm up: %w", err)
	}
	ends, err := r.listenForEnds(ctx, 0)
	if err != nil {
		return out, err
	}
	defer ends.close()
	out.Jobs = o.Rate * o.Seconds
	sent, err := r.sendSinglesFrom(ctx, o.Rate, out.Jobs, len(warm), o.Progress)
	if err != nil {
		return out, err
	}
	ids := make([]string, len(sent))
	for i, s := range sent {
		ids[i] = s.id
	}
	completed, err := ends.awaitCompleted(ctx, ids)
	if err != nil {
		return out, err
	}
	if err := r.fleet.Stop(); err != nil {
		return out, err
	}
	log, err := journal.Read(journals)
	if err != nil {
		return out, err
	}
	out.compute(sent, completed, log)
	if out.PublishedStarted == (Quantiles{}) {
		return out, errNoStarts
	}
	return out, nil
}

func (l *Latency) compute(sent []singleJob, completed []groupEnd, log journal.Log) {
	started := firstStarts(log)
	var accepted, published, ends []float64
	for i, s := range sent {
		if at, ok := started[s.id]; ok {
			accepted = append(accepted, completed[i].msUntil(at))
			published = append(published, float64(at-s.due)/1000)
		}
		ends = append(ends, float64(completed[i].readAt-s.due)/1000)
	}
	q := quantilesOf(accepted)
	l.P50MS, l.P99MS, l.MaxMS = q.P50MS, q.P99MS, q.MaxMS
	l.PublishedStarted, l.PublishedFinished = quantilesOf(published), quantilesOf(ends)
}

// firstStarts returns the time at which the first job of each group started, in µs by Redis's
// clock.
func firstStarts(log journal.Log) map[string]int64 {
	started := map[string]int64{}
	for _, s := range log.Starts { // ordered by time
		if _, again := started[s.Group]; !again {
			started[s.Group] = s.At
		}
	}
	return started
}

// sendSingles sends n single jobs at a steady rate and waits until they are done.
func (r *fleetRun) sendSingles(ctx context.Context, rate, n int) ([]singleJob, error) {
	return r.sendSinglesFrom(ctx, rate, n, 0, nil)
}

// paceSenders is the number of goroutines that send, so that a slow reply delays no other job.
const paceSenders = 8

// sendSinglesFrom does the same as sendSingles for groups that are numbered from first on. It calls
// progress, which may be nil, for some jobs, with the number of jobs sent.
func (r *fleetRun) sendSinglesFrom(ctx context.Context, rate, n, first int, progress func(int)) ([]singleJob, error) {
	offset, err := r.clockOffset(ctx)
	if err != nil {
		return nil, err
	}
	sent, groups := make([]singleJob, n), make([]group, n)
	for i := range sent {
		id := fmt.Sprintf("%s-single-%d", r.name, first+i)
		sent[i].id, groups[i] = id, group{id: id, tenant: "single", jobs: 1}
	}
	err = pace(ctx, rate, n, func(ctx context.Context, i int, due time.Time) error {
		sent[i].due = due.Add(offset).UnixMicro()
		if progress != nil && i%paceSenders == 0 {
			progress(i)
		}
		return r.sendSingle(ctx, sent[i].id)
	})
	if err != nil {
		return nil, err
	}
	return sent, follow(r.fleet, r.space, groups, nil).wait(ctx, nil)
}

// pace calls send for 0 to n-1 at a steady rate, each at the time at which it is due or, if its
// goroutine still waits for an earlier call, later. paceSenders goroutines call it. The first error
// cancels the other calls; pace waits for them.
func pace(ctx context.Context, rate, n int, send func(ctx context.Context, i int, due time.Time) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	began := time.Now()
	errs := make([]error, paceSenders)
	var wg sync.WaitGroup
	for p := range paceSenders {
		wg.Go(func() {
			for i := p; i < n && errs[p] == nil; i += paceSenders {
				due := began.Add(time.Duration(i) * time.Second / time.Duration(rate))
				if errs[p] = redisx.Sleep(ctx, time.Until(due)); errs[p] == nil {
					errs[p] = send(ctx, i, due)
				}
			}
			if errs[p] != nil {
				cancel()
			}
		})
	}
	wg.Wait()
	if err := firstCause(errs); err != nil {
		return fmt.Errorf("send single jobs: %w", err)
	}
	return nil
}

func (r *fleetRun) sendSingle(ctx context.Context, id string) error {
	pipe := r.fleet.Conn.Cmd.Pipeline()
	data := map[string]any{
		"id":     id,
		"tenant": "single",
		"type":   "NOOP",
		"seal":   true,
		"jobs":   []jobBody{{json.RawMessage("{}")}},
	}
	if err := publish(ctx, pipe, r.space, "group.submit", data); err != nil {
		return err
	}
	_, err := pipe.Exec(ctx)
	return err
}

// clockOffset returns Redis's clock minus the clock of this process.
func (r *fleetRun) clockOffset(ctx context.Context) (time.Duration, error) {
	before := time.Now()
	t, err := r.fleet.Conn.Cmd.Time(ctx).Result()
	if err != nil {
		return 0, fmt.Errorf("ask for Redis's time: %w", err)
	}
	return t.Sub(before.Add(time.Since(before) / 2)), nil
}

// acceptedToStarted returns the waiting time of each job in whole ms, from the timestamps of its
// group, in the order of sent.
func (r *fleetRun) acceptedToStarted(ctx context.Context, sent []singleJob) ([]float64, error) {
	groups := make([]group, len(sent))
	for i, s := range sent {
		groups[i] = group{id: s.id, tenant: "single"}
	}
	now, err := readProgress(ctx, r.fleet, r.space, groups)
	if err != nil {
		return nil, err
	}
	out := make([]float64, len(sent))
	for i, g := range now {
		out[i] = float64(g.Started.Sub(g.Created).Milliseconds())
	}
	return out, nil
}
