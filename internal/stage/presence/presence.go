// Package presence tells which processes are alive, and how many jobs the workers can take. Each
// process publishes its status in a heartbeat; a worker process adds its capacity. The package
// hides how heartbeats are stored in Redis, and when a process counts as gone.
package presence

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

// Interval is the time between two heartbeats of a process; a broker's are a second apart. A
// process without a heartbeat for TTL counts as gone.
const (
	Interval = 500 * time.Millisecond
	TTL      = 5 * time.Second
)

// WorkerReport is the heartbeat of a worker process: its status, and its capacity by job type.
type WorkerReport struct {
	api.WorkerStatus
	// StartedPerSecond is the start rate by type: jobs a second, a mean over the last 5 s or less.
	// RunMS is the moving average of run times by type, ms.
	StartedPerSecond map[string]float64 `json:"started_per_second"`
	RunMS            map[string]float64 `json:"run_ms"`
	// BatchSizes is, by type whose jobs run in batches, the most jobs of one call, which takes one slot.
	// A job's run time is its share of the call's.
	BatchSizes map[string]int `json:"batch_sizes,omitempty"`
	// PermissionsPerSecond is, by gated type, how many permissions a second all processes together
	// can get for its jobs; a type without a bound is not listed.
	PermissionsPerSecond map[string]float64 `json:"permissions_per_second,omitempty"`
	// NoPermissionUntil is, by gated type, the time until which the worker starts none of its jobs,
	// because it can get no permission.
	NoPermissionUntil map[string]time.Time `json:"no_permission_until,omitempty"`
	// RunningSince is, by the id of a job, when the job began to run, by the clock of the worker. It
	// has 200 jobs at most.
	RunningSince map[string]time.Time `json:"running_since,omitempty"`
	// StartDelays are those of all first attempts since the process began.
	StartDelays Delays `json:"start_delays,omitzero"`
}

// PublishWorker stores the heartbeat of a worker process.
func PublishWorker(ctx context.Context, conn *redisx.Conn, space keyspace.Space, r WorkerReport) error {
	return publish(ctx, conn, space.Workers(), r.ID, r)
}

// PublishStage stores the heartbeat of a process of a role other than worker and broker.
func PublishStage(ctx context.Context, conn *redisx.Conn, space keyspace.Space, s api.StageStatus) error {
	return publish(ctx, conn, space.Stages(), s.ID, s)
}

// PublishBroker stores the heartbeat of a broker process under s.ID, which is the instance in its
// conns. known is false if Redis had no earlier heartbeat of it.
func PublishBroker(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, s api.StageStatus,
) (known bool, err error) {
	return put(ctx, conn, space.Brokers(), s.ID, s)
}

// Brokers returns the statuses of live brokers, ordered by id. It deletes old statuses, as read
// does.
func Brokers(ctx context.Context, conn *redisx.Conn, space keyspace.Space) ([]api.StageStatus, error) {
	return read[api.StageStatus](ctx, conn, space.Brokers(), 20*TTL)
}

// Withdraw removes the heartbeat of a process of any role but broker when the process stops, also
// if ctx has ended. It tries for a second at most and returns no error: a heartbeat that is not
// removed is ignored after TTL.
func Withdraw(ctx context.Context, conn *redisx.Conn, space keyspace.Space, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = conn.Cmd.HDel(ctx, space.Workers(), id).Err()
	// The last report of another role stays, for Absent.
	if all, _, err := reports(ctx, conn, space.Stages()); err == nil && all[id] != "" {
		_, text := splitReport(all[id])
		var s departed
		if json.Unmarshal([]byte(text), &s.StageStatus) == nil {
			s.Left = true
			_ = publish(ctx, conn, space.Stages(), id, s)
		}
	}
}

// departed is the last report of a process that has stopped in order.
type departed struct {
	api.StageStatus
	Left bool `json:"left"`
}

// The report of a process of a stage that is gone is kept for remember, while the hash has at most
// maxRemembered reports, and otherwise for 20 times TTL: it says since when its role is away.
const (
	remember      = 24 * time.Hour
	maxRemembered = 100
)

