package groups

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/backpressure"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/layout"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
)

// Stats returns the figures of the installation: jobs by type in all partitions, used permits, and
// the live processes.
func (s *Store) Stats(ctx context.Context) (api.Stats, error) {
	st, err := s.readStats(ctx)
	return st, apiError(err)
}

// ResizeWorker asks a worker process to have n slots. The process reads the number with its next
// heartbeat.
func (s *Store) ResizeWorker(ctx context.Context, id string, n int) error {
	return apiError(presence.SetPoolSize(ctx, s.conn, s.space, id, n))
}

func (s *Store) readStats(ctx context.Context) (api.Stats, error) {
	st := api.Stats{
		Partitions: s.space.Partitions(),
		Types:      []api.TypeStats{},
		Workers:    []api.WorkerStatus{},
		Stages:     []api.StageStatus{},
		RateLimit: api.RateLimit{
			Limiter:  s.cfg.Meter.Limiter,
			WindowMS: s.cfg.Meter.Window.Milliseconds(),
		},
	}
	set, err := ledger.ReadLimitSettings(ctx, s.conn.Cmd, s.space)
	if err != nil {
		return st, err
	}
	global := s.globalLimits(set)
	st.RateLimit.RPS, st.RateLimit.Share = global.RPS.Effective, global.Share.Effective
	byType := map[string]*api.TypeStats{}
	if err := s.addPartitions(ctx, &st, byType); err != nil {
		return st, err
	}
	slow, err := s.slow.GetOr("", func() (slowStats, error) { return s.readSlow(ctx) })
	if err != nil {
		return st, err
	}
	st.Memory, st.OldestWaiting = slow.memory, slow.oldest
	rejected, err := s.conn.Cmd.XLen(ctx, s.space.Rejected()).Result()
	if err != nil {
		return st, fmt.Errorf("read stats: %w", err)
	}
	st.Rejected = rejected
	if st.Layouts, err = s.layouts(ctx); err != nil {
		return st, err
	}
	workers, err := presence.Workers(ctx, s.conn, s.space)
	if err != nil {
		return st, err
	}
	s.delays.see(workers)
	for _, w := range workers {
		st.Workers = append(st.Workers, w.WorkerStatus)
		for _, typ := range w.Types {
			statsOf(byType, typ).Workers++
		}
		for _, r := range w.StartedPerSecond {
			st.StartedPerSec += r
		}
	}
	stages, err := presence.Stages(ctx, s.conn, s.space)
	if err != nil {
		return st, err
	}
	brokers, err := presence.Brokers(ctx, s.conn, s.space)
	if err != nil {
		return st, err
	}
	st.Stages = append(append(st.Stages, stages...), brokers...)
	st.Roles = rolesOf(st.Stages, len(workers))
	for _, t := range byType {
		st.Types = append(st.Types, *t)
	}
	slices.SortFunc(st.Types, func(a, b api.TypeStats) int { return cmp.Compare(a.Type, b.Type) })
	return st, nil
}

// slowStats are figures that a process reads once in slowAge.
type slowStats struct {
	memory api.RedisMemory
	oldest *time.Time
}

const slowAge = 5 * time.Second

func (s *Store) readSlow(ctx context.Context) (slow slowStats, err error) {
	if slow.memory, err = backpressure.Memory(ctx, s.conn); err != nil {
		return slow, fmt.Errorf("read the memory of Redis: %w", err)
	}
	all, err := s.readBusiest(ctx)
	for _, found := range all {
		if at := found.Oldest; at != nil && (slow.oldest == nil || at.Before(*slow.oldest)) {
			slow.oldest = at
		}
	}
	return slow, err
}

// maxCounted is the number of workers, also those that have gone, after which startDelays begins anew.
const maxCounted = 10_000

