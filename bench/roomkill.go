package bench

import (
	"context"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/bench/roomload"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

const (
	// killTokenTTL, killLeeway and killReady are settings of the event in the part kill. A broker
	// may die just after one of its users was promoted. The times are long enough for this user to
	// reach another broker and still have the slot. If a user never returns, the slot is free
	// within a minute.
	killTokenTTL, killLeeway, killReady = 30 * time.Second, 5 * time.Second, 30 * time.Second
	killSession                         = time.Second
	// slotsPatience is a time after the last user has left: a slot that is still in use then has
	// leaked.
	slotsPatience = time.Minute
)

// kill kills brokers, as a crash does, while slots become free and are given to the next users all
// the time. It returns how the users of these brokers fared, and whether slots were lost. At the
// end it starts these brokers again.
func (b *roomBench) kill(ctx context.Context) (*RoomReturns, *RoomKill, error) {
	const event = "kill"
	if err := b.declare(ctx, event, func(s *waitingroom.Settings) {
		s.Capacity, s.TokenTTL, s.Leeway, s.Ready = int64(b.Capacity), killTokenTTL, killLeeway, killReady
	}); err != nil {
		return nil, nil, err
	}
	if err := b.startAPI(ctx); err != nil {
		return nil, nil, err
	}
	c, err := b.enterWaiting(ctx, roomload.Task{
		Events: []string{event}, Prefix: "k", Session: killSession, API: b.api,
	})
	if err != nil {
		return nil, nil, err
	}
	numbers, err := b.numbers(ctx, event)
	if err != nil {
		return nil, nil, err
	}
	began := time.Now()
	if err := b.setMode(ctx, event, api.ModeOpen); err != nil {
		return nil, nil, err
	}
	if err := c.awaitAdmitted(ctx, b.Users/10); err != nil {
		return nil, nil, err
	}
	victims := slices.Clone(b.brokers[:b.Kill])
	from := time.Now()
	for range b.Kill {
		b.killBroker()
	}
	to := time.Now()
	back := func(n roomload.Counts) bool { return n.Shown+n.Admitted >= int64(b.Users) }
	if _, err := c.await(ctx, patience, back); err != nil {
		return nil, nil, err
	}
	after, err := b.numbers(ctx, event)
	if err != nil {
		return nil, nil, err
	}
	if err := c.awaitAdmitted(ctx, b.Users); err != nil {
		return nil, nil, err
	}
	costs := &RoomKill{KillDrainTime: measure.Round2(time.Since(began).Seconds())}
	if _, err := c.await(ctx, patience, func(n roomload.Counts) bool { return n.Ended == int64(b.Users) }); err != nil {
		return nil, nil, err
	}
	a, err := c.end(numbers)
	if err != nil {
		return nil, nil, err
	}
	b.judge(a, b.Capacity, true)
	// Streams that broke up to 2 s after the last kill count too: a user notices the end a little
	// later.
	r := roomload.CheckReturns(a.Visits, from.UnixMicro(), to.Add(2*time.Second).UnixMicro(), numbers, after)
	out := b.judgeReturns(r, costs)
	if err := b.awaitFreeSlots(ctx, event, costs); err != nil {
		return nil, nil, err
	}
	for i, addr := range victims { // for the next parts
		if err := b.startBroker(ctx, b.Brokers+i, addr); err != nil {
			return nil, nil, err
		}
	}
	return out, costs, b.forget(ctx, event)
}

func (b *roomBench) judgeReturns(r roomload.Returns, costs *RoomKill) *RoomReturns {
	costs.Broken, costs.ReturnedMaxS = r.Users, measure.Round2(measure.Percentile(r.Seconds, 100))
	if r.Users == 0 {
		b.violatef("no stream was broken: the killed broker had no users")
	}
	if len(r.NotBack) > 0 {
		b.violatef("%d users did not come back, first %s", len(r.NotBack), r.NotBack[0])
	}
	if len(r.NotKept) > 0 {
		b.violatef("%d users lost their places, first %s", len(r.NotKept), r.NotKept[0])
	}
	return &RoomReturns{
		ReturnedP99S: measure.Round2(measure.Percentile(r.Seconds, 99)),
		PlacesKept:   measure.Ratio(float64(r.Kept), float64(r.Users)),
	}
}

// awaitFreeSlots waits until all slots of an event are free, at most slotsPatience. It stores in
// costs how long that took, and how many slots are still in use: these are a violation.
func (b *roomBench) awaitFreeSlots(ctx context.Context, event string, costs *RoomKill) error {
	began := time.Now()
	err := b.fleet.await(ctx, "free slots", pollInterval, func() (int, error) {
		slots, _, err := b.used(ctx, event)
		costs.SlotsLeaked = int(slots)
		if time.Since(began) > slotsPatience {
			return 0, err
		}
		return int(slots), err
	})
	costs.FreeAfterS = measure.Round2(time.Since(began).Seconds())
	if costs.SlotsLeaked > 0 {
		b.violatef("%d slots are in use %s after the last user has left", costs.SlotsLeaked, slotsPatience)
	}
	return err
}
