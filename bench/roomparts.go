package bench

import (
	"context"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/bench/roomload"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

const (
	// streamsWindow is how long the part streams measures CPU time and the ages of positions;
	// commandsWindow is how long it then counts Redis commands.
	streamsWindow  = 8 * time.Second
	commandsWindow = 4 * time.Second
	// standstill is how long nobody is promoted before positions are checked. The contract says
	// that all shown positions are exact after a second.
	standstill = 2500 * time.Millisecond
)

// streams measures users who wait, each on a stream. One user a second is promoted, so that each
// frame has a new position.
func (b *roomBench) streams(ctx context.Context) (*RoomStreams, *RoomStreamCosts, error) {
	const event = "streams"
	if err := b.declare(ctx, event, func(s *waitingroom.Settings) {
		s.Capacity, s.Rate, s.Burst = int64(b.Users), 1, 1
	}); err != nil {
		return nil, nil, err
	}
	before, err := b.residentKiB()
	if err != nil {
		return nil, nil, err
	}
	began := time.Now()
	c, err := b.enterWaiting(ctx, roomload.Task{Events: []string{event}, Prefix: "s"})
	if err != nil {
		return nil, nil, err
	}
	costs := &RoomStreamCosts{OpenedPerSecond: measure.Round2(float64(b.Users) / time.Since(began).Seconds())}
	numbers, err := b.numbers(ctx, event)
	if err != nil {
		return nil, nil, err
	}
	if err := b.setMode(ctx, event, api.ModeOpen); err != nil {
		return nil, nil, err
	}
	if err := redisx.Sleep(ctx, time.Second); err != nil { // a first round of frames
		return nil, nil, err
	}
	out := &RoomStreams{}
	if err := c.window(ctx, out, costs); err != nil {
		return nil, nil, err
	}
	after, err := b.residentKiB()
	if err != nil {
		return nil, nil, err
	}
	var sum float64
	for i := range after {
		sum += after[i] - before[i]
	}
	out.RSSKiBPerStream = measure.Round2(sum / float64(b.Users))
	return out, costs, c.endStreams(ctx, event, numbers, out, costs)
}

// window measures what waiting users cost.
func (c *crowd) window(ctx context.Context, out *RoomStreams, costs *RoomStreamCosts) error {
	if _, err := c.step(roomload.Mark); err != nil {
		return err
	}
	began := time.Now()
	used, err := c.measure(ctx, func() error { return redisx.Sleep(ctx, streamsWindow) })
	if err != nil {
		return err
	}
	seconds := time.Since(began).Seconds()
	a, err := c.step(roomload.Look)
	if err != nil {
		return err
	}
	out.RedisCPURatio = measure.Round4(used.redisTotal().CPU.Seconds() / seconds)
	costs.FramesPerSecond = measure.Round2(float64(a.Frames) / seconds)
	costs.FrameCPUUS = measure.PerJob(used.roles[brokerRole], int(max(a.Frames, 1)))
	commands, err := c.clientCommands(ctx, commandsWindow)
	out.RedisCommandsPerSecond = measure.Round2(
		float64(commands) / commandsWindow.Seconds() / float64(len(c.brokers)))
	return err
}

// endStreams pauses the event, and then compares the position that each user was shown last with
// the numbers in Redis. It ends the task.
func (c *crowd) endStreams(
	ctx context.Context, event string, numbers map[string]int64, out *RoomStreams, costs *RoomStreamCosts,
) error {
	if err := c.setMode(ctx, event, api.ModePaused); err != nil {
		return err
	}
	if err := redisx.Sleep(ctx, standstill); err != nil {
		return err
	}
	queue, err := c.numbers(ctx, event)
	if err != nil {
		return err
	}
	a, err := c.end(numbers)
	if err != nil {
		return err
	}
	out.PositionAgeP99MS = roomload.AgePercentile(a.Ages, 99)
	costs.PositionAgeP50MS = roomload.AgePercentile(a.Ages, 50)
	c.judge(a, c.Users, false)
	if wrong := roomload.WrongPositions(a.Visits, queue); len(wrong) > 0 {
		costs.WrongPositions = len(wrong)
		c.violatef("%d users have a wrong position after the queue has stood still, first %s", len(wrong), wrong[0])
	}
	return c.forget(ctx, event)
}

// pacedEntries is the number of users a second who enter while the time of entering is measured.
const pacedEntries = 3000

// enter measures POST …/ticket, the request with which a user enters. It measures two loads: as
// many requests as the brokers can answer, and a steady rate of pacedEntries.
func (b *roomBench) enter(ctx context.Context) (*RoomEnter, *RoomEnterCosts, error) {
	out, costs := &RoomEnter{}, &RoomEnterCosts{}
	for i, perSecond := range []float64{0, pacedEntries} {
		event := "enter-" + []string{"fast", "paced"}[i]
		if err := b.declare(ctx, event, func(*waitingroom.Settings) {}); err != nil {
			return nil, nil, err
		}
		c, err := b.crowd(roomload.Task{
			Kind: roomload.Entries, Events: []string{event}, Prefix: "e", Users: 1_000_000, Seconds: 3,
			PerSecond: perSecond / float64(len(b.loaders)), Parallel: max(1, 32/len(b.loaders)),
		})
		if err != nil {
			return nil, nil, err
		}
		var ended roomload.Counts
		var took time.Duration
		used, err := b.measure(ctx, func() (err error) {
			ended, err = c.await(ctx, patience, func(n roomload.Counts) bool { return n.Ended == 1_000_000 })
			took = time.Since(c.began)
			return err
		})
		if err != nil {
			return nil, nil, err
		}
		a, err := c.end(nil)
		if err != nil {
			return nil, nil, err
		}
		b.judge(a, 0, false)
		if perSecond == 0 {
			out.EnterPerSecond = measure.Round2(float64(ended.Entered) / took.Seconds())
			costs.EnterCPUUS = measure.PerJob(used.roles[brokerRole], int(max(ended.Entered, 1)))
			costs.EnterRedisCPUUS = measure.PerJob(used.redisTotal().CPU, int(max(ended.Entered, 1)))
		} else {
			out.EnterP99MS = measure.Round2(measure.Percentile(a.Waits, 99))
			costs.EnterP50MS = measure.Round2(measure.Percentile(a.Waits, 50))
		}
		if err := b.forget(ctx, event); err != nil {
			return nil, nil, err
		}
	}
	return out, costs, nil
}

// promotion promotes users at a steady rate. It measures the time from the promotion until the user
// has the token.
func (b *roomBench) promotion(ctx context.Context) (*RoomPromotion, *RoomPromotionCosts, error) {
	const event = "promotion"
	if err := b.declare(ctx, event, func(s *waitingroom.Settings) {
		s.Capacity, s.Rate, s.Burst = int64(b.Users), b.Rate, max(1, int64(b.Rate/20))
	}); err != nil {
		return nil, nil, err
	}
	c, err := b.enterWaiting(ctx, roomload.Task{Events: []string{event}, Prefix: "p"})
	if err != nil {
		return nil, nil, err
	}
	numbers, err := b.numbers(ctx, event)
	if err != nil {
		return nil, nil, err
	}
	began := time.Now()
	used, err := b.measure(ctx, func() error {
		if err := b.setMode(ctx, event, api.ModeOpen); err != nil {
			return err
		}
		return c.awaitAdmitted(ctx, b.Users)
	})
	if err != nil {
		return nil, nil, err
	}
	took := time.Since(began)
	a, err := c.end(numbers)
	if err != nil {
		return nil, nil, err
	}
	b.judge(a, b.Users, true)
	ms := promoteToAdmitted(a.Visits)
	return &RoomPromotion{
			PromoteToAdmittedP50MS: measure.Round2(measure.Percentile(ms, 50)),
			PromoteToAdmittedP99MS: measure.Round2(measure.Percentile(ms, 99)),
		}, &RoomPromotionCosts{
			PromotionCPUUS:      measure.PerJob(used.roles[brokerRole], max(1, len(ms))),
			PromotionRedisCPUUS: measure.PerJob(used.redisTotal().CPU, max(1, len(ms))),
			PromotionsPerSecond: measure.Round2(float64(len(ms)) / took.Seconds()),
		}, b.forget(ctx, event)
}

// promoteToAdmitted returns, for each user with a token, the ms from the promotion to the receipt
// of the token.
func promoteToAdmitted(visits []roomload.Visit) (ms []float64) {
	for _, v := range visits {
		if v.Admitted > 0 {
			ms = append(ms, float64(v.Admitted-v.Fence)/1000)
		}
	}
	return ms
}

// empty measures users who enter while nobody waits.
func (b *roomBench) empty(ctx context.Context) (*RoomEmpty, error) {
	const event, users, perSecond = "empty", 400, 100
	if err := b.declare(ctx, event, func(s *waitingroom.Settings) {
		s.Capacity, s.Mode = users, api.ModeOpen
	}); err != nil {
		return nil, err
	}
	c, err := b.crowd(roomload.Task{
		Events: []string{event}, Prefix: "i", Users: users, PerSecond: perSecond / float64(len(b.loaders)),
		Session: 10 * time.Millisecond,
	})
	if err != nil {
		return nil, err
	}
	if _, err = c.await(ctx, patience, func(n roomload.Counts) bool { return n.Ended == users }); err != nil {
		return nil, err
	}
	a, err := c.end(nil)
	if err != nil {
		return nil, err
	}
	b.judge(a, users, true)
	var ms []float64
	for _, v := range a.Visits {
		if v.Admitted > 0 {
			ms = append(ms, float64(v.Admitted-v.Sent)/1000)
		}
	}
	return &RoomEmpty{
		EmptyP50MS: measure.Round2(measure.Percentile(ms, 50)),
		EmptyP99MS: measure.Round2(measure.Percentile(ms, 99)),
	}, b.forget(ctx, event)
}
