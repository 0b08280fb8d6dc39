// Package backpressure decides whether ingest accepts more jobs now. It refuses them while too many
// jobs wait or Redis's memory is full, and tells the client when to try again. As a rule, a refused
// client gets a reservation: space is kept for it until it returns at that time.
package backpressure

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
)

// The constants are the greatest ages of the view by which jobs are accepted. The view is the size
// of the backlog, the rate at which it drains, the number of ingest processes and the memory in
// use, as last read from Redis. A request that may never fit into this process's share
// (exceedsShare) needs the fresher view.
const (
	viewMaxAge      = 200 * time.Millisecond
	freshViewMaxAge = 20 * time.Millisecond
)

// readRetryTime is the longest time for all repetitions while one view is read. A view takes
// several commands; one that gets no reply is repeated, because all requests fail without a view.
// The time is short, because all requests wait for it while Redis is away.
const readRetryTime = 500 * time.Millisecond

// stuckMemoryWait is how much longer full memory is expected to stay full while its use does not
// fall. The Retry-After is longer, see reserve.
const stuckMemoryWait = 5 * time.Second

// ingestRole is the name of the role ingest in the heartbeats of processes, by which the controller
// counts ingest processes.
const ingestRole = "ingest"

// Config holds the limits. 0 means no limit.
type Config struct {
	MaxBacklog     int64   // waiting, non-ready and ready jobs of all groups
	MaxMemoryRatio float64 // part of Redis's maxmemory up to which jobs are accepted
}

// Controller is the admission controller of one process: it accepts jobs or refuses them.
type Controller struct {
	cfg   Config
	conn  *redisx.Conn
	space keyspace.Space

	mu        sync.Mutex
	admission admission
	readAt    time.Time // when the view was last read
	err       error     // of the last read of the view
	memory    memory

	// inTransit is the number of accepted jobs whose requests have not ended yet. These jobs may
	// not be in the backlog yet.
	inTransit atomic.Int64
}

// memory is the memory use of the fullest Redis server.
type memory struct {
	ratio    float64 // used part of maxmemory
	readAt   time.Time
	fallRate float64 // by how much ratio falls per second, smoothed
}

// New returns the admission controller of one process.
func New(cfg Config, conn *redisx.Conn, space keyspace.Space) *Controller {
	return &Controller{cfg: cfg, conn: conn, space: space, admission: newAdmission(cfg.MaxBacklog)}
}

// Check returns an *api.BackpressureError when n more jobs can't be accepted now. The client then
// has a reservation, except in the cases of reserve. Without an error the jobs count as accepted
// from now on. Check may read the view first; it returns the error of the last read if it failed.
// It returns api.ErrInvalid for more jobs than the backlog may ever hold.
func (c *Controller) Check(ctx context.Context, n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	limit, jobs := c.cfg.MaxBacklog, int64(n)
	if limit > 0 && jobs > limit {
		return fmt.Errorf("%d jobs at once: the backlog takes at most %d in all: send them in smaller pieces: %w",
			n, limit, api.ErrInvalid)
	}
	age := viewMaxAge
	if c.admission.exceedsShare(jobs) {
		age = freshViewMaxAge
	}
	// One request reads the view for all that wait for the mutex, so the read ignores this
	// request's cancellation. A failed read counts as a view too: otherwise each waiting request
	// would try for itself while Redis does not answer.
	if time.Since(c.readAt) > age {
		c.err = c.readView(context.WithoutCancel(ctx))
		c.readAt = time.Now()
	}
	if c.err != nil {
		return c.err
	}
	r, blocked := requestOf(ctx), c.memoryWait()
	if blocked == 0 && (limit <= 0 || n == 0) {
		return nil
	}
	var cl client
	if r != nil {
		cl = r.client
	}
	wait, ok := c.admission.accept(time.Now(), cl, jobs, blocked)
	if ok {
		r.start(c, jobs)
		return nil
	}
	full := &api.BackpressureError{
		RetryAfter: wait,
		Reason:     fmt.Sprintf("the backlog has %d of at most %d jobs", limit-c.admission.free, limit),
	}
	switch {
	case blocked > 0:
		full.Reason = fmt.Sprintf("Redis uses %.0f%% of its memory; jobs are accepted up to %.0f%%",
			c.memory.ratio*100, c.cfg.MaxMemoryRatio*100)
	case jobs <= c.admission.free:
		full.Reason += ", and the rest is reserved for clients that were refused before"
	}
	return full
}

