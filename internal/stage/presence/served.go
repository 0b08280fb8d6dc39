package presence

import (
	"context"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// servedMaxAge is how old the answer of [Served.Types] may be. It lets many submissions share one
// read of Redis a second.
const servedMaxAge = time.Second

// servedTimeout bounds the read of Redis in [Served.Types], because a submission waits for it.
const servedTimeout = 250 * time.Millisecond

// Served knows which types of jobs live workers serve. Its methods are safe for concurrent use.
type Served struct {
	conn  *redisx.Conn
	space keyspace.Space

	mu    sync.Mutex
	at    time.Time       // when types was read
	types map[string]bool // never changed, only replaced
}

// NewServed returns a Served that reads the heartbeats of an installation's workers from Redis.
func NewServed(conn *redisx.Conn, space keyspace.Space) *Served {
	return &Served{conn: conn, space: space}
}

// Types returns the types that live workers served at most a second ago. known is false if Redis
// does not answer within servedTimeout, or while another caller is asking it. The caller must not
// change the map.
func (s *Served) Types(ctx context.Context) (types map[string]bool, known bool) {
	if !s.mu.TryLock() {
		return nil, false
	}
	defer s.mu.Unlock()
	if time.Since(s.at) >= servedMaxAge {
		ctx, cancel := context.WithTimeout(ctx, servedTimeout)
		defer cancel()
		workers, err := Workers(ctx, s.conn, s.space)
		if err != nil {
			return nil, false
		}
		s.at, s.types = time.Now(), map[string]bool{}
		for _, w := range workers {
			for _, t := range w.Types {
				s.types[t] = true
			}
		}
	}
	return s.types, true
}
