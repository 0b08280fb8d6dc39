package broker

import (
	"context"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/position"
	"github.com/bulkaction/bulkaction/internal/room/roomapi"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// nearPosition is the highest position whose user sees it in each round. Users behind it see their
// positions in fewer rounds while the broker can't keep up.
const nearPosition = 1000

// everyRounds has a number n for each level of frameThrottle: users behind nearPosition see their
// positions in one round of n.
var everyRounds = []int{1, 2, 5, 10}

// frameThrottle decides in which rounds users behind nearPosition see their positions. Its zero
// value has level 0: in each round.
type frameThrottle struct {
	level, good, round int
	last               time.Time
}

// next begins a round, and returns the highest position that the round shows. A round that begins
// more than half an interval late raises the level by 1. Eleven rounds in time, in a row, lower it
// by 1.
func (t *frameThrottle) next(now time.Time, interval time.Duration) (to int64) {
	t.round++
	switch late := !t.last.IsZero() && now.Sub(t.last) > interval*3/2; {
	case late:
		t.level, t.good = min(t.level+1, len(everyRounds)-1), 0
	case t.good < 10:
		t.good++
	default:
		t.level, t.good = max(0, t.level-1), 0
	}
	t.last = now
	if t.round%everyRounds[t.level] != 0 {
		return nearPosition
	}
	return furthest
}

// sendPositions begins a round each PositionInterval, until ctx ends: it shows the streams their positions,
// those behind nearPosition as frameThrottle allows. It shows none from a silence of this broker
// until enter is repeated for its users (see keepStatus).
func (b *Broker) sendPositions(ctx context.Context) error {
	var throttle frameThrottle
	for {
		began := time.Now()
		to := throttle.next(began, b.cfg.PositionInterval)
		if !b.suspended.Load() {
			events := b.conns.byEvent()
			var oldest time.Duration
			for event, conns := range events {
				oldest = max(oldest, b.showEvent(ctx, event, conns, to))
			}
			b.positionAge.Store(oldest.Milliseconds())
			b.metrics.DropGauges(func(event string) bool { return events[event] != nil })
		}
		wait := b.cfg.PositionInterval - time.Since(began)
		if redisx.Sleep(ctx, max(wait, time.Millisecond)) != nil {
			return nil
		}
	}
}

// showEvent shows the streams of one event their positions, if these are at most `to`, and checks
// what the streams do not learn by dispatch messages: that the event is closed, that a message was
// lost, that a token has expired. It returns the age of the oldest known position.
func (b *Broker) showEvent(
	ctx context.Context, event string, conns []*connection, to int64,
) (age time.Duration) {
	snapshot, known := conns[0].followed.Snapshot()
	deleted := known && snapshot.Event == "" // or it was declared a moment ago: the delivery check finds out
	if known = known && !deleted; known {
		pace, _ := conns[0].followed.Pace()
		b.metrics.SetGauges(event, telemetry.RoomGauges{
			Waiting: snapshot.Waiting, Away: snapshot.Away, Used: snapshot.Used, Free: snapshot.Free,
			Connections: int64(len(conns)), Pace: pace, Lag: conns[0].followed.Lag(),
		})
	}
	mode := snapshot.Settings.Mode
	ended := endOf[mode]
	var redisNow, oldest time.Time
	var lost []*connection
	for _, c := range conns {
		place := c.showPosition(to)
		if place.Known && (oldest.IsZero() || place.At.Before(oldest)) {
			oldest = place.At
		}
		if place.At.After(redisNow) {
			redisNow = place.At
		}
		waits, unknown := c.noteView(place, deleted)
		if unknown >= unknownLimit && len(lost) < waitingroom.MostUsers {
			lost = append(lost, c)
		}
		switch {
		case !waits || !known:
		case ended != "":
			b.endHere(c, ended)
		default:
			c.showState(api.TicketInEntry, mode)
		}
	}
	if !oldest.IsZero() {
		age = max(0, time.Since(oldest))
		b.metrics.PositionAge(event, age)
	}
	// Repeat enter for users whose place is unknown for unknownLimit: Redis may have lost the
	// changes of the queue that their numbers depend on.
	promoted, err := b.enterAgain(ctx, event, lost)
	if err == nil {
		err = b.admit(ctx, event, promoted...)
	}
	if err != nil && ctx.Err() == nil {
		b.Tel.Log.Warn("users without a known place could not enter again, trying again in a second", "event", event,
			"error", err)
	}
	if err := b.checkDelivery(ctx, event, conns, redisNow); err != nil && ctx.Err() == nil {
		b.Tel.Log.Warn("delivery check failed, trying again in a second", "event", event, "error", err)
	}
	return age
}

// unknownLimit is how long the view may have no position for a waiting user before the broker
// repeats enter for the user. To load the view of a million users takes less.
const unknownLimit = 5 * time.Second

// endOf is the reason with which the stream of a waiting user ends, by the event's mode. In other
// modes the stream does not end.
var endOf = map[string]string{api.ModeClosed: roomapi.EndedClosed, api.ModeSoldOut: roomapi.EndedSoldOut}

// followMoves keeps the views of a partition up to date.
func (b *Broker) followMoves(ctx context.Context, views *position.Views) error {
	loops := redisx.Loops{Log: b.Tel.Log}
	retry := redisx.Backoff{Min: 50 * time.Millisecond, Max: time.Second}
	loops.Run(ctx, "positions", retry, func(ctx context.Context) (time.Duration, error) {
		return 0, views.Round(ctx)
	}, nil)
	return nil
}

// source reads one partition from Redis for the views of its events. It also counts how often a
// view is loaded, and adds to lookups each event whose number of seats is not known yet.
type source struct {
	broker    *Broker
	partition keyspace.Partition
}

func (s source) Snapshot(ctx context.Context, events ...string) (waitingroom.Snapshots, error) {
	snapshots, err := s.broker.rooms.Snapshot(ctx, s.partition, events...)
	for _, e := range snapshots.Events {
		if e.Settings.SeatsPending {
			s.broker.lookups.add(e.Event)
		}
	}
	return snapshots, err
}

func (s source) Numbers(ctx context.Context, event string, yield func(numbers []int64)) error {
	s.broker.metrics.Count(telemetry.RoomResyncs, event, 1)
	return s.broker.rooms.Numbers(ctx, event, yield)
}

func (s source) Moves(ctx context.Context, after string, block time.Duration) ([]waitingroom.Move, error) {
	return s.broker.rooms.Moves(ctx, s.partition, after, block)
}