// Absent returns those of the roles, in the order given, that have no live process, and for how
// long each has had none; 0 if that is not known.
func Absent(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, roles ...string,
) (absent []string, away []time.Duration, err error) {
	all, now, err := reports(ctx, conn, space.Stages())
	if err != nil {
		return nil, nil, err
	}
	last, alive := map[string]time.Time{}, map[string]bool{}
	for _, report := range all {
		var s departed
		at, text := splitReport(report)
		if json.Unmarshal([]byte(text), &s) != nil {
			continue
		}
		if at.After(last[s.Role]) {
			last[s.Role] = at
		}
		alive[s.Role] = alive[s.Role] || !s.Left && now.Sub(at) <= TTL
	}
	for _, role := range roles {
		if alive[role] {
			continue
		}
		gone := time.Duration(0)
		if at, known := last[role]; known {
			gone = max(now.Sub(at), time.Millisecond)
		}
		absent, away = append(absent, role), append(away, gone)
	}
	return absent, away, nil
}

// Older returns the ids of the live processes that can't read a layout of a part of the data.
// Processes that report no layouts read layout 1.
func Older(ctx context.Context, conn *redisx.Conn, space keyspace.Space, part string, newest int) ([]string, error) {
	var older []string
	look := func(id string, layouts map[string]int) {
		if max(1, layouts[part]) < newest {
			older = append(older, id)
		}
	}
	workers, err := Workers(ctx, conn, space)
	if err != nil {
		return nil, err
	}
	for _, w := range workers {
		look(w.ID, w.Layouts)
	}
	for _, list := range []func(context.Context, *redisx.Conn, keyspace.Space) ([]api.StageStatus, error){Stages, Brokers} {
		stages, err := list(ctx, conn, space)
		if err != nil {
			return nil, err
		}
		for _, s := range stages {
			look(s.ID, s.Layouts)
		}
	}
	return older, nil
}

func publish(ctx context.Context, conn *redisx.Conn, key, id string, status any) error {
	_, err := put(ctx, conn, key, id, status)
	return err
}

// put stores a heartbeat as a field of the hash at key, named by the process's id. known says
// whether the field existed.
func put(ctx context.Context, conn *redisx.Conn, key, id string, status any) (known bool, err error) {
	b, err := json.Marshal(status)
	if err != nil {
		return false, fmt.Errorf("encode status: %w", err)
	}
	r := heartbeat.Read(ctx, conn.Cmd, []string{key}, []any{id, b})
	known = r.Number() == 0
	if err := r.Err(); err != nil {
		return false, fmt.Errorf("publish status: %w", err)
	}
	return known, nil
}

// heartbeat is the script that stores a process's status with the time of Redis, because the clocks
// of hosts differ. heartbeats is the script that returns all statuses of a hash and the time of
// Redis.
var (
	heartbeat  = call.NewScript("heartbeat", lua.Source("processes/heartbeat"))
	heartbeats = call.NewScript("heartbeats", lua.Source("processes/heartbeats"))
)

// Workers returns the reports of live workers, ordered by id. It deletes old reports, as read does.
func Workers(ctx context.Context, conn *redisx.Conn, space keyspace.Space) ([]WorkerReport, error) {
	return read[WorkerReport](ctx, conn, space.Workers(), 20*TTL)
}

// Stages returns the statuses of live processes of all roles but worker and broker, ordered by id.
// It deletes old statuses, as read does.
func Stages(ctx context.Context, conn *redisx.Conn, space keyspace.Space) ([]api.StageStatus, error) {
	return read[api.StageStatus](ctx, conn, space.Stages(), remember)
}