// startDelays knows what the workers have counted of start delays. The zero value is ready for use.
type startDelays struct {
	mu       sync.Mutex
	now      map[string]presence.Delays // by worker
	recorded map[string]presence.Delays // at the time of the last sample
	at       time.Time                  // of the last sample
}

func (d *startDelays) see(workers []presence.WorkerReport) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.now = map[string]presence.Delays{}
	for _, w := range workers {
		d.now[w.ID] = w.StartDelays
	}
}

// since returns the delays of the jobs that started after the last sample; none if that is so old
// that another process may have led meanwhile. stored is to be called when its sample is stored.
func (d *startDelays) since(at time.Time) (all presence.Delays, stored func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.now
	for id, counts := range now {
		if d.recorded == nil || at.Sub(d.at) > 3*ledger.SampleSlot {
			break
		}
		for i, n := range counts.Since(d.recorded[id]) {
			all[i] += n
		}
	}
	return all, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.recorded == nil || len(d.recorded) > maxCounted {
			d.recorded = map[string]presence.Delays{}
		}
		maps.Copy(d.recorded, now) // those of a worker whose heartbeat is late stay
		d.at = at
	}
}

// layouts returns the numbers of the layouts by part.
func (s *Store) layouts(ctx context.Context) (map[string]string, error) {
	numbers, err := layout.Read(ctx, s.conn.Cmd, s.space.Layouts(), layout.Part{Name: layout.Jobs}, layout.Part{Name: layout.Rooms})
	if err != nil {
		return nil, err
	}
	guards, err := layout.Read(ctx, s.conn.Cmd, keyspace.GuardLayout(s.space.Prefix()), layout.GuardPart)
	if err != nil {
		return nil, err
	}
	return map[string]string{
		layout.Jobs: numbers[0].String(), layout.Rooms: numbers[1].String(), layout.Guards: guards[0].String(),
	}, nil
}

// rolesOf counts the live processes of each role. The role broker is left out if it has none.
func rolesOf(stages []api.StageStatus, workers int) []api.RoleStatus {
	live := map[string]int{"worker": workers}
	for _, st := range stages {
		live[st.Role]++
	}
	var all []api.RoleStatus
	for _, role := range append(slices.Clone(api.Roles), api.RoleBroker) {
		if n := live[role]; n > 0 || role != api.RoleBroker {
			all = append(all, api.RoleStatus{Role: role, Processes: n})
		}
	}
	return all
}

// addPartitions adds the figures of all partitions to the answer.
func (s *Store) addPartitions(ctx context.Context, st *api.Stats, byType map[string]*api.TypeStats) error {
	all := s.space.All()
	parts := make([]partitionStats, len(all))
	if err := concurrently(ctx, len(all), func(ctx context.Context, i int) (err error) {
		parts[i], err = s.readPartition(ctx, all[i])
		return err
	}); err != nil {
		return err
	}
	for _, part := range parts {
		st.Groups += part.Groups
		st.ActiveTenants += part.ActiveTenants
		st.DeadLetters += part.DeadLetters
		st.RateLimit.Used += part.used
		addTotals(&st.Totals, part.Retired)
		for _, l := range part.loads {
			addStats(statsOf(byType, l.Type), l)
			addTotals(&st.Totals, l.Totals)
		}
		for _, typ := range part.paused {
			statsOf(byType, typ).Paused = true
		}
	}
	return nil
}

type partitionStats struct {
	ledger.PartitionStats
	loads  []api.TypeStats
	paused []string // types
	used   int64    // permits of the global limit, as ledger.PermitsUsed counts them
}

