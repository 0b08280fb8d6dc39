package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/bench/roomload"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// crowd is a task that all child processes which act as users carry out together.
type crowd struct {
	*roomBench
	began time.Time
}

// crowd sends a task to all child processes that act as users, each with its share of the users,
// and lets them begin. It sets the fields that are the same for all.
func (b *roomBench) crowd(t roomload.Task) (*crowd, error) {
	t.Brokers, t.Header, t.Issuer, t.Keys = b.brokers, userHeader, b.publicURL, keysURL(b.brokers[0])
	if t.Kind == "" {
		t.Kind = roomload.Streams
	}
	n, users := len(b.loaders), t.Users
	for i, l := range b.loaders {
		t.First, t.Users, t.Seed = users*i/n, users*(i+1)/n-users*i/n, uint64(i)
		if err := l.send.Encode(t); err != nil {
			return nil, fmt.Errorf("give a task: %w", err)
		}
	}
	c := &crowd{b, time.Now()}
	if _, err := c.answers(); err != nil {
		return nil, err
	}
	_, err := c.step(roomload.Begin)
	return c, err
}

// step sends a step to all child processes, and returns the sum of their answers.
func (c *crowd) step(do string) (roomload.Answer, error) {
	for _, l := range c.loaders {
		if err := l.send.Encode(roomload.Step{Do: do}); err != nil {
			return roomload.Answer{}, fmt.Errorf("ask users to %s: %w", do, err)
		}
	}
	return c.answers()
}

func (c *crowd) answers() (sum roomload.Answer, err error) {
	for _, l := range c.loaders {
		var a roomload.Answer
		if err := l.reports.Decode(&a); err != nil {
			return sum, fmt.Errorf("a process of users has ended: %w: %s", err, l.log)
		}
		if a.Error != "" {
			return sum, fmt.Errorf("a process of users: %s", a.Error)
		}
		sum.Add(a)
	}
	c.mostStreams = max(c.mostStreams, int(sum.Counts.Open))
	return sum, nil
}

// lookEvery is the pause between two reads of the users' counts in await.
const lookEvery = 20 * time.Millisecond

// await reads the counts of all users until reached accepts them. If they do not change for
// patience, it returns without an error: users are lost then, and judge reports which.
func (c *crowd) await(
	ctx context.Context, patience time.Duration, reached func(roomload.Counts) bool,
) (roomload.Counts, error) {
	var last roomload.Counts
	changed := time.Now()
	for {
		a, err := c.step(roomload.Look)
		switch {
		case err != nil || reached(a.Counts):
			return a.Counts, err
		case a.Counts != last:
			last, changed = a.Counts, time.Now()
		case time.Since(changed) > patience:
			return a.Counts, nil
		}
		if err := redisx.Sleep(ctx, lookEvery); err != nil {
			return a.Counts, err
		}
		if err := c.check(); err != nil {
			return a.Counts, err
		}
	}
}

// patience is how long await accepts that no count of users changes.
const patience = 20 * time.Second

// enterWaiting lets b.Users users enter, each with a stream of its own, and waits until each stream
// has shown a position. It also returns, without an error, when the counts of users do not change
// for the time patience: the judgement of the benchmark reports the missing users.
func (b *roomBench) enterWaiting(ctx context.Context, t roomload.Task) (*crowd, error) {
	t.Users, t.Parallel = b.Users, 64
	c, err := b.crowd(t)
	if err != nil {
		return nil, err
	}
	_, err = c.await(ctx, patience, func(n roomload.Counts) bool { return n.Shown == int64(b.Users) })
	return c, err
}

// awaitAdmitted waits until n users have had a token, or until no count changes for patience.
func (c *crowd) awaitAdmitted(ctx context.Context, n int) error {
	_, err := c.await(ctx, patience, func(now roomload.Counts) bool { return now.Admitted >= int64(n) })
	return err
}

// end ends the task and returns what all users received. It stores the ticket number in each visit
// whose user is in numbers.
func (c *crowd) end(numbers map[string]int64) (roomload.Answer, error) {
	a, err := c.step(roomload.End)
	for i := range a.Visits {
		a.Visits[i].Number = numbers[a.Visits[i].User]
	}
	return a, err
}
