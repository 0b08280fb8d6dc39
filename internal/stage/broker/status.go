package broker

import (
	"context"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/presence"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/roomapi"
	"github.com/bulkaction/bulkaction/internal/waitingroom"
)

// silence is the age of a broker's last status from which on the others may have given the broker
// up, so that its users may be away.
const silence = 2 * time.Second

// statusInterval is the time between two statuses of a broker.
const statusInterval = time.Second

// lifeSigns publishes that this broker lives, and repairs what its silence has cost.
type lifeSigns struct{ admissions }

// keepStatus publishes that this broker lives. After a silence, all users of the broker enter again
// before they are shown positions. A broker that stops does not withdraw its status, so that nobody
// is away because of a deployment.
func (b lifeSigns) keepStatus(ctx context.Context) error {
	var written time.Time // when the last status was written
	for {
		// Without its last status, Redis has lost its data, and maybe the places of this broker's
		// users.
		known, err := b.Conn.Cmd.HExists(ctx, b.Space.Brokers(), b.instance).Result()
		if err == nil {
			err = presence.PublishBroker(ctx, b.Conn, b.Space, api.StageStatus{
				ID: b.instance, Role: "broker", Running: !b.draining.Load(), SeenAt: time.Now(),
			})
		}
		switch {
		case err == nil:
			late := !written.IsZero() && (!known || time.Since(written) > silence)
			written = time.Now()
			if late {
				b.suspended.Store(true)
			}
			if b.suspended.Load() && b.enterAgain(ctx) {
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

// enterAgain repeats enter for all streams of this broker with their conns: users whom the sweep
// has moved to away wait again under their numbers. It returns false if it has to be repeated.
func (b lifeSigns) enterAgain(ctx context.Context) bool {
	for event, conns := range b.conns.byEvent() {
		// Users who are just connecting may have no place yet, or one with their former conn.
		conns = slices.DeleteFunc(conns, func(c *connection) bool { return !c.hasEntered() })
		for chunk := range slices.Chunk(conns, waitingroom.MostUsers) {
			if err := b.enterChunk(ctx, event, chunk); err != nil {
				b.Tel.Log.Warn("users could not enter again after a silence, trying again", "event", event,
					"error", err)
				return false
			}
		}
	}
	return true
}

func (b lifeSigns) enterChunk(ctx context.Context, event string, chunk []*connection) error {
	visitors := make([]waitingroom.Visitor, len(chunk))
	for i, c := range chunk {
		visitors[i] = c.visitor()
	}
	reply, err := b.rooms.Enter(ctx, event, waitingroom.EnterAgain, 0, visitors...)
	if err == waitingroom.ErrUnknown { //nolint:errorlint // Enter returns it bare
		for _, c := range chunk {
			b.endHere(c, roomapi.EndedGone)
		}
		return nil
	}
	if err != nil {
		return err
	}
	var admitted []*connection
	for i, c := range chunk {
		e := reply.Entries[i]
		switch e.Code {
		case waitingroom.Ready, waitingroom.InProgress:
			admitted = append(admitted, c)
		case waitingroom.Stale:
			b.endHere(c, roomapi.EndedReplaced)
		case waitingroom.None:
			b.endHere(c, roomapi.EndedGone)
		case waitingroom.Closed:
			b.endHere(c, roomapi.EndedClosed)
		case waitingroom.SoldOut:
			b.endHere(c, roomapi.EndedSoldOut)
		default:
			c.mu.Lock()
			c.number, c.change, c.leftAt = e.Number, reply.Change, time.Time{}
			c.mu.Unlock()
		}
	}
	return b.admit(ctx, event, admitted...)
}
