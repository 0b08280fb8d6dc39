package waitingroom_test

import (
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// world is a key space of its own with the rooms in it.
type world struct {
	*testing.T
	*waitingroom.Rooms
	rdb   redis.UniversalClient
	space keyspace.Space
	p     keyspace.Partition
}

// onBoth runs a test on a real Redis and on miniredis.
func onBoth(t *testing.T, test func(w *world)) {
	t.Helper()
	t.Parallel()
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		url, prefix := redistest.Shared(t)
		test(newWorld(t, url, prefix))
	})
	t.Run("miniredis", func(t *testing.T) {
		t.Parallel()
		test(newWorld(t, "redis://"+miniredis.RunT(t).Addr(), "bulk-action:"))
	})
}

func newWorld(t *testing.T, url, prefix string) *world {
	t.Helper()
	conn, err := redisx.Connect(t.Context(), redisx.Config{URL: url, PoolMaxIdle: 2, PoolMaxActive: 10})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	space, err := keyspace.New(prefix, 1)
	require.NoError(t, err)
	return &world{T: t, Rooms: waitingroom.New(conn, space, func(string, time.Duration, error) {}), rdb: conn.Cmd, space: space, p: space.Partition(0)}
}

// event is the id of the event of the tests.
const event = "sale"

// defaults are the settings of the design, with a capacity.
func defaults(capacity int64) waitingroom.Settings {
	return waitingroom.Settings{
		Capacity: capacity, MaxWaiting: 1_000_000, TokenTTL: 5 * time.Minute, Leeway: 10 * time.Second,
		MaxSession: 15 * time.Minute, Ready: 30 * time.Second, Grace: time.Minute, OnClose: "keep", NoShow: "wait",
		Retention: 24 * time.Hour,
	}
}

// declare creates the event.
func (w *world) declare(s waitingroom.Settings) {
	w.Helper()
	d, err := w.Declare(w.Context(), event, s, waitingroom.DeclareOptions{})
	require.NoError(w, err)
	require.Equal(w, "CREATED", d.Code)
}

// enter enters each user with a stream of the broker 00000001, and returns their entries.
func (w *world) enter(users ...string) []waitingroom.Entry {
	w.Helper()
	var visitors []waitingroom.Visitor
	for _, user := range users {
		visitors = append(visitors, waitingroom.Visitor{User: user, Conn: connOf(user)})
	}
	e, err := w.Enter(w.Context(), event, waitingroom.EnterNew, 0, visitors...)
	require.NoError(w, err)
	require.Len(w, e.Entries, len(users))
	return e.Entries
}

func connOf(user string) string { return "00000001." + user }

func visitor(user string) waitingroom.Visitor {
	return waitingroom.Visitor{User: user, Conn: connOf(user)}
}

func (w *world) snapshot() waitingroom.Snapshot {
	w.Helper()
	s, err := w.Snapshot(w.Context(), w.p, event)
	require.NoError(w, err)
	require.Len(w, s.Events, 1)
	return s.Events[0]
}

func (w *world) promote() waitingroom.Progress {
	w.Helper()
	p, err := w.Promote(w.Context(), event)
	require.NoError(w, err)
	return p
}

func (w *world) claim(users ...string) []waitingroom.Claim {
	w.Helper()
	var visitors []waitingroom.Visitor
	for _, user := range users {
		visitors = append(visitors, visitor(user))
	}
	c, err := w.Claim(w.Context(), event, visitors...)
	require.NoError(w, err)
	return c
}
