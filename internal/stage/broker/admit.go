package broker

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/roomapi"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/waitingroom"
	"github.com/bulkaction/bulkaction/internal/waitingroom/dispatch"
)

// admissions delivers tokens, and ends streams whose users have none to expect.
type admissions struct{ *shared }

// admit claims the tokens of promoted users and sends them. Users who hold no slot any more, or who
// have connected elsewhere, learn that. It may be called again for the same connections.
func (b admissions) admit(ctx context.Context, event string, conns ...*connection) error {
	s, err := b.snapshot(ctx, event)
	if errors.Is(err, roomapi.ErrUnknownEvent) {
		for _, c := range conns {
			b.endHere(c, roomapi.EndedGone)
		}
		return nil
	}
	if err != nil {
		return err
	}
	for chunk := range slices.Chunk(conns, waitingroom.MostUsers) {
		claims, err := b.rooms.Claim(ctx, event, visitorsOf(chunk)...)
		if err != nil {
			return b.apiError(err)
		}
		var without []*connection
		for i, c := range chunk {
			if claims[i].Code == waitingroom.None && !c.hadToken() {
				without = append(without, c)
				continue
			}
			if err := b.deliver(s, c, claims[i]); err != nil {
				return err
			}
		}
		// They may still wait: Redis may have lost their promotion in a failover.
		promoted, err := b.enterAgain(ctx, event, without)
		if err != nil {
			return err
		}
		for _, c := range promoted {
			c.setLeft() // the delivery check claims in a second
		}
	}
	return nil
}

// enterAgain repeats enter for users with their conns. It ends the streams of those without a
// place, shows the others from their present places on, and returns those who have been promoted.
func (b admissions) enterAgain(
	ctx context.Context, event string, conns []*connection,
) (promoted []*connection, err error) {
	if len(conns) == 0 {
		return nil, nil
	}
	reply, err := b.rooms.Enter(ctx, event, waitingroom.EnterAgain, 0, visitorsOf(conns)...)
	if errors.Is(err, waitingroom.ErrUnknown) {
		for _, c := range conns {
			b.endHere(c, roomapi.EndedGone)
		}
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	// Users without a place learn that the event has ended, if the queue was dissolved.
	gone := sync.OnceValue(func() string {
		s, err := b.fresh(ctx, event)
		if reason := endOf[s.Settings.Mode]; err == nil && reason != "" {
			return reason
		}
		return roomapi.EndedGone
	})
	for i, c := range conns {
		e := reply.Entries[i]
		switch e.Code {
		case waitingroom.Ready, waitingroom.InProgress:
			promoted = append(promoted, c)
		case waitingroom.Stale:
			b.endHere(c, roomapi.EndedReplaced)
		case waitingroom.None:
			if c.hadToken() {
				b.endHere(c, roomapi.EndedGone)
			} else {
				b.endHere(c, gone())
			}
		case waitingroom.Closed:
			b.endHere(c, roomapi.EndedClosed)
		case waitingroom.SoldOut:
			b.endHere(c, roomapi.EndedSoldOut)
		default:
			c.setPlace(e.Number, reply.Change)
		}
	}
	return promoted, nil
}

// deliver shows a connection the result of a claim.
func (b admissions) deliver(s waitingroom.Snapshot, c *connection, claim waitingroom.Claim) error {
	switch claim.Code {
	case waitingroom.Stale:
		b.endHere(c, roomapi.EndedReplaced)
		return nil
	case waitingroom.None:
		b.endHere(c, roomapi.EndedGone) // the token has expired
		return nil
	}
	c.mu.Lock()
	known := c.token && c.expires.Equal(claim.Expires)
	first := !c.token
	c.token, c.expires = true, claim.Expires
	over := c.over
	c.mu.Unlock()
	if known || over {
		return nil
	}
	_, span := b.beginSpan(context.Background(), "claim", c)
	defer span.End()
	token, err := b.signFor(s, c.event, c.user, claim)
	if err != nil {
		c.mu.Lock()
		c.token = !first
		c.mu.Unlock()
		return err
	}
	c.stream.State(api.TicketInProgress, s.Settings.Mode)
	c.stream.Admitted(token, s.Settings.ReturnURL)
	if first {
		b.metrics.Count(telemetry.RoomAdmitted, c.event, 1)
	}
	return nil
}

// endHere ends a stream of this broker for good.
func (b admissions) endHere(c *connection, reason string) {
	if c.markOver() {
		c.stream.Ended(reason)
	}
}

// end ends the stream with a conn, here or at the broker that holds it.
func (b admissions) end(ctx context.Context, event, user, conn, reason string) {
	if c := b.conns.find(event, user, conn); c != nil {
		b.endHere(c, reason)
		return
	}
	if b.owns(conn) {
		return // it has ended
	}
	var err error
	if reason == roomapi.EndedReplaced {
		err = b.publisher.Replaced(ctx, dispatch.Replaced{Event: event, User: user, Conn: conn})
	} else {
		err = b.publisher.Removed(ctx, dispatch.Removed{Event: event, User: user, Conn: conn, Reason: reason})
	}
	if err != nil {
		b.Tel.Log.Warn("another broker can't be told that a stream is over; it finds out by itself",
			"event", event, "error", err)
	}
}

// checkDelivery claims for users whose numbers have left the queue a second ago, and who have been
// told nothing: their message was lost or the user is gone. For users whose token has expired, it
// looks whether the token was renewed.
func (b admissions) checkDelivery(ctx context.Context, event string, conns []*connection, redisNow time.Time) error {
	var late []*connection
	for _, c := range conns {
		c.mu.Lock()
		switch {
		case c.over || !c.entered:
		case c.token && !redisNow.Before(c.expires),
			!c.token && !c.leftAt.IsZero() && time.Since(c.leftAt) >= deliveryCheck:
			late = append(late, c)
		}
		c.mu.Unlock()
	}
	if len(late) == 0 {
		return nil
	}
	return b.admit(ctx, event, late...)
}

// deliveryCheck is how long a broker waits for the message about a user whose number has left the
// queue.
const deliveryCheck = time.Second
