package httpapi

import (
	"fmt"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web"
)

// What one caller may have open at the same time.
const (
	maxAppends    = 64  // bodies of jobs
	maxKeyStreams = 500 // answers that are streams: events, results and failures
)

// kind is a kind of requests that may take any time.
type kind struct {
	most    int    // how many of them a caller may have open
	problem string // what a caller with most of them is told
}

var (
	appendKind = kind{maxAppends, "%d bodies of jobs are being sent by you already: end one, or send more jobs in each"}
	streamKind = kind{maxKeyStreams, "your API key has %d streams of events, results and failures already: end one"}
)

// callers limits the requests of each caller to this server, so that no caller can occupy its
// connections or CPU. A caller is an API key or, for an API without keys, a client's address; the
// rate of requests is limited only for keys.
type callers struct {
	perSecond int // requests that a key may make in a second, and at once; 0: any number

	mu    sync.Mutex
	open  map[opened]int           // requests
	rates map[string]*rate.Limiter // by key id; only keys that were valid get in
}

type opened struct {
	caller string
	kind   kind
}

func newCallers(perSecond int) *callers {
	return &callers{perSecond: perSecond, open: map[opened]int{}, rates: map[string]*rate.Limiter{}}
}

// maxRates: when this many rate limiters exist, those of idle keys are removed. There may be 10,000
// keys, and rotated keys are replaced by new ones.
const maxRates = 20_000

// request counts a request of an API key. It returns a problem if the key has made too many
// requests.
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
	if wait := auth.TakeFrom(limiter, now); wait > 0 {
		return web.RetryLater(api.TooManyRequests, wait,
			fmt.Sprintf("your API key may make %d requests a second at this server", c.perSecond))
	}
	return nil
}

// removeIdle removes the limiters that have all their permits, if there are maxRates limiters. A
// removed limiter changes nothing: a new one would have all its permits, too.
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

// begin counts an open request of kind k for the caller until end is called. It returns a problem
// if the caller already has k.most open ones. A caller with the name "" is not counted.
func (c *callers) begin(caller string, k kind) (end func(), err error) {
	if caller == "" {
		return func() {}, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	o := opened{caller, k}
	if c.open[o] >= k.most {
		return nil, web.RetryLater(api.TooManyStreams, tooManyRetry, fmt.Sprintf(k.problem, k.most))
	}
	c.open[o]++
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.open[o]--; c.open[o] == 0 {
			delete(c.open, o)
		}
	}, nil
}

// callerOf returns the name under which the limits count the caller of a request: the id of its API
// key or, if p is zero because the API has no keys, its address. It returns "" if a trusted proxy
// does not name the client.
func (s Shared) callerOf(r *http.Request, p auth.Principal) string {
	if p.KeyID != "" {
		return p.KeyID
	}
	if ip := s.Proxies.ClientOf(r); ip.IsValid() {
		return ip.String()
	}
	return ""
}
