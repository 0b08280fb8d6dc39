package ledger_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// wide are bounds that no test reaches.
var wide = ledger.NewCallbackBounds(1000, 1<<20)

var callbackScenes = []scene{
	{"add callbacks to a full queue", false, func(w *world) act {
		w.tell(wide, told("a", "acme"))
		return w.telling(ledger.NewCallbackBounds(1, 1000), told("b", "acme"))
	}},
	{"add callbacks behind one whose data is lost", false, func(w *world) act {
		w.tell(wide, told("a", "acme"))
		w.c.Del(w.Context(), w.p.Callback("a"))
		return w.telling(ledger.NewCallbackBounds(1, 1000), told("b", "acme"))
	}},
	{"claim callbacks", false, func(w *world) act {
		w.tell(wide, told("a", "acme"), told("b", "acme"), told("c", "lost"), told("d", "globex"))
		w.c.Del(w.Context(), w.p.Callback("c"))
		return func() error {
			_, _, _, err := ledger.ClaimCallbacks(w.Context(), w.c, w.p, ledger.Claim{Most: 10, Each: 2, Lease: time.Minute})
			return err
		}
	}},
	{"settle_callback: delivered", false, func(w *world) act { return w.settling(ledger.Delivered) }},
	{"settle_callback: to be tried again at once", false, func(w *world) act { return w.settling(ledger.Retry) }},
	{"settle_callback: dead", false, func(w *world) act { return w.settling(ledger.Dead) }},
	{"settle_callback: not tried", false, func(w *world) act { return w.settling(ledger.Released) }},
	{"redeliver a dead and a pending callback", false, func(w *world) act {
		w.dead("a")
		w.tell(wide, told("b", "globex"))
		w.claim(10, 2, nil)
		return func() error {
			_, _, _, err := ledger.RedeliverCallbacks(w.Context(), w.c, w.p, "a", "b")
			return err
		}
	}},
	{"forget_callbacks", false, func(w *world) act {
		w.dead("a", "b")
		return func() error {
			_, err := ledger.ForgetCallbacks(w.Context(), w.c, w.p, time.Now().Add(time.Hour), 10)
			return err
		}
	}},
	{"set_endpoint", false, func(w *world) act { return w.changing("acme", "https://a.example") }},
	{"set_endpoint: delete", false, func(w *world) act {
		require.NoError(w, w.changing("acme", "https://a.example")())
		return w.changing("acme", "")
	}},
}

// passesOver says whether a script that has met a key of a wrong type has passed over one callback, or one
// queue.
func passesOver(scene, key string) bool {
	switch {
	case strings.HasPrefix(scene, "add callbacks"):
		return key == "callback:a" // the one that dies
	case strings.HasPrefix(scene, "claim callbacks"), strings.HasPrefix(scene, "redeliver"):
		return strings.HasPrefix(key, "callback:") || strings.HasPrefix(key, "callbacks:due:") || strings.HasPrefix(key, "callbacks:age:")
	}
	return false
}

// told returns a callback to a tenant's endpoint, with a body of 10 bytes.
func told(id, tenant string) ledger.NewCallback {
	return ledger.NewCallback{
		ID: id, Queue: ledger.QueueOf(tenant, ""), Tenant: tenant, Group: "g", Type: "group.completed", At: time.UnixMilli(1_700_000_000_000).UTC(),
		Body: []byte(`{"a":"12"}`),
	}
}

func (w *world) telling(b ledger.CallbackBounds, all ...ledger.NewCallback) act {
	return func() error {
		_, errs, err := b.Add(w.Context(), w.c, w.p, all...)
		return errors.Join(append(errs, err)...)
	}
}

// tell adds callbacks, and returns how many have died.
func (w *world) tell(b ledger.CallbackBounds, all ...ledger.NewCallback) int64 {
	w.Helper()
	died, errs, err := b.Add(w.Context(), w.c, w.p, all...)
	require.NoError(w, err)
	require.Empty(w, errs)
	return died
}

// claim claims callbacks for a minute.
func (w *world) claim(most, each int, busy map[string]int) []ledger.ClaimedCallback {
	w.Helper()
	all, now, _, err := ledger.ClaimCallbacks(w.Context(), w.c, w.p, ledger.Claim{Most: most, Each: each, Lease: time.Minute, Busy: busy})
	require.NoError(w, err)
	require.InDelta(w, time.Now().UnixMilli(), now.UnixMilli(), 60_000)
	return all
}

