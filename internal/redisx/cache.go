package redisx

import (
	"container/list"
	"sync"
	"time"
)

// Cache keeps values that this process has read: at most Max, each for TTL. A new value replaces the
// oldest one if the cache is full. It is safe for concurrent use; the fields may be changed only
// before.
type Cache[K comparable, V any] struct {
	TTL time.Duration
	Max int
	Now func() time.Time // the clock

	mu    sync.Mutex
	byKey map[K]*list.Element
	order list.List // of *cached[K, V], the oldest first
}

type cached[K comparable, V any] struct {
	key   K
	value V
	at    time.Time
}

// NewCache returns an empty cache that uses the time of this machine.
func NewCache[K comparable, V any](ttl time.Duration, most int) *Cache[K, V] {
	return &Cache[K, V]{TTL: ttl, Max: most, Now: time.Now, byKey: map[K]*list.Element{}}
}

// Get returns the value of a key, and when it was put. ok is false if there is none that is younger
// than TTL.
func (c *Cache[K, V]) Get(key K) (value V, at time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	found := c.byKey[key]
	if found == nil {
		return value, at, false
	}
	e := found.Value.(*cached[K, V])
	if c.Now().Sub(e.at) >= c.TTL {
		return value, at, false
	}
	return e.value, e.at, true
}

// GetOr returns the value of a key or, if there is none, the one that read returns, which it puts
// unless read returns an error. Concurrent calls for one key may read several times.
func (c *Cache[K, V]) GetOr(key K, read func() (V, error)) (V, error) {
	if value, _, ok := c.Get(key); ok {
		return value, nil
	}
	value, err := read()
	if err == nil {
		c.Put(key, value)
	}
	return value, err
}

// Put keeps the value of a key, in place of an earlier one.
func (c *Cache[K, V]) Put(key K, value V) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.Now()
	c.remove(c.byKey[key])
	for first := c.order.Front(); first != nil; first = c.order.Front() {
		if len(c.byKey) < c.Max && now.Sub(first.Value.(*cached[K, V]).at) < c.TTL {
			break
		}
		c.remove(first)
	}
	c.byKey[key] = c.order.PushBack(&cached[K, V]{key, value, now})
}

// Delete removes the value of a key.
func (c *Cache[K, V]) Delete(key K) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove(c.byKey[key])
}

// remove removes an element, unless it is nil. The caller holds mu.
func (c *Cache[K, V]) remove(e *list.Element) {
	if e != nil {
		delete(c.byKey, c.order.Remove(e).(*cached[K, V]).key)
	}
}

// All returns all values, also those that are too old.
func (c *Cache[K, V]) All() map[K]V {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := map[K]V{}
	for key, e := range c.byKey {
		all[key] = e.Value.(*cached[K, V]).value
	}
	return all
}
