package audittest

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Whole names a violation that is about a group as a whole.
func Whole(law, group string) string { return strings.TrimSpace(law + " " + group) }

// Of names a violation that is about a job.
func Of(law, group string, ordinal int64) string { return fmt.Sprintf("%s %s %d", law, group, ordinal) }

// Summary names the violations, sorted and without repetitions.
func Summary(violations []api.Violation) []string {
	var all []string
	for _, v := range violations {
		s := Whole(v.Law, v.Group)
		if v.Ordinal != nil {
			s = Of(v.Law, v.Group, *v.Ordinal)
		}
		all = append(all, s)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// All returns the partition of the group "all".
func (w *World) All() keyspace.Partition { return w.Part("all") }

// Incr adds n to a field of a hash.
func (w *World) Incr(key, field string, n int64) { w.OK(w.C.HIncrBy(w.Context(), key, field, n).Err()) }

// setState writes one byte of a job's state: at 0 its letter, at 1 its attempt mark.
func (w *World) setState(group string, ordinal int64, at int, to byte) {
	w.OK(w.C.SetRange(w.Context(), w.Part(group).States(group), 2*ordinal+int64(at), string(to)).Err())
}

// attemptMark returns the second byte of a state.
func attemptMark(attempt int) byte { return byte(33 + attempt%90) }

// Entry returns the entry of a ready stream that holds a job.
func (w *World) Entry(typ, group string, ordinal int64) redis.XMessage {
	for _, m := range w.C.XRange(w.Context(), w.All().Ready(typ), "-", "+").Val() {
		d, err := ledger.ParseJob(ledger.MessageBlob(m.Values))
		if err == nil && d.Group == group && d.Ordinal == ordinal {
			return m
		}
	}
	require.Fail(w, "no such entry")
	return redis.XMessage{}
}

func (w *World) addEntry(stream string, fields ...any) {
	w.OK(w.C.XAdd(w.Context(), &redis.XAddArgs{Stream: stream, Values: fields}).Err())
}

// nonReady returns a non-ready job of the group "all", and its member in the tenant's sorted set.
func (w *World) nonReady() (blob string, ordinal int64) {
	for _, blob := range w.C.ZRange(w.Context(), w.All().NonReadyOf("acme"), 0, -1).Val() {
		if d, err := ledger.ParseJob(blob); err == nil && d.Group == "all" && d.Reason == ledger.ReasonError {
			return blob, d.Ordinal
		}
	}
	require.Fail(w, "no job is non-ready")
	return "", 0
}

// AddNonReady adds a member to a tenant's non-ready set.
func (w *World) AddNonReady(p keyspace.Partition, tenant, blob string) {
	w.OK(w.C.ZAdd(w.Context(), p.NonReadyOf(tenant), redis.Z{Score: 1e15, Member: blob}).Err())
}

// Moving returns the moving blob of a job.
func Moving(group, typ string, attempt, ordinal int) string {
	return fmt.Sprintf("%s|%s|%d|0|0|0|0|0|0|1|E|%d|1||{}", group, typ, attempt, ordinal)
}

// chunk returns the lines in the first chunk of a group's results, and a function that replaces
// them.
func (w *World) chunk(group string) (lines []string, set func([]string)) {
	key := w.Part(group).Results(group)
	return strings.Split(w.C.LIndex(w.Context(), key, 0).Val(), "\n"), func(lines []string) {
		w.OK(w.C.LSet(w.Context(), key, 0, strings.Join(lines, "\n")).Err())
	}
}

// resultLine returns a result line.
func resultLine(ordinal int64) string { return fmt.Sprintf(`{"ordinal":%d,"data":1}`, ordinal) }

// Tamper is a change that no script makes. Do makes it, and returns the violations that an audit
// must find then.
type Tamper struct {
	Name string
	Do   func(w *World) []string
}

// The laws, as the audit names them.
const (
	lawConservation = "conservation"
	lawStates       = "states"
	lawLocation     = "location"
	lawResults      = "results"
	lawLifecycle    = "lifecycle"
	lawCounters     = "counters"
	lawRegistry     = "registry"
)

// maxReported is how many jobs of one group the audit reports for one law; a summary stands for the
// others.
const maxReported = 100

// Tampers lists one tamper or more for everything that a law says. They are made in the inhabited
// world.
var Tampers = []Tamper{
	{"accepted", func(w *World) []string {
		w.Incr(w.All().Group("all"), "accepted", 1)
		return []string{Whole(lawConservation, "all"), Whole(lawStates, "all")}
	}},
	{"reduced", func(w *World) []string {
		w.Incr(w.All().Group("all"), "reduced", -1)
		return []string{Whole(lawStates, "all")}
	}},
	{"two counts whose errors cancel out", func(w *World) []string {
		w.Incr(w.All().Group("all"), "ready", 1)
		w.Incr(w.All().Group("all"), "done", -1)
		return []string{Whole(lawStates, "all")}
	}},
	{"negative count", func(w *World) []string {
		w.OK(w.C.HSet(w.Context(), w.All().Group("all"), "cancelled", -1, "waiting", w.count("all", 'W')+1).Err())
		return []string{Whole(lawConservation, "all"), Whole(lawStates, "all")}
	}},
	{"count of an ended group", func(w *World) []string {
		w.Incr(w.Part("completed").Group("completed"), "done", -1)
		return []string{Whole(lawConservation, "completed"), Whole(lawStates, "completed")}
	}},
	{"one state too many", func(w *World) []string {
		n := int64(len(w.statesOf("all")) / 2)
		w.OK(w.C.Append(w.Context(), w.All().States("all"), "W!").Err())
		return []string{Whole(lawStates, "all"), Of(lawLocation, "all", n)}
	}},
	{"no states", func(w *World) []string {
		w.OK(w.C.Del(w.Context(), w.Part("scheduled").States("scheduled")).Err())
		want := []string{Whole(lawStates, "scheduled")}
		for i := range int64(5) {
			want = append(want, Of(lawLocation, "scheduled", i))
		}
		return want
	}},
	{"unknown state letter", func(w *World) []string {
		n := w.JobIn("all", 'W', 0)
		w.setState("all", n, 0, 'x')
		return []string{Whole(lawStates, "all"), Of(lawStates, "all", n), Of(lawLocation, "all", n)}
	}},
	{"waiting to non-ready", func(w *World) []string {
		n := w.JobIn("all", 'W', 1)
		w.setState("all", n, 0, 'N')
		return []string{Whole(lawStates, "all"), Of(lawLocation, "all", n)}
	}},
	{"reduced to done", func(w *World) []string {
		n := w.JobIn("all", 'A', 1)
		w.setState("all", n, 0, 'D')
		return []string{Whole(lawStates, "all"), Whole(lawResults, "all"), Of(lawResults, "all", n)}
	}},
	{"done to reduced", func(w *World) []string {
		n := w.JobIn("all", 'D', 0)
		w.setState("all", n, 0, 'A')
		return []string{Whole(lawStates, "all"), Whole(lawResults, "all"), Of(lawResults, "all", n)}
	}},
	{"failed to cancelled", func(w *World) []string {
		n := w.JobIn("all", 'F', 0)
		w.setState("all", n, 0, 'C')
		return []string{Whole(lawStates, "all"), Whole(lawLocation, "all"), Of(lawLocation, "all", n)}
	}},
	{"reduced to waiting in an ended group", func(w *World) []string {
		w.setState("completed", 3, 0, 'W')
		return []string{
			Whole(lawStates, "completed"), Whole(lawLifecycle, "completed"), Whole(lawResults, "completed"),
			Of(lawResults, "completed", 3), Of(lawLocation, "completed", 3),
		}
	}},
	{"attempt of a non-ready job", func(w *World) []string {
		_, n := w.nonReady()
		w.setState("all", n, 1, attemptMark(40))
		return []string{Of(lawLocation, "all", n)}
	}},
	{"attempt of a ready job", func(w *World) []string {
		n := w.JobIn("all", 'R', 0)
		w.setState("all", n, 1, attemptMark(40))
		return []string{Of(lawLocation, "all", n)}
	}},
	{"attempt of a failed job", func(w *World) []string {
		n := w.JobIn("all", 'F', 0)
		w.setState("all", n, 1, attemptMark(40))
		return []string{Of(lawLocation, "all", n)}
	}},

	{"queued job gone", func(w *World) []string {
		blob, err := w.C.LPop(w.Context(), w.All().Queue("all", "T")).Result()
		w.OK(err)
		n, _ := ledger.QueuedOrdinal(blob)
		return []string{Of(lawLocation, "all", n)}
	}},
	{"queue gone", func(w *World) []string {
		w.OK(w.C.Del(w.Context(), w.Part("scheduled").Queue("scheduled", "T")).Err())
		var want []string
		for i := range int64(5) {
			want = append(want, Of(lawLocation, "scheduled", i))
		}
		return want
	}},
	{"queue of many gone", func(w *World) []string {
		w.OK(w.C.Del(w.Context(), w.Part("many").Queue("many", "many")).Err())
		want := []string{Whole(lawLocation, "many")}
		for i := range int64(maxReported) {
			want = append(want, Of(lawLocation, "many", 50+i))
		}
		return want
	}},
	{"queued job twice", func(w *World) []string {
		blob := w.C.LIndex(w.Context(), w.All().Queue("all", "T"), 2).Val()
		w.OK(w.C.RPush(w.Context(), w.All().Queue("all", "T"), blob).Err())
		n, _ := ledger.QueuedOrdinal(blob)
		return []string{Of(lawLocation, "all", n)}
	}},
	{"queued job in two queues, among many", func(w *World) []string {
		w.Append("many", Jobs(1, OfType("other")))
		blob := w.C.LIndex(w.Context(), w.Part("many").Queue("many", "many"), 1000).Val()
		w.OK(w.C.RPush(w.Context(), w.Part("many").Queue("many", "other"), blob).Err())
		return []string{Of(lawLocation, "many", 1050)}
	}},
	{"unknown job queued", func(w *World) []string {
		w.OK(w.C.RPush(w.Context(), w.All().Queue("all", "U"), "99999|1||{}").Err())
		return []string{Of(lawLocation, "all", 99999)}
	}},
	{"unreadable queued job", func(w *World) []string {
		w.OK(w.C.RPush(w.Context(), w.All().Queue("all", "U"), "rubbish", "").Err())
		return []string{Whole(lawLocation, "all")}
	}},
	{"ready job queued too", func(w *World) []string {
		n := w.JobIn("all", 'R', 0)
		w.OK(w.C.RPush(w.Context(), w.All().Queue("all", "T"), fmt.Sprintf("%d|1||{}", n)).Err())
		return []string{Of(lawLocation, "all", n)}
	}},
	{"queue of a cancelled group", func(w *World) []string {
		n := w.JobIn("sweeping", 'W', 0)
		w.OK(w.C.RPush(w.Context(), w.Part("sweeping").Queue("sweeping", "sweeping"), fmt.Sprintf("%d|1||{}", n)).Err())
		return []string{Of(lawLocation, "sweeping", n)}
	}},

	{"ready entry gone", func(w *World) []string {
		n := w.JobIn("all", 'R', 0)
		w.OK(w.C.XDel(w.Context(), w.All().Ready("T"), w.Entry("T", "all", n).ID).Err())
		return []string{Of(lawLocation, "all", n)}
	}},
	{"entry of a started job gone", func(w *World) []string {
		n := w.JobIn("all", 'I', 0)
		w.OK(w.C.XDel(w.Context(), w.All().Ready("T"), w.Entry("T", "all", n).ID).Err())
		return []string{Of(lawLocation, "all", n)}
	}},
	{"ready stream gone", func(w *World) []string {
		w.OK(w.C.Del(w.Context(), w.Part("limited").Ready("limited")).Err())
		var want []string
		for _, g := range []string{"limited", "beside"} {
			for n := range w.count(g, 'R') {
				want = append(want, Of(lawLocation, g, w.JobIn(g, 'R', n)))
			}
		}
		return want
	}},
	{"ready entry twice", func(w *World) []string {
		n := w.JobIn("all", 'R', 0)
		w.addEntry(w.All().Ready("T"), ledger.BlobField, ledger.MessageBlob(w.Entry("T", "all", n).Values))
		return []string{Of(lawLocation, "all", n)}
	}},
	{"ready entry under another attempt", func(w *World) []string {
		n := w.JobIn("all", 'I', 1)
		w.addEntry(w.All().Ready("T"), ledger.BlobField, Moving("all", "T", 7, int(n)))
		return []string{Of(lawLocation, "all", n)}
	}},
	{"ready entry of a done job", func(w *World) []string {
		n := w.JobIn("all", 'A', 0)
		w.addEntry(w.All().Ready("T"), ledger.BlobField, Moving("all", "T", 1, int(n)))
		return []string{Of(lawLocation, "all", n)}
	}},
	{"ready entry of an ended group", func(w *World) []string {
		w.addEntry(w.Part("completed").Ready("T"), ledger.BlobField, Moving("completed", "T", 1, 4))
		return []string{Of(lawLocation, "completed", 4)}
	}},
	{"ready entry of an unknown group", func(w *World) []string {
		w.addEntry(w.All().Ready("T"), ledger.BlobField, Moving("nosuch", "T", 1, 4))
		return []string{Of(lawLocation, "nosuch", 4)}
	}},
	{"ready entry of an unknown job", func(w *World) []string {
		w.addEntry(w.All().Ready("T"), ledger.BlobField, Moving("all", "T", 1, 1e15))
		return []string{Of(lawLocation, "all", 1e15)}
	}},
	{"ready entry in the stream of another type", func(w *World) []string {
		n := w.JobIn("all", 'R', 0)
		e := w.Entry("T", "all", n)
		w.OK(w.C.XDel(w.Context(), w.All().Ready("T"), e.ID).Err())
		w.addEntry(w.All().Ready("U"), ledger.BlobField, ledger.MessageBlob(e.Values))
		return []string{Of(lawLocation, "all", n)}
	}},
	{"unreadable ready entry", func(w *World) []string {
		w.addEntry(w.All().Ready("T"), "k", "v")
		return []string{Whole(lawLocation, "")}
	}},

	{"non-ready job gone", func(w *World) []string {
		blob, n := w.nonReady()
		w.OK(w.C.ZRem(w.Context(), w.All().NonReadyOf("acme"), blob).Err())
		return []string{Of(lawLocation, "all", n)}
	}},
	{"non-ready job twice", func(w *World) []string {
		blob, n := w.nonReady()
		w.AddNonReady(w.All(), "acme", blob+" ")
		return []string{Of(lawLocation, "all", n)}
	}},
	{"non-ready under another attempt too", func(w *World) []string {
		_, n := w.nonReady()
		w.AddNonReady(w.All(), "acme", Moving("all", "T", 7, int(n)))
		return []string{Of(lawLocation, "all", n)}
	}},
	{"non-ready job of another tenant", func(w *World) []string {
		blob, n := w.nonReady()
		w.OK(w.C.ZRem(w.Context(), w.All().NonReadyOf("acme"), blob).Err())
		w.AddNonReady(w.All(), "unknown", blob)
		w.OK(w.C.ZAdd(w.Context(), w.All().NonReady(), redis.Z{Score: 1e15, Member: "unknown"}).Err())
		return []string{Of(lawLocation, "all", n)}
	}},
	{"non-ready job of an unknown group", func(w *World) []string {
		w.AddNonReady(w.All(), "acme", Moving("nosuch", "T", 1, 0))
		return []string{Of(lawLocation, "nosuch", 0)}
	}},
	{"non-ready job of a swept group", func(w *World) []string {
		n := w.JobIn("cancelled", 'C', 0)
		w.AddNonReady(w.Part("cancelled"), "hooli", Moving("cancelled", "cancelled", 0, int(n)))
		return []string{Of(lawLocation, "cancelled", n)}
	}},
	{"unreadable non-ready job", func(w *World) []string {
		w.AddNonReady(w.All(), "acme", "rubbish")
		return []string{Whole(lawLocation, "")}
	}},

	{"failure gone", func(w *World) []string {
		n := w.JobIn("all", 'F', 0)
		w.OK(w.C.HDel(w.Context(), w.All().Failures("all"), strconv.FormatInt(n, 10)).Err())
		return []string{Of(lawLocation, "all", n)}
	}},
	{"failure of a job that has not failed", func(w *World) []string {
		n := w.JobIn("all", 'A', 0)
		w.OK(w.C.HSet(w.Context(), w.All().Failures("all"), n, "{}\n"+Moving("all", "T", 1, int(n))).Err())
		return []string{Of(lawLocation, "all", n)}
	}},
	{"failure of another job", func(w *World) []string {
		n := w.JobIn("all", 'F', 0)
		w.OK(w.C.HSet(w.Context(), w.All().Failures("all"), n, "{}\n"+Moving("all", "T", 1, int(n)+1)).Err())
		return []string{Whole(lawLocation, "all"), Of(lawLocation, "all", n)}
	}},
	{"code", func(w *World) []string {
		w.Incr(w.All().Codes("all"), "BOOM", 1)
		return []string{Whole(lawLocation, "all")}
	}},

	{"results entry gone", func(w *World) []string {
		n := w.JobIn("all", 'D', 0)
		for _, m := range w.C.XRange(w.Context(), w.All().ResultStream(), "-", "+").Val() {
			if got, _ := ordinalOf(m.Values["l"].(string)); got == n {
				w.OK(w.C.XDel(w.Context(), w.All().ResultStream(), m.ID).Err())
			}
		}
		return []string{Of(lawResults, "all", n)}
	}},
	{"results entry twice", func(w *World) []string {
		n := w.JobIn("all", 'D', 0)
		w.addEntry(w.All().ResultStream(), "g", "all", "l", resultLine(n), "t", "")
		return []string{Of(lawResults, "all", n)}
	}},
	{"results of a reduced job", func(w *World) []string {
		n := w.JobIn("all", 'A', 0)
		w.addEntry(w.All().ResultStream(), "g", "all", "l", resultLine(n), "t", "")
		return []string{Of(lawResults, "all", n)}
	}},
	{"results of an unknown group", func(w *World) []string {
		w.addEntry(w.All().ResultStream(), "g", "nosuch", "l", resultLine(0)+"\n"+resultLine(1), "t", "")
		return []string{Of(lawResults, "nosuch", 0), Of(lawResults, "nosuch", 1)}
	}},
	{"unreadable results entry", func(w *World) []string {
		w.addEntry(w.All().ResultStream(), "g", "all", "l", "rubbish")
		return []string{Whole(lawResults, "")}
	}},
	{"result line gone", func(w *World) []string {
		lines, _ := w.chunk("completed")
		n, _ := ordinalOf(lines[0])
		w.OK(w.C.LTrim(w.Context(), w.Part("completed").Results("completed"), 1, -1).Err())
		return []string{Of(lawResults, "completed", n)}
	}},
	{"result line twice", func(w *World) []string {
		lines, set := w.chunk("completed")
		n, _ := ordinalOf(lines[0])
		set(append(lines, lines[0]))
		return []string{Of(lawResults, "completed", n)}
	}},
	{"result line of another job", func(w *World) []string {
		n := w.JobIn("all", 'F', 0)
		lines, set := w.chunk("all")
		set(append(lines, resultLine(n)))
		return []string{Of(lawResults, "all", n)}
	}},
	{"unreadable result line", func(w *World) []string {
		lines, set := w.chunk("all")
		set(append(lines, "rubbish"))
		return []string{Whole(lawResults, "all")}
	}},
	{"result lines deleted, not expired", func(w *World) []string {
		w.OK(w.C.Del(w.Context(), w.Part("completed").Results("completed")).Err())
		var want []string
		for n := range int64(10) {
			want = append(want, Of(lawResults, "completed", n))
		}
		return want
	}},
	{"partial aggregate gone", func(w *World) []string {
		w.OK(w.C.HDel(w.Context(), w.All().Aggregate("all"), "partial:7").Err())
		return []string{Whole(lawResults, "all")}
	}},
	{"partial aggregate with a higher count", func(w *World) []string {
		partial := w.C.HGet(w.Context(), w.All().Aggregate("all"), "partial:7").Val()
		wrong := strings.Replace(partial, `{"count":2`, `{"count":3`, 1)
		w.OK(w.C.HSet(w.Context(), w.All().Aggregate("all"), "partial:7", wrong).Err())
		return []string{Whole(lawResults, "all")}
	}},
	{"aggregate with a higher count", func(w *World) []string {
		partial := w.C.HGet(w.Context(), w.Part("completed").Aggregate("completed"), "partial:0").Val()
		i := strings.LastIndex(partial, `"count":10`)
		require.Positive(w, i)
		wrong := partial[:i] + `"count":11` + partial[i+10:]
		w.OK(w.C.HSet(w.Context(), w.Part("completed").Aggregate("completed"), "partial:0", wrong).Err())
		return []string{Whole(lawResults, "completed")}
	}},
	{"unreadable partial aggregate", func(w *World) []string {
		w.OK(w.C.HSet(w.Context(), w.All().Aggregate("all"), "partial:7", "rubbish").Err())
		return []string{Whole(lawResults, "all")}
	}},

	{"waiting counter of a type", func(w *World) []string {
		w.Incr(w.All().Load("T"), "waiting", -1)
		return []string{Whole(lawCounters, "")}
	}},
	{"non-ready counter of a type", func(w *World) []string {
		w.Incr(w.All().Load("T"), "non_ready", 1)
		return []string{Whole(lawCounters, "")}
	}},
	{"counter of a type without jobs", func(w *World) []string {
		w.Incr(w.All().Load("other"), "waiting", 1)
		w.OK(w.C.ZAdd(w.Context(), w.All().Types(), redis.Z{Score: 1, Member: "other"}).Err())
		return []string{Whole(lawCounters, "")}
	}},
	{"unfinished", func(w *World) []string {
		w.Incr(w.All().Tenant("acme"), "unfinished", 1)
		return []string{Whole(lawCounters, "")}
	}},
	{"congested", func(w *World) []string {
		w.Incr(w.All().Tenant("acme"), "congested", 1)
		return []string{Whole(lawCounters, "")}
	}},
	{"active", func(w *World) []string {
		w.Incr(w.Part("limited").Tenant("umbrella"), "active", 1)
		return []string{Whole(lawCounters, "")}
	}},
	{"counter of a tenant whose groups have ended", func(w *World) []string {
		w.Incr(w.Part("partly").Tenant("initech"), "unfinished", -1)
		return []string{Whole(lawCounters, "")}
	}},
	{"active tenant not in the active set", func(w *World) []string {
		w.OK(w.C.SRem(w.Context(), w.All().Active(), "acme").Err())
		return []string{Whole(lawCounters, "")}
	}},
	{"unknown tenant in the active set", func(w *World) []string {
		w.OK(w.C.SAdd(w.Context(), w.All().Active(), "unknown").Err())
		return []string{Whole(lawCounters, "")}
	}},

	{"no owner", func(w *World) []string {
		w.OK(w.C.Del(w.Context(), w.Space.OfGroup("completed").Owner("completed")).Err())
		return []string{Whole(lawRegistry, "completed")}
	}},
	{"another owner", func(w *World) []string {
		w.OK(w.C.Set(w.Context(), w.Space.OfGroup("completed").Owner("completed"), "acme", 0).Err())
		return []string{Whole(lawRegistry, "completed")}
	}},
	{"not on its tenant's list", func(w *World) []string {
		w.OK(w.C.ZRem(w.Context(), w.Part("completed").GroupsOf("globex"), "completed").Err())
		return []string{Whole(lawRegistry, "completed")}
	}},
	{"listed, but deleted", func(w *World) []string {
		w.OK(w.C.Del(w.Context(), w.Part("completed").Group("completed")).Err())
		return []string{Whole(lawRegistry, "completed")}
	}},
	{"in the wrong partition", func(w *World) []string {
		p := w.Space.Partition((w.Space.OfTenant("acme").Index() + 1) % w.Space.Partitions())
		w.OK(w.C.Set(w.Context(), w.Space.OfGroup("lost").Owner("lost"), "acme", 0).Err())
		_, err := ledger.Create(w.Context(), w.C, p,
			ledger.CreateArgs{Group: "lost", Tenant: "acme", Type: "T", Hash: "h"})
		w.OK(err)
		return []string{Whole(lawRegistry, "lost")}
	}},

	{"failed below its threshold", func(w *World) []string {
		w.OK(w.C.HSet(w.Context(), w.Part("partly").Group("partly"),
			"status", "FAILED", "at:failed", "9999999999999").Err())
		w.OK(w.C.HDel(w.Context(), w.Part("partly").Group("partly"), "at:completed").Err())
		return []string{Whole(lawLifecycle, "partly")}
	}},
	{"unknown status", func(w *World) []string {
		w.OK(w.C.HSet(w.Context(), w.Part("empty").Group("empty"), "status", "ODD").Err())
		return []string{Whole(lawLifecycle, "empty")}
	}},
	{"no time of a state", func(w *World) []string {
		w.OK(w.C.HDel(w.Context(), w.Part("partly").Group("partly"), "at:running").Err())
		return []string{Whole(lawLifecycle, "partly")}
	}},
	{"time of a later state", func(w *World) []string {
		w.OK(w.C.HSet(w.Context(), w.Part("empty").Group("empty"), "at:running", 9e12).Err())
		return []string{Whole(lawLifecycle, "empty")}
	}},
	{"times out of order", func(w *World) []string {
		w.OK(w.C.HSet(w.Context(), w.Part("partly").Group("partly"), "at:running", 1).Err())
		return []string{Whole(lawLifecycle, "partly")}
	}},
	{"ended and not on the list", func(w *World) []string {
		w.OK(w.C.ZRem(w.Context(), w.Part("partly").Ended(), "partly").Err())
		return []string{Whole(lawLifecycle, "partly")}
	}},
	{"ended and open", func(w *World) []string {
		w.OK(w.C.ZAdd(w.Context(), w.Part("partly").Open(), redis.Z{Score: 1, Member: "partly"}).Err())
		return []string{Whole(lawLifecycle, "partly")}
	}},
	{"unsealed", func(w *World) []string {
		w.OK(w.C.HDel(w.Context(), w.Part("partly").Group("partly"), "sealed").Err())
		return []string{Whole(lawLifecycle, "partly")}
	}},
	{"swept, but not completely", func(w *World) []string {
		w.OK(w.C.HDel(w.Context(), w.Part("sweeping").Group("sweeping"), "sweep").Err())
		return []string{Whole(lawLifecycle, "sweeping")}
	}},
	{"ready to end, but not dirty", func(w *World) []string {
		w.OK(w.C.SRem(w.Context(), w.Part("ending").Dirty(), "ending").Err())
		return []string{Whole(lawLifecycle, "ending")}
	}},
}

func init() {
	for _, name := range []string{"waiting", "non_ready", "ready", "in_flight", "done", "failed", "cancelled"} {
		Tampers = append(Tampers, Tamper{"count " + name, func(w *World) []string {
			w.Incr(w.All().Group("all"), name, 1)
			return []string{Whole(lawConservation, "all"), Whole(lawStates, "all")}
		}})
	}
}
