package lua_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

// world is one partition on one server, with the steps that the roles would take.
type world struct {
	t   *testing.T
	ctx context.Context
	c   redis.UniversalClient
	p   keyspace.Partition
}

var noLimit = lua.Limit{Window: time.Second}

func (w *world) create(group, tenant, typ string, fields ...string) {
	w.t.Helper()
	f := map[string]string{"lane": "normal"}
	for i := 0; i+1 < len(fields); i += 2 {
		f[fields[i]] = fields[i+1]
	}
	_, err := lua.Create(w.ctx, w.c, w.p, lua.CreateArgs{Group: group, Tenant: tenant, Type: typ, Hash: "h", Fields: f})
	require.NoError(w.t, err)
}

func (w *world) append(group string, n int) {
	w.t.Helper()
	jobs := make([]lua.NewJob, n)
	for i := range jobs {
		jobs[i].Payload = fmt.Appendf(nil, `{"n":%d}`, i)
	}
	_, err := lua.Append(w.ctx, w.c, w.p, lua.AppendArgs{Group: group, Limit: 1e7, Jobs: jobs})
	require.NoError(w.t, err)
}

func (w *world) seal(group string) {
	w.t.Helper()
	_, err := lua.Seal(w.ctx, w.c, w.p, group, nil)
	require.NoError(w.t, err)
}

func (w *world) admit(typ string, most int, limit lua.Limit) lua.AdmitReply {
	w.t.Helper()
	r, err := lua.Admit(w.ctx, w.c, w.p, lua.AdmitArgs{Type: typ, Most: most, Cap: 1000, Limit: limit, Seed: "0badcafe", LaneWeights: [3]int{6, 3, 1}})
	require.NoError(w.t, err)
	return r
}

func (w *world) promote(typ string, limit lua.Limit) lua.PromoteReply {
	w.t.Helper()
	r, err := lua.Promote(w.ctx, w.c, w.p, lua.PromoteArgs{Most: 100, Limit: limit, Seed: "0badcafe", FullWait: 10 * time.Millisecond, Caps: map[string]int{typ: 1000}})
	require.NoError(w.t, err)
	return r
}

type taken struct {
	entry string
	lua.Delivered
	token int64
	terms lua.GroupTerms
}

func (w *world) read(typ, consumer string) []taken {
	w.t.Helper()
	w.c.XGroupCreateMkStream(w.ctx, w.p.Ready(typ), keyspace.GroupWorkers, "0")
	r, err := w.c.XReadGroup(w.ctx, &redis.XReadGroupArgs{Group: keyspace.GroupWorkers, Consumer: consumer, Streams: []string{w.p.Ready(typ), ">"}, Count: 500, Block: -1}).Result()
	if err == redis.Nil {
		return nil
	}
	require.NoError(w.t, err)
	var out []taken
	for _, m := range r[0].Messages {
		d, err := lua.ParseDelivered(m.Values[lua.Field].(string))
		require.NoError(w.t, err)
		out = append(out, taken{entry: m.ID, Delivered: d})
	}
	return out
}

func (w *world) start(typ string, jobs []taken) {
	w.t.Helper()
	for i := range jobs {
		r, err := lua.Start(w.ctx, w.c, w.p, typ, []lua.StartGroup{{Group: jobs[i].Group, Jobs: []lua.StartJob{{Entry: jobs[i].entry, Ordinal: jobs[i].Ordinal, Attempt: jobs[i].Attempt}}}})
		require.NoError(w.t, err)
		jobs[i].token, jobs[i].terms = r.Tokens[0], r.Groups[0]
	}
}

func done(jobs ...taken) []lua.GroupOutcome {
	by := map[string]*lua.GroupOutcome{}
	var order []string
	for _, j := range jobs {
		g := by[j.Group]
		if g == nil {
			g = &lua.GroupOutcome{Group: j.Group}
			by[j.Group], order = g, append(order, j.Group)
		}
		g.Done = append(g.Done, lua.DoneJob{Entry: j.entry, Ordinal: j.Ordinal, Attempt: int(j.token), Line: fmt.Appendf(nil, `{"ordinal":%d}`, j.Ordinal)})
	}
	var out []lua.GroupOutcome
	for _, g := range order {
		out = append(out, *by[g])
	}
	return out
}