// memoryWait returns how long memory will stay full, 1 s to 1 min, by the rate at which its use
// falls. It returns 0 when memory is not full, and stuckMemoryWait when the use does not fall.
func (c *Controller) memoryWait() time.Duration {
	over := c.memory.ratio - c.cfg.MaxMemoryRatio
	switch {
	case c.cfg.MaxMemoryRatio <= 0 || over <= 0:
		return 0
	case c.memory.fallRate <= 0:
		return stuckMemoryWait
	}
	return max(time.Second, time.Duration(min(over/c.memory.fallRate, time.Minute.Seconds())*float64(time.Second)))
}

// readView reads the view. It repeats each command that Redis does not answer, for readRetryTime in
// all.
func (c *Controller) readView(ctx context.Context) error {
	since, until := c.readAt, time.Now().Add(readRetryTime)
	backlog := c.inTransit.Load() // read before the backlog: jobs may be counted twice, but none is missed
	for _, part := range c.space.All() {
		types, err := retry(ctx, until, func(ctx context.Context) ([]string, error) {
			return ledger.Types(ctx, c.conn.Cmd, part)
		})
		if err != nil {
			return err
		}
		loads, err := retry(ctx, until, func(ctx context.Context) ([]api.TypeStats, error) {
			return ledger.Loads(ctx, c.conn.Cmd, part, types)
		})
		if err != nil {
			return err
		}
		for _, l := range loads {
			backlog += l.Backlog
		}
	}
	workers, err := retry(ctx, until, func(ctx context.Context) ([]presence.WorkerReport, error) {
		return presence.Workers(ctx, c.conn, c.space)
	})
	if err != nil {
		return err
	}
	drain := 0.0
	for _, w := range workers {
		for _, r := range w.StartedPerSecond {
			drain += r
		}
	}
	stages, err := retry(ctx, until, func(ctx context.Context) ([]api.StageStatus, error) {
		return presence.Stages(ctx, c.conn, c.space)
	})
	if err != nil {
		return err
	}
	peers := int64(0)
	for _, s := range stages {
		if s.Role == ingestRole {
			peers++
		}
	}
	c.admission.update(backlog, peers, drain, time.Since(since))
	return c.readMemory(ctx, until)
}

// retry repeats a read until Redis answers, or until the time `until`. It returns the last error.
func retry[T any](
	ctx context.Context, until time.Time, read func(context.Context) (T, error),
) (value T, err error) {
	err = redisx.RetryWhile(ctx, time.Until(until), call.IsUnavailable, func(ctx context.Context) (err error) {
		value, err = read(ctx)
		return err
	})
	return value, err
}

func (c *Controller) readMemory(ctx context.Context, until time.Time) error {
	if c.cfg.MaxMemoryRatio <= 0 {
		return nil
	}
	used, err := retry(ctx, until, func(ctx context.Context) (api.RedisMemory, error) { return Memory(ctx, c.conn) })
	if err != nil {
		return err
	}
	ratio := Ratio(used)
	m := &c.memory
	now := time.Now()
	if elapsed := now.Sub(m.readAt); !m.readAt.IsZero() && elapsed < time.Minute {
		falls := (m.ratio - ratio) / elapsed.Seconds()
		m.fallRate += (falls - m.fallRate) * (1 - math.Exp(-elapsed.Seconds()))
	}
	m.ratio, m.readAt = ratio, now
	return nil
}

// Memory returns the use of the memory of the fullest server; of a server without a limit, only if no
// server has one.
func Memory(ctx context.Context, conn *redisx.Conn) (fullest api.RedisMemory, err error) {
	var mu sync.Mutex // guards fullest
	err = conn.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		info, err := shard.Info(ctx, "memory").Result()
		if call.IsUnavailable(err) {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		// The embedded server of dev and demo reports no maxmemory.
		m := api.RedisMemory{Used: infoField(info, "used_memory"), Max: infoField(info, "maxmemory")}
		if Ratio(m) > Ratio(fullest) || fullest.Max == 0 && (m.Max > 0 || m.Used > fullest.Used) {
			fullest = m
		}
		return nil
	})
	return fullest, err
}

// Ratio returns the used part of a memory; 0: it has no limit.
func Ratio(m api.RedisMemory) float64 {
	if m.Max <= 0 {
		return 0
	}
	return float64(m.Used) / float64(m.Max)
}

func infoField(info, name string) int64 {
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(v), 10, 64)
			return n
		}
	}
	return 0
}

// drainAverageTime is the time constant of the moving average of the drain rate.
const drainAverageTime = 5 * time.Second

