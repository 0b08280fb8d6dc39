package roomapi

import (
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
)

// maxBuckets is the most addresses with a rate limiter at a time. A new address replaces the one
// that was used longest ago. That one normally has all its permits again by then; not if as many
// addresses enter within a second.
const maxBuckets = 1 << 16

// clients limits the open streams, in all and per address, and the new visitors per address. The
// address is that of auth.Proxies.ClientOf. If a trusted proxy names no client, only the
// limit of all streams together applies.
type clients struct {
	proxies     auth.Proxies
	maxOpen     int
	maxPerIP    int
	newVisitors *auth.Limiters

	mu   sync.Mutex
	open int
	byIP map[netip.Addr]int // open streams
}

func newClients(proxies []netip.Prefix, maxOpen, maxPerIP, perIP int) *clients {
	return &clients{
		proxies: proxies, maxOpen: maxOpen, maxPerIP: maxPerIP,
		newVisitors: auth.NewLimiters(rate.Limit(perIP), perIP, maxBuckets), byIP: map[netip.Addr]int{},
	}
}

// connect counts a new stream of an address, or returns a problem if a limit is reached. After
// success the caller must call disconnect when the stream ends.
func (c *clients) connect(ip netip.Addr) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open >= c.maxOpen {
		return newProblem(api.Busy, "connections",
			"this server has reached its limit of open streams").later(busy, 10*time.Second)
	}
	if ip.IsValid() {
		if c.byIP[ip] >= c.maxPerIP {
			return newProblem(api.TooManyStreams, "connections",
				"your address has reached its limit of open streams: close some, or poll").later(busy, 10*time.Second)
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

// newVisitor takes one permit from the rate limiter of an address, or returns a problem if there is
// none. It is not called for visitors whose id is known, for example by a valid cookie: all users
// behind one address must be able to come back at once.
func (c *clients) newVisitor(ip netip.Addr) error {
	wait := c.newVisitors.Take(ip, time.Now())
	if wait == 0 {
		return nil
	}
	return newProblem(api.TooManyRequests, "rate",
		"too many new visitors come from your address: try again in a moment").later(busy, wait)
}
