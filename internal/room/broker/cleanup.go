package broker

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

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
	*shared
	partition keyspace.Partition

	seen    map[string]bool // brokers that were alive at the last step
	sweepAt []time.Time     // when to sweep

	clockWarned time.Time
}

func (c *cleanup) step(ctx context.Context) (time.Duration, error) {
	asked := time.Now()
	ran, err := c.rooms.Expire(ctx, c.partition, "")
	if err != nil {
		return 0, err
	}
	if c.partition.Index() == 0 {
		c.checkClock(ran.At, asked, time.Now())
	}
	alive, err := c.alive(ctx)
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
// time of issue of tokens (see signFor).
func (c *cleanup) checkClock(at, before, after time.Time) {
	if at.After(before.Add(-clockTolerance)) && at.Before(after.Add(clockTolerance)) {
		return
	}
	c.metrics.ClockWasOff()
	if time.Since(c.clockWarned) >= time.Minute {
		c.clockWarned = time.Now()
		c.Tel.Log.Warn("the clock of this process differs from Redis's, set it by NTP",
			"difference", before.Sub(at).Round(time.Millisecond))
	}
}

// sweep is the room sweep: it moves the waiting users of dead brokers to away. One process at a
// time sweeps a partition. It returns false if the caller should repeat it, because another process
// sweeps or there is a hold of places.
func (c *cleanup) sweep(ctx context.Context, alive []string) (done bool, err error) {
	key := c.partition.RoomSweep()
	locked, err := c.Conn.Cmd.SetNX(ctx, key, c.instance, sweepLock).Result()
	if err != nil || !locked {
		return false, err
	}
	defer func() { // an error leaves the lock to its end
		if unlock := c.Conn.Cmd.Del(context.WithoutCancel(ctx), key).Err(); err == nil {
			err = unlock
		}
	}()
	events, err := c.rooms.InPartition(ctx, c.partition)
	if err != nil {
		return false, err
	}
	renewed := time.Now()
	for _, event := range events {
		for from := int64(0); ; {
			next, n, hold, err := c.rooms.Sweep(ctx, event, from, alive)
			if err != nil || hold > 0 {
				return false, err
			}
			c.metrics.Count(telemetry.RoomOrphans, event, n)
			if from = next; from == 0 {
				break
			}
			if time.Since(renewed) < sweepLock/3 {
				continue
			}
			if err := c.Conn.Cmd.PExpire(ctx, key, sweepLock).Err(); err != nil {
				return false, err
			}
			renewed = time.Now()
		}
	}
	return true, nil
}
