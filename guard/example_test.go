package guard_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/guard"
)

// connect returns a client of guards on a Redis in memory. A real service connects to its own
// Redis: a single server, Sentinel or a Cluster.
func connect() (c *guard.Client, end func()) {
	server, err := miniredis.Run()
	if err != nil {
		log.Fatal(err)
	}
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	c = guard.New(rdb)
	return c, func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := c.Close(ctx); err != nil { // it waits for leases that are still out
			log.Print(err)
		}
		_ = rdb.Close()
		server.Close()
	}
}

// At most 3 calls a minute for each user, over all processes.
func ExampleLimiter_Take() {
	c, end := connect()
	defer end()
	ctx := context.Background()

	perUser := c.Limiter("api", guard.Bucket(3, time.Minute))
	for range 4 {
		d, err := perUser.Take(ctx, "user-7", 1)
		if err != nil {
			log.Fatal(err)
		}
		if d.Allowed {
			fmt.Println("allowed, left:", d.Left)
		} else {
			fmt.Println("try again in", d.RetryAfter.Round(time.Second))
		}
	}
	// Output:
	// allowed, left: 2
	// allowed, left: 1
	// allowed, left: 0
	// try again in 20s
}

// After two failures in a row no process calls the API for 10 minutes, or until an operator closes
// the breaker.
func ExampleBreaker_Do() {
	c, end := connect()
	defer end()
	ctx := context.Background()

	works := false
	callAPI := func(context.Context) error {
		if !works {
			return errors.New("the API answers 500")
		}
		return nil
	}
	b := c.Breaker("payments", guard.BreakerPolicy{Failures: 2, OpenFor: 10 * time.Minute, Successes: 1})
	for range 3 {
		err := b.Do(ctx, callAPI)
		var denied *guard.DeniedError
		if errors.As(err, &denied) {
			fmt.Println("not called:", denied.Reason)
			continue
		}
		fmt.Println("called:", err)
	}
	works = true
	if err := c.Control(ctx, "breaker/payments", "1", guard.CloseBreaker); err != nil {
		log.Fatal(err)
	}
	fmt.Println("called:", b.Do(ctx, callAPI))
	// Output:
	// called: the API answers 500
	// called: the API answers 500
	// not called: circuit_open
	// called: <nil>
}

// document is a row of a store that refuses writes with an old fence. An SQL store does the same in
// one statement:
//
//	UPDATE documents SET text = $2, fence = $1 WHERE id = $3 AND fence <= $1
//
// A statement that changes no row means that a newer holder has written.
type document struct {
	text  string
	fence int64
}

func (d *document) write(fence int64, text string) error {
	if d.fence > fence {
		return errors.New("refused: a newer holder has written")
	}
	d.text, d.fence = text, fence
	return nil
}

// A holder that was suspended may write after its lease has ended. The fence lets the store refuse
// that write.
func ExampleLock() {
	c, end := connect()
	defer end()
	ctx := context.Background()
	lock, doc := c.Lock("report"), &document{}

	suspended, err := lock.TryLock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	// The lease of a process that hangs ends after 30 s. Here an operator ends it at once.
	if err := c.Control(ctx, "lock/report", "1", guard.TakeBack); err != nil {
		log.Fatal(err)
	}
	err = lock.Do(ctx, func(_ context.Context, l *guard.Lease) error { // it unlocks also after a panic
		return doc.write(l.Fence(), "new")
	})
	fmt.Println("new holder:", err)
	fmt.Println("old holder:", doc.write(suspended.Fence(), "old"))
	fmt.Println("the document is", doc.text)
	if err := suspended.Release(ctx, guard.Neutral); err != nil { // no error: the lease is gone
		log.Fatal(err)
	}
	// Output:
	// new holder: <nil>
	// old holder: refused: a newer holder has written
	// the document is new
}

// Two accounts with a limit and a breaker of their own. The least recently used one is lent. An
// account that is told to wait, or that fails too often, is left out until it may be used again.
func ExamplePool() {
	c, end := connect()
	defer end()
	ctx := context.Background()

	accounts, err := c.Pool(ctx, "smtp", guard.Spec{
		Members: []guard.Member{{ID: "alice"}, {ID: "bob"}},
		Rate:    guard.PerWindow(80, 10*time.Minute),
		Breaker: guard.BreakerPolicy{Failures: 3, OpenFor: 10 * time.Minute, Successes: 3},
	})
	if err != nil {
		log.Fatal(err)
	}
	answers := map[string]guard.Outcome{"alice": guard.Throttled(time.Hour), "bob": guard.Success}
	for range 3 {
		l, err := accounts.Acquire(ctx, guard.MaxWait(time.Second))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("send with", l.Member())
		if err := l.Release(ctx, answers[l.Member()]); err != nil {
			log.Print(err) // the lease ends by itself
		}
	}
	// Output:
	// send with alice
	// send with bob
	// send with bob
}

// At most two processes or goroutines compress at once; the others wait in the queue.
func ExampleClient_Semaphore() {
	c, end := connect()
	defer end()
	err := c.Semaphore("compress", 2).Do(context.Background(), func(ctx context.Context, _ *guard.Lease) error {
		fmt.Println("compress") // stop when ctx ends: then the lease is lost
		return ctx.Err()
	})
	fmt.Println(err)
	// Output:
	// compress
	// <nil>
}
