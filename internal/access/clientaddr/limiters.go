package clientaddr

import (
	"container/list"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Limiters has a token bucket for each of the most recently used addresses. A new address replaces
// the least recently used one, so that memory is bounded. It is safe for concurrent use.
type Limiters struct {
	limit rate.Limit
	burst int
	most  int

	mu      sync.Mutex
	buckets map[netip.Addr]*list.Element
	recent  *list.List // of *bucket, the one used last at the front
}

type bucket struct {
	ip    netip.Addr
	limit *rate.Limiter
}

// NewLimiters returns limiters that give each address limit permits a second, with bursts of burst
// permits. At most `most` addresses have a bucket at the same time.
func NewLimiters(limit rate.Limit, burst, most int) *Limiters {
	return &Limiters{
		limit: limit, burst: burst, most: most, buckets: map[netip.Addr]*list.Element{}, recent: list.New(),
	}
}

// Take takes one permit of an address and returns 0. If the address has no permit, Take takes
// nothing and returns how long the caller would have to wait for one. The zero Addr is not limited.
func (l *Limiters) Take(ip netip.Addr, now time.Time) (wait time.Duration) {
	if !ip.IsValid() {
		return 0
	}
	return TakeFrom(l.of(ip), now)
}

// TakeFrom takes one permit of a limiter and returns 0. If there is no permit, it takes nothing and
// returns how long the caller would have to wait for one.
func TakeFrom(l *rate.Limiter, now time.Time) (wait time.Duration) {
	reservation := l.ReserveN(now, 1)
	if wait = reservation.DelayFrom(now); wait > 0 {
		reservation.CancelAt(now)
	}
	return wait
}

func (l *Limiters) of(ip netip.Addr) *rate.Limiter {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e, ok := l.buckets[ip]; ok {
		l.recent.MoveToFront(e)
		return e.Value.(*bucket).limit
	}
	if len(l.buckets) >= l.most {
		last := l.recent.Back()
		delete(l.buckets, l.recent.Remove(last).(*bucket).ip)
	}
	b := &bucket{ip, rate.NewLimiter(l.limit, l.burst)}
	l.buckets[ip] = l.recent.PushFront(b)
	return b.limit
}
