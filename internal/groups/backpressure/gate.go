package backpressure

import (
	"math"
	"time"
)

// drainAge is how long the drain is averaged over.
const drainAge = 5 * time.Second

// gate decides by a view of the backlog. Each ingest process lets in its share of the room and
// makes promises of its share of the drain, so that together they neither go beyond the limit nor
// promise anything twice.
type gate struct {
	limit int64 // jobs in the backlog
	line  *line
	peers int64   // processes that let jobs in
	room  int64   // for all of them, less what was let in here since the look
	share int64   // this process's part of it
	drain float64 // jobs a second that leave the backlog
}

func newGate(limit int64) gate { return gate{limit: limit, line: newLine(), peers: 1} }

// see takes a new view; elapsed is the age of the one before.
func (g *gate) see(backlog, peers int64, drain float64, elapsed time.Duration) {
	// What is promised is far ahead of what the last half second says.
	if g.drain == 0 {
		g.drain = drain
	}
	g.drain += (drain - g.drain) * (1 - math.Exp(-elapsed.Seconds()/drainAge.Seconds()))
	g.peers = max(1, peers)
	g.room = g.limit - backlog
	g.share = g.room / g.peers
}

// large tells of what a share may never suffice for. It is measured by all the room, which the
// caller looks at afresh.
func (g *gate) large(jobs int64) bool {
	return g.peers > 1 && g.limit > 0 && jobs > g.limit/(2*g.peers)
}

// admit lets jobs in, or says how long they have to wait. shut is how long nothing at all comes in.
func (g *gate) admit(now time.Time, c claim, jobs int64, shut time.Duration) (wait time.Duration, ok bool) {
	o := offer{claim: c, jobs: jobs, room: g.share, drain: g.drain / float64(g.peers), shut: shut}
	if g.large(jobs) {
		o.room = g.room
	}
	wait, ok = g.line.admit(now, o)
	if ok {
		g.room, g.share = g.room-jobs, g.share-jobs
	}
	return wait, ok
}