// Configured returns the global limits in the environments of all live processes that report them,
// ordered by id.
func Configured(ctx context.Context, conn *redisx.Conn, space keyspace.Space) ([]api.ProcessLimits, error) {
	workers, err := Workers(ctx, conn, space)
	if err != nil {
		return nil, err
	}
	stages, err := Stages(ctx, conn, space)
	if err != nil {
		return nil, err
	}
	all := []api.ProcessLimits{}
	add := func(id, role string, l *api.ConfiguredLimits) {
		if l != nil {
			all = append(all, api.ProcessLimits{ID: id, Role: role, ConfiguredLimits: *l})
		}
	}
	for _, w := range workers {
		add(w.ID, "worker", w.Limits)
	}
	for _, s := range stages {
		add(s.ID, s.Role, s.Limits)
	}
	slices.SortFunc(all, func(a, b api.ProcessLimits) int { return strings.Compare(a.ID, b.ID) })
	return all, nil
}

// reports returns the reports in the hash at key, by the id of the process, and the time of Redis.
func reports(ctx context.Context, conn *redisx.Conn, key string) (all map[string]string, now time.Time, err error) {
	r := heartbeats.Read(ctx, conn.Cmd, []string{key}, nil)
	all = map[string]string{}
	for r.Len() > 1 {
		id := r.Text()
		all[id] = r.Text()
	}
	now = r.Time()
	if err := r.Err(); err != nil {
		return nil, now, fmt.Errorf("read status: %w", err)
	}
	return all, now, nil
}

// splitReport returns when a report was stored, by Redis, and its JSON.
func splitReport(report string) (at time.Time, text string) {
	shown, text, _ := strings.Cut(report, " ")
	ms, _ := strconv.ParseInt(shown, 10, 64)
	return time.UnixMilli(ms), text
}

// read returns the statuses of live processes in the hash at key, ordered by id. It deletes
// statuses that can't be read or are older than keep; if the hash has many, those older than 20
// times TTL.
func read[T any](ctx context.Context, conn *redisx.Conn, key string, keep time.Duration) ([]T, error) {
	all, now, err := reports(ctx, conn, key)
	if err != nil {
		return nil, err
	}
	var live []T
	for _, id := range slices.Sorted(maps.Keys(all)) {
		var s T
		var end departed
		at, text := splitReport(all[id])
		err := json.Unmarshal([]byte(text), &s)
		_ = json.Unmarshal([]byte(text), &end)
		switch age := now.Sub(at); {
		case err != nil || age > keep || age > 20*TTL && len(all) > maxRemembered:
			_ = conn.Cmd.HDel(ctx, key, id).Err() // unreadable, or left by a process that is gone
		case age <= TTL && !end.Left:
			live = append(live, s)
		}
	}
	return live, nil
}

// servedMaxAge is how old the answer of [Served.Types] may be. It lets many submissions share one
// read of Redis a second.
const servedMaxAge = time.Second

// servedTimeout bounds the read of Redis in [Served.Types], because a submission waits for it.
const servedTimeout = 250 * time.Millisecond

// Served knows which types of jobs live workers serve, and which reducers live aggregators have.
// Its methods are safe for concurrent use.
type Served struct {
	conn            *redisx.Conn
	space           keyspace.Space
	types, reducers servedNames
}

type servedNames struct {
	mu    sync.Mutex
	at    time.Time       // when names was read
	names map[string]bool // never changed, only replaced
}

// NewServed returns a Served that reads the heartbeats of an installation's workers from Redis.
func NewServed(conn *redisx.Conn, space keyspace.Space) *Served {
	return &Served{conn: conn, space: space}
}

// Types returns the types that live workers served at most a second ago. known is false if Redis
// does not answer within servedTimeout, or while another caller is asking it. The caller must not
// change the map.
func (s *Served) Types(ctx context.Context) (types map[string]bool, known bool) {
	return s.types.read(ctx, func(ctx context.Context) (map[string]bool, error) {
		workers, err := Workers(ctx, s.conn, s.space)
		types := map[string]bool{}
		for _, w := range workers {
			for _, t := range w.Types {
				types[t] = true
			}
		}
		return types, err
	})
}

// Reducers does the same as Types for the names of the reducers that live aggregators have.
func (s *Served) Reducers(ctx context.Context) (ops map[string]bool, known bool) {
	return s.reducers.read(ctx, func(ctx context.Context) (map[string]bool, error) {
		return Reducers(ctx, s.conn, s.space, "aggregator")
	})
}

