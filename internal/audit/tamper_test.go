package audit

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// whole names a violation of a group as a whole; of names one of a job.
func whole(law, group string) string { return strings.TrimSpace(law + " " + group) }

func of(law, group string, ordinal int64) string { return fmt.Sprintf("%s %s %d", law, group, ordinal) }

func summary(r Report) []string {
	var all []string
	for _, v := range r.Violations {
		s := whole(v.Law, v.Group)
		if v.Ordinal != nil {
			s = of(v.Law, v.Group, *v.Ordinal)
		}
		all = append(all, s)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// all returns the partition of the group "all".
func (w *world) all() keyspace.Partition { return w.part("all") }

func (w *world) incr(key, field string, n int64) { w.ok(w.c.HIncrBy(w.Context(), key, field, n).Err()) }

// setState writes one byte of a job's state: at 0 its letter, at 1 its attempt mark.
func (w *world) setState(group string, ordinal int64, at int, to byte) {
	w.ok(w.c.SetRange(w.Context(), w.part(group).States(group), 2*ordinal+int64(at), string(to)).Err())
}

// attemptMark returns the second byte of a state.
func attemptMark(attempt int) byte { return byte(33 + attempt%90) }

// entry returns the entry of a ready stream that holds a job.
func (w *world) entry(typ, group string, ordinal int64) redis.XMessage {
	for _, m := range w.c.XRange(w.Context(), w.all().Ready(typ), "-", "+").Val() {
		if d, err := ledger.ParseJob(ledger.MessageBlob(m.Values)); err == nil && d.Group == group && d.Ordinal == ordinal {
			return m
		}
	}
	require.Fail(w, "no such entry")
	return redis.XMessage{}
}

func (w *world) xadd(stream string, fields ...any) {
	w.ok(w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: stream, Values: fields}).Err())
}

// nonReady returns a non-ready job of the group "all", and its member in the tenant's sorted set.
func (w *world) nonReady() (blob string, ordinal int64) {
	for _, blob := range w.c.ZRange(w.Context(), w.all().NonReadyOf("acme"), 0, -1).Val() {
		if d, err := ledger.ParseJob(blob); err == nil && d.Group == "all" && d.Reason == ledger.ReasonError {
			return blob, d.Ordinal
		}
	}
	require.Fail(w, "no job is non-ready")
	return "", 0
}

// addNonReady adds a member to a tenant's non-ready set.
func (w *world) addNonReady(p keyspace.Partition, tenant, blob string) {
	w.ok(w.c.ZAdd(w.Context(), p.NonReadyOf(tenant), redis.Z{Score: 1e15, Member: blob}).Err())
}

// moving returns the moving blob of a job.
func moving(group, typ string, attempt, ordinal int) string {
	return fmt.Sprintf("%s|%s|%d|0|0|0|0|0|0|1|E|%d|1||{}", group, typ, attempt, ordinal)
}

// chunk returns the lines in the first chunk of a group's results, and a function that replaces
// them.
func (w *world) chunk(group string) (lines []string, set func([]string)) {
	key := w.part(group).Results(group)
	return strings.Split(w.c.LIndex(w.Context(), key, 0).Val(), "\n"), func(lines []string) {
		w.ok(w.c.LSet(w.Context(), key, 0, strings.Join(lines, "\n")).Err())
	}
}

// line returns a result line.
func line(ordinal int64) string { return fmt.Sprintf(`{"ordinal":%d,"data":1}`, ordinal) }

// tamper is a change that no script makes. Do makes it, and returns the violations that an audit
// must find then.
type tamper struct {
	name string
	do   func(w *world) []string
}

