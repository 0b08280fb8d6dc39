package wm

import (
	"log/slog"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// outage logs an outage of Redis once for several loops: when the first of them fails, and when all
// of them work again.
type outage struct {
	log *slog.Logger

	mu      sync.Mutex
	since   time.Time
	failing map[string]bool
}

func (o *outage) failed(what string, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.failing) == 0 {
		o.since, o.failing = time.Now(), map[string]bool{}
		o.log.Warn("stream cannot be served, trying on",
			"operation", what, "redis_unavailable", call.IsUnavailable(err), "error", err)
	}
	o.failing[what] = true
}

func (o *outage) worked(what string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.failing[what] {
		return
	}
	if delete(o.failing, what); len(o.failing) == 0 {
		o.log.Info("stream is served again", "after", time.Since(o.since))
	}
}