// HasReducers reports whether a live process of a role has all of these reducers.
func HasReducers(ctx context.Context, conn *redisx.Conn, space keyspace.Space, role string, ops []string) (bool, error) {
	stages, err := Stages(ctx, conn, space)
	for _, p := range stages {
		if p.Role == role && !slices.ContainsFunc(ops, func(op string) bool { return !slices.Contains(p.Reducers, op) }) {
			return true, err
		}
	}
	return false, err
}

// Reducers returns the names of the reducers that live processes of a role have, each of them true.
func Reducers(ctx context.Context, conn *redisx.Conn, space keyspace.Space, role string) (map[string]bool, error) {
	stages, err := Stages(ctx, conn, space)
	ops := map[string]bool{}
	for _, p := range stages {
		if p.Role == role {
			for _, op := range p.Reducers {
				ops[op] = true
			}
		}
	}
	return ops, err
}

func (s *servedNames) read(
	ctx context.Context, read func(context.Context) (map[string]bool, error),
) (names map[string]bool, known bool) {
	if !s.mu.TryLock() {
		return nil, false
	}
	defer s.mu.Unlock()
	if time.Since(s.at) >= servedMaxAge {
		ctx, cancel := context.WithTimeout(ctx, servedTimeout)
		defer cancel()
		names, err := read(ctx)
		if err != nil {
			return nil, false
		}
		s.at, s.names = time.Now(), names
	}
	return s.names, true
}

// Capacity computes, from the reports of workers, how many jobs of each type fetchers and
// dispatchers should make ready. It is safe for concurrent use, except Refresh, which only one
// goroutine may call.
type Capacity struct {
	conn  *redisx.Conn
	space keyspace.Space

	mu         sync.Mutex // guards the next two fields and all drainRates
	types      map[string]typeCapacity
	drainRates map[string]*drainRate // by type: how fast workers take the jobs that this process admits

	// Only Refresh uses these.
	serving    map[string]bool // by id: the workers that served a type at the last Refresh
	checkUntil time.Time       // until then, Refresh counts the unserved jobs
}

// typeCapacity is what the live workers that serve a type have reported.
type typeCapacity struct {
	slots     int
	jobs      int     // that these slots run at a time
	batch     int     // most jobs of a call; 1: the type has no batches
	startRate float64 // jobs started per second
	// runTime is the sum of the mean run times (ms) of all workers, each multiplied by its weight:
	// the jobs that this worker starts a second. weight is the sum of these weights.
	runTime, weight float64
	unserved        int // jobs held by workers that no longer serve the type
	// permissions is how many permissions a second the jobs of a gated type can get; of the
	// workers' numbers, the highest. Negative: no bound, or the type is not gated
	permissions float64
}

// NewCapacity returns a Capacity that knows no workers until its first Refresh.
func NewCapacity(conn *redisx.Conn, space keyspace.Space) *Capacity {
	return &Capacity{conn: conn, space: space, drainRates: map[string]*drainRate{}}
}

// drainRate measures how fast workers take the jobs of one type that this process admits. It reacts
// within about drainSpan; the reports of workers come only every half second.
type drainRate struct {
	since time.Time // begin of the current measurement
	// entries is the number of jobs admitted since then: the jobs that workers took. The first
	// measurement subtracts the streams' bounds, so it is negative while the streams fill
	entries   int
	perSecond float64 // result of the last measurement
}

const (
	// drainSpan is the shortest measurement.
	drainSpan = 50 * time.Millisecond
	// drainRateTTL is how long a rate stays valid.
	drainRateTTL = time.Second
)

// current returns the rate in jobs per second; 0 if there is none, or if it is too old.
func (p *drainRate) current() float64 {
	if p == nil || time.Since(p.since) > drainRateTTL {
		return 0
	}
	return p.perSecond
}

