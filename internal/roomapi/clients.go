package roomapi

import (
	"container/list"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/bulkaction/bulkaction/api"
)

// maxBuckets is how many addresses have a rate limiter at a time. A new one replaces the one that
// was used longest ago. That one has all its permits again by then, unless so many addresses enter
// within a second.
const maxBuckets = 1 << 16

// clients holds the limits of streams and of new visitors. It counts by IP address; the addresses
// of a /64 network of IPv6 count as one, because one host can use all of them.
type clients struct {
	proxies  []netip.Prefix
	maxOpen  int
	maxPerIP int
	perIP    int // new visitors a second

	mu      sync.Mutex
	open    int
	byIP    map[netip.Addr]int // open streams
	buckets map[netip.Addr]*list.Element
	recent  *list.List // of *bucket, the one used last at the front
}

type bucket struct {
	ip    netip.Addr
	limit *rate.Limiter
}

func newClients(proxies []netip.Prefix, maxOpen, maxPerIP, perIP int) *clients {
	return &clients{
		proxies: proxies, maxOpen: maxOpen, maxPerIP: maxPerIP, perIP: perIP,
		byIP: map[netip.Addr]int{}, buckets: map[netip.Addr]*list.Element{}, recent: list.New(),
	}
}

// fromProxy tells whether a request comes from a trusted proxy.
func (c *clients) fromProxy(r *http.Request) bool { return c.isProxy(peer(r)) }

func (c *clients) isProxy(ip netip.Addr) bool {
	for _, p := range c.proxies {
		if p.Contains(ip) {
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

// ip returns the address by which a request is limited. A trusted proxy names its client in
// X-Forwarded-For: each proxy appends the address of its peer, so the last one that is not a
// trusted proxy is the client. If no client is named, the address is zero: no limit per IP holds,
// since all users of the proxy would share it.
func (c *clients) ip(r *http.Request) netip.Addr {
	ip := peer(r)
	if !c.isProxy(ip) {
		return networkOf(ip)
	}
	named := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for i := len(named) - 1; i >= 0; i-- {
		ip, ok := parseForwarded(strings.TrimSpace(named[i]))
		if !ok {
			break
		}
		if !c.isProxy(ip) {
			return networkOf(ip)
		}
	}
	return netip.Addr{}
}

// parseForwarded parses an address, which some proxies write with a port.
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

// connect counts a stream, or returns a problem. The caller must call disconnect, unless there was
// an error.
func (c *clients) connect(ip netip.Addr) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open >= c.maxOpen {
		return newProblem(api.Busy, "connections",
			"this server has as many streams as it may have").later(busy, 10*time.Second)
	}
	if ip.IsValid() {
		if c.byIP[ip] >= c.maxPerIP {
			return newProblem(api.TooManyStreams, "connections",
				"your address has as many open streams as it may have: close some, or poll").later(busy, 10*time.Second)
		}
		c.byIP[ip]++
	}
	c.open++
	return nil
}

func (c *clients) disconnect(ip netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open--
	if !ip.IsValid() {
		return
	}
	if c.byIP[ip]--; c.byIP[ip] == 0 {
		delete(c.byIP, ip)
	}
}

func (c *clients) connections() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.open
}

// newVisitor takes one permit from the rate limiter of an address; if there is none, it returns a
// problem. Visitors who are known need no permit: all users behind one address must be able to come
// back at once.
func (c *clients) newVisitor(ip netip.Addr) error {
	if !ip.IsValid() {
		return nil
	}
	reservation := c.bucket(ip).Reserve()
	wait := reservation.Delay()
	if wait == 0 {
		return nil
	}
	reservation.Cancel()
	return newProblem(api.TooManyRequests, "rate",
		"too many new visitors come from your address: try again in a moment").later(busy, wait)
}

func (c *clients) bucket(ip netip.Addr) *rate.Limiter {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.buckets[ip]; ok {
		c.recent.MoveToFront(e)
		return e.Value.(*bucket).limit
	}
	if len(c.buckets) >= maxBuckets {
		last := c.recent.Back()
		delete(c.buckets, c.recent.Remove(last).(*bucket).ip)
	}
	b := &bucket{ip, rate.NewLimiter(rate.Limit(c.perIP), c.perIP)}
	c.buckets[ip] = c.recent.PushFront(b)
	return b.limit
}
