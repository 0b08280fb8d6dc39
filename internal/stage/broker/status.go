package broker

import (
	"context"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/presence"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/waitingroom"
)

// silence is the longest time between two statuses of a broker without a re-entry. The other
// brokers count a broker as dead after presence.TTL, and then make its users away. 2 s is well
// before presence.TTL.
const silence = 2 * time.Second

// statusInterval is the time between two statuses of a broker.
const statusInterval = time.Second

// lifeSigns publishes that this broker lives, and repairs what its silence has cost.
type lifeSigns struct{ admissions }

// keepStatus publishes that this broker lives. After a silence, all users of the broker enter again
// before they are shown positions. A stopping broker leaves its status in Redis. So the sweep does
// not make its users away at once, and they have time to connect to another broker.
func (b lifeSigns) keepStatus(ctx context.Context) error {
	var written time.Time // when the last status was written
	for {
		// Without its last status, Redis has lost its data, and maybe the places of this broker's
		// users.
		known, err := presence.PublishBroker(ctx, b.Conn, b.Space, api.StageStatus{
			ID: b.instance, Version: b.Version, Role: api.RoleBroker, Running: !b.draining.Load(), SeenAt: time.Now(),
			Counts: map[string]int64{"streams": int64(b.conns.len()), "position_age_ms": b.positionAge.Load()},
		})
		switch {
		case err == nil:
			late := !written.IsZero() && (!known || time.Since(written) > silence)
			written = time.Now()
			if late {
				b.suspended.Store(true)
			}
			if b.suspended.Load() && b.enterAllAgain(ctx) {
				b.suspended.Store(false)
			}
		case ctx.Err() == nil:
			b.Tel.Log.Debug("status was not published", "error", err)
		}
		if redisx.Sleep(ctx, statusInterval) != nil {
			return nil
		}
	}
}

// enterAllAgain repeats enter for all streams of this broker: users whom the sweep has moved to
// away wait again under their numbers. It returns false if it has to be repeated.
func (b lifeSigns) enterAllAgain(ctx context.Context) bool {
	for event, conns := range b.conns.byEvent() {
		// Users who are just connecting may have no place yet, or one with their former conn.
		conns = slices.DeleteFunc(conns, func(c *connection) bool { return !c.hasEntered() })
		for chunk := range slices.Chunk(conns, waitingroom.MostUsers) {
			promoted, err := b.enterAgain(ctx, event, chunk)
			if err == nil {
				err = b.admit(ctx, event, promoted...)
			}
			if err != nil {
				b.Tel.Log.Warn("users could not enter again after a silence, trying again", "event", event,
					"error", err)
				return false
			}
		}
	}
	return true
}