// admission decides by the latest view of the backlog whether jobs are accepted. Each ingest
// process accepts jobs up to its share of the free backlog, and reserves its share of the drain. So
// all processes together hardly exceed the limit, and nothing is reserved twice.
type admission struct {
	limit        int64 // most jobs in the backlog
	reservations *reservationQueue
	processes    int64   // live ingest processes, which share the free backlog
	free         int64   // jobs that the backlog may still take, less those accepted here since the last view
	freeShare    int64   // this process's share of free
	drainRate    float64 // jobs that leave the backlog per second, averaged
}

func newAdmission(limit int64) admission {
	return admission{limit: limit, reservations: newReservationQueue(), processes: 1}
}

// update replaces the view of the backlog by one that was just read: backlog is its jobs, peers the
// live ingest processes, drain the jobs that leave it per second. elapsed is the time since the
// view before.
func (a *admission) update(backlog, peers int64, drain float64, elapsed time.Duration) {
	// Reservations are made minutes ahead, so a rate measured over half a second must be averaged.
	if a.drainRate == 0 {
		a.drainRate = drain
	}
	a.drainRate += (drain - a.drainRate) * (1 - math.Exp(-elapsed.Seconds()/drainAverageTime.Seconds()))
	a.processes = max(1, peers)
	a.free = a.limit - backlog
	a.freeShare = a.free / a.processes
}

// exceedsShare reports whether a request is so large, more than half of this process's share of an
// empty backlog, that the share may never have enough space for it. Such a request is compared with
// the free space of all processes, so the caller must read a fresh view first.
func (a *admission) exceedsShare(jobs int64) bool {
	return a.processes > 1 && a.limit > 0 && jobs > a.limit/(2*a.processes)
}

// accept accepts jobs and counts them, or makes a reservation, as a rule, and returns how long the
// client has to wait (see reserve). With blocked above 0 it accepts no new jobs: blocked is the
// expected time until jobs are accepted again.
func (a *admission) accept(now time.Time, cl client, jobs int64, blocked time.Duration) (wait time.Duration, ok bool) {
	d := demand{
		client:    cl,
		jobs:      jobs,
		free:      a.freeShare,
		drainRate: a.drainRate / float64(a.processes),
		blocked:   blocked,
	}
	if a.exceedsShare(jobs) {
		d.free = a.free
	}
	wait, ok = a.reservations.accept(now, d)
	if ok {
		a.free, a.freeShare = a.free-jobs, a.freeShare-jobs
	}
	return wait, ok
}

// client identifies who wants to add jobs, so that a refused client is recognized when it returns.
type client struct {
	key    string // name of the client or its request
	unique bool   // no other client has this key
	// retries says that the caller tries again by itself until it is accepted. It gets no
	// reservation.
	retries bool

	body  string // for a piece of a streamed body: identifies the body
	piece int64  // number of the piece in the body
}

// Request is one attempt of a client to add jobs. By it the admission controller recognizes a
// client that was refused before, and counts jobs that are on their way to Redis.
type Request struct {
	client
	controller *Controller // that has accepted the jobs
	jobs       atomic.Int64
}

type requestKey struct{}

// WithRequest returns a context for one submission or append. key names the client or its request.
// unique says that no other client has this key, for example because it is an idempotency key. The
// caller must call End after the jobs are stored or refused.
func WithRequest(ctx context.Context, key string, unique bool) (context.Context, *Request) {
	return withRequest(ctx, client{key: key, unique: unique})
}

// WithPiece is WithRequest for one piece of a streamed body. A body that is sent again must have
// the same body id.
func WithPiece(ctx context.Context, key, body string, piece int64) (context.Context, *Request) {
	return withRequest(ctx, client{key: key, body: body, piece: piece})
}

// WithoutReservation is WithRequest for a caller that tries again by itself until it is accepted,
// whatever Retry-After says.
func WithoutReservation(ctx context.Context) (context.Context, *Request) {
	return withRequest(ctx, client{retries: true})
}

func withRequest(ctx context.Context, cl client) (context.Context, *Request) {
	r := &Request{client: cl}
	return context.WithValue(ctx, requestKey{}, r), r
}

// End tells the controller that the request's jobs are stored now, or never will be: they are no
// longer counted as on their way.
func (r *Request) End() {
	if n := r.jobs.Swap(0); n > 0 {
		r.controller.inTransit.Add(-n)
	}
}

func requestOf(ctx context.Context) *Request {
	r, _ := ctx.Value(requestKey{}).(*Request)
	return r
}

