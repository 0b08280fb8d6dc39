package audittest

import (
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// tampersOfLocations are tampers that change ready streams, non-ready jobs and failures.
var tampersOfLocations = []Tamper{
	ofJob("ready entry gone", 'R', 0, lawLocation, func(w *World, n int64) {
		w.OK(w.C.XDel(w.Context(), w.All().Ready("T"), w.Entry("T", "all", n).ID).Err())
	}),
	ofJob("entry of a started job gone", 'I', 0, lawLocation, func(w *World, n int64) {
		w.OK(w.C.XDel(w.Context(), w.All().Ready("T"), w.Entry("T", "all", n).ID).Err())
	}),
	{"ready stream gone", func(w *World) []string {
		w.OK(w.C.Del(w.Context(), w.Part("limited").Ready("limited")).Err())
		var want []string
		for _, g := range []string{"limited", "beside"} {
			for _, n := range w.jobsIn(g, 'R') {
				want = append(want, Of(lawLocation, g, n))
			}
		}
		return want
	}},
	ofJob("ready entry twice", 'R', 0, lawLocation, func(w *World, n int64) {
		w.addEntry(w.All().Ready("T"), ledger.BlobField, ledger.MessageBlob(w.Entry("T", "all", n).Values))
	}),
	ofJob("ready entry under another attempt", 'I', 1, lawLocation, func(w *World, n int64) {
		w.addEntry(w.All().Ready("T"), ledger.BlobField, Moving("all", "T", 7, int(n)))
	}),
	ofJob("ready entry of a done job", 'A', 0, lawLocation, func(w *World, n int64) {
		w.addEntry(w.All().Ready("T"), ledger.BlobField, Moving("all", "T", 1, int(n)))
	}),
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
	ofJob("ready entry in the stream of another type", 'R', 0, lawLocation, func(w *World, n int64) {
		e := w.Entry("T", "all", n)
		w.OK(w.C.XDel(w.Context(), w.All().Ready("T"), e.ID).Err())
		w.addEntry(w.All().Ready("U"), ledger.BlobField, ledger.MessageBlob(e.Values))
	}),
	ofNonReady("non-ready job gone", func(w *World, blob string, n int64) {
		w.OK(w.C.ZRem(w.Context(), w.All().NonReadyOf("acme"), blob).Err())
	}),
	ofNonReady("non-ready job twice", func(w *World, blob string, n int64) {
		w.AddNonReady(w.All(), "acme", blob+" ")
	}),
	ofNonReady("non-ready under another attempt too", func(w *World, blob string, n int64) {
		w.AddNonReady(w.All(), "acme", Moving("all", "T", 7, int(n)))
	}),
	ofNonReady("non-ready job of another tenant", func(w *World, blob string, n int64) {
		w.OK(w.C.ZRem(w.Context(), w.All().NonReadyOf("acme"), blob).Err())
		w.AddNonReady(w.All(), "unknown", blob)
		w.OK(w.C.ZAdd(w.Context(), w.All().NonReady(), redis.Z{Score: 1e15, Member: "unknown"}).Err())
	}),
	{"non-ready job of an unknown group", func(w *World) []string {
		w.AddNonReady(w.All(), "acme", Moving("nosuch", "T", 1, 0))
		return []string{Of(lawLocation, "nosuch", 0)}
	}},
	{"non-ready job of a swept group", func(w *World) []string {
		n := w.JobIn("cancelled", 'C', 0)
		w.AddNonReady(w.Part("cancelled"), "hooli", Moving("cancelled", "cancelled", 0, int(n)))
		return []string{Of(lawLocation, "cancelled", n)}
	}},
	ofJob("failure gone", 'F', 0, lawLocation, func(w *World, n int64) {
		w.OK(w.C.HDel(w.Context(), w.All().Failures("all"), strconv.FormatInt(n, 10)).Err())
	}),
	ofJob("failure of a job that has not failed", 'A', 0, lawLocation, func(w *World, n int64) {
		w.OK(w.C.HSet(w.Context(), w.All().Failures("all"), n, "{}\n"+Moving("all", "T", 1, int(n))).Err())
	}),
	{"failure of another job", func(w *World) []string {
		n := w.JobIn("all", 'F', 0)
		w.OK(w.C.HSet(w.Context(), w.All().Failures("all"), n, "{}\n"+Moving("all", "T", 1, int(n)+1)).Err())
		return []string{"location all", Of(lawLocation, "all", n)}
	}},
}

// tampersOfResults change results and aggregates.
var tampersOfResults = []Tamper{
	ofJob("results entry gone", 'D', 0, lawResults, func(w *World, n int64) {
		for _, m := range w.C.XRange(w.Context(), w.All().ResultStream(), "-", "+").Val() {
			if got, _ := ordinalOf(m.Values["l"].(string)); got == n {
				w.OK(w.C.XDel(w.Context(), w.All().ResultStream(), m.ID).Err())
			}
		}
	}),
	ofJob("results entry twice", 'D', 0, lawResults, func(w *World, n int64) {
		w.addEntry(w.All().ResultStream(), "g", "all", "l", resultLine(n), "t", "")
	}),
	ofJob("results of a reduced job", 'A', 0, lawResults, func(w *World, n int64) {
		w.addEntry(w.All().ResultStream(), "g", "all", "l", resultLine(n), "t", "")
	}),
	{"results of an unknown group", func(w *World) []string {
		w.addEntry(w.All().ResultStream(), "g", "nosuch", "l", resultLine(0)+"\n"+resultLine(1), "t", "")
		return []string{Of(lawResults, "nosuch", 0), Of(lawResults, "nosuch", 1)}
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
	ofJob("result line of another job", 'F', 0, lawResults, func(w *World, n int64) {
		lines, set := w.chunk("all")
		set(append(lines, resultLine(n)))
	}),
	{"unreadable result line", func(w *World) []string {
		lines, set := w.chunk("all")
		set(append(lines, "rubbish"))
		return []string{"results all"}
	}},
	{"partial aggregate with a higher count", func(w *World) []string {
		partial := w.C.HGet(w.Context(), w.All().Aggregate("all"), "partial:7").Val()
		wrong := strings.Replace(partial, `{"count":2`, `{"count":3`, 1)
		w.OK(w.C.HSet(w.Context(), w.All().Aggregate("all"), "partial:7", wrong).Err())
		return []string{"results all"}
	}},
	{"aggregate with a higher count", func(w *World) []string {
		partial := w.C.HGet(w.Context(), w.Part("completed").Aggregate("completed"), "partial:0").Val()
		i := strings.LastIndex(partial, `"count":10`)
		require.Positive(w, i)
		wrong := partial[:i] + `"count":11` + partial[i+10:]
		w.OK(w.C.HSet(w.Context(), w.Part("completed").Aggregate("completed"), "partial:0", wrong).Err())
		return []string{"results completed"}
	}},
}

// tampersOfGroups are tampers that change counters and index keys of types, tenants and groups.
var tampersOfGroups = []Tamper{
	{"counter of a type without jobs", func(w *World) []string {
		w.Incr(w.All().Load("other"), "waiting", 1)
		w.OK(w.C.ZAdd(w.Context(), w.All().Types(), redis.Z{Score: 1, Member: "other"}).Err())
		return []string{"counters"}
	}},
	{"no owner", func(w *World) []string {
		w.OK(w.C.Del(w.Context(), w.Space.OfGroup("completed").Owner("completed")).Err())
		return []string{"registry completed"}
	}},
	{"another owner", func(w *World) []string {
		w.OK(w.C.Set(w.Context(), w.Space.OfGroup("completed").Owner("completed"), "acme", 0).Err())
		return []string{"registry completed"}
	}},
	{"in the wrong partition", func(w *World) []string {
		p := w.Space.Partition((w.Space.OfTenant("acme").Index() + 1) % w.Space.Partitions())
		w.OK(w.C.Set(w.Context(), w.Space.OfGroup("lost").Owner("lost"), "acme", 0).Err())
		w.did(ledger.Create(w.Context(), w.C, p,
			ledger.CreateArgs{Group: "lost", Tenant: "acme", Type: "T", Hash: "h"}))
		return []string{"registry lost"}
	}},
}
