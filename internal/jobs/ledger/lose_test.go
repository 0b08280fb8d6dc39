package ledger_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func init() {
	scenes = append(scenes,
		scene{"lose", false, func(w *world) act {
			w.everywhere("g")
			w.seal("g")
			return w.losing("g", "T", w.vanish("g", "T")...)
		}},
		scene{"lose a part of a queue, and the head of a tenant without a permit", false, func(w *world) act {
			w.spent("acme")
			w.admit("T", 1, limit(20))
			w.c.Del(w.Context(), w.p.NonReadyOf("acme"))
			w.c.LPop(w.Context(), w.p.Queue("g", "T"))
			return w.losing("g", "T", w.stateOf("g", 0), w.stateOf("g", 1))
		}})
}

func (w *world) losing(group, typ string, jobs ...ledger.Missed) act {
	return func() error {
		_, err := ledger.Lose(w.Context(), w.c, w.p, group, typ, jobs)
		return err
	}
}

func (w *world) lose(group, typ string, jobs ...ledger.Missed) int {
	w.Helper()
	ended, err := ledger.Lose(w.Context(), w.c, w.p, group, typ, jobs)
	require.NoError(w, err)
	for _, ordinal := range ended {
		require.Contains(w, w.stateOf(group, ordinal).State, "F")
	}
	return len(ended)
}

func (w *world) stateOf(group string, ordinal int64) ledger.Missed {
	w.Helper()
	state, err := w.c.GetRange(w.Context(), w.p.States(group), 2*ordinal, 2*ordinal+1).Result()
	require.NoError(w, err)
	return ledger.Missed{Ordinal: ordinal, State: ledger.State(state)}
}

// vanish simulates lost data: it deletes the group's queue of a type, the type's ready stream, the
// tenant's non-ready jobs and the results stream. It returns the group's jobs that are lost by
// that: those that have not ended, and done jobs that are not reduced.
func (w *world) vanish(group, typ string) []ledger.Missed {
	w.Helper()
	tenant := w.c.HGet(w.Context(), w.p.Group(group), "tenant").Val()
	require.NoError(w, w.c.Del(w.Context(), w.p.Queue(group, typ), w.p.Ready(typ), w.p.NonReadyOf(tenant), w.p.ResultStream()).Err())
	var all []ledger.Missed
	for i, letter := range w.states(group) {
		if slices.Contains([]rune("WNRID"), letter) {
			all = append(all, w.stateOf(group, int64(i)))
		}
	}
	return all
}

// TestLose: Lose makes vanished jobs failed, with the code LOST. It corrects the group's counts and
// the tenant's counters, so that the group can end. A second call changes nothing.
func TestLose(t *testing.T) {
	both(t, func(w *world) {
		w.everywhere("g")
		w.seal("g")
		was := w.ledger("g")
		for _, place := range []string{"waiting", "non_ready", "ready", "in_flight", "done"} {
			require.Positive(w, was[place], place)
		}
		lost := w.vanish("g", "T")
		failed := was["failed"]
		w.c.Del(w.Context(), w.p.Dirty())
		require.Equal(w, len(lost), w.lose("g", "T", lost...))
		now := w.ledger("g")
		require.Equal(w, failed+int64(len(lost)), now["failed"])
		for _, place := range []string{"waiting", "non_ready", "ready", "in_flight"} {
			require.Zero(w, now[place], place)
			require.Contains(w, []string{"", "0"}, w.c.HGet(w.Context(), w.p.Load("T"), place).Val(), place)
		}
		counters := w.countersOf("acme")
		for _, name := range []string{"unfinished", "active", "congested"} {
			require.Contains(w, []string{"", "0"}, counters[name], name)
		}
		require.False(w, w.c.SIsMember(w.Context(), w.p.Active(), "acme").Val())
		require.Zero(w, w.c.ZCard(w.Context(), w.p.NonReady()).Val())
		require.Equal(w, fmtInt(int64(len(lost))), w.c.HGet(w.Context(), w.p.Codes("g"), "LOST").Val())
		require.EqualValues(w, len(lost)+int(failed), w.c.HLen(w.Context(), w.p.Failures("g")).Val())
		require.Equal(w, []string{"g"}, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
		require.Equal(w, ledger.AdmitEmpty, w.admit("T", 10, noLimit).State)
		w.unchanged(func() { require.Zero(w, w.lose("g", "T", lost...)) })
		w.advance("g")
		require.Contains(w, []string{"COMPLETED", "FAILED"}, w.status("g"))
	})
}

// TestLoseDeferred: a deferred job does not count in the tenant's counter congested, so its loss
// leaves the counter as it is.
func TestLoseDeferred(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 2)
		run := w.begin("T", "c", 2)
		slices.SortFunc(run, byJob)
		w.outcome("T", other(ledger.OutcomeRetry, run[0], time.Hour))
		w.outcome("T", other(ledger.OutcomeDeferred, run[1], time.Hour))
		for _, blob := range w.c.ZRange(w.Context(), w.p.NonReadyOf("acme"), 0, -1).Val() {
			if strings.Contains(blob, "|G|1|") {
				w.c.ZRem(w.Context(), w.p.NonReadyOf("acme"), blob)
			}
		}
		require.Equal(w, 1, w.lose("g", "T", w.stateOf("g", 1)))
		require.Equal(w, "NF", w.states("g"))
		require.Equal(w, "1", w.countersOf("acme")["congested"])
	})
}