func claimedIDs(all []ledger.ClaimedCallback) (ids []string) {
	for i := range all {
		ids = append(ids, all[i].ID)
	}
	return ids
}

// ended settles an attempt, and says whether that was stored.
func (w *world) ended(c ledger.ClaimedCallback, how ledger.Settlement, delay time.Duration) bool {
	w.Helper()
	stored, err := ledger.SettleCallback(w.Context(), w.c, w.p, &c, how, delay, "answered 500", "oops")
	require.NoError(w, err)
	return stored
}

func (w *world) settling(how ledger.Settlement) act {
	w.tell(wide, told("a", "acme"))
	c := w.claim(1, 1, nil)[0]
	return func() error {
		_, err := ledger.SettleCallback(w.Context(), w.c, w.p, &c, how, 0, "answered 500", "oops")
		return err
	}
}

// dead makes dead callbacks of tenant acme.
func (w *world) dead(ids ...string) {
	w.Helper()
	for _, id := range ids {
		w.tell(wide, told(id, "acme"))
		require.True(w, w.ended(w.claim(1, 1, nil)[0], ledger.Dead, 0))
	}
}

func (w *world) changing(tenant, url string) act {
	return func() error {
		_, err := ledger.ChangeEndpoint(w.Context(), w.c, w.p, tenant, func(e *ledger.Endpoint) error {
			e.URL = url
			return nil
		})
		return err
	}
}

// callbackStates returns the states of callbacks, "" of one that does not exist.
func (w *world) callbackStates(ids ...string) (states []string) {
	w.Helper()
	for _, id := range ids {
		states = append(states, w.c.HGet(w.Context(), w.p.Callback(id), "state").Val())
	}
	return states
}

func (w *world) callback(id string) api.Callback {
	w.Helper()
	all, err := ledger.ReadCallbacks(w.Context(), w.c, w.p, id)
	require.NoError(w, err)
	require.Len(w, all, 1)
	return all[0]
}

// lapse makes pending callbacks of a queue due.
func (w *world) lapse(queue string, ids ...string) {
	w.Helper()
	for _, id := range ids {
		require.NoError(w, w.c.ZAddXX(w.Context(), w.p.CallbackQueue(queue), redis.Z{Score: 1, Member: id}).Err())
	}
	require.NoError(w, w.c.ZAdd(w.Context(), w.p.Callbacks(), redis.Z{Score: 1, Member: queue}).Err())
}

// noCallbacks checks that nothing is left of callbacks but wake tokens.
func (w *world) noCallbacks() {
	w.Helper()
	for _, key := range w.keys() {
		require.False(w, strings.Contains(key, ":callback") && !strings.Contains(key, ":wake:"), key)
	}
}

// TestCallbackIsAddedOnce: a callback that is added again stays as it is, while it is pending and when it
// is dead. When it is delivered nothing is left of it, and it can be added again.
func TestCallbackIsAddedOnce(t *testing.T) {
	onStores(t, func(w *world) {
		own := told("a", "acme")
		own.URL, own.Queue = "https://b.example:444/x", ledger.QueueOf("acme", "https://b.example:444")
		w.tell(wide, own, own, told("b", "acme"))
		w.unchanged(func() { w.tell(wide, own) })
		all := append(w.claim(10, 5, map[string]int{"acme": 5}), w.claim(10, 5, nil)...)
		require.Equal(w, []string{"a", "b"}, claimedIDs(all))
		require.Equal(w, ledger.ClaimedCallback{NewCallback: own, Attempt: 1}, all[0])
		w.unchanged(func() { w.tell(wide, own) })
		require.True(w, w.ended(all[0], ledger.Dead, 0))
		w.unchanged(func() { w.tell(wide, own) })
		require.Equal(w, []string{"dead", "pending"}, w.callbackStates("a", "b"))

		require.True(w, w.ended(all[1], ledger.Delivered, 0))
		require.Equal(w, []string{"dead", ""}, w.callbackStates("a", "b"))
		w.unchanged(func() { require.False(w, w.ended(all[1], ledger.Delivered, 0)) })
		n, err := ledger.ForgetCallbacks(w.Context(), w.c, w.p, time.Now().Add(time.Hour), 10)
		require.NoError(w, err)
		require.EqualValues(w, 1, n)
		w.noCallbacks()
		w.tell(wide, own)
		require.Equal(w, []string{"pending"}, w.callbackStates("a"))
	})
}

