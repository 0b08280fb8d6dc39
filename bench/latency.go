package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/journal"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// LatencyOptions say how many single jobs are sent.
type LatencyOptions struct {
	FleetOptions
	Rate     int // jobs a second
	Seconds  int
	Progress func(done int) // may be nil
}

// Latency is how long single jobs wait, each a group of its own, while little else happens.
// Accepted is the time of the script that created the group, which Redis keeps to the ms and rounds
// down: up to 1 ms less was waited. The rest is exact to the µs.
type Latency struct {
	P50MS    float64 `json:"p50_ms"` // accepted to started
	P99MS    float64 `json:"p99_ms"`
	MaxMS    float64 `json:"max_ms"`
	Rate     int     `json:"rate"`
	Jobs     int     `json:"jobs"`
	Workload string  `json:"workload"`

	// From the time when the job was due to be published: what a slow producer delays counts.
	PublishedStarted Quantiles `json:"published_to_started"`
	// to the event that the group is COMPLETED, as its producer reads it
	PublishedFinished Quantiles `json:"published_to_finished"`

	Overrides map[string]string `json:"overrides"`
}

// Quantiles of a wait.
type Quantiles struct {
	P50MS float64 `json:"p50_ms"`
	P99MS float64 `json:"p99_ms"`
	MaxMS float64 `json:"max_ms"`
}

func quantiles(ms []float64) Quantiles {
	if len(ms) == 0 {
		return Quantiles{}
	}
	return Quantiles{round(percentile(ms, 50)), round(percentile(ms, 99)), round(slices.Max(ms))}
}

// single is a group of one job, and when it was due to be published (µs of Redis).
type single struct {
	id string
	at int64
}

// RunLatency sends single jobs at a steady rate, whatever becomes of those before.
func RunLatency(ctx context.Context, o LatencyOptions) (Latency, error) {
	out := Latency{Rate: o.Rate, Workload: "groups of one job, a message each, of one tenant"}
	journals, err := os.MkdirTemp("", "bulkaction-journals-")
	if err != nil {
		return out, fmt.Errorf("make a folder for journals: %w", err)
	}
	defer os.RemoveAll(journals) //nolint:errcheck // a temporary folder
	o.Journal = journals
	b, err := startRun(ctx, &o.FleetOptions, []string{noLimit}, 1)
	if err != nil {
		return out, err
	}
	defer b.close()
	out.Overrides = o.Overrides()
	warm, err := b.paced(ctx, o.Rate, min(o.Rate, warmJobs))
	if err != nil {
		return out, fmt.Errorf("warm up: %w", err)
	}
	events, err := b.listen(ctx)
	if err != nil {
		return out, err
	}
	defer events.close()
	out.Jobs = o.Rate * o.Seconds
	sent, err := b.pacedTo(ctx, o.Rate, out.Jobs, len(warm), o.Progress)
	if err != nil {
		return out, err
	}
	finished, err := events.await(ctx, sent)
	if err != nil {
		return out, err
	}
	created, err := b.created(ctx, sent)
	if err != nil {
		return out, err
	}
	if err := b.f.Stop(); err != nil {
		return out, err
	}
	log, err := journal.Read(journals)
	if err != nil {
		return out, err
	}
	out.compute(sent, created, finished, log)
	if out.PublishedStarted == (Quantiles{}) {
		return out, errNoStarts
	}
	return out, nil
}

func (l *Latency) compute(sent []single, created []int64, finished map[string]int64, log journal.Log) {
	started := map[string]int64{}
	for _, s := range log.Starts {
		if _, again := started[s.Group]; !again {
			started[s.Group] = s.At
		}
	}
	var accepted, published, ends []float64
	for i, s := range sent {
		if at, ok := started[s.id]; ok {
			accepted = append(accepted, float64(at-created[i]*1000)/1000)
			published = append(published, float64(at-s.at)/1000)
		}
		if at, ok := finished[s.id]; ok {
			ends = append(ends, float64(at-s.at)/1000)
		}
	}
	q := quantiles(accepted)
	l.P50MS, l.P99MS, l.MaxMS = q.P50MS, q.P99MS, q.MaxMS
	l.PublishedStarted, l.PublishedFinished = quantiles(published), quantiles(ends)
}

// paced sends n single jobs and waits for their end.
func (b *run) paced(ctx context.Context, rate, n int) ([]single, error) {
	return b.pacedTo(ctx, rate, n, 0, nil)
}

// pacers send at the same time, so that a reply that is late holds up no other job.
const pacers = 8

