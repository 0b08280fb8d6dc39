package ledger_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
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
	onStores(t, func(w *world) {
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
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T")
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
	onStores(t, func(w *world) {
		w.fill("g", 4, "acme", "T")
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
	onStores(t, func(w *world) {
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
	onStores(t, func(w *world) {
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
	onStores(t, func(w *world) {
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

func init() {
	drop := func(name string, prepare func(w *world) ledger.Misplaced) scene {
		return scene{"repair_misplaced " + name, false, func(w *world) act {
			l := prepare(w)
			return func() error {
				_, err := ledger.RepairMisplaced(w.Context(), w.c, w.p, l)
				return err
			}
		}}
	}
	scenes = append(scenes,
		scene{"repair", false, func(w *world) act {
			w.everywhere("g")
			w.seal("g")
			w.c.HIncrBy(w.Context(), w.p.Group("g"), "done", 1)
			w.c.ZRem(w.Context(), w.p.Groups(), "g")
			w.c.ZAdd(w.Context(), w.p.Ended(), redis.Z{Member: "g"})
			w.c.Del(w.Context(), w.p.Dirty())
			return w.repairing("g", map[string]int64{"done": -1, "code:BOOM": -1})
		}},
		scene{"repair a group that is gone", false, func(w *world) act {
			w.c.ZAdd(w.Context(), w.p.Groups(), redis.Z{Member: "g"})
			w.c.ZAdd(w.Context(), w.p.Open(), redis.Z{Member: "g"})
			return w.repairing("g", nil)
		}},
		scene{"repair a group on wrong lists of tags", false, func(w *world) act {
			w.submit(tagged("g", "a=1", "b=2"), tagged("h", "c=3"))
			w.c.ZRem(w.Context(), w.p.Tagged("acme", "a=1"), "g")
			w.c.ZAdd(w.Context(), w.p.Tagged("acme", "c=3"), redis.Z{Score: 1, Member: "g"})
			return w.repairing("g", nil)
		}},
		scene{"repair_counter", false, func(w *world) act {
			w.fill("g", 2, "acme", "T")
			w.c.SRem(w.Context(), w.p.Active(), "acme")
			w.c.HIncrBy(w.Context(), w.p.Tenant("acme"), "active", 3)
			return func() error {
				_, err := ledger.RepairCounter(w.Context(), w.c, w.p, ledger.Counter{Tenant: true, Of: "acme", Name: "active", Have: 5, Want: 2})
				return err
			}
		}},
		drop("in a queue", func(w *world) ledger.Misplaced {
			w.fill("g", 1, "acme", "T")
			w.c.RPush(w.Context(), w.p.Queue("g", "T"), "nonsense")
			return ledger.Misplaced{Location: "queue", Owner: "g", Type: "T", Item: "nonsense"}
		}),
		drop("among what is non-ready", func(w *world) ledger.Misplaced {
			w.nonReady("g", 1)
			w.c.ZAdd(w.Context(), w.p.NonReadyOf("acme"), redis.Z{Score: 1, Member: "nonsense"})
			return ledger.Misplaced{Location: "non-ready", Owner: "acme", Item: "nonsense"}
		}),
		drop("in a ready stream", func(w *world) ledger.Misplaced {
			id := w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: w.p.Ready("T"), Values: []string{"k", "v"}}).Val()
			w.consumerGroup(w.p.Ready("T"), keyspace.GroupWorkers)
			return ledger.Misplaced{Location: "ready", Owner: "T", Item: id}
		}),
		drop("in results", func(w *world) ledger.Misplaced {
			id := w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: w.p.ResultStream(), Values: []string{"k", "v"}}).Val()
			return ledger.Misplaced{Location: "results", Item: id}
		}),
		drop("among failures", func(w *world) ledger.Misplaced {
			w.fill("g", 1, "acme", "T")
			w.c.HSet(w.Context(), w.p.Failures("g"), "0", "nonsense")
			return ledger.Misplaced{Location: "failures", Owner: "g", Item: "0"}
		}))
}

func (w *world) repairing(group string, differences map[string]int64) act {
	return func() error {
		_, err := ledger.RepairGroup(w.Context(), w.c, w.p, group, "acme", 0, differences)
		return err
	}
}

// TestRepairGroup: RepairGroup repairs the counts and lists of a group, although a job was appended
// after the recount. The same call again changes nothing.
func TestRepairGroup(t *testing.T) {
	onStores(t, func(w *world) {
		w.everywhere("g")
		want := w.ledger("g")
		w.c.HIncrBy(w.Context(), w.p.Group("g"), "done", 2)
		w.c.HIncrBy(w.Context(), w.p.Codes("g"), "ODD", 1)
		w.c.Del(w.Context(), w.p.Open(), w.p.Groups(), w.p.GroupsOf("acme"))
		differences := map[string]int64{"done": -2, "code:ODD": -1}
		w.append("g", 1) // that it moves meanwhile does not matter
		want["waiting"]++
		did, err := ledger.RepairGroup(w.Context(), w.c, w.p, "g", "acme", 0, differences)
		require.NoError(w, err)
		require.True(w, did)
		require.Equal(w, want, w.ledger("g"))
		require.Equal(w, map[string]string{"BOOM": "1"}, w.c.HGetAll(w.Context(), w.p.Codes("g")).Val())
		for _, list := range []string{w.p.Open(), w.p.Groups(), w.p.GroupsOf("acme")} {
			require.Equal(w, []string{"g"}, w.c.ZRange(w.Context(), list, 0, -1).Val(), list)
		}
		w.unchanged(func() {
			did, err := ledger.RepairGroup(w.Context(), w.c, w.p, "g", "acme", 0, differences)
			require.NoError(w, err)
			require.False(w, did)
		})
	})
}

func TestRepairCounter(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 3, "acme", "T")
		repair := func(n ledger.Counter) bool {
			did, err := ledger.RepairCounter(w.Context(), w.c, w.p, n)
			require.NoError(w, err)
			return did
		}
		w.unchanged(func() {
			require.False(w, repair(ledger.Counter{Of: "T", Name: "waiting", Have: 2, Want: 1}), "it has moved")
		})
		require.True(w, repair(ledger.Counter{Of: "T", Name: "waiting", Have: 3, Want: 0}))
		require.False(w, w.c.HExists(w.Context(), w.p.Load("T"), "waiting").Val())
		require.True(w, repair(ledger.Counter{Tenant: true, Of: "acme", Name: "active", Have: 3, Want: 0}))
		require.Zero(w, w.c.SCard(w.Context(), w.p.Active()).Val())
		require.True(w, repair(ledger.Counter{Tenant: true, Of: "acme", Name: "active", Want: 3}))
		require.Equal(w, int64(1), w.c.SCard(w.Context(), w.p.Active()).Val())
		require.Equal(w, 3, w.admit("T", 10, noLimit).Moved)
	})
}

// TestRepairMisplacedSparesJobs: RepairMisplaced never quarantines a job at the right location, nor
// one of two elements of a job unless both exist.
func TestRepairMisplacedSparesJobs(t *testing.T) {
	onStores(t, func(w *world) {
		w.everywhere("g")
		w.c.XGroupCreateMkStream(w.Context(), w.p.ResultStream(), keyspace.GroupAggregator, "0")
		spare := func(l ledger.Misplaced) {
			w.unchanged(func() {
				did, err := ledger.RepairMisplaced(w.Context(), w.c, w.p, l)
				require.NoError(w, err)
				require.False(w, did, "%v", l)
			})
		}
		drop := func(l ledger.Misplaced) {
			did, err := ledger.RepairMisplaced(w.Context(), w.c, w.p, l)
			require.NoError(w, err)
			require.True(w, did, "%v", l)
			spare(l)
		}
		for _, blob := range w.c.LRange(w.Context(), w.p.Queue("g", "T"), 0, -1).Val() {
			spare(ledger.Misplaced{Location: "queue", Owner: "g", Type: "T", Item: blob})
		}
		spare(ledger.Misplaced{Location: "queue", Owner: "g", Type: "T", Item: "nonsense"})
		nonReady := w.c.ZRange(w.Context(), w.p.NonReadyOf("acme"), 0, -1).Val()
		for _, blob := range nonReady {
			spare(ledger.Misplaced{Location: "non-ready", Owner: "acme", Item: blob})
			spare(ledger.Misplaced{Location: "non-ready", Owner: "acme", Item: blob, Twin: nonReady[0] + "?"})
		}
		ready := w.c.XRange(w.Context(), w.p.Ready("T"), "-", "+").Val()
		require.Len(w, ready, 2)
		for _, e := range ready {
			spare(ledger.Misplaced{Location: "ready", Owner: "T", Item: e.ID})
			spare(ledger.Misplaced{Location: "ready", Owner: "T", Item: e.ID, Twin: "1-1"})
			spare(ledger.Misplaced{Location: "ready", Owner: "T", Item: e.ID, Twin: e.ID})
		}
		spare(ledger.Misplaced{Location: "ready", Owner: "T", Item: ready[0].ID, Twin: ready[1].ID})
		for _, e := range w.c.XRange(w.Context(), w.p.ResultStream(), "-", "+").Val() {
			spare(ledger.Misplaced{Location: "results", Item: e.ID})
		}
		spare(ledger.Misplaced{Location: "failures", Owner: "g", Item: "1"})
		before := w.ledger("g")

		twin := w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: w.p.Ready("T"), Values: ready[0].Values}).Val()
		drop(ledger.Misplaced{Location: "ready", Owner: "T", Item: twin, Twin: ready[0].ID})
		w.c.ZAdd(w.Context(), w.p.NonReadyOf("acme"), redis.Z{Score: 1, Member: nonReady[0] + " "})
		drop(ledger.Misplaced{Location: "non-ready", Owner: "acme", Item: nonReady[0] + " ", Twin: nonReady[0]})
		w.c.ZAdd(w.Context(), w.p.NonReadyOf("nobody"), redis.Z{Score: 1, Member: nonReady[0]})
		drop(ledger.Misplaced{Location: "non-ready", Owner: "nobody", Item: nonReady[0]})
		require.Equal(w, before, w.ledger("g"))
		require.EqualValues(w, 3, w.c.LLen(w.Context(), w.p.Quarantine()).Val())

		// Without the string states:GROUP nobody can tell the states of the group's jobs, so
		// RepairMisplaced leaves their elements.
		w.c.Del(w.Context(), w.p.States("g"))
		spare(ledger.Misplaced{Location: "ready", Owner: "T", Item: ready[0].ID})
		spare(ledger.Misplaced{Location: "non-ready", Owner: "acme", Item: nonReady[0]})
		spare(ledger.Misplaced{Location: "queue", Owner: "g", Type: "T", Item: w.c.LIndex(w.Context(), w.p.Queue("g", "T"), 0).Val()})
		spare(ledger.Misplaced{Location: "failures", Owner: "g", Item: "1"})
	})
}
