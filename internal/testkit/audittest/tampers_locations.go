package audittest

import (
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// tampersOfLocations change ready streams, non-ready jobs, failures, results and aggregates.
var tampersOfLocations = []Tamper{
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
}

// tampersOfGroups change counters and indexes of types, tenants and groups, and groups as a whole.
var tampersOfGroups = []Tamper{
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