// pacedTo numbers the groups from first on.
func (b *run) pacedTo(ctx context.Context, rate, n, first int, progress func(int)) ([]single, error) {
	offset, err := b.offset(ctx)
	if err != nil {
		return nil, err
	}
	sent, groups := make([]single, n), make([]group, n)
	for i := range sent {
		id := fmt.Sprintf("%s-single-%d", b.name, first+i)
		sent[i].id, groups[i] = id, group{id: id, tenant: "single", jobs: 1}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	began := time.Now()
	errs := make([]error, pacers)
	var wg sync.WaitGroup
	for p := range pacers {
		wg.Go(func() {
			for i := p; i < n; i += pacers {
				due := began.Add(time.Duration(i) * time.Second / time.Duration(rate))
				sent[i].at = due.Add(offset).UnixMicro()
				if errs[p] = redisx.Sleep(ctx, time.Until(due)); errs[p] != nil {
					return
				}
				if errs[p] = b.single(ctx, sent[i].id); errs[p] != nil {
					cancel()
					return
				}
				if progress != nil && p == 0 {
					progress(i)
				}
			}
		})
	}
	wg.Wait()
	if err := cause(errs); err != nil {
		return nil, fmt.Errorf("send single jobs: %w", err)
	}
	return sent, follow(b.f, b.space, groups, nil).wait(ctx, nil)
}

func (b *run) single(ctx context.Context, id string) error {
	pipe := b.f.Conn.Cmd.Pipeline()
	data := map[string]any{
		"id":     id,
		"tenant": "single",
		"type":   "NOOP",
		"seal":   true,
		"jobs":   []job{{json.RawMessage("{}")}},
	}
	if err := publish(ctx, pipe, b.space, "group.submit", data); err != nil {
		return err
	}
	_, err := pipe.Exec(ctx)
	return err
}

// offset is by how much Redis's clock is ahead of ours.
func (b *run) offset(ctx context.Context) (time.Duration, error) {
	before := time.Now()
	t, err := b.f.Conn.Cmd.Time(ctx).Result()
	if err != nil {
		return 0, fmt.Errorf("ask for Redis's time: %w", err)
	}
	return t.Sub(before.Add(time.Since(before) / 2)), nil
}

// created is when the groups were created, in ms of Redis.
func (b *run) created(ctx context.Context, sent []single) ([]int64, error) {
	v, err := b.fields(ctx, sent, "at:created")
	if err != nil {
		return nil, err
	}
	out := make([]int64, len(sent))
	for i := range out {
		out[i], _ = strconv.ParseInt(v[i][0], 10, 64)
	}
	return out, nil
}

// waits are the ms from accepted to started as far as the groups tell.
func (b *run) waits(ctx context.Context, sent []single) ([]float64, error) {
	v, err := b.fields(ctx, sent, "at:created", "started")
	if err != nil {
		return nil, err
	}
	out := make([]float64, len(sent))
	for i := range out {
		created, _ := strconv.ParseFloat(v[i][0], 64)
		started, _ := strconv.ParseFloat(v[i][1], 64)
		out[i] = started - created
	}
	return out, nil
}

func (b *run) fields(ctx context.Context, sent []single, fields ...string) ([][]string, error) {
	cmds := make([]*redis.SliceCmd, len(sent))
	_, err := b.f.Conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, s := range sent {
			cmds[i] = pipe.HMGet(ctx, b.space.OfTenant("single").Group(s.id), fields...)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read groups: %w", err)
	}
	out := make([][]string, len(sent))
	for i, c := range cmds {
		for _, v := range c.Val() {
			text, _ := v.(string)
			out[i] = append(out[i], text)
		}
	}
	return out, nil
}

// arrivals are the ends of groups as their producer hears of them, by events.
type arrivals struct {
	b      *run
	offset time.Duration
	from   string // the last event that was read
	stop   context.CancelFunc
	done   chan struct{}

	mu   sync.Mutex
	at   map[string]int64 // µs of Redis
	fail error
}

// listen reads the events from now on.
func (b *run) listen(ctx context.Context) (*arrivals, error) {
	a := &arrivals{b: b, from: "0", done: make(chan struct{}), at: map[string]int64{}}
	var err error
	if a.offset, err = b.offset(ctx); err != nil {
		return nil, err
	}
	last, err := b.f.Conn.Cmd.XRevRangeN(ctx, b.space.Events(), "+", "-", 1).Result()
	if err != nil {
		return nil, fmt.Errorf("read events: %w", err)
	}
	if len(last) > 0 {
		a.from = last[0].ID
	}
	ctx, a.stop = context.WithCancel(ctx)
	go a.read(ctx)
	return a, nil
}

func (a *arrivals) close() {
	a.stop()
	<-a.done
}

func (a *arrivals) read(ctx context.Context) {
	defer close(a.done)
	for ctx.Err() == nil {
		read, err := a.b.f.Conn.Block.XRead(ctx,
			&redis.XReadArgs{
				Streams: []string{a.b.space.Events(), a.from},
				Block:   redisx.MaxBlock,
				Count:   1000,
			}).Result()
		now := time.Now().Add(a.offset).UnixMicro()
		if errors.Is(err, redis.Nil) {
			continue
		}
		a.mu.Lock()
		if a.fail = err; err == nil {
			a.note(read[0].Messages, now)
		}
		a.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (a *arrivals) note(messages []redis.XMessage, now int64) {
	for _, m := range messages {
		a.from = m.ID
		var event api.Event
		data, _ := m.Values["data"].(string)
		if json.Unmarshal([]byte(data), &event) == nil && event.Group != nil &&
			event.Group.Status == api.StatusCompleted {
			a.at[event.Group.ID] = now
		}
	}
}

// await waits until the ends of all these have come.
func (a *arrivals) await(ctx context.Context, sent []single) (map[string]int64, error) {
	for giveUp := time.Now().Add(stalled); ; {
		a.mu.Lock()
		missing, err := slices.ContainsFunc(sent, func(s single) bool { return a.at[s.id] == 0 }), a.fail
		a.mu.Unlock()
		switch {
		case err != nil:
			return nil, fmt.Errorf("read events: %w", err)
		case !missing:
			a.close()
			return a.at, nil
		case time.Now().After(giveUp):
			return nil, fmt.Errorf("await events: not all came within %s", stalled)
		}
		if err := redisx.Sleep(ctx, pollInterval); err != nil {
			return nil, err
		}
	}
}
