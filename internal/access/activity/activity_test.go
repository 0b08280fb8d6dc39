package activity_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

type world struct {
	*testing.T
	c     redis.UniversalClient
	space keyspace.Space
	lines *bytes.Buffer // of slog
}

func newWorld(t *testing.T) *world {
	url, prefix := redistest.Parallel(t)
	opt, err := redis.ParseURL(url)
	require.NoError(t, err)
	c := redis.NewClient(opt)
	t.Cleanup(func() { _ = c.Close() })
	space, err := keyspace.New(prefix, 1)
	require.NoError(t, err)
	return &world{T: t, c: c, space: space, lines: &bytes.Buffer{}}
}

func (w *world) log(keep time.Duration) *activity.Log {
	return activity.New(w.c, w.space, keep, slog.New(slog.NewTextHandler(w.lines, nil)))
}

func (w *world) read(q activity.Query) api.ActivityList {
	w.Helper()
	if q.Limit == 0 {
		q.Limit = 100
	}
	list, err := w.log(0).Read(w.Context(), q)
	require.NoError(w, err)
	return list
}

func TestEntryIsStoredBeforeItsEffect(t *testing.T) {
	w := newWorld(t)
	ctx := activity.WithActor(t.Context(), api.Activity{
		Actor: "key_abc", Role: "operator", Via: api.ViaAPI, IP: "192.0.2.1", RequestID: "r1", Tenant: "acme",
	})
	e := api.Activity{
		Action: "tenant.set", Object: "acme",
		Before: activity.JSON(api.TenantSettings{}), After: json.RawMessage(`{"rps":5}`),
	}
	require.NoError(t, w.log(time.Hour).Do(ctx, e, func(context.Context) error {
		before := w.read(activity.Query{}).Activity
		require.Len(t, before, 1)
		require.Empty(t, before[0].Outcome)
		return nil
	}))
	got := w.read(activity.Query{}).Activity
	require.Len(t, got, 1)
	require.WithinDuration(t, time.Now(), got[0].At, time.Minute)
	want := e
	want.ID, want.At = got[0].ID, got[0].At
	want.Actor, want.Role, want.Via, want.IP, want.RequestID, want.Tenant = "key_abc", "operator", "api", "192.0.2.1", "r1", "acme"
	require.Equal(t, want, got[0])
	require.Contains(t, w.lines.String(), "msg=activity actor=key_abc role=operator via=api ip=192.0.2.1 request_id=r1 action=tenant.set object=acme tenant=acme")
}

func TestFailedActivityHasAnOutcome(t *testing.T) {
	w := newWorld(t)
	broken := errors.New("group g: not found")
	ctx, cancel := context.WithCancel(t.Context())
	err := w.log(0).Do(ctx, api.Activity{Action: "group.cancel", Object: "g"}, func(context.Context) error {
		cancel() // the caller is gone
		return broken
	})
	require.ErrorIs(t, err, broken)
	got := w.read(activity.Query{}).Activity
	require.Len(t, got, 2)
	require.Equal(t, "failed: group g: not found", got[0].Outcome)
	require.Empty(t, got[1].Outcome)
	require.Equal(t, activity.Anonymous, got[1].Actor)
}

func TestNoEntryNoChange(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.c.Set(t.Context(), w.space.Activity(), "no stream", 0).Err())
	err := w.log(0).Do(t.Context(), api.Activity{Action: "group.cancel", Object: "g"}, func(context.Context) error {
		t.Error("the change was carried out without an entry")
		return nil
	})
	require.ErrorContains(t, err, "store the activity group.cancel of g before it is carried out: script add: WRONGTYPE")
	require.Empty(t, w.lines.String())
}

// TestEntryIsStoredWhenMemoryIsFull: an entry is stored even if Redis's memory is full: operators
// must then be able to cancel groups, and a change needs an entry.
func TestEntryIsStoredWhenMemoryIsFull(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t, redistest.Args("--maxmemory", "1", "--maxmemory-policy", "noeviction"))
	c := redis.NewClient(&redis.Options{Addr: server.Addr()})
	t.Cleanup(func() { _ = c.Close() })
	space, err := keyspace.New("t:", 1)
	require.NoError(t, err)
	require.ErrorContains(t, c.XAdd(t.Context(), &redis.XAddArgs{Stream: "other", Values: []string{"a", "b"}}).Err(), "OOM")
	log := activity.New(c, space, time.Hour, slog.New(slog.DiscardHandler))
	for range 2 {
		require.NoError(t, log.Do(t.Context(), api.Activity{Action: "group.cancel", Object: "g"}, func(context.Context) error { return nil }))
	}
	list, err := log.Read(t.Context(), activity.Query{Limit: 10})
	require.NoError(t, err)
	require.Len(t, list.Activity, 2)
}