func (s *Store) readPartition(ctx context.Context, p keyspace.Partition) (part partitionStats, err error) {
	if part.PartitionStats, err = ledger.ReadPartition(ctx, s.conn.Cmd, p); err != nil {
		return part, err
	}
	if part.loads, err = ledger.Loads(ctx, s.conn.Cmd, p, part.Types); err != nil {
		return part, err
	}
	if part.paused, err = ledger.PausedTypes(ctx, s.conn.Cmd, p, part.Types); err != nil {
		return part, err
	}
	if _, err = ledger.SetRunnable(ctx, s.conn.Cmd, p, part.loads, part.paused, nil, false); err != nil {
		return part, err
	}
	limits, err := ledger.ReadLimits(ctx, s.conn.Cmd, p, s.cfg.Meter, "")
	if err != nil {
		return part, fmt.Errorf("read permits: %w", err)
	}
	part.used = limits.Used
	return part, nil
}

// addStats adds the figures of a type in one partition to the sums of this type.
func addStats(sum *api.TypeStats, t api.TypeStats) {
	sum.Backlog += t.Backlog
	sum.Runnable += t.Runnable
	sum.Waiting += t.Waiting
	sum.NonReady += t.NonReady
	sum.Ready += t.Ready
	sum.InFlight += t.InFlight
	sum.StaleOutcomes += t.StaleOutcomes
	sum.LeasesLost += t.LeasesLost
	addTotals(&sum.Totals, t.Totals)
}

func addTotals(sum *api.JobTotals, t api.JobTotals) {
	sum.Accepted += t.Accepted
	sum.Started += t.Started
	sum.Done += t.Done
	sum.Failed += t.Failed
	sum.Retried += t.Retried
	sum.Throttled += t.Throttled
}

// statsOf returns the entry of a type in the answer; it adds the entry if it is missing.
func statsOf(byType map[string]*api.TypeStats, typ string) *api.TypeStats {
	if byType[typ] == nil {
		byType[typ] = &api.TypeStats{Type: typ}
	}
	return byType[typ]
}

// maxViolations is the most violations that the answer about the audit lists.
const maxViolations = 100

// Audit returns the results that the watchers stored after they last audited their partitions, and
// which watcher leads each partition now. It recounts nothing itself.
func (s *Store) Audit(ctx context.Context) (api.AuditState, error) {
	st := api.AuditState{OK: true, Violations: []api.Violation{}, ByLaw: map[string]int64{}}
	who, err := caller(ctx)
	switch {
	case err != nil:
		return st, err
	case !who.May(auth.ReadSystem):
		return st, api.ErrNotAllowed
	}
	parts := s.space.All()
	audits, leaders := make([]ledger.AuditState, len(parts)), make([]string, len(parts))
	err = concurrently(ctx, len(parts), func(ctx context.Context, i int) (err error) {
		if audits[i], err = ledger.ReadAudit(ctx, s.conn.Cmd, parts[i]); err == nil {
			leaders[i], err = ledger.Leader(ctx, s.conn.Cmd, parts[i])
		}
		return err
	})
	if err != nil {
		return st, apiError(err)
	}
	for i, found := range audits {
		st.Partitions = append(st.Partitions, api.AuditedPartition{
			Partition: parts[i].Index(), Leader: leaders[i], LookedAt: found.LookedAt, DeepAt: found.DeepAt,
		})
		st.OK = st.OK && leaders[i] != "" && found.LookedAt != nil
		for law, n := range found.ByLaw {
			st.ByLaw[law] += n
			st.OK = st.OK && n == 0
		}
		for _, v := range found.Violations {
			st.Violations = append(st.Violations, v.Violation)
		}
	}
	slices.SortStableFunc(st.Violations, func(a, b api.Violation) int {
		return cmp.Or(cmp.Compare(a.Law, b.Law), cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Group, b.Group))
	})
	st.Violations = st.Violations[:min(len(st.Violations), maxViolations)]
	return st, nil
}

// maxPoints is about the most points that an answer about the history has.
const maxPoints = 1500

// Now returns the time of Redis.
func (s *Store) Now(ctx context.Context) (time.Time, error) {
	now, err := s.conn.Cmd.Time(ctx).Result()
	if err != nil {
		return now, fmt.Errorf("read the time of Redis: %w", err)
	}
	return now, nil
}