// TestCallbacksAreBounded: the oldest callbacks of an endpoint die when there are too many, or when their
// bodies are too large. Another endpoint's do not, and a body that is too large by itself stays alone.
func TestCallbacksAreBounded(t *testing.T) {
	onStores(t, func(w *world) {
		bounds := ledger.NewCallbackBounds(3, 100)
		require.Zero(w, w.tell(bounds, told("z", "acme"), told("x", "globex")))
		for _, id := range []string{"y", "w"} {
			time.Sleep(2 * time.Millisecond) // older ones first
			require.Zero(w, w.tell(bounds, told(id, "acme")))
		}
		time.Sleep(2 * time.Millisecond)
		require.EqualValues(w, 2, w.tell(bounds, told("a", "acme"), told("b", "acme")))
		require.Equal(w, []string{"dead", "dead", "pending", "pending", "pending", "pending"}, w.callbackStates("z", "y", "w", "a", "b", "x"))
		require.Contains(w, w.callback("z").Error, "too many pending callbacks")
		require.Equal(w, "30", w.c.HGet(w.Context(), w.p.CallbackBytes(), "acme").Val())
		require.False(w, w.c.HExists(w.Context(), w.p.Callback("z"), "body").Val())

		time.Sleep(2 * time.Millisecond)
		large := told("c", "acme")
		large.Body = []byte(strings.Repeat("x", 85))
		require.EqualValues(w, 2, w.tell(bounds, large)) // 3 in number, then 85 and 10 bytes
		require.Equal(w, "95", w.c.HGet(w.Context(), w.p.CallbackBytes(), "acme").Val())
		time.Sleep(2 * time.Millisecond)
		large.ID, large.Body = "d", []byte(strings.Repeat("x", 200))
		require.EqualValues(w, 2, w.tell(bounds, large))
		require.Equal(w, []string{"pending"}, w.callbackStates("d"))
		require.Equal(w, map[string]string{"acme": "200", "globex": "10"}, w.c.HGetAll(w.Context(), w.p.CallbackBytes()).Val())

		n, err := ledger.CountCallbacks(w.Context(), w.c, w.p)
		require.NoError(w, err)
		require.Equal(w, []int64{2, 6}, []int64{n.Pending, n.Dead})
		require.WithinDuration(w, time.Now(), n.Oldest, time.Hour)
		for _, c := range w.claim(10, 2, nil) {
			require.True(w, w.ended(c, ledger.Delivered, 0))
		}
		require.Empty(w, w.c.HGetAll(w.Context(), w.p.CallbackBytes()).Val())
		require.Zero(w, w.c.ZCard(w.Context(), w.p.Callbacks()).Val())
	})
}

// TestClaimsAreShared: a watcher gets at most so many callbacks of a queue, with those that it sends
// already, and finds those of other queues behind many of a dead endpoint. Tenants may have the name of an
// error.
func TestClaimsAreShared(t *testing.T) {
	onStores(t, func(w *world) {
		var all []ledger.NewCallback
		for i := range 1000 {
			all = append(all, told(fmt.Sprint("dead", i), "dead"))
		}
		w.tell(wide, all...)
		time.Sleep(2 * time.Millisecond)
		w.tell(wide, told("a1", "ERR"), told("a2", "ERR"), told("a3", "ERR"))
		require.Equal(w, []string{"a1", "a2"}, claimedIDs(w.claim(10, 2, map[string]int{"dead": 2})))
		require.Equal(w, []string{"a3"}, claimedIDs(w.claim(10, 2, map[string]int{"dead": 3, "ERR": 1})))
		require.Empty(w, w.claim(10, 2, map[string]int{"dead": 2, "ERR": 2}))
		require.Len(w, w.claim(1, 2, nil), 1)
		require.Len(w, w.claim(10, 2, map[string]int{"dead": 1}), 1)
		require.Len(w, w.claim(10, 7, nil), 7)
		require.Empty(w, w.claim(0, 2, nil))
	})
}

