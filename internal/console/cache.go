package console

import (
	"context"
	"sync"
	"time"
)

// every returns a function that reads at most once per interval, and has the last data in between.
// Only one goroutine may use it.
func every(interval time.Duration, read func(context.Context) (any, error)) func(context.Context) (any, error) {
	var last any
	var readAt time.Time
	return func(ctx context.Context) (any, error) {
		if !readAt.IsZero() && time.Since(readAt) < interval {
			return last, nil
		}
		data, err := read(ctx)
		if err != nil {
			return nil, err
		}
		last, readAt = data, time.Now()
		return last, nil
	}
}

// maxAnswers is how many answers are kept of one kind of question.
const maxAnswers = 100

// cache keeps answers to expensive questions for one interval. All pages and readers share them.
// Concurrent calls that find no fresh answer each read it. A full cache is cleared.
type cache[T any] struct {
	interval time.Duration
	mu       sync.Mutex
	all      map[string]answer[T] // by question
}

type answer[T any] struct {
	value T
	at    time.Time
}

func newCache[T any](interval time.Duration) *cache[T] {
	return &cache[T]{interval: interval, all: map[string]answer[T]{}}
}

// get returns the answer to a question, which read gives if none is kept. Errors are not kept.
func (c *cache[T]) get(question string, read func() (T, error)) (T, error) {
	c.mu.Lock()
	last, ok := c.all[question]
	c.mu.Unlock()
	if ok && time.Since(last.at) < c.interval {
		return last.value, nil
	}
	value, err := read()
	if err != nil {
		return value, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.all) >= maxAnswers {
		clear(c.all)
	}
	c.all[question] = answer[T]{value, time.Now()}
	return value, nil
}
