package broker

import (
	"context"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
)

// silence is the longest time between two published statuses of a broker after which its users need
// not enter again. After presence.TTL, which is longer, other brokers count the broker as dead and
// make its users away.
const silence = 2 * time.Second

// statusInterval is the time between two statuses of a broker.
const statusInterval = time.Second

// lifeSigns publishes the status that shows that this broker lives, and after a silence repeats the
// script enter for its users.
type lifeSigns struct{ admissions }

// keepStatus publishes the status of this broker each second. After a silence, or when Redis has
// lost the last status, the broker repeats the script enter for all its users before it shows them
// positions again. When the broker stops, its last status stays in Redis until it expires, so that
// the sweep does not make its users away before they can connect to another broker.
func (b lifeSigns) keepStatus(ctx context.Context) error {
	var written time.Time // when the last status was written
	for {
		// known is false if the last status is not in Redis any more: then Redis has lost its data,
		// and maybe the places of this broker's users.
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

// enterAllAgain repeats the script enter for all streams of this broker, so that users whom the
// sweep has moved to away wait again under their numbers. It claims for those who were promoted
// meanwhile. It returns false if the caller has to repeat it.
func (b lifeSigns) enterAllAgain(ctx context.Context) bool {
	for event, conns := range b.conns.byEvent() {
		// Leave out users whose first call of enter still runs: they may have no place yet, or one
		// with an older conn, and enter would end their streams.
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
