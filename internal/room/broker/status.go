package broker

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// silence is the longest time between two published statuses of a broker after which its users need
// not enter again. After presence.TTL, which is longer, other brokers count the broker as dead and
// make its users away.
const silence = 2 * time.Second

// statusInterval is the time between two statuses of a broker.
const statusInterval = time.Second

// keepStatus publishes the status of this broker. After a silence, or when Redis has lost the last
// status, the broker repeats the script enter for all its users before it shows them positions
// again. When the broker stops, its last status stays in Redis until it expires, so that the sweep
// does not make its users away before they can connect to another broker.
func (b *Broker) keepStatus(ctx context.Context) error {
	// known is false if the last status is not in Redis any more: then Redis has lost its data, and
	// maybe the places of this broker's users.
	known, err := presence.PublishBroker(ctx, b.Conn, b.Space, api.StageStatus{
		ID: b.instance, Version: b.Version, Layouts: b.Layouts, Role: api.RoleBroker, Running: !b.draining.Load(), SeenAt: time.Now(),
		Counts: map[string]int64{"streams": int64(b.conns.len()), "position_age_ms": b.positionAge.Load()},
	})
	if err != nil {
		return err
	}
	if !b.statusAt.IsZero() && (!known || time.Since(b.statusAt) > silence) {
		b.suspended.Store(true)
	}
	b.statusAt = time.Now()
	if b.suspended.Load() && b.enterAllAgain(ctx) {
		b.suspended.Store(false)
	}
	return nil
}

// enterAllAgain repeats the script enter for all streams of this broker, so that users whom the
// sweep has moved to away wait again under their numbers. It claims for those who were promoted
// meanwhile. It returns false if the caller has to repeat it.
func (b *Broker) enterAllAgain(ctx context.Context) bool {
	for event, conns := range b.conns.byEvent() {
		// Leave out users whose first call of enter still runs: they may have no place yet, or one
		// with an older conn, and enter would end their streams.
		conns = slices.DeleteFunc(conns, func(c *connection) bool { return !c.now().entered })
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

// alive returns the instances of the brokers that are alive. This broker is one of them.
func (b *Broker) alive(ctx context.Context) (map[string]bool, error) {
	brokers, err := presence.Brokers(ctx, b.Conn, b.Space)
	if err != nil {
		return nil, err
	}
	alive := map[string]bool{b.instance: true}
	for _, s := range brokers {
		alive[s.ID] = true
	}
	return alive, nil
}

const (
	cleanupInterval = time.Second
	// sweepLock is the lifetime of the lock in Redis by which only one broker sweeps a partition. A
	// long sweep renews the lock.
	sweepLock = 30 * time.Second
	// sweepAgain is the time after which a sweep is repeated: a sweep leaves out streams younger
	// than 10 s, and a broker may have had some when it died.
	sweepAgain = 11 * time.Second
	// clockTolerance is the largest difference between a broker's clock and Redis's about which the
	// broker logs no warning.
	clockTolerance = 2 * time.Second
)

// cleanup is the cleanup loop of a partition. Each second it calls the script expire_users without
// an event, which stores that brokers are at work: a gap of more than 5 s starts a hold of places.
// It runs a room sweep when this broker starts and when another broker has died, and a second one
// after sweepAgain.
type cleanup struct {
	broker    *Broker
	partition keyspace.Partition

	seen    map[string]bool // brokers that were alive at the last step
	sweepAt []time.Time     // when to sweep

	clockWarned time.Time
}

func (c *cleanup) step(ctx context.Context) (time.Duration, error) {
	asked := time.Now()
	ran, err := c.broker.rooms.Expire(ctx, c.partition, "")
	if err != nil {
		return 0, err
	}
	if c.partition.Index() == 0 {
		c.checkClock(ran.At, asked, time.Now())
	}
	alive, err := c.broker.alive(ctx)
	if err != nil {
		return 0, err
	}
	now := time.Now()
	died := c.seen == nil
	for instance := range c.seen {
		died = died || !alive[instance]
	}
	if died {
		c.sweepAt = append(c.sweepAt, now, now.Add(sweepAgain))
	}
	c.seen = alive
	if len(c.sweepAt) == 0 || now.Before(c.sweepAt[0]) {
		return cleanupInterval, nil
	}
	done, err := c.sweep(ctx, slices.Collect(maps.Keys(alive)))
	if err != nil {
		return 0, err
	}
	if done {
		c.sweepAt = slices.DeleteFunc(c.sweepAt, func(at time.Time) bool { return !now.Before(at) })
	}
	return cleanupInterval, nil
}

// checkClock counts that this process's clock differs from Redis's by more than clockTolerance, and
// logs it once a minute. at is Redis's time, at an instant between before and after. Entry tokens
// end at Redis's times, so a difference affects only what this broker measures and logs, and the
// time of issue of tokens (see sign).
func (c *cleanup) checkClock(at, before, after time.Time) {
	if at.After(before.Add(-clockTolerance)) && at.Before(after.Add(clockTolerance)) {
		return
	}
	c.broker.metrics.ClockWasOff()
	if time.Since(c.clockWarned) >= time.Minute {
		c.clockWarned = time.Now()
		c.broker.Tel.Log.Warn("the clock of this process differs from Redis's, set it by NTP",
			"difference", before.Sub(at).Round(time.Millisecond))
	}
}

// sweep is the room sweep: it moves the waiting users of dead brokers to away. One process at a
// time sweeps a partition. It returns false if the caller should repeat it, because another process
// sweeps or there is a hold of places.
func (c *cleanup) sweep(ctx context.Context, alive []string) (done bool, err error) {
	key := c.partition.RoomSweep()
	locked, err := c.broker.Conn.Cmd.SetNX(ctx, key, c.broker.instance, sweepLock).Result()
	if err != nil || !locked {
		return false, err
	}
	defer func() { // an error leaves the lock to its end
		if unlock := c.broker.Conn.Cmd.Del(context.WithoutCancel(ctx), key).Err(); err == nil {
			err = unlock
		}
	}()
	events, err := c.broker.rooms.InPartition(ctx, c.partition)
	if err != nil {
		return false, err
	}
	renewed := time.Now()
	for _, event := range events {
		for from := int64(0); ; {
			next, n, hold, err := c.broker.rooms.Sweep(ctx, event, from, alive)
			if err != nil || hold > 0 {
				return false, err
			}
			c.broker.metrics.Count(telemetry.RoomOrphans, event, n)
			if from = next; from == 0 {
				break
			}
			if time.Since(renewed) < sweepLock/3 {
				continue
			}
			if err := c.broker.Conn.Cmd.PExpire(ctx, key, sweepLock).Err(); err != nil {
				return false, err
			}
			renewed = time.Now()
		}
	}
	return true, nil
}