func other(kind lua.OutcomeKind, j taken, delay time.Duration) []lua.GroupOutcome {
	attempt := int(j.token)
	if kind == lua.OutcomeUnstarted {
		attempt = j.Attempt
	}
	return []lua.GroupOutcome{{Group: j.Group, Others: []lua.OtherJob{{
		Entry: j.entry, Ordinal: j.Ordinal, Attempt: attempt, Kind: kind, Retries: j.Retries, Waits: j.Waits, Queued: []byte(j.Queued),
		Delay: delay, Code: "BOOM", Text: "it broke",
	}}}}
}

func (w *world) outcome(typ string, groups []lua.GroupOutcome) lua.OutcomeReply {
	w.t.Helper()
	r, err := lua.Outcome(w.ctx, w.c, w.p, typ, lua.Congestion{Base: time.Millisecond, Cap: time.Second}, groups)
	require.NoError(w.t, err)
	return r
}

// ledger reads the counters and checks promise 4: accepted is the sum of the places, which agree with the states.
func (w *world) ledger(group string) map[string]int64 {
	w.t.Helper()
	h, err := w.c.HGetAll(w.ctx, w.p.Group(group)).Result()
	require.NoError(w.t, err)
	states, err := w.c.Get(w.ctx, w.p.States(group)).Result()
	if err != redis.Nil {
		require.NoError(w.t, err)
	}
	out, count := map[string]int64{}, map[string]int64{}
	for i := 0; i < len(states); i += 2 {
		count[map[byte]string{'W': "waiting", 'N': "non_ready", 'R': "ready", 'I': "in_flight", 'D': "done", 'A': "done", 'F': "failed", 'C': "cancelled"}[states[i]]]++
	}
	var sum int64
	for _, f := range []string{"waiting", "non_ready", "ready", "in_flight", "done", "failed", "cancelled"} {
		var n int64
		fmt.Sscan(h[f], &n)
		require.Equal(w.t, count[f], n, "ledger of %s, field %s, states %s", group, f, states)
		if n != 0 {
			out[f] = n
		}
		sum += n
	}
	var accepted int64
	fmt.Sscan(h["accepted"], &accepted)
	require.Equal(w.t, accepted, sum)
	return out
}

func (w *world) status(group string) string {
	w.t.Helper()
	return w.c.HGet(w.ctx, w.p.Group(group), "status").Val()
}

func (w *world) advance(group string) {
	w.t.Helper()
	fence, err := lua.Lead(w.ctx, w.c, w.p, "w1", time.Minute)
	require.NoError(w.t, err)
	_, err = lua.Advance(w.ctx, w.c, w.p, group, fence)
	require.NoError(w.t, err)
}

// reduceAll does what an aggregator does with all entries of the results stream.
func (w *world) reduceAll() {
	w.t.Helper()
	w.c.XGroupCreateMkStream(w.ctx, w.p.ResultStream(), keyspace.GroupAggregator, "0")
	r, err := w.c.XReadGroup(w.ctx, &redis.XReadGroupArgs{Group: keyspace.GroupAggregator, Consumer: "a", Streams: []string{w.p.ResultStream(), ">"}, Count: 100, Block: -1}).Result()
	if err == redis.Nil {
		return
	}
	require.NoError(w.t, err)
	for _, m := range r[0].Messages {
		group := m.Values["g"].(string)
		var ords []int64
		for _, line := range splitLines(m.Values["l"].(string)) {
			var o int64
			fmt.Sscanf(line, `{"ordinal":%d}`, &o)
			ords = append(ords, o)
		}
		version, _ := w.c.HGet(w.ctx, w.p.Aggregate(group), "version:0").Int64()
		rep, err := lua.Reduce(w.ctx, w.c, w.p, lua.ReduceArgs{Group: group, Slot: "0", Version: version, State: []byte("{}"), Lines: []byte(m.Values["l"].(string)), Entries: []string{m.ID}, Ordinals: ords})
		require.NoError(w.t, err)
		require.Equal(w.t, lua.ReduceOK, rep.State)
	}
}

func splitLines(s string) []string {
	var out []string
	for len(s) > 0 {
		i := 0
		for i < len(s) && s[i] != '\n' {
			i++
		}
		out = append(out, s[:i])
		if i == len(s) {
			break
		}
		s = s[i+1:]
	}
	return out
}