// Admitted records that n jobs of type typ were put into a ready stream of the given bound. From
// these calls it measures how fast workers take jobs: they have taken what exceeds the bounds of
// all partitions, and later as many as are admitted.
func (c *Capacity) Admitted(typ string, n int, bound ReadyBound) {
	if n == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.drainRates[typ]
	if p == nil || time.Since(p.since) > drainRateTTL {
		p = &drainRate{since: time.Now(), entries: -max(bound.Cap, bound.Ahead) * c.space.Partitions()}
		c.drainRates[typ] = p
	}
	p.entries += n
	if age := time.Since(p.since); age >= drainSpan {
		*p = drainRate{since: time.Now(), perSecond: float64(max(0, p.entries)) / age.Seconds()}
	}
}

// Refresh reads the reports of all live workers, and counts the jobs of workers that have left (see
// countUnserved). After an error the old numbers stay.
func (c *Capacity) Refresh(ctx context.Context) error {
	workers, err := Workers(ctx, c.conn, c.space)
	if err != nil {
		return err
	}
	types, serving := map[string]typeCapacity{}, map[string]bool{}
	for _, w := range workers {
		for _, typ := range w.Types {
			serving[w.ID] = true
			t, known := types[typ]
			if !known {
				t.permissions = -1
			}
			if n, bounded := w.PermissionsPerSecond[typ]; bounded {
				t.permissions = max(t.permissions, n)
			}
			size := max(1, w.BatchSizes[typ])
			t.batch = max(t.batch, size)
			t.slots, t.jobs = t.slots+w.WorkerStatus.Workers, t.jobs+w.WorkerStatus.Workers*size
			t.startRate += w.StartedPerSecond[typ]
			if ms := w.RunMS[typ]; ms > 0 {
				weight := max(w.StartedPerSecond[typ], 0.01)
				t.runTime += weight * ms
				t.weight += weight
			}
			types[typ] = t
		}
	}
	if err := c.countUnserved(ctx, serving, types); err != nil {
		return err
	}
	c.mu.Lock()
	c.types = types
	c.mu.Unlock()
	return nil
}

// Served returns the types that live workers served at the last Refresh, in no order.
func (c *Capacity) Served() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.types))
}

// countUnserved sets, by type, how many jobs are held by workers that no longer serve the type: by
// dead workers, and by stopping workers that finish their jobs. These jobs are still in the ready
// stream, but need no slot of the serving workers. It counts only for unservedCheck after a worker
// has left, and only if there is one partition.
func (c *Capacity) countUnserved(
	ctx context.Context, serving map[string]bool, types map[string]typeCapacity,
) error {
	if c.space.Partitions() > 1 {
		return nil
	}
	left := c.serving == nil
	for id := range c.serving {
		left = left || !serving[id]
	}
	c.serving = serving
	if left {
		c.checkUntil = time.Now().Add(unservedCheck)
	}
	if time.Now().After(c.checkUntil) {
		return nil
	}
	for typ, t := range types {
		p, err := c.conn.Cmd.XPending(ctx, c.space.Partition(0).Ready(typ), keyspace.GroupWorkers).Result()
		if call.IsUnavailable(err) {
			return fmt.Errorf("read what workers hold: %w", err)
		}
		if err != nil {
			continue // no consumer group: no worker has read the stream yet
		}
		for consumer, n := range p.Consumers {
			if !serving[consumer] {
				t.unserved += int(n)
				c.checkUntil = time.Now().Add(unservedCheck)
			}
		}
		types[typ] = t
	}
	return nil
}

// unservedCheck is for how long, after a worker has left, countUnserved counts its jobs; longer
// while there are such jobs. It also counts for this time after the first Refresh.
const unservedCheck = 10 * time.Second

// readyWork is how much work should wait in the ready streams, as the time in which all slots
// together do it. It is enough that a slot that becomes free finds a job, while the fetcher refills
// a stream when a quarter is gone. More work would delay jobs that come later but should run
// earlier, because fairness and the rate limit have no effect on ready jobs.
const readyWork = 5 * time.Millisecond

// ReadyBound is how many jobs of one type may be in one partition's ready stream.
type ReadyBound struct {
	Cap int // largest number of undelivered jobs
	// Slots is the number of slots of the workers that serve the type, plus the jobs held by
	// workers that no longer do; 0: not known
	Slots int
	Ahead int // if Slots is not 0: jobs beyond those that run, so that the stream holds Slots + Ahead jobs at most
}