func TestOldEntriesAreDeleted(t *testing.T) {
	w := newWorld(t)
	old := time.Now().Add(-2 * time.Hour)
	add := func(at time.Time) {
		id := fmt.Sprint(at.UnixMilli(), "-0")
		require.NoError(t, w.c.XAdd(t.Context(), &redis.XAddArgs{Stream: w.space.Activity(), ID: id, Values: []string{"actor", "a"}}).Err())
	}
	add(old)
	add(time.Now().Add(-time.Minute))
	list, err := w.log(time.Hour).Read(t.Context(), activity.Query{Limit: 10})
	require.NoError(t, err)
	require.Len(t, list.Activity, 1, "an entry that is too old is not shown, although nothing has deleted it yet")
	require.NoError(t, w.log(time.Hour).Do(t.Context(), api.Activity{Action: "x", Object: "y"}, func(context.Context) error { return nil }))
	require.Len(t, w.read(activity.Query{}).Activity, 2)
}

func TestReadFiltersAndPages(t *testing.T) {
	w := newWorld(t)
	for i := range 50 {
		ctx := activity.WithActor(t.Context(), api.Activity{Actor: fmt.Sprint("a", i%5), Tenant: fmt.Sprint("t", i%2)})
		require.NoError(t, w.log(0).Do(ctx, api.Activity{Action: "group.pause", Object: fmt.Sprint("g", i)}, func(context.Context) error { return nil }))
	}
	objects := func(q activity.Query) (all []string) {
		for {
			page := w.read(q)
			for _, a := range page.Activity {
				all = append(all, a.Object)
			}
			if q.Cursor = page.Cursor; q.Cursor == "" {
				return all
			}
		}
	}
	require.Equal(t, []string{"g43", "g33", "g23", "g13", "g3"}, objects(activity.Query{Actor: "a3", Tenant: "t1", Limit: 2}))
	require.Len(t, objects(activity.Query{Limit: 7}), 50)
	require.Empty(t, objects(activity.Query{Since: time.Now().Add(time.Hour)}))
	require.Len(t, objects(activity.Query{Since: time.Now().Add(-time.Hour)}), 50)
}

// TestReadIsBounded: one call of Read reads at most 10,000 entries, even if none matches. Its
// cursor lets the next call continue there.
func TestReadIsBounded(t *testing.T) {
	w := newWorld(t)
	_, err := w.c.Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
		for i := range 10_600 {
			actor := "other"
			if i == 0 {
				actor = "wanted"
			}
			pipe.XAdd(t.Context(), &redis.XAddArgs{Stream: w.space.Activity(), Values: []string{"actor", actor}})
		}
		return nil
	})
	require.NoError(t, err)
	first := w.read(activity.Query{Actor: "wanted"})
	require.Empty(t, first.Activity)
	require.Equal(t, 10_000, first.Scanned)
	second := w.read(activity.Query{Actor: "wanted", Cursor: first.Cursor})
	require.Len(t, second.Activity, 1)
	require.Empty(t, second.Cursor)
}

// TestStrangeEntries: an entry with a malformed time, malformed JSON and an unknown field is read
// with its id alone. Of an own entry with values of 20,000 bytes, Object is cut to 8192 and After
// left out.
func TestStrangeEntries(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.c.XAdd(t.Context(), &redis.XAddArgs{Stream: w.space.Activity(), Values: []string{"at", "yesterday", "before", "{", "x", "y"}}).Err())
	long := strings.Repeat("ä", 10_000)
	e := api.Activity{Action: "tenant.set", Object: long, After: activity.JSON(long)}
	require.NoError(t, w.log(0).Do(t.Context(), e, func(context.Context) error { return nil }))
	got := w.read(activity.Query{}).Activity
	require.Len(t, got, 2)
	require.Len(t, got[0].Object, 8192)
	require.Nil(t, got[0].After)
	require.Equal(t, api.Activity{ID: got[1].ID}, got[1])
}

// TestEntryOnBothServers: the script that stores entries works on a real Redis, and on the embedded
// server of `bulkaction dev`.
func TestEntryOnBothServers(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		opt, err := redis.ParseURL(url)
		require.NoError(t, err)
		c := redis.NewClient(opt)
		t.Cleanup(func() { _ = c.Close() })
		space, err := keyspace.New(prefix, 1)
		require.NoError(t, err)
		for _, keep := range []time.Duration{0, time.Hour} {
			log := activity.New(c, space, keep, slog.New(slog.DiscardHandler))
			require.NoError(t, log.Do(t.Context(), api.Activity{Action: "group.cancel", Object: "g"}, func(context.Context) error { return nil }))
		}
		list, err := activity.New(c, space, 0, slog.New(slog.DiscardHandler)).Read(t.Context(), activity.Query{Limit: 10})
		require.NoError(t, err)
		require.Len(t, list.Activity, 2)
	})
}
