package ledger

import (
	"cmp"
	"fmt"
	"time"
)

// Limiters, by how they count. lua/parts/limiters.lua says what each holds to.
const (
	LimiterFixed   = "fixed"
	LimiterSliding = "sliding"
	LimiterToken   = "token"
)

// Shares say what becomes of permits that a tenant leaves.
const (
	ShareStatic  = "static"
	ShareElastic = "elastic" // they are lent to others
)

// Limit is the rate limit that a script holds to. The zero limiter is fixed, the zero share static;
// 0 permits are no limit.
type Limit struct {
	Limiter string
	Share   string
	Window  time.Duration
	Permits int64 // a window, of all partitions together
	// With several partitions, the part of this one until the limit is divided by demand, and the
	// name of what is divided: "" with one partition.
	Part int64
	Tag  string
}

func (l Limit) args() []any {
	return []any{cmp.Or(l.Limiter, LimiterFixed), l.Window.Milliseconds(), l.Permits, l.Part, l.Tag}
}

func (l Limit) share() string { return cmp.Or(l.Share, ShareStatic) }

// Rate is the limit of the whole installation: RPS permits a second, counted in
// windows. 0 is no limit.
type Rate struct {
	RPS     int64
	Window  time.Duration
	Limiter string
	Share   string
}

// PerWindow is the permits of one window of all partitions together, at least 1.
func (r Rate) PerWindow() int64 {
	if r.RPS <= 0 {
		return 0
	}
	return max(1, r.RPS*r.Window.Milliseconds()/1000)
}

// Of is the limit as one partition, counted from 0, holds to it. The first parts of
// all add up to the whole.
func (r Rate) Of(partition, partitions int) Limit {
	n, i := int64(partitions), int64(partition)
	all := r.PerWindow()
	l := Limit{Limiter: r.Limiter, Share: r.Share, Window: r.Window, Permits: all, Part: all*(i+1)/n - all*i/n}
	if partitions > 1 {
		l.Tag = fmt.Sprintf("%d/%d/%s/%d", all, r.Window.Milliseconds(), cmp.Or(r.Limiter, LimiterFixed), partitions)
	}
	return l
}

// RPSOf is the permits a second of one partition, for estimates.
func (r Rate) RPSOf(partitions int) int64 {
	if r.RPS <= 0 {
		return 0
	}
	return max(1, r.RPS/int64(partitions))
}

// keepStats is how long congestion statistics are kept, in ms; an hour where nobody says.
func keepStats(d time.Duration) int64 { return cmp.Or(d, time.Hour).Milliseconds() }
