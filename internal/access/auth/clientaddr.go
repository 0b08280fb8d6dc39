package auth

import (
	"container/list"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Proxies are the networks of trusted proxies. X-Forwarded-For counts only in requests from them.
type Proxies []netip.Prefix

// Sent reports whether a request comes from a trusted proxy.
func (p Proxies) Sent(r *http.Request) bool { return p.contains(peer(r)) }

// ClientOf returns the address by which a request is rate-limited: an IPv4 address, or the /64
// network of an IPv6 address, because one host can use all addresses of such a network.
//
// Each proxy appends the address of its peer to X-Forwarded-For. So for a request from a trusted
// proxy, ClientOf reads this header from its end, passes over the addresses of trusted proxies, and
// returns the next one. If the header has no other address, or the next entry is not an address,
// ClientOf returns the zero Addr. It does not return the proxy's own address, because all clients
// of the proxy would share it.
func (p Proxies) ClientOf(r *http.Request) netip.Addr {
	ip := peer(r)
	if !p.contains(ip) {
		return networkOf(ip)
	}
	named := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for i := len(named) - 1; i >= 0; i-- {
		ip, ok := parseForwarded(strings.TrimSpace(named[i]))
		if !ok {
			break
		}
		if !p.contains(ip) {
			return networkOf(ip)
		}
	}
	return netip.Addr{}
}

func (p Proxies) contains(ip netip.Addr) bool {
	for _, network := range p {
		if network.Contains(ip) {
			return true
		}
	}
	return false
}

func peer(r *http.Request) netip.Addr {
	p, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	return p.Addr().Unmap().WithZone("")
}

// parseForwarded parses an address from X-Forwarded-For, to which some proxies add a port.
func parseForwarded(s string) (netip.Addr, bool) {
	if host, _, err := net.SplitHostPort(s); err == nil {
		s = host
	}
	ip, err := netip.ParseAddr(strings.Trim(s, "[]"))
	return ip.Unmap().WithZone(""), err == nil
}

func networkOf(ip netip.Addr) netip.Addr {
	if !ip.Is6() {
		return ip
	}
	p, _ := ip.Prefix(64) // an address of IPv6 without a zone has one
	return p.Addr()
}

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
