package bench

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// eventCalls are the calls that the benchmark itself makes on events of the waiting room, directly
// in Redis.
type eventCalls struct {
	on    *fleet
	rooms *waitingroom.Rooms
	space keyspace.Space
}

// newEventCalls returns the calls on events whose Redis keys begin with prefix.
func newEventCalls(on *fleet, prefix string) (eventCalls, error) {
	space, err := keyspace.New(prefix, 1)
	unobserved := func(string, time.Duration, error) {}
	return eventCalls{on, waitingroom.New(on.conn, space, unobserved), space}, err
}

// declare creates an event. It is paused, so that nobody is promoted yet, unless change sets
// another mode. change may set other settings too.
func (e eventCalls) declare(ctx context.Context, event string, change func(*waitingroom.Settings)) error {
	s := waitingroom.Settings{
		MaxWaiting: 10_000_000, TokenTTL: 5 * time.Minute, Leeway: 10 * time.Second, MaxSession: 15 * time.Minute,
		Ready: 30 * time.Second, Grace: time.Minute, OnClose: "keep", NoShow: "wait",
		Mode: api.ModePaused, Retention: time.Hour,
	}
	change(&s)
	if _, err := e.rooms.Declare(ctx, event, s, waitingroom.DeclareOptions{}); err != nil {
		return fmt.Errorf("declare event %s: %w", event, err)
	}
	return nil
}

// setMode changes the mode of an event.
func (e eventCalls) setMode(ctx context.Context, event, mode string) error {
	if _, err := e.rooms.Change(ctx, event, waitingroom.Changes{Mode: mode}); err != nil {
		return fmt.Errorf("change event %s: %w", event, err)
	}
	return nil
}

// numbers returns the ticket numbers of the present, waiting users of an event, by user.
func (e eventCalls) numbers(ctx context.Context, event string) (map[string]int64, error) {
	const page = 1000
	out := map[string]int64{}
	for last := int64(0); ; {
		users, err := e.on.conn.Cmd.ZRangeByScoreWithScores(ctx, e.space.OfEvent(event).RoomWaiting(event),
			&redis.ZRangeBy{Min: "(" + strconv.FormatInt(last, 10), Max: "+inf", Count: page}).Result()
		if err != nil {
			return nil, fmt.Errorf("read the queue of %s: %w", event, err)
		}
		for _, u := range users {
			user, _ := u.Member.(string)
			last = int64(u.Score)
			out[user] = last
		}
		if len(users) < page {
			return out, nil
		}
	}
}

// used returns the number of slots in use, and of users in the queue, away ones included.
func (e eventCalls) used(ctx context.Context, event string) (slots, queue int64, err error) {
	s, err := e.rooms.Snapshot(ctx, e.space.OfEvent(event), event)
	if err != nil {
		return 0, 0, err
	}
	if len(s.Events) == 0 {
		return 0, 0, errors.New("there is no event " + event)
	}
	return s.Events[0].Used, s.Events[0].Waiting + s.Events[0].Away, nil
}

// forget closes events and waits until their queues are empty, so that they cost nothing while
// other parts are measured. Brokers delete the events.
func (e eventCalls) forget(ctx context.Context, events ...string) error {
	for _, event := range events {
		retention, capacity := time.Duration(0), int64(0)
		if _, err := e.rooms.Change(ctx, event, waitingroom.Changes{
			Mode: api.ModeClosed, Retention: &retention, Capacity: &capacity,
		}); err != nil {
			return fmt.Errorf("close event %s: %w", event, err)
		}
	}
	return e.on.await(ctx, "the end of events", pollInterval, func() (int, error) {
		left := 0
		for _, event := range events {
			s, err := e.rooms.Snapshot(ctx, e.space.OfEvent(event), event)
			if err != nil {
				return 0, err
			}
			for _, one := range s.Events {
				left += int(one.Waiting + one.Away)
			}
		}
		return left, nil
	})
}