// start counts the jobs of an accepted request as on their way to Redis. r may be nil.
func (r *Request) start(c *Controller, jobs int64) {
	if r != nil {
		r.controller = c
		r.jobs.Add(jobs)
		c.inTransit.Add(jobs)
	}
}

const (
	bucketWidth     = 100 * time.Millisecond // reservations that fall due within this time are one bucket
	earlyTolerance  = 100 * time.Millisecond // how much too early a client may return, because clocks and timers differ
	holdTime        = 150 * time.Millisecond // for how long after its due time a reservation keeps space free
	expiryTime      = time.Second            // this long after its due time a reservation is removed
	dueMargin       = 800 * time.Millisecond // a reservation falls due this long after its space should be free
	maxReservedWait = 10 * time.Minute       // no reservation is made further ahead
	noDrainWait     = 10 * time.Second       // least wait when less than 1 job a second drains

	// The factors bound the part of the measured drain rate that may be reserved. The part falls
	// when space was not free in time and rises when it was.
	maxDrainFactor, minDrainFactor = 0.9, 0.1
)

// reservationQueue holds the reservations of refused clients, ordered by the time at which they
// fall due. Each client was told when to return. Space that the workers free until then is kept for
// the reservations; other clients get only what is left. So a client that returns at its time was
// refused only once, however many clients come, unless less space was freed than expected.
type reservationQueue struct {
	buckets     []bucket // consecutive, each bucketWidth long
	firstBucket int64    // number of the first bucket since the Unix epoch
	reserved    int64    // jobs of all reservations
	byKey       map[string][]*reservation
	drainFactor float64
}

// bucket holds the reservations that fall due within one bucketWidth.
type bucket struct {
	reserved     int64
	reservations []*reservation
}

// reservation is the right of a refused client to be accepted when it returns at due.
type reservation struct {
	client
	jobs   int64
	due    time.Time
	closed bool // used, withdrawn or expired; its bucket may still list it
}

// demand is a client's request to add jobs, and the view by which it is accepted or refused.
type demand struct {
	client
	jobs      int64
	free      int64         // jobs that may be added now
	drainRate float64       // jobs that leave the backlog per second
	blocked   time.Duration // nothing is accepted for this time, because memory is full; 0: memory is free
}

func newReservationQueue() *reservationQueue {
	return &reservationQueue{byKey: map[string][]*reservation{}, drainFactor: maxDrainFactor}
}

// accept accepts a demand, or reserves space and returns the wait in whole seconds after which the
// client should return (see reserve). A client that returns too early keeps its reservation. An
// accepted demand uses up the client's reservation. The caller counts the accepted jobs: accept
// does not change the free space.
func (q *reservationQueue) accept(now time.Time, d demand) (wait time.Duration, ok bool) {
	q.removeExpired(now)
	drain := d.drainRate * q.drainFactor
	fits := d.jobs <= d.free && d.blocked == 0
	if r := q.claimable(now, d.client, d.jobs); r != nil {
		if d.body == r.body && d.piece < r.piece {
			return 0, true // this piece was stored before the body was sent again: it adds nothing
		}
		q.remove(r)
		if fits && (d.jobs <= r.jobs || q.keepsReservations(now, d, drain, nil)) {
			q.drainFactor = min(maxDrainFactor, q.drainFactor*1.02)
			return 0, true
		}
		if d.jobs <= r.jobs {
			q.drainFactor = max(minDrainFactor, q.drainFactor*0.9) // the backlog drains more slowly than measured
		}
		return q.reserve(now, d, q.dueJobs(now), drain), false // before the reservations that are not due yet
	}
	r := q.existing(d.client)
	if fits && q.keepsReservations(now, d, drain, r) {
		if r != nil {
			q.remove(r)
		}
		return 0, true
	}
	if r != nil {
		return roundUpToSeconds(r.due.Sub(now)), false // the client is too early: its reservation stays
	}
	return q.reserve(now, d, q.reserved, drain), false
}

// keepsReservations reports whether all reservations, except own, can still be kept when d is
// accepted now. drain is the number of jobs per second that may be reserved.
func (q *reservationQueue) keepsReservations(now time.Time, d demand, drain float64, own *reservation) bool {
	if own != nil {
		b := &q.buckets[bucketOf(own.due)-q.firstBucket]
		b.reserved -= own.jobs
		defer func() { b.reserved += own.jobs }()
	}
	free, reserved := float64(d.free-d.jobs), 0.0
	for i := range q.buckets {
		if q.buckets[i].reserved == 0 || q.bucketTime(i).Add(bucketWidth+holdTime).Before(now) {
			continue
		}
		reserved += float64(q.buckets[i].reserved)
		until := max(0, q.bucketTime(i).Sub(now)-dueMargin)
		if free+drain*until.Seconds() < reserved {
			return false
		}
	}
	return true
}