// TestWaitOfClaims: a watcher is told when the next callback is due that it may send.
func TestWaitOfClaims(t *testing.T) {
	onStores(t, func(w *world) {
		wait := func(busy map[string]int) time.Duration {
			all, _, wait, err := ledger.ClaimCallbacks(w.Context(), w.c, w.p, ledger.Claim{Most: 1, Each: 1, Lease: time.Hour, Busy: busy})
			require.NoError(w, err)
			require.Empty(w, all)
			return wait
		}
		require.Negative(w, wait(nil))
		w.tell(wide, told("a", "acme"), told("b", "globex"))
		for _, c := range []ledger.ClaimedCallback{w.claim(1, 1, nil)[0], w.claim(1, 1, nil)[0]} {
			require.True(w, w.ended(c, ledger.Retry, map[string]time.Duration{"a": 1000 * time.Hour, "b": 2000 * time.Hour}[c.ID]))
		}
		require.InDelta(w, 1000*time.Hour, wait(nil), float64(time.Hour))
		require.InDelta(w, 2000*time.Hour, wait(map[string]int{"acme": 1}), float64(time.Hour))
		require.Negative(w, wait(map[string]int{"acme": 1, "globex": 1}))
	})
}

// TestOnlyTheLastAttemptSettles: a callback is given again when its lease has ended; the attempt before
// settles nothing any more. An attempt settles once.
func TestOnlyTheLastAttemptSettles(t *testing.T) {
	onStores(t, func(w *world) {
		w.tell(wide, told("a", "acme"))
		first := w.claim(10, 2, nil)[0]
		require.Empty(w, w.claim(10, 2, nil))
		w.lapse("acme", "a")
		second := w.claim(10, 2, nil)[0]
		require.Equal(w, []int64{1, 2}, []int64{first.Attempt, second.Attempt})
		for _, how := range []ledger.Settlement{ledger.Delivered, ledger.Retry, ledger.Dead, ledger.Released} {
			w.unchanged(func() { require.False(w, w.ended(first, how, 0)) })
		}
		require.True(w, w.ended(second, ledger.Retry, time.Hour))
		w.unchanged(func() { require.False(w, w.ended(second, ledger.Retry, 2*time.Hour)) })
		c := w.callback("a")
		require.Equal(w, api.Callback{
			ID: "a", Tenant: "acme", Group: "g", Type: "group.completed", At: told("", "").At, State: "pending", Tries: 1, NextAt: c.NextAt,
			Error: "answered 500", Answer: "oops",
		}, c)
		require.InDelta(w, time.Now().Add(time.Hour).UnixMilli(), c.NextAt.UnixMilli(), 60_000)

		w.lapse("acme", "a")
		third := w.claim(10, 2, nil)[0]
		require.Equal(w, 1, third.Tries)
		require.Equal(w, told("a", "acme").Body, third.Body)
		require.True(w, w.ended(third, ledger.Released, 0))
		fourth := w.claim(10, 2, nil)[0]
		require.Equal(w, 1, fourth.Tries)
		require.True(w, w.ended(fourth, ledger.Dead, 0))
		w.unchanged(func() { require.False(w, w.ended(fourth, ledger.Dead, 0)) })
		require.Empty(w, w.claim(10, 2, nil))
		c = w.callback("a")
		require.NotNil(w, c.DiedAt)
		require.Nil(w, c.NextAt)
		require.Equal(w, "dead 2", fmt.Sprint(c.State, " ", c.Tries))
	})
}

