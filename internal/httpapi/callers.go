package httpapi

import (
	"fmt"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/auth"
	"github.com/bulkaction/bulkaction/internal/clientaddr"
)

// maxAppends is the number of bodies of jobs that one caller may send at the same time.
const maxAppends = 64

// callers bounds what one caller may do at this server, so that no caller takes the connections or
// the CPU of all. A caller is an API key or, for an API without keys, a client's address.
type callers struct {
	perSecond int // requests that a key may make in a second, and at once; 0: any number

	mu      sync.Mutex
	appends map[string]int           // open appends by caller
	rates   map[string]*rate.Limiter // by key id; only keys that were valid get in
}

func newCallers(perSecond int) *callers {
	return &callers{perSecond: perSecond, appends: map[string]int{}, rates: map[string]*rate.Limiter{}}
}

// maxRates is the number of rate limiters from which on those of idle keys are removed: there may
// be 10,000 keys, and rotated ones are replaced.
const maxRates = 20_000

// request counts a request of a key. It returns a problem if the key has made too many.
func (c *callers) request(p auth.Principal, now time.Time) error {
	if c.perSecond == 0 {
		return nil
	}
	c.mu.Lock()
	limiter := c.rates[p.KeyID]
	if limiter == nil {
		c.removeIdle(now)
		limiter = rate.NewLimiter(rate.Limit(c.perSecond), c.perSecond)
		c.rates[p.KeyID] = limiter
	}
	c.mu.Unlock()
	if wait := clientaddr.TakeFrom(limiter, now); wait > 0 {
		return retryLater(api.TooManyRequests, wait,
			fmt.Sprintf("your API key may make %d requests a second at this server", c.perSecond))
	}
	return nil
}

// removeIdle removes the limiters that have all their permits, if there are many limiters: a new
// limiter would decide the same.
func (c *callers) removeIdle(now time.Time) {
	if len(c.rates) < maxRates {
		return
	}
	for id, limiter := range c.rates {
		if limiter.TokensAt(now) >= float64(c.perSecond) {
			delete(c.rates, id)
		}
	}
}

// append counts an append of a caller until the caller of append calls end. It returns a problem if
// maxAppends are open. Callers without a name are not counted.
func (c *callers) append(caller string) (end func(), err error) {
	if caller == "" {
		return func() {}, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.appends[caller] >= maxAppends {
		return nil, retryLater(api.TooManyStreams, tooManyRetry, fmt.Sprintf(
			"%d bodies of jobs are being sent by you already: end one, or send more jobs in each", maxAppends))
	}
	c.appends[caller]++
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.appends[caller]--; c.appends[caller] == 0 {
			delete(c.appends, caller)
		}
	}, nil
}

// callerOf returns the name by which callers knows the caller of a request. The principal is zero
// for an API without keys. The name is empty if a proxy does not say whose request it is.
func (s *server) callerOf(r *http.Request, p auth.Principal) string {
	if p.KeyID != "" {
		return p.KeyID
	}
	if ip := s.proxies.ClientOf(r); ip.IsValid() {
		return ip.String()
	}
	return ""
}