func TestLifeOfAGroup(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		require.Equal(w.t, "CREATED", w.status("g"))
		w.append("g", 5)
		w.append("g", 5)
		require.Equal(w.t, map[string]int64{"waiting": 10}, w.ledger("g"))
		w.seal("g")
		w.advance("g")
		require.Equal(w.t, "DISPATCHED", w.status("g"))

		r := w.admit("T", 4, noLimit)
		require.Equal(w.t, lua.AdmitOK, r.State)
		require.Equal(w.t, 4, r.Moved)
		require.Equal(w.t, []lua.Permit{{Tenant: "acme", N: 4}}, r.Permits)
		r = w.admit("T", 100, noLimit)
		require.Equal(w.t, 6, r.Moved)
		r = w.admit("T", 100, noLimit)
		require.Equal(w.t, lua.AdmitEmpty, r.State)
		require.Equal(w.t, map[string]int64{"ready": 10}, w.ledger("g"))

		jobs := w.read("T", "c1")
		require.Len(w.t, jobs, 10)
		w.start("T", jobs)
		require.Equal(w.t, map[string]int64{"in_flight": 10}, w.ledger("g"))
		require.Equal(w.t, "acme", jobs[0].terms.Tenant)
		w.advance("g")
		require.Equal(w.t, "RUNNING", w.status("g"))

		require.Equal(w.t, lua.OutcomeReply{Owned: 6}, w.outcome("T", done(jobs[:6]...)))
		require.Equal(w.t, lua.OutcomeReply{Stale: 6}, w.outcome("T", done(jobs[:6]...)), "the same outcome again changes nothing")
		require.Equal(w.t, lua.OutcomeReply{Owned: 1}, w.outcome("T", other(lua.OutcomeRetry, jobs[6], 0)))
		require.Equal(w.t, lua.OutcomeReply{Owned: 1}, w.outcome("T", other(lua.OutcomeFailed, jobs[7], 0)))
		require.Equal(w.t, lua.OutcomeReply{Owned: 1}, w.outcome("T", other(lua.OutcomeReleased, jobs[8], 0)))
		require.Equal(w.t, lua.OutcomeReply{Owned: 1}, w.outcome("T", done(jobs[9])))
		require.Equal(w.t, map[string]int64{"done": 7, "failed": 1, "non_ready": 2}, w.ledger("g"))
		require.Equal(w.t, int64(0), w.c.XLen(w.ctx, w.p.Ready("T")).Val())

		require.Eventually(w.t, func() bool { w.promote("T", noLimit); return w.ledger("g")["ready"] == 2 }, 5*time.Second, 2*time.Millisecond)
		again := w.read("T", "c1")
		w.start("T", again)
		require.Equal(w.t, 2, again[0].Attempt)
		require.Equal(w.t, lua.OutcomeReply{Owned: 2}, w.outcome("T", done(again...)))
		w.advance("g")
		require.Equal(w.t, "AGGREGATING", w.status("g"))
		w.reduceAll()
		w.advance("g")
		require.Equal(w.t, "COMPLETED", w.status("g"))
		require.Equal(w.t, int64(1), w.c.XLen(w.ctx, w.p.DeadLetters()).Val())
		require.Equal(w.t, "1", w.c.HGet(w.ctx, w.p.Codes("g"), "BOOM").Val())
		require.Equal(w.t, int64(0), w.c.SCard(w.ctx, w.p.Active()).Val())

		// The next round runs only what has failed.
		round, err := lua.Reopen(w.ctx, w.c, w.p, "g")
		require.NoError(w.t, err)
		require.Equal(w.t, 2, round)
		more, err := lua.Requeue(w.ctx, w.c, w.p, "g")
		require.NoError(w.t, err)
		require.False(w.t, more)
		require.Equal(w.t, map[string]int64{"done": 9, "waiting": 1}, w.ledger("g"))
		require.Equal(w.t, 1, w.admit("T", 10, noLimit).Moved)
		last := w.read("T", "c2")
		w.start("T", last)
		w.outcome("T", done(last...))
		w.reduceAll()
		w.advance("g")
		require.Equal(w.t, "COMPLETED", w.status("g"))
		require.Equal(w.t, map[string]int64{"done": 10}, w.ledger("g"))
	})
}