// Record stores the figures st as a sample; at is when they were read, by Redis. Only the first
// sample of each slot of time is stored, whichever process sends it.
func (s *Store) Record(ctx context.Context, at time.Time, st api.Stats) error {
	sample := ledger.Sample{At: at, JobTotals: st.Totals, Gauges: api.Gauges{ActiveTenants: st.ActiveTenants}}
	for _, t := range st.Types {
		sample.Waiting += t.Waiting
		sample.NonReady += t.NonReady
		sample.Ready += t.Ready
		sample.InFlight += t.InFlight
	}
	for _, w := range st.Workers {
		sample.Pool += int64(w.Workers)
		sample.Busy += int64(w.Active)
	}
	delays, keep := s.delays.since(at)
	if p50, ok := delays.Quantile(0.5); ok {
		p99, _ := delays.Quantile(0.99)
		p50, p99 = round(p50, 10), round(p99, 10)
		sample.StartDelayP50MS, sample.StartDelayP99MS = &p50, &p99
	}
	stored, err := ledger.RecordSample(ctx, s.conn.Cmd, s.space, sample)
	if stored {
		keep()
	}
	return err
}

// History returns the points of the last minutes.
func (s *Store) History(ctx context.Context, minutes int) (api.History, error) {
	who, err := caller(ctx)
	switch {
	case err != nil:
		return api.History{}, err
	case !who.May(auth.ReadMetrics):
		return api.History{}, api.ErrNotAllowed
	}
	now, err := s.Now(ctx)
	if err != nil {
		return api.History{}, apiError(err)
	}
	length := time.Duration(minutes) * time.Minute
	slots := int(length / ledger.SampleSlot)
	step := ledger.SampleSlot * time.Duration((slots+maxPoints-1)/maxPoints)
	// The sample before the first point is read, too: a rate is computed from two samples.
	samples, err := ledger.Samples(ctx, s.conn.Cmd, s.space, slots+int(step/ledger.SampleSlot)+1)
	if err != nil {
		return api.History{}, apiError(err)
	}
	return historyOf(samples, now.Add(-length), step), nil
}

// historyOf turns samples, newest first, into the points of the history since from. The newest
// sample of each step becomes a point. A sample that is not older than the one before it in the
// list is left out: the clock of Redis was set back.
func historyOf(samples []ledger.Sample, from time.Time, step time.Duration) api.History {
	h := api.History{StepSeconds: int(step / time.Second), Points: []api.HistoryPoint{}}
	var kept []ledger.Sample // newest first, one for each step
	for _, s := range samples {
		if n := len(kept); n > 0 && !s.At.Truncate(step).Before(kept[n-1].At.Truncate(step)) {
			continue
		}
		kept = append(kept, s)
	}
	for i := len(kept) - 2; i >= 0; i-- {
		if s := kept[i]; !s.At.Before(from) {
			h.Points = append(h.Points, pointOf(kept[i+1], s))
		}
	}
	return h
}

// pointOf computes a point of the history from a sample and the one before it. A total that has
// become smaller, because a failover of Redis has lost writes, counts as unchanged.
func pointOf(before, s ledger.Sample) api.HistoryPoint {
	seconds := s.At.Sub(before.At).Seconds()
	rate := func(total, earlier int64) float64 {
		return round(float64(max(0, total-earlier))/seconds, 100)
	}
	return api.HistoryPoint{
		T:         s.At,
		Accepted:  rate(s.Accepted, before.Accepted),
		Started:   rate(s.Started, before.Started),
		Done:      rate(s.Done, before.Done),
		Failed:    rate(s.Failed, before.Failed),
		Retried:   rate(s.Retried, before.Retried),
		Throttled: rate(s.Throttled, before.Throttled),
		Gauges:    s.Gauges,

		StartDelayP50MS: s.StartDelayP50MS, StartDelayP99MS: s.StartDelayP99MS,
	}
}