// TestRedeliver: a dead callback is pending again, with all its tries but without a body, unless its queue
// is full; a pending one is due at once. An attempt from before its death settles nothing.
func TestRedeliver(t *testing.T) {
	onStores(t, func(w *world) {
		bounds := ledger.NewCallbackBounds(1, 1000)
		redeliver := func(ids ...string) string {
			done, missing, full, err := bounds.Redeliver(w.Context(), w.c, w.p, ids...)
			require.NoError(w, err)
			return fmt.Sprint(done, missing, full)
		}
		w.tell(wide, told("a", "acme"))
		before := w.claim(1, 1, nil)[0]
		require.True(w, w.ended(before, ledger.Dead, 0))
		w.dead("b")
		require.Equal(w, "1 [c] true", redeliver("a", "b", "c"))
		require.Equal(w, []string{"pending", "dead", ""}, w.callbackStates("a", "b", "c"))
		require.False(w, w.ended(before, ledger.Dead, 0), "it is late")
		ids, err := ledger.CallbackIDs(w.Context(), w.c, w.p, "", 0, 10)
		require.NoError(w, err)
		require.Equal(w, []string{"b"}, ids)
		again := w.claim(10, 2, nil)[0]
		require.Equal(w, "a", again.ID)
		require.Zero(w, again.Tries)
		require.Empty(w, again.Body)

		require.True(w, w.ended(again, ledger.Retry, time.Hour))
		require.Empty(w, w.claim(10, 2, nil))
		require.Equal(w, "1 [] false", redeliver("a"))
		again = w.claim(10, 2, nil)[0]
		require.Zero(w, again.Tries, "it has all its tries again")
		require.True(w, w.ended(again, ledger.Delivered, 0))
		require.Equal(w, "0 [a] false", redeliver("a"))
	})
}

// TestForgetCallbacks: dead callbacks are deleted some at a time, and only old ones.
func TestForgetCallbacks(t *testing.T) {
	onStores(t, func(w *world) {
		w.dead("a", "b", "c")
		w.tell(wide, told("d", "acme"))
		forget := func(before time.Time) int64 {
			n, err := ledger.ForgetCallbacks(w.Context(), w.c, w.p, before, 2)
			require.NoError(w, err)
			return n
		}
		require.Zero(w, forget(time.Now().Add(-time.Hour)))
		require.EqualValues(w, 2, forget(time.Now().Add(time.Hour)))
		require.EqualValues(w, 1, forget(time.Now().Add(time.Hour)))
		require.Zero(w, forget(time.Now().Add(time.Hour)))
		require.Equal(w, []string{"", "", "", "pending"}, w.callbackStates("a", "b", "c", "d"))
	})
}

// TestEndpointIsChangedByOneAtATime: a change that was made meanwhile is not overwritten: the endpoint is
// read and changed again.
func TestEndpointIsChangedByOneAtATime(t *testing.T) {
	onStores(t, func(w *world) {
		calls := 0
		e, err := ledger.ChangeEndpoint(w.Context(), w.c, w.p, "acme", func(e *ledger.Endpoint) error {
			if calls++; calls == 1 {
				require.NoError(w, w.changing("acme", "https://other.example")())
			}
			e.Version++
			return nil
		})
		require.NoError(w, err)
		require.Equal(w, 2, calls)
		require.Equal(w, "https://other.example 1", fmt.Sprint(e.URL, " ", e.Version))
		read, err := ledger.ReadEndpoint(w.Context(), w.c, w.p, "acme")
		require.NoError(w, err)
		require.Equal(w, e, read)
		w.unchanged(func() { require.NoError(w, w.changing("acme", "https://other.example")()) })

		require.NoError(w, w.changing("globex", "https://b.example")())
		require.NoError(w, w.changing("globex", "")())
		require.NoError(w, w.changing("acme", "")())
		require.Equal(w, map[string]string{"acme": `{"version":1}`}, w.c.HGetAll(w.Context(), w.p.Endpoints()).Val())
	})
}

// TestDamagedCallbacks: what is lost or of another type stops no other callback, and no queue.
func TestDamagedCallbacks(t *testing.T) {
	onStores(t, func(w *world) {
		w.tell(wide, told("a", "acme"), told("b", "acme"), told("c", "acme"), told("d", "globex"), told("e", "initech"))
		spoil := func(key string) { w.spoil(key, "hash") }
		w.c.Del(w.Context(), w.p.Callback("a"))
		spoil(w.p.Callback("b"))
		spoil(w.p.CallbackQueue("globex"))
		spoil(w.p.CallbackAges("initech"))
		w.claim(10, 2, nil)
		require.Equal(w, []string{"c"}, claimedIDs(w.claim(10, 2, nil)))
		require.Empty(w, w.claim(10, 2, nil))

		spoil(w.p.Callback("f"))
		_, errs, err := wide.Add(w.Context(), w.c, w.p, told("f", "acme"), told("g", "acme"), told("h", "globex"))
		require.NoError(w, err)
		require.Len(w, errs, 2)
		require.ErrorContains(w, errs[0], "callback f: ")
		require.ErrorContains(w, errs[1], "WRONGTYPE")
		require.Equal(w, []string{"g"}, claimedIDs(w.claim(10, 2, nil)))

		done, missing, _, err := ledger.RedeliverCallbacks(w.Context(), w.c, w.p, "f", "g", "d")
		require.NoError(w, err)
		require.EqualValues(w, 1, done)
		require.Equal(w, []string{"f", "d"}, missing)

		all, err := ledger.ReadCallbacks(w.Context(), w.c, w.p, "a", "b", "g", "e")
		require.NoError(w, err)
		require.Len(w, all, 2)

		// The sets that all queues share: callbacks are refused, one by one.
		spoil(w.p.Callbacks())
		_, errs, err = wide.Add(w.Context(), w.c, w.p, told("x", "acme"), told("y", "hooli"))
		require.NoError(w, err)
		require.Len(w, errs, 2)
	})
}