// tampers lists one tamper or more for everything that a law says. They are made in the inhabited
// world.
var tampers = []tamper{
	{"accepted", func(w *world) []string {
		w.incr(w.all().Group("all"), "accepted", 1)
		return []string{whole(LawConservation, "all"), whole(LawStates, "all")}
	}},
	{"reduced", func(w *world) []string {
		w.incr(w.all().Group("all"), "reduced", -1)
		return []string{whole(LawStates, "all")}
	}},
	{"two counts whose errors cancel out", func(w *world) []string {
		w.incr(w.all().Group("all"), "ready", 1)
		w.incr(w.all().Group("all"), "done", -1)
		return []string{whole(LawStates, "all")}
	}},
	{"negative count", func(w *world) []string {
		w.ok(w.c.HSet(w.Context(), w.all().Group("all"), "cancelled", -1, "waiting", w.count("all", 'W')+1).Err())
		return []string{whole(LawConservation, "all"), whole(LawStates, "all")}
	}},
	{"count of an ended group", func(w *world) []string {
		w.incr(w.part("completed").Group("completed"), "done", -1)
		return []string{whole(LawConservation, "completed"), whole(LawStates, "completed")}
	}},
	{"one state too many", func(w *world) []string {
		n := int64(len(w.states("all")) / 2)
		w.ok(w.c.Append(w.Context(), w.all().States("all"), "W!").Err())
		return []string{whole(LawStates, "all"), of(LawLocation, "all", n)}
	}},
	{"no states", func(w *world) []string {
		w.ok(w.c.Del(w.Context(), w.part("scheduled").States("scheduled")).Err())
		want := []string{whole(LawStates, "scheduled")}
		for i := range int64(5) {
			want = append(want, of(LawLocation, "scheduled", i))
		}
		return want
	}},
	{"unknown state letter", func(w *world) []string {
		n := w.jobIn("all", 'W', 0)
		w.setState("all", n, 0, 'x')
		return []string{whole(LawStates, "all"), of(LawStates, "all", n), of(LawLocation, "all", n)}
	}},
	{"waiting to non-ready", func(w *world) []string {
		n := w.jobIn("all", 'W', 1)
		w.setState("all", n, 0, 'N')
		return []string{whole(LawStates, "all"), of(LawLocation, "all", n)}
	}},
	{"reduced to done", func(w *world) []string {
		n := w.jobIn("all", 'A', 1)
		w.setState("all", n, 0, 'D')
		return []string{whole(LawStates, "all"), whole(LawResults, "all"), of(LawResults, "all", n)}
	}},
	{"done to reduced", func(w *world) []string {
		n := w.jobIn("all", 'D', 0)
		w.setState("all", n, 0, 'A')
		return []string{whole(LawStates, "all"), whole(LawResults, "all"), of(LawResults, "all", n)}
	}},
	{"failed to cancelled", func(w *world) []string {
		n := w.jobIn("all", 'F', 0)
		w.setState("all", n, 0, 'C')
		return []string{whole(LawStates, "all"), whole(LawLocation, "all"), of(LawLocation, "all", n)}
	}},
	{"reduced to waiting in an ended group", func(w *world) []string {
		w.setState("completed", 3, 0, 'W')
		return []string{
			whole(LawStates, "completed"), whole(LawLifecycle, "completed"), whole(LawResults, "completed"), of(LawResults, "completed", 3), of(LawLocation, "completed", 3),
		}
	}},
	{"attempt of a non-ready job", func(w *world) []string {
		_, n := w.nonReady()
		w.setState("all", n, 1, attemptMark(40))
		return []string{of(LawLocation, "all", n)}
	}},
	{"attempt of a ready job", func(w *world) []string {
		n := w.jobIn("all", 'R', 0)
		w.setState("all", n, 1, attemptMark(40))
		return []string{of(LawLocation, "all", n)}
	}},
	{"attempt of a failed job", func(w *world) []string {
		n := w.jobIn("all", 'F', 0)
		w.setState("all", n, 1, attemptMark(40))
		return []string{of(LawLocation, "all", n)}
	}},

	{"queued job gone", func(w *world) []string {
		blob, err := w.c.LPop(w.Context(), w.all().Queue("all", "T")).Result()
		w.ok(err)
		n, _ := ledger.QueuedOrdinal(blob)
		return []string{of(LawLocation, "all", n)}
	}},
	{"queue gone", func(w *world) []string {
		w.ok(w.c.Del(w.Context(), w.part("scheduled").Queue("scheduled", "T")).Err())
		var want []string
		for i := range int64(5) {
			want = append(want, of(LawLocation, "scheduled", i))
		}
		return want
	}},
	{"queue of many gone", func(w *world) []string {
		w.ok(w.c.Del(w.Context(), w.part("many").Queue("many", "many")).Err())
		want := []string{whole(LawLocation, "many")}
		for i := range int64(maxPerGroupAndLaw) {
			want = append(want, of(LawLocation, "many", 50+i))
		}
		return want
	}},
	{"queued job twice", func(w *world) []string {
		blob := w.c.LIndex(w.Context(), w.all().Queue("all", "T"), 2).Val()
		w.ok(w.c.RPush(w.Context(), w.all().Queue("all", "T"), blob).Err())
		n, _ := ledger.QueuedOrdinal(blob)
		return []string{of(LawLocation, "all", n)}
	}},
	{"queued job in two queues, among many", func(w *world) []string {
		w.append("many", jobs(1, ofType("other")))
		w.ok(w.c.RPush(w.Context(), w.part("many").Queue("many", "other"), w.c.LIndex(w.Context(), w.part("many").Queue("many", "many"), 1000).Val()).Err())
		return []string{of(LawLocation, "many", 1050)}
	}},
	{"unknown job queued", func(w *world) []string {
		w.ok(w.c.RPush(w.Context(), w.all().Queue("all", "U"), "99999|1||{}").Err())
		return []string{of(LawLocation, "all", 99999)}
	}},
	{"unreadable queued job", func(w *world) []string {
		w.ok(w.c.RPush(w.Context(), w.all().Queue("all", "U"), "rubbish", "").Err())
		return []string{whole(LawLocation, "all")}
	}},
	{"ready job queued too", func(w *world) []string {
		n := w.jobIn("all", 'R', 0)
		w.ok(w.c.RPush(w.Context(), w.all().Queue("all", "T"), fmt.Sprintf("%d|1||{}", n)).Err())
		return []string{of(LawLocation, "all", n)}
	}},
	{"queue of a cancelled group", func(w *world) []string {
		n := w.jobIn("sweeping", 'W', 0)
		w.ok(w.c.RPush(w.Context(), w.part("sweeping").Queue("sweeping", "sweeping"), fmt.Sprintf("%d|1||{}", n)).Err())
		return []string{of(LawLocation, "sweeping", n)}
	}},

	{"ready entry gone", func(w *world) []string {
		n := w.jobIn("all", 'R', 0)
		w.ok(w.c.XDel(w.Context(), w.all().Ready("T"), w.entry("T", "all", n).ID).Err())
		return []string{of(LawLocation, "all", n)}
	}},
	{"entry of a started job gone", func(w *world) []string {
		n := w.jobIn("all", 'I', 0)
		w.ok(w.c.XDel(w.Context(), w.all().Ready("T"), w.entry("T", "all", n).ID).Err())
		return []string{of(LawLocation, "all", n)}
	}},
	{"ready stream gone", func(w *world) []string {
		w.ok(w.c.Del(w.Context(), w.part("limited").Ready("limited")).Err())
		var want []string
		for _, g := range []string{"limited", "beside"} {
			for n := range w.count(g, 'R') {
				want = append(want, of(LawLocation, g, w.jobIn(g, 'R', n)))
			}
		}
		return want
	}},
	{"ready entry twice", func(w *world) []string {
		n := w.jobIn("all", 'R', 0)
		w.xadd(w.all().Ready("T"), ledger.BlobField, ledger.MessageBlob(w.entry("T", "all", n).Values))
		return []string{of(LawLocation, "all", n)}
	}},
	{"ready entry under another attempt", func(w *world) []string {
		n := w.jobIn("all", 'I', 1)
		w.xadd(w.all().Ready("T"), ledger.BlobField, moving("all", "T", 7, int(n)))
		return []string{of(LawLocation, "all", n)}
	}},
	{"ready entry of a done job", func(w *world) []string {
		n := w.jobIn("all", 'A', 0)
		w.xadd(w.all().Ready("T"), ledger.BlobField, moving("all", "T", 1, int(n)))
		return []string{of(LawLocation, "all", n)}
	}},
	{"ready entry of an ended group", func(w *world) []string {
		w.xadd(w.part("completed").Ready("T"), ledger.BlobField, moving("completed", "T", 1, 4))
		return []string{of(LawLocation, "completed", 4)}
	}},
	{"ready entry of an unknown group", func(w *world) []string {
		w.xadd(w.all().Ready("T"), ledger.BlobField, moving("nosuch", "T", 1, 4))
		return []string{of(LawLocation, "nosuch", 4)}
	}},
	{"ready entry of an unknown job", func(w *world) []string {
		w.xadd(w.all().Ready("T"), ledger.BlobField, moving("all", "T", 1, 1e15))
		return []string{of(LawLocation, "all", 1e15)}
	}},
	{"ready entry in the stream of another type", func(w *world) []string {
		n := w.jobIn("all", 'R', 0)
		e := w.entry("T", "all", n)
		w.ok(w.c.XDel(w.Context(), w.all().Ready("T"), e.ID).Err())
		w.xadd(w.all().Ready("U"), ledger.BlobField, ledger.MessageBlob(e.Values))
		return []string{of(LawLocation, "all", n)}
	}},
	{"unreadable ready entry", func(w *world) []string {
		w.xadd(w.all().Ready("T"), "k", "v")
		return []string{whole(LawLocation, "")}
	}},

	{"non-ready job gone", func(w *world) []string {
		blob, n := w.nonReady()
		w.ok(w.c.ZRem(w.Context(), w.all().NonReadyOf("acme"), blob).Err())
		return []string{of(LawLocation, "all", n)}
	}},
	{"non-ready job twice", func(w *world) []string {
		blob, n := w.nonReady()
		w.addNonReady(w.all(), "acme", blob+" ")
		return []string{of(LawLocation, "all", n)}
	}},
	{"non-ready under another attempt too", func(w *world) []string {
		_, n := w.nonReady()
		w.addNonReady(w.all(), "acme", moving("all", "T", 7, int(n)))
		return []string{of(LawLocation, "all", n)}
	}},
	{"non-ready job of another tenant", func(w *world) []string {
		blob, n := w.nonReady()
		w.ok(w.c.ZRem(w.Context(), w.all().NonReadyOf("acme"), blob).Err())
		w.addNonReady(w.all(), "unknown", blob)
		w.ok(w.c.ZAdd(w.Context(), w.all().NonReady(), redis.Z{Score: 1e15, Member: "unknown"}).Err())
		return []string{of(LawLocation, "all", n)}
	}},
	{"non-ready job of an unknown group", func(w *world) []string {
		w.addNonReady(w.all(), "acme", moving("nosuch", "T", 1, 0))
		return []string{of(LawLocation, "nosuch", 0)}
	}},
	{"non-ready job of a swept group", func(w *world) []string {
		n := w.jobIn("cancelled", 'C', 0)
		w.addNonReady(w.part("cancelled"), "hooli", moving("cancelled", "cancelled", 0, int(n)))
		return []string{of(LawLocation, "cancelled", n)}
	}},
	{"unreadable non-ready job", func(w *world) []string {
		w.addNonReady(w.all(), "acme", "rubbish")
		return []string{whole(LawLocation, "")}
	}},

	{"failure gone", func(w *world) []string {
		n := w.jobIn("all", 'F', 0)
		w.ok(w.c.HDel(w.Context(), w.all().Failures("all"), strconv.FormatInt(n, 10)).Err())
		return []string{of(LawLocation, "all", n)}
	}},
	{"failure of a job that has not failed", func(w *world) []string {
		n := w.jobIn("all", 'A', 0)
		w.ok(w.c.HSet(w.Context(), w.all().Failures("all"), n, "{}\n"+moving("all", "T", 1, int(n))).Err())
		return []string{of(LawLocation, "all", n)}
	}},
	{"failure of another job", func(w *world) []string {
		n := w.jobIn("all", 'F', 0)
		w.ok(w.c.HSet(w.Context(), w.all().Failures("all"), n, "{}\n"+moving("all", "T", 1, int(n)+1)).Err())
		return []string{whole(LawLocation, "all"), of(LawLocation, "all", n)}
	}},
	{"code", func(w *world) []string {
		w.incr(w.all().Codes("all"), "BOOM", 1)
		return []string{whole(LawLocation, "all")}
	}},

	{"results entry gone", func(w *world) []string {
		n := w.jobIn("all", 'D', 0)
		for _, m := range w.c.XRange(w.Context(), w.all().ResultStream(), "-", "+").Val() {
			if got, _ := read.ParseResultLine(m.Values["l"].(string)); got == n {
				w.ok(w.c.XDel(w.Context(), w.all().ResultStream(), m.ID).Err())
			}
		}
		return []string{of(LawResults, "all", n)}
	}},
	{"results entry twice", func(w *world) []string {
		n := w.jobIn("all", 'D', 0)
		w.xadd(w.all().ResultStream(), "g", "all", "l", line(n), "t", "")
		return []string{of(LawResults, "all", n)}
	}},
	{"results of a reduced job", func(w *world) []string {
		n := w.jobIn("all", 'A', 0)
		w.xadd(w.all().ResultStream(), "g", "all", "l", line(n), "t", "")
		return []string{of(LawResults, "all", n)}
	}},
	{"results of an unknown group", func(w *world) []string {
		w.xadd(w.all().ResultStream(), "g", "nosuch", "l", line(0)+"\n"+line(1), "t", "")
		return []string{of(LawResults, "nosuch", 0), of(LawResults, "nosuch", 1)}
	}},
	{"unreadable results entry", func(w *world) []string {
		w.xadd(w.all().ResultStream(), "g", "all", "l", "rubbish")
		return []string{whole(LawResults, "")}
	}},
	{"result line gone", func(w *world) []string {
		lines, _ := w.chunk("completed")
		n, _ := read.ParseResultLine(lines[0])
		w.ok(w.c.LTrim(w.Context(), w.part("completed").Results("completed"), 1, -1).Err())
		return []string{of(LawResults, "completed", n)}
	}},
	{"result line twice", func(w *world) []string {
		lines, set := w.chunk("completed")
		n, _ := read.ParseResultLine(lines[0])
		set(append(lines, lines[0]))
		return []string{of(LawResults, "completed", n)}
	}},
	{"result line of another job", func(w *world) []string {
		n := w.jobIn("all", 'F', 0)
		lines, set := w.chunk("all")
		set(append(lines, line(n)))
		return []string{of(LawResults, "all", n)}
	}},
	{"unreadable result line", func(w *world) []string {
		lines, set := w.chunk("all")
		set(append(lines, "rubbish"))
		return []string{whole(LawResults, "all")}
	}},
	{"result lines deleted, not expired", func(w *world) []string {
		w.ok(w.c.Del(w.Context(), w.part("completed").Results("completed")).Err())
		var want []string
		for n := range int64(10) {
			want = append(want, of(LawResults, "completed", n))
		}
		return want
	}},
	{"partial aggregate gone", func(w *world) []string {
		w.ok(w.c.HDel(w.Context(), w.all().Aggregate("all"), "partial:7").Err())
		return []string{whole(LawResults, "all")}
	}},
	{"partial aggregate with a higher count", func(w *world) []string {
		partial := w.c.HGet(w.Context(), w.all().Aggregate("all"), "partial:7").Val()
		w.ok(w.c.HSet(w.Context(), w.all().Aggregate("all"), "partial:7", strings.Replace(partial, `{"count":2`, `{"count":3`, 1)).Err())
		return []string{whole(LawResults, "all")}
	}},
	{"aggregate with a higher count", func(w *world) []string {
		partial := w.c.HGet(w.Context(), w.part("completed").Aggregate("completed"), "partial:0").Val()
		i := strings.LastIndex(partial, `"count":10`)
		require.Positive(w, i)
		w.ok(w.c.HSet(w.Context(), w.part("completed").Aggregate("completed"), "partial:0", partial[:i]+`"count":11`+partial[i+10:]).Err())
		return []string{whole(LawResults, "completed")}
	}},
	{"unreadable partial aggregate", func(w *world) []string {
		w.ok(w.c.HSet(w.Context(), w.all().Aggregate("all"), "partial:7", "rubbish").Err())
		return []string{whole(LawResults, "all")}
	}},

	{"waiting counter of a type", func(w *world) []string {
		w.incr(w.all().Load("T"), "waiting", -1)
		return []string{whole(LawCounters, "")}
	}},
	{"non-ready counter of a type", func(w *world) []string {
		w.incr(w.all().Load("T"), "non_ready", 1)
		return []string{whole(LawCounters, "")}
	}},
	{"counter of a type without jobs", func(w *world) []string {
		w.incr(w.all().Load("other"), "waiting", 1)
		w.ok(w.c.ZAdd(w.Context(), w.all().Types(), redis.Z{Score: 1, Member: "other"}).Err())
		return []string{whole(LawCounters, "")}
	}},
	{"unfinished", func(w *world) []string {
		w.incr(w.all().Tenant("acme"), "unfinished", 1)
		return []string{whole(LawCounters, "")}
	}},
	{"congested", func(w *world) []string {
		w.incr(w.all().Tenant("acme"), "congested", 1)
		return []string{whole(LawCounters, "")}
	}},
	{"active", func(w *world) []string {
		w.incr(w.part("limited").Tenant("umbrella"), "active", 1)
		return []string{whole(LawCounters, "")}
	}},
	{"counter of a tenant whose groups have ended", func(w *world) []string {
		w.incr(w.part("partly").Tenant("initech"), "unfinished", -1)
		return []string{whole(LawCounters, "")}
	}},
	{"active tenant not in the active set", func(w *world) []string {
		w.ok(w.c.SRem(w.Context(), w.all().Active(), "acme").Err())
		return []string{whole(LawCounters, "")}
	}},
	{"unknown tenant in the active set", func(w *world) []string {
		w.ok(w.c.SAdd(w.Context(), w.all().Active(), "unknown").Err())
		return []string{whole(LawCounters, "")}
	}},

	{"no owner", func(w *world) []string {
		w.ok(w.c.Del(w.Context(), w.space.OfGroup("completed").Owner("completed")).Err())
		return []string{whole(LawRegistry, "completed")}
	}},
	{"another owner", func(w *world) []string {
		w.ok(w.c.Set(w.Context(), w.space.OfGroup("completed").Owner("completed"), "acme", 0).Err())
		return []string{whole(LawRegistry, "completed")}
	}},
	{"not on its tenant's list", func(w *world) []string {
		w.ok(w.c.ZRem(w.Context(), w.part("completed").GroupsOf("globex"), "completed").Err())
		return []string{whole(LawRegistry, "completed")}
	}},
	{"listed, but deleted", func(w *world) []string {
		w.ok(w.c.Del(w.Context(), w.part("completed").Group("completed")).Err())
		return []string{whole(LawRegistry, "completed")}
	}},
	{"in the wrong partition", func(w *world) []string {
		p := w.space.Partition((w.space.OfTenant("acme").Index() + 1) % w.space.Partitions())
		w.ok(w.c.Set(w.Context(), w.space.OfGroup("lost").Owner("lost"), "acme", 0).Err())
		_, err := ledger.Create(w.Context(), w.c, p, ledger.CreateArgs{Group: "lost", Tenant: "acme", Type: "T", Hash: "h"})
		w.ok(err)
		return []string{whole(LawRegistry, "lost")}
	}},

	{"failed below its threshold", func(w *world) []string {
		w.ok(w.c.HSet(w.Context(), w.part("partly").Group("partly"), "status", "FAILED", "at:failed", "9999999999999").Err())
		w.ok(w.c.HDel(w.Context(), w.part("partly").Group("partly"), "at:completed").Err())
		return []string{whole(LawLifecycle, "partly")}
	}},
	{"unknown status", func(w *world) []string {
		w.ok(w.c.HSet(w.Context(), w.part("empty").Group("empty"), "status", "ODD").Err())
		return []string{whole(LawLifecycle, "empty")}
	}},
	{"no time of a state", func(w *world) []string {
		w.ok(w.c.HDel(w.Context(), w.part("partly").Group("partly"), "at:running").Err())
		return []string{whole(LawLifecycle, "partly")}
	}},
	{"time of a later state", func(w *world) []string {
		w.ok(w.c.HSet(w.Context(), w.part("empty").Group("empty"), "at:running", 9e12).Err())
		return []string{whole(LawLifecycle, "empty")}
	}},
	{"times out of order", func(w *world) []string {
		w.ok(w.c.HSet(w.Context(), w.part("partly").Group("partly"), "at:running", 1).Err())
		return []string{whole(LawLifecycle, "partly")}
	}},
	{"ended and not on the list", func(w *world) []string {
		w.ok(w.c.ZRem(w.Context(), w.part("partly").Ended(), "partly").Err())
		return []string{whole(LawLifecycle, "partly")}
	}},
	{"ended and open", func(w *world) []string {
		w.ok(w.c.ZAdd(w.Context(), w.part("partly").Open(), redis.Z{Score: 1, Member: "partly"}).Err())
		return []string{whole(LawLifecycle, "partly")}
	}},
	{"unsealed", func(w *world) []string {
		w.ok(w.c.HDel(w.Context(), w.part("partly").Group("partly"), "sealed").Err())
		return []string{whole(LawLifecycle, "partly")}
	}},
	{"swept, but not completely", func(w *world) []string {
		w.ok(w.c.HDel(w.Context(), w.part("sweeping").Group("sweeping"), "sweep").Err())
		return []string{whole(LawLifecycle, "sweeping")}
	}},
	{"ready to end, but not dirty", func(w *world) []string {
		w.ok(w.c.SRem(w.Context(), w.part("ending").Dirty(), "ending").Err())
		return []string{whole(LawLifecycle, "ending")}
	}},
}

