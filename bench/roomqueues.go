package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/bench/roomload"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// manyEvents compares how fast all users of one event are promoted with how fast as many users of
// many events are.
func (b *roomBench) manyEvents(ctx context.Context) (*RoomEvents, error) {
	one, err := b.promoteEvents(ctx, "one", 1)
	if err != nil {
		return nil, err
	}
	slowest, err := b.promoteEvents(ctx, "many", b.Events)
	return &RoomEvents{
		EventsOpened: b.Events, OneEventS: measure.Round4(one), SlowestEventS: measure.Round4(slowest),
		EventsRatio: measure.Ratio(slowest, one),
	}, err
}

// promoteEvents lets users wait for n events and opens the events one after the other. It returns
// the seconds from just before the first opening until all users of all events had a token.
func (b *roomBench) promoteEvents(ctx context.Context, name string, n int) (float64, error) {
	events := make([]string, n)
	for i := range events {
		events[i] = fmt.Sprintf("%s-%d", name, i)
		if err := b.declare(ctx, events[i], func(s *waitingroom.Settings) { s.Capacity = int64(b.Users) }); err != nil {
			return 0, err
		}
	}
	c, err := b.enterWaiting(ctx, roomload.Task{Events: events, Prefix: name})
	if err != nil {
		return 0, err
	}
	opened := time.Now()
	for _, event := range events {
		if err := b.setMode(ctx, event, api.ModeOpen); err != nil {
			return 0, err
		}
	}
	if err := c.awaitAdmitted(ctx, b.Users); err != nil {
		return 0, err
	}
	a, err := c.end(nil)
	if err != nil {
		return 0, err
	}
	b.judge(a, b.Users, true)
	var last int64
	for _, v := range a.Visits {
		last = max(last, v.Admitted)
	}
	return float64(last-opened.UnixMicro()) / 1e6, b.forget(ctx, events...)
}

// abandoned is the fraction of users who close their tabs in the second run of the part abandon.
const abandoned = 0.5

// abandon measures how well slots are used in two runs: in the first some users reload the page, in
// the second half of them close the tab at random times.
func (b *roomBench) abandon(ctx context.Context) (*RoomUse, *RoomAbandon, error) {
	use, err := b.drain(ctx, "use", roomload.Task{Churn: b.Churn}, "keep")
	if err != nil {
		return nil, nil, err
	}
	// Users who are inside keep their stream open. It ends when they close the tab, and with the
	// setting "release" the broker then gives the slot back.
	left, err := b.drain(ctx, "abandon", roomload.Task{Close: abandoned, KeepOpen: true}, "release")
	return &RoomUse{Utilisation: use.slots}, &RoomAbandon{
		TokenUtilisation: use.tokens, AbandonUtilisation: left.slots, AbandonTokenUtilisation: left.tokens,
		ClosedTabs: left.closed,
	}, err
}

// utilisation has the parts of the capacity that were used while users waited, and the number of
// tabs closed.
type utilisation struct {
	slots  float64 // slots in use in Redis
	tokens float64 // tokens that users held
	closed int     // tabs
}

// drain lets all users through an event with few slots.
func (b *roomBench) drain(
	ctx context.Context, event string, t roomload.Task, onClose string,
) (u utilisation, err error) {
	if err := b.declare(ctx, event, func(s *waitingroom.Settings) {
		s.Capacity, s.OnClose = int64(b.Capacity), onClose
	}); err != nil {
		return u, err
	}
	if err := b.startAPI(ctx); err != nil {
		return u, err
	}
	t.Events, t.Prefix, t.Session, t.API = []string{event}, event, b.Session, b.api
	// About as long as it takes to let through those who stay.
	t.Within = time.Duration((1 - t.Close) * float64(b.Users) / float64(b.Capacity) * float64(b.Session))
	c, err := b.enterWaiting(ctx, t)
	if err != nil {
		return u, err
	}
	numbers, err := b.numbers(ctx, event)
	if err != nil {
		return u, err
	}
	if err := b.setMode(ctx, event, api.ModeOpen); err != nil {
		return u, err
	}
	if _, err := c.step(roomload.Act); err != nil {
		return u, err
	}
	var all errgroup.Group
	all.Go(func() (err error) {
		u.slots, err = b.sampleSlots(ctx, event)
		return err
	})
	_, err = c.await(ctx, patience+b.Session, func(n roomload.Counts) bool { return n.Ended == int64(b.Users) })
	if err := errors.Join(err, all.Wait()); err != nil {
		return u, err
	}
	a, err := c.end(numbers)
	if err != nil {
		return u, err
	}
	b.judge(a, b.Capacity, true)
	for _, v := range a.Visits {
		if v.Closed {
			u.closed++
		}
	}
	u.tokens = measure.Round4(roomload.Utilisation(a.Visits, b.Capacity))
	return u, b.forget(ctx, event)
}

// sampleSlots returns the fraction of the event's capacity that is in use, on average, until nobody
// waits any more, or for stallTimeout.
func (b *roomBench) sampleSlots(ctx context.Context, event string) (float64, error) {
	const every = 10 * time.Millisecond
	keys := b.space.OfEvent(event)
	var samples, sum float64
	for began := time.Now(); time.Since(began) < stallTimeout; {
		pipe := b.conn.Cmd.Pipeline()
		waiting, slots := pipe.ZCard(ctx, keys.RoomWaiting(event)), pipe.ZCard(ctx, keys.RoomSlots(event))
		if _, err := pipe.Exec(ctx); err != nil {
			return 0, fmt.Errorf("count slots: %w", err)
		}
		if waiting.Val() == 0 {
			break
		}
		samples, sum = samples+1, sum+float64(slots.Val())
		if err := redisx.Sleep(ctx, every); err != nil {
			return 0, err
		}
	}
	return measure.Ratio(sum/max(samples, 1), float64(b.Capacity)), nil
}