// TestEndpointOfClaimedCallback: a claimed callback comes with its tenant's endpoint; one that can't be read
// is an error of this callback alone.
func TestEndpointOfClaimedCallback(t *testing.T) {
	onStores(t, func(w *world) {
		require.NoError(w, w.changing("acme", "https://a.example")())
		w.c.HSet(w.Context(), w.p.Endpoints(), "bad", "{")
		w.tell(wide, told("a", "acme"), told("b", "bad"))
		all := w.claim(10, 2, nil)
		require.Len(w, all, 2)
		require.NoError(w, all[0].Err)
		require.Equal(w, "https://a.example", all[0].Endpoint.URL)
		require.ErrorContains(w, all[1].Err, "callback endpoint")
	})
}

// TestIDOfADeletedGroup: a group that has the id of one that was deleted has callbacks of its own.
func TestIDOfADeletedGroup(t *testing.T) {
	onStores(t, func(w *world) {
		w.dead("a")
		later := told("a", "acme")
		later.At = later.At.Add(time.Hour)
		later.Tenant, later.Queue = "globex", "globex"
		w.tell(wide, later)
		require.Equal(w, []string{api.CallbackPending}, w.callbackStates("a"))
		require.Equal(w, "globex", w.callback("a").Tenant)
		later.At = later.At.Add(time.Hour)
		later.Tenant, later.Queue = "acme", "acme"
		w.tell(wide, later)
		require.Equal(w, []string{"a"}, claimedIDs(w.claim(10, 10, nil)))
		require.Zero(w, w.c.ZCard(w.Context(), w.p.DeadCallbacks()).Val())
	})
}

// TestBusyQueuesLetOthersPass: endpoints that are always behind don't keep others from the slots.
func TestBusyQueuesLetOthersPass(t *testing.T) {
	onStores(t, func(w *world) {
		busy := map[string]int{}
		for i := range 5 {
			for j := range 4 {
				w.tell(wide, told(fmt.Sprintf("slow%d-%d", i, j), fmt.Sprint("slow", i)))
			}
		}
		running := w.claim(4, 2, nil)
		for _, c := range running {
			busy[c.Queue]++
		}
		time.Sleep(2 * time.Millisecond)
		w.tell(wide, told("good", "good"))
		for range 6 { // one of the slots gets free
			require.True(w, w.ended(running[0], ledger.Retry, time.Hour))
			if busy[running[0].Queue]--; busy[running[0].Queue] == 0 {
				delete(busy, running[0].Queue)
			}
			running = append(running[1:], w.claim(1, 2, busy)...)
			last := running[len(running)-1].Queue
			if last == "good" {
				return
			}
			busy[last]++
		}
		require.Fail(w, "it was never its turn")
	})
}

// TestEndpointsOfAWrongType: the outbox says that they can't be read.
func TestEndpointsOfAWrongType(t *testing.T) {
	onStores(t, func(w *world) {
		require.NoError(w, w.c.Set(w.Context(), w.p.Endpoints(), "x", 0).Err())
		require.NoError(w, w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: w.p.Outbox(), Values: []string{"group", "g", "round", "1", "status", "COMPLETED", "at", "1", "snapshot", `["tenant","acme"]`}}).Err())
		all, err := ledger.ReadOutbox(w.Context(), w.c, w.p, 10)
		require.NoError(w, err)
		require.Error(w, all[0].EndpointErr)
	})
}