func TestTampering(t *testing.T) {
	for _, name := range []string{"waiting", "non_ready", "ready", "in_flight", "done", "failed", "cancelled"} {
		tampers = append(tampers, tamper{"count " + name, func(w *world) []string {
			w.incr(w.all().Group("all"), name, 1)
			return []string{whole(LawConservation, "all"), whole(LawStates, "all")}
		}})
	}
	t.Run("redis", func(t *testing.T) {
		for _, tamper := range tampers {
			t.Run(tamper.name, func(t *testing.T) {
				t.Parallel()
				url, prefix := redistest.Shared(t)
				tamper.alarms(t, url, prefix)
			})
		}
	})
	t.Run("miniredis", func(t *testing.T) {
		for i := 0; i < len(tampers); i += 12 { // some are enough to see that miniredis behaves as Redis does
			t.Run(tampers[i].name, func(t *testing.T) {
				t.Parallel()
				_, url := redistest.Mini(t)
				tampers[i].alarms(t, url, "t:")
			})
		}
	})
}

// alarms makes the tamper in an inhabited world, requires that an audit finds exactly what it must
// find, and repairs it.
func (c tamper) alarms(t *testing.T, url, prefix string) {
	w := newWorld(t, url, prefix, 3)
	inhabited(w)
	want := c.do(w)
	slices.Sort(want)
	r := w.audit(Options{})
	require.False(t, r.OK)
	require.Equal(t, want, summary(r), "%v", r.Violations)
	if strings.Contains(c.name, "ready") {
		again := w.audit(Options{stateBytes: 1})
		require.Equal(t, r.Violations, again.Violations, "one group at a time")
	}
	c.requireRepaired(w, r)
}