// ReadyBound returns the bound of the ready stream of type typ in one partition.
//
// Ahead is the number of jobs that the workers start in 100 ms, but at least `least` and the number
// of slots; then at most what all slots run in readyWork (few jobs, while they are long), and at
// most `most`. Of a type with batches, Ahead is at least one batch, and a slot counts as the jobs of
// one. With one partition, Cap is Ahead, but at least `least` and the number of slots, and
// at most `most`. With several partitions, the work is divided among them, Ahead is at least 1, Cap
// is Ahead, and Slots is not known. The same holds for a gated type with a bound; its Ahead is at
// most the permissions of a second. Without reports of workers, only Cap is set: it is `least` or
// more, so that some jobs become ready and show that workers are needed.
func (c *Capacity) ReadyBound(typ string, least, most int) ReadyBound {
	c.mu.Lock()
	t, drained := c.types[typ], c.drainRates[typ].current()
	c.mu.Unlock()
	if t.slots == 0 {
		// No worker has reported yet, but a new worker may already take jobs: use the measured
		// rate.
		return ReadyBound{Cap: min(most, max(least, int(drained/10)))}
	}
	partitions := c.space.Partitions()
	bound := max(least, t.jobs, int(max(t.startRate, drained)/10)/partitions)
	if t.weight > 0 {
		meanRun := t.runTime / t.weight * float64(time.Millisecond)
		bound = min(bound, int(float64(t.slots)*float64(readyWork)/meanRun)/partitions)
	}
	if t.batch > 1 {
		bound = max(bound, t.batch/partitions)
	}
	if t.permissions >= 0 {
		bound = min(bound, int(t.permissions)/partitions)
	}
	if partitions > 1 || t.permissions >= 0 {
		// Leave Slots out: slots serve all partitions, and how many of them run jobs of this
		// partition is unknown.
		bound = min(most, max(1, bound))
		return ReadyBound{Cap: bound, Ahead: bound}
	}
	return ReadyBound{Cap: min(most, max(least, t.jobs, bound)), Slots: t.jobs + t.unserved, Ahead: min(most, bound)}
}

// poolSizeTTL is the lifetime of a requested number of slots in Redis. A worker process that can't
// reach Redis for longer never learns it.
const poolSizeTTL = time.Hour

// SetPoolSize asks a live worker process to have n slots. The process reads the number with its
// next heartbeat. The error wraps api.ErrNotFound if there is no such process, or it is stopping.
func SetPoolSize(ctx context.Context, conn *redisx.Conn, space keyspace.Space, id string, n int) error {
	workers, err := Workers(ctx, conn, space)
	if err != nil {
		return err
	}
	for _, w := range workers {
		if w.ID != id || w.ShuttingDown {
			continue
		}
		// The time makes each request differ from the last one, also if it names the same number
		// again.
		value := fmt.Sprintf("%d %d", n, time.Now().UnixNano())
		if err := conn.Cmd.Set(ctx, space.PoolSize(id), value, poolSizeTTL).Err(); err != nil {
			return fmt.Errorf("resize worker %s: %w", id, err)
		}
		return nil
	}
	return &api.NotFoundError{Text: "worker " + id + ": no live process has this id"}
}

// PoolSizes reads the numbers of slots that SetPoolSize sets for one worker process. Only one
// goroutine may use it.
type PoolSizes struct{ last string }

// Next reads the latest number from Redis and calls resize with it, unless it has done so for this
// call of SetPoolSize. It calls resize once for each number that it reads, even if resize fails.
func (p *PoolSizes) Next(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, id string, resize func(int) error,
) error {
	value, err := conn.Cmd.Get(ctx, space.PoolSize(id)).Result()
	if errors.Is(err, redis.Nil) || err == nil && value == p.last {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read pool size: %w", err)
	}
	p.last = value
	var n int
	if _, err := fmt.Sscan(value, &n); err != nil {
		return fmt.Errorf("read pool size %q: %w", value, err)
	}
	return resize(n)
}
