package backpressure

import (
	"math"
	"time"
)

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