// TestLoseOnlyWhatHasNotMoved: Lose does not fail a job that has moved since it was missed or may
// still be in a queue, nor one of a cancelled or unknown group. It refuses more than 200 jobs.
func TestLoseOnlyWhatHasNotMoved(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 4)
		before := w.stateOf("g", 0)
		w.unchanged(func() {
			require.Zero(w, w.lose("g", "T", before, w.stateOf("g", 3)), "the queue is as long as it should be")
		})
		run := w.begin("T", "c", 1)
		in := w.stateOf("g", 0)
		w.unchanged(func() { require.Zero(w, w.lose("g", "T", before)) })
		w.outcome("T", done(run...))
		w.unchanged(func() { require.Zero(w, w.lose("g", "T", in)) })

		w.c.LPop(w.Context(), w.p.Queue("g", "T"))
		require.Equal(w, 1, w.lose("g", "T", w.stateOf("g", 1), w.stateOf("g", 2)), "one is too many for the queue")
		require.Equal(w, "DFWW", w.states("g"))
		require.Equal(w, "2", w.c.HGet(w.Context(), w.p.Load("T"), "waiting").Val())
		require.Equal(w, "2", w.countersOf("acme")["active"])
		require.Equal(w, 2, w.admit("T", 10, noLimit).Moved)

		w.cancel("g")
		w.unchanged(func() { require.Zero(w, w.lose("g", "T", w.stateOf("g", 2)), "sweep settles it") })
		w.unchanged(func() { require.Zero(w, w.lose("nosuch", "T", w.stateOf("g", 2))) })
		_, err := ledger.Lose(w.Context(), w.c, w.p, "g", "T", make([]ledger.Missed, ledger.MaxLose+1))
		require.ErrorContains(w, err, "201 are more than 200")
	})
}

// TestLostJobsAreRetried: after a retry, two lost jobs become ready without a payload in the blob.
// The large payload is still stored apart; the small one is lost, as its dead letter says.
func TestLostJobsAreRetried(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Mode: ledger.AppendSeal, Jobs: []ledger.NewJob{{Payload: []byte(`{"small":1}`)}, {Payload: large}}})
		w.begin("T", "c", 2)
		lost := w.vanish("g", "T")
		require.Equal(w, 2, w.lose("g", "T", lost...))
		var letters []string
		for _, m := range w.c.XRange(w.Context(), w.p.DeadLetters(), "-", "+").Val() {
			require.Equal(w, "LOST", m.Values["code"])
			letters = append(letters, m.Values["error"].(string))
		}
		require.Equal(w, []string{
			"the job was in-flight and vanished from Redis, its payload too: submit it again in a new group",
			"the job was in-flight and vanished from Redis; its payload is kept: retry the group to run it",
		}, letters)
		w.advance("g")
		require.Equal(w, "FAILED", w.status("g"))
		w.retry("g")
		require.Equal(w, 2, w.admit("T", 10, noLimit).Moved)
		again := w.read("T", "c")
		for _, j := range again {
			require.Empty(w, j.Payload)
			require.Equal(w, 2, j.Attempt)
			require.Equal(w, j.Ordinal == 1, w.c.HExists(context.WithoutCancel(w.Context()), w.p.Payloads("g"), fmtInt(j.Ordinal)).Val())
		}
	})
}

// TestLoseOfSeveralTypes: in a group with two types the type of a lost job is unknown: Lose makes
// the job failed and leaves the counters waiting of both types as they are.
func TestLoseOfSeveralTypes(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: []ledger.NewJob{{Payload: []byte("1")}, {Type: "U", Payload: []byte("2")}}})
		w.c.Del(w.Context(), w.p.Queue("g", "U"))
		require.Equal(w, 1, w.lose("g", "", w.stateOf("g", 1)))
		require.Equal(w, "WF", w.states("g"))
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Load("T"), "waiting").Val())
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Load("U"), "waiting").Val())
		require.Equal(w, "1", w.countersOf("acme")["active"])
		w.ledger("g")
	})
}

// TestLostJobOfSeveralTypesRunsAsNoOther: after a retry, two lost jobs of unknown type are ready.
// No payload of them is left in the blobs or in the group's payloads hash, so that neither can run
// as another type with its payload.
func TestLostJobOfSeveralTypesRunsAsNoOther(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Mode: ledger.AppendSeal, Jobs: []ledger.NewJob{{Payload: []byte("1")}, {Type: "U", Payload: large}}})
		w.c.Del(w.Context(), w.p.Queue("g", "U"), w.p.Queue("g", "T"))
		require.Equal(w, 2, w.lose("g", "", w.stateOf("g", 0), w.stateOf("g", 1)))
		letter := w.c.XRange(w.Context(), w.p.DeadLetters(), "-", "+").Val()[1].Values
		require.Equal(w, "the job was waiting and vanished from Redis; its type can not be told: submit it again in a new group", letter["error"])
		require.Equal(w, string(large), letter["payload"])
		w.advance("g")
		w.retry("g")
		require.Equal(w, 2, w.admit("T", 10, noLimit).Moved)
		for _, j := range w.read("T", "c") {
			require.Empty(w, j.Payload)
		}
		require.Zero(w, w.c.HLen(w.Context(), w.p.Payloads("g")).Val(), "who meets it reports PAYLOAD_LOST")
	})
}
