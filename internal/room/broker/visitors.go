package broker

import (
	"context"
	"errors"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/room/roomapi"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

var _ roomapi.Room = (*Broker)(nil)

// Connect implements roomapi.Room.
func (b *Broker) Connect(ctx context.Context, event, user string, s *roomapi.Stream) (left func(), err error) {
	if b.draining.Load() {
		return nil, roomapi.ErrDraining
	}
	c := &connection{
		event: event, user: user, stream: s, followed: b.viewsOf(event).Open(event),
		conn: b.instance + "." + strconv.FormatInt(b.lastConn.Add(1), 10),
	}
	// Add the connection before the script enter runs: the dispatch message about a promotion may
	// come before the script's answer.
	b.conns.add(c)
	leave := func(disconnect bool) {
		c.markOver()
		if disconnect {
			b.endedStreams.add(c.event, c.visitor())
		}
		b.conns.remove(c)
		c.followed.Close()
	}
	if err := b.enterStream(ctx, c); err != nil {
		leave(call.IsUnavailable(err) && !call.NeverSent(err)) // the script may have run
		return nil, err
	}
	return func() { leave(!c.now().handedOver) }, nil
}

// enterStream enters the user of a connection, and sends the first frames: the state and the
// position, or the token.
func (b *Broker) enterStream(ctx context.Context, c *connection) error {
	mode, err := b.mode(ctx, c.event)
	if err != nil {
		return err
	}
	ctx, span := b.beginSpan(ctx, "enter", c)
	defer span.End()
	c.span = span.SpanContext()
	reply, err := b.enter(ctx, c.event, waitingroom.EnterNew, 0, c.visitor())
	if err != nil {
		return err
	}
	e := reply.Entries[0]
	span.SetAttributes(attribute.String("bulkaction.result", string(e.Code)),
		attribute.Int64("bulkaction.number", e.Number))
	countEntry(b.metrics, c.event, e)
	if err := refusal(e.Code); err != nil {
		return err
	}
	if e.Replaced != "" {
		b.end(ctx, c.event, c.user, e.Replaced, roomapi.EndedReplaced)
	}
	c.setPlace(e.Number, reply.Change)
	if e.Code == waitingroom.Ready || e.Code == waitingroom.InProgress {
		c.showState(api.TicketReady, mode)
		if err := b.admit(ctx, c.event, c); err != nil {
			// The delivery check repeats it.
			b.Tel.Log.Warn("claim failed, trying again in a second", "event", c.event, "error", err)
			c.setLeft()
		}
		return nil
	}
	if !c.now().token { // a promotion may have been faster than the answer of enter
		c.showState(api.TicketInEntry, mode)
		c.showPosition(furthest)
	}
	return nil
}

// enter calls the script enter for one visitor. If the event is unknown, mode is EnterNew and there
// is a seat service, enter creates the event, unless the service does not know it either, and calls
// the script again.
func (b *Broker) enter(
	ctx context.Context, event string, mode waitingroom.Mode, poll time.Duration, who waitingroom.Visitor,
) (waitingroom.EnterReply, error) {
	kind := enterKind{event, mode, poll}
	reply, err := b.enterOne(ctx, kind, who)
	if errors.Is(err, waitingroom.ErrUnknown) && mode == waitingroom.EnterNew && b.cfg.Seats != nil {
		if err = b.createFromSeats(ctx, event); err == nil {
			reply, err = b.enterOne(ctx, kind, who)
		}
	}
	return reply, b.apiError(err)
}

// refusal returns the error that the visitor gets for a code of the script enter; nil for a user
// with a place.
func refusal(code waitingroom.Code) error {
	switch code {
	case waitingroom.Full:
		return roomapi.ErrFull
	case waitingroom.Closed:
		return roomapi.ErrClosed
	case waitingroom.SoldOut:
		return roomapi.ErrSoldOut
	case waitingroom.None:
		return roomapi.ErrNoTicket
	}
	return nil
}

// Poll implements roomapi.Room.
func (b *Broker) Poll(ctx context.Context, event, user string, enter bool) (t api.Ticket, created bool, err error) {
	followed := b.viewsOf(event).Open(event)
	defer followed.Close()
	mode := waitingroom.EnterKnown
	if enter {
		if mode = waitingroom.EnterNew; b.draining.Load() {
			return t, false, roomapi.ErrDraining
		}
	}
	longest := pollAfter(maxPollPosition) // the user can't have a higher position than the queue's length
	if s, ok := followed.Snapshot(); ok {
		longest = pollAfter(s.Waiting + s.Away + 1)
	}
	reply, err := b.enter(ctx, event, mode, longest, waitingroom.Visitor{User: user})
	if err != nil {
		return t, false, err
	}
	e := reply.Entries[0]
	if enter {
		countEntry(b.metrics, event, e)
	}
	if err := refusal(e.Code); err != nil {
		return t, false, err
	}
	switch e.Code {
	case waitingroom.Ready:
		return api.Ticket{State: api.TicketReady, PollAfterMS: pollAfter(1).Milliseconds()}, e.New, nil
	case waitingroom.InProgress:
		t = api.Ticket{State: api.TicketInProgress, PollAfterMS: pollAfter(1).Milliseconds()}
		s, err := b.snapshot(ctx, event)
		if err != nil {
			return t, false, err
		}
		token, err := b.sign(s, event, user, waitingroom.Claim{Fence: e.Fence, Expires: e.Expires})
		t.Token = token.Token
		return t, false, err
	}
	t = api.Ticket{State: api.TicketInEntry, PollAfterMS: longest.Milliseconds()}
	if followed.Wait(ctx, reply.Change) {
		if place := followed.Place(e.Number, reply.Change); place.Known && !place.Left {
			t.Position, t.Total = &place.Position, &place.Total
			if eta, ok := place.ETA(); ok {
				seconds := float64(eta)
				t.ETASeconds = &seconds
			}
			t.PollAfterMS = min(longest, pollAfter(place.Position)).Milliseconds()
		}
	}
	return t, e.New, nil
}

const maxPollPosition = 1 << 20

// pollAfter returns when a user at a position should poll again: after 2 s, and 10 ms more for each
// position; at most 20 s, from position 1,800 on.
func pollAfter(position int64) time.Duration {
	return min(20*time.Second, 2*time.Second+time.Duration(min(position, maxPollPosition))*10*time.Millisecond)
}

// Leave implements roomapi.Room.
func (b *Broker) Leave(ctx context.Context, event, user string) error {
	conn, left, err := b.rooms.Leave(ctx, event, user)
	if err != nil || !left {
		return b.apiError(err)
	}
	b.metrics.Count(telemetry.RoomLeft, event, 1)
	if conn != "" {
		b.end(ctx, event, user, conn, roomapi.EndedLeft)
	}
	return nil
}

// Token implements roomapi.Room.
func (b *Broker) Token(ctx context.Context, event, user string) (t api.EntryToken, returnURL string, err error) {
	claims, err := b.rooms.Claim(ctx, event, waitingroom.Visitor{User: user})
	if err != nil {
		return t, "", b.apiError(err)
	}
	if claims[0].Code != waitingroom.Claimed {
		state, err := b.rooms.State(ctx, event, user)
		switch {
		case err != nil:
			return t, "", b.apiError(err)
		case state == waitingroom.Entered || state == waitingroom.Away:
			return t, "", roomapi.ErrNotReady
		}
		return t, "", roomapi.ErrNoTicket
	}
	s, err := b.snapshot(ctx, event)
	if err != nil {
		return t, "", err
	}
	t, err = b.sign(s, event, user, claims[0])
	return t, s.Settings.ReturnURL, err
}

// Status implements roomapi.Room.
func (b *Broker) Status(ctx context.Context, event string) (api.EventStatus, error) {
	s, err := b.fresh(ctx, event)
	if err != nil {
		return api.EventStatus{}, err
	}
	status := api.EventStatus{
		Status: s.Settings.Mode, Mode: s.Settings.Mode, Waiting: s.Waiting, Away: s.Away,
		Slots: api.EventSlots{Capacity: s.Settings.Capacity, Used: s.Used, Free: s.Free, Stock: s.Left},
	}
	if status.Status == api.ModeOpen && (s.Free == 0 || s.Waiting > 0) {
		status.Status = "queueing"
	}
	followed := b.viewsOf(event).Open(event)
	defer followed.Close()
	pace, known := followed.Pace()
	if known {
		perMinute := pace * 60
		status.PacePerMinute = &perMinute
	}
	switch {
	case status.Status == api.ModeOpen: // a user who enters now is admitted at once
		status.ETASeconds = new(float64)
	case known && pace > 0:
		eta := float64(s.Waiting+s.Away+1) / pace
		status.ETASeconds = &eta
	}
	return status, nil
}

// JWKS implements roomapi.Room.
func (b *Broker) JWKS() []byte { return b.keys.JWKS() }
