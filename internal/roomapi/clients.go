package roomapi

import (
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/clientaddr"
)

// maxBuckets is how many addresses have a rate limiter at a time. A new one replaces the one that
// was used longest ago. That one has all its permits again by then, unless so many addresses enter
// within a second.
const maxBuckets = 1 << 16

// clients holds the limits of streams and of new visitors. It counts by the addresses of
// clientaddr.Proxies.ClientOf. If a trusted proxy names no client, only the limit of all streams
// together holds.
type clients struct {
	proxies     clientaddr.Proxies
	maxOpen     int
	maxPerIP    int
	newVisitors *clientaddr.Limiters

	mu   sync.Mutex
	open int
	byIP map[netip.Addr]int // open streams
}

func newClients(proxies []netip.Prefix, maxOpen, maxPerIP, perIP int) *clients {
	return &clients{
		proxies: proxies, maxOpen: maxOpen, maxPerIP: maxPerIP,
		newVisitors: clientaddr.NewLimiters(rate.Limit(perIP), perIP, maxBuckets), byIP: map[netip.Addr]int{},
	}
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
	wait := c.newVisitors.Take(ip, time.Now())
	if wait == 0 {
		return nil
	}
	return newProblem(api.TooManyRequests, "rate",
		"too many new visitors come from your address: try again in a moment").later(busy, wait)
}
