package console

import (
	"context"
	"sync"
	"time"
)

// every returns a function that calls read at most once per interval, and otherwise returns the
// data of the last call. After an error, the next call reads again. Only one goroutine may use the
// function.
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

// maxAnswers is the highest number of entries in one cache. A full cache is emptied before the next
// answer is stored.
const maxAnswers = 100

// cache stores the answers to expensive reads, each for one interval. All pages and readers share
// it. If several calls at the same time find no fresh answer, each of them reads it.
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

// get returns the cached answer to question if it is fresh. Otherwise it calls read and caches the
// answer. It does not cache errors.
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
