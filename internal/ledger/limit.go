package ledger

import (
	"cmp"
	"fmt"
	"time"
)

// The limiters. lua/parts/limiters.lua says what each of them guarantees.
const (
	LimiterFixed   = "fixed"
	LimiterSliding = "sliding"
	LimiterToken   = "token"
)

// Shares say whether other tenants may borrow the unused part of a tenant's share.
const (
	ShareStatic  = "static"
	ShareElastic = "elastic" // other tenants may borrow it
)

// Limit is the global rate limit, as a script of one partition applies it.
type Limit struct {
	Limiter string // "": fixed
	Share   string // "": static
	Window  time.Duration
	Permits int64 // in a window, of all partitions together; 0: no limit
	Part    int64 // with several partitions: this one's part of Permits until it is rebalanced
	// Tag names the limit and the number of partitions: a quota of another tag is not valid. ""
	// with one partition.
	Tag string
}

func (l Limit) args() []any {
	return []any{cmp.Or(l.Limiter, LimiterFixed), l.Window.Milliseconds(), l.Permits, l.Part, l.Tag}
}

func (l Limit) share() string { return cmp.Or(l.Share, ShareStatic) }

// Rate is the rate limit of the whole installation: RPS permits a second, counted in windows. An
// RPS of 0 is no limit.
type Rate struct {
	RPS     int64
	Window  time.Duration
	Limiter string
	Share   string
}

// PerWindow returns the permits in a window, of all partitions together: at least 1, or 0 without a
// limit.
func (r Rate) PerWindow() int64 {
	if r.RPS <= 0 {
		return 0
	}
	return max(1, r.RPS*r.Window.Milliseconds()/1000)
}

// Of returns the global limit with what one partition, counted from 0, needs to apply it: Permits
// is the whole limit, Part the partition's quota until the quotas are rebalanced. The Parts of all
// partitions add up to Permits.
func (r Rate) Of(partition, partitions int) Limit {
	n, i := int64(partitions), int64(partition)
	all := r.PerWindow()
	l := Limit{Limiter: r.Limiter, Share: r.Share, Window: r.Window, Permits: all, Part: all*(i+1)/n - all*i/n}
	if partitions > 1 {
		l.Tag = fmt.Sprintf("%d/%d/%s/%d", all, r.Window.Milliseconds(), cmp.Or(r.Limiter, LimiterFixed), partitions)
	}
	return l
}

// RPSOf returns an equal part of RPS for one partition, at least 1, for estimates; 0 without a
// limit.
func (r Rate) RPSOf(partitions int) int64 {
	if r.RPS <= 0 {
		return 0
	}
	return max(1, r.RPS/int64(partitions))
}

// keepStats returns how long congestion statistics are kept, in ms. The default is one hour.
func keepStats(d time.Duration) int64 { return cmp.Or(d, time.Hour).Milliseconds() }
