package broker

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/room/roomapi"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// admit claims entry tokens for the users of conns, who were promoted, and sends each token over
// the user's stream. It ends the stream of a user who holds no slot any more or has a newer stream;
// for a user whose promotion Redis has lost, it repeats enter. If the event is unknown, it ends all
// the streams. It may be repeated for the same conns.
func (b *Broker) admit(ctx context.Context, event string, conns ...*connection) error {
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
			if claims[i].Code == waitingroom.None && !c.now().token {
				without = append(without, c)
				continue
			}
			if err := b.deliver(s, c, claims[i]); err != nil {
				return err
			}
		}
		// The users in without hold no slot, but may still be waiting: Redis may have lost their
		// promotion in a failover.
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

// enterAgain repeats the script enter for the users of conns. It ends the streams of users without
// a place or with a newer stream, stores in the connection the number of each user who waits, and
// returns the connections of users who are promoted by now: the caller claims for these.
func (b *Broker) enterAgain(
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
	// gone is the reason that is shown to users without a place. It says that the event is closed
	// or sold out if it is, because then the event's queue was dissolved.
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
			if c.now().token {
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

// deliver sends the token of a claim to a connection that does not have it yet, or ends its stream
// if the claim gave none.
func (b *Broker) deliver(s waitingroom.Snapshot, c *connection, claim waitingroom.Claim) error {
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
	token, err := b.sign(s, c.event, c.user, claim)
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

// sign returns the signed entry token for a user's claim. The same claim gives the same token while
// the token keys and the event's token_ttl stay the same.
func (b *Broker) sign(s waitingroom.Snapshot, event, user string, c waitingroom.Claim) (api.EntryToken, error) {
	// issued is the token's time of issue (iat): its expiry less token_ttl. This is the time of the
	// claim or renewal, by Redis's clock; it is earlier if max_session has shortened the renewal or
	// token_ttl was raised since. If it is in the future, which some verifiers refuse, because
	// token_ttl was lowered since or this process's clock is slow, issued is the time of the
	// promotion instead.
	issued := c.Expires.Add(-s.Settings.TokenTTL)
	if promoted, err := strconv.ParseInt(c.Fence, 10, 64); err == nil && issued.After(time.Now()) {
		issued = time.UnixMicro(promoted) // fences are at least the time of their promotion
	}
	token, err := b.keys.Sign(entrytoken.Claims{
		Issuer: b.cfg.PublicURL, Audience: b.cfg.Audience, User: user, Event: event, Fence: c.Fence,
		IssuedAt: issued, ExpiresAt: c.Expires,
	})
	return api.EntryToken{Token: token, ExpiresAt: c.Expires.Truncate(time.Second)}, err
}

// endHere ends a stream of this broker for good, with the reason that the client is shown.
func (b *Broker) endHere(c *connection, reason string) {
	if c.markOver() {
		c.stream.Ended(reason)
	}
}

// end ends the stream with the id conn: directly if this broker holds it, else by a dispatch
// message to the broker that holds it.
func (b *Broker) end(ctx context.Context, event, user, conn, reason string) {
	if c := b.conns.find(event, user, conn); c != nil {
		b.endHere(c, reason)
		return
	}
	if b.owns(conn) {
		return // it has ended
	}
	if reason == roomapi.EndedReplaced {
		reason = ""
	}
	m := waitingroom.StreamEnd{Event: event, User: user, Conn: conn, Reason: reason}
	if err := b.rooms.SendEnd(ctx, m); err != nil {
		b.Tel.Log.Warn("another broker can't be told that a stream is over; it finds out by itself",
			"event", event, "error", err)
	}
}

func (b *Broker) owns(conn string) bool { return keyspace.InstanceOf(conn) == b.instance }

// checkDelivery is the delivery check. It claims for users whose numbers left the queue at least a
// second ago and who have no token: their dispatch message was lost, or the user is gone. For a
// user whose token has expired, the claim shows whether the token was renewed; if not, the stream
// ends.
func (b *Broker) checkDelivery(ctx context.Context, event string, conns []*connection, redisNow time.Time) error {
	var late []*connection
	for _, c := range conns {
		switch s := c.now(); {
		case s.over || !s.entered:
		case s.token && !redisNow.Before(s.expires),
			!s.token && !s.leftAt.IsZero() && time.Since(s.leftAt) >= deliveryCheck:
			late = append(late, c)
		}
	}
	if len(late) == 0 {
		return nil
	}
	return b.admit(ctx, event, late...)
}

// deliveryCheck is how long a broker waits for the dispatch message about a user whose number has
// left the queue, before it claims by itself.
const deliveryCheck = time.Second