// reserve makes a reservation behind `ahead` other jobs and returns the wait until it is due. It
// makes no reservation, and returns only a wait, when drain is below 1 job a second, when the wait
// would exceed maxReservedWait, or when the client retries by itself.
func (q *reservationQueue) reserve(now time.Time, d demand, ahead int64, drain float64) time.Duration {
	if drain < 1 {
		return max(noDrainWait, roundUpToSeconds(d.blocked))
	}
	need := max(0, float64(ahead+d.jobs-max(0, d.free))/drain)
	if need += (dueMargin + d.blocked).Seconds(); need > maxReservedWait.Seconds() {
		return maxReservedWait
	}
	wait := roundUpToSeconds(time.Duration(need * float64(time.Second)))
	if d.retries {
		return wait
	}
	r := &reservation{client: d.client, jobs: d.jobs, due: now.Add(wait)}
	t := bucketOf(r.due)
	if len(q.buckets) == 0 {
		q.firstBucket = t
	}
	for ; q.firstBucket > t; q.firstBucket-- {
		q.buckets = slices.Insert(q.buckets, 0, bucket{})
	}
	for t >= q.firstBucket+int64(len(q.buckets)) {
		q.buckets = append(q.buckets, bucket{})
	}
	b := &q.buckets[t-q.firstBucket]
	b.reservations, b.reserved, q.reserved = append(b.reservations, r), b.reserved+r.jobs, q.reserved+r.jobs
	q.byKey[r.key] = append(q.byKey[r.key], r)
	return wait
}

// claimable returns a reservation under the client's key that is due now or within earlyTolerance.
// It prefers one for the same number of jobs, and then the earliest. If several clients have the
// same key, the reservation may belong to another client. claimable returns nil if it finds none.
func (q *reservationQueue) claimable(now time.Time, cl client, jobs int64) *reservation {
	var found *reservation
	for _, r := range q.byKey[cl.key] {
		switch {
		case r.due.After(now.Add(earlyTolerance)):
		case found == nil, r.jobs == jobs && found.jobs != jobs,
			r.due.Before(found.due) && (found.jobs != jobs || r.jobs == jobs):
			found = r
		}
	}
	return found
}

// existing returns the reservation that certainly belongs to the client, due or not: its key is
// unique, or the reservation is for the same body. It returns nil if there is none.
func (q *reservationQueue) existing(cl client) *reservation {
	for _, r := range q.byKey[cl.key] {
		if cl.unique || cl.body != "" && cl.body == r.body {
			return r
		}
	}
	return nil
}

// dueJobs counts the jobs of the reservations that are due, those of the present bucket included. A
// client that returned in time and is refused again gets a place behind these jobs only.
func (q *reservationQueue) dueJobs(now time.Time) (jobs int64) {
	for i := range q.buckets {
		if q.bucketTime(i).After(now) {
			break
		}
		jobs += q.buckets[i].reserved
	}
	return jobs
}

func (q *reservationQueue) remove(r *reservation) {
	r.closed = true
	q.reserved -= r.jobs
	q.buckets[bucketOf(r.due)-q.firstBucket].reserved -= r.jobs
	rest := slices.DeleteFunc(q.byKey[r.key], func(other *reservation) bool { return other == r })
	if q.byKey[r.key] = rest; len(rest) == 0 {
		delete(q.byKey, r.key)
	}
}

// removeExpired removes the reservations whose clients did not return in time.
func (q *reservationQueue) removeExpired(now time.Time) {
	for len(q.buckets) > 0 && q.bucketTime(0).Add(bucketWidth+expiryTime).Before(now) {
		for _, r := range q.buckets[0].reservations {
			if !r.closed {
				q.remove(r)
			}
		}
		q.buckets[0].reservations = nil
		q.buckets, q.firstBucket = q.buckets[1:], q.firstBucket+1
	}
}

func (q *reservationQueue) bucketTime(i int) time.Time {
	return time.UnixMilli((q.firstBucket + int64(i)) * bucketWidth.Milliseconds())
}

func bucketOf(t time.Time) int64 { return t.UnixMilli() / bucketWidth.Milliseconds() }

// roundUpToSeconds rounds up to whole seconds, at least 1, because Retry-After has no smaller unit.
func roundUpToSeconds(d time.Duration) time.Duration {
	return time.Duration(max(1, math.Ceil(d.Seconds()))) * time.Second
}
