package backpressure

import (
	"math"
	"slices"
	"time"
)

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
