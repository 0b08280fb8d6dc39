package audittest

import (
	"fmt"
	"slices"
	"testing"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

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

// Tampers lists one tamper or more for everything that a law says. Each is made in a world that
// Inhabit has filled.
var Tampers = slices.Concat(
	tampersOfCounts(), tampersOfStates, tampersOfLocations, tampersOfGroups,
)

// EachTamper runs check for each tamper, in a world of three partitions that Inhabit has filled.
// The worlds are in Redis; some are in miniredis too, enough to see that it behaves as Redis does.
func EachTamper(t *testing.T, check func(*World, Tamper)) {
	inhabited := func(t *testing.T, url, prefix string) *World {
		w := New(t, url, prefix, 3)
		Inhabit(w)
		return w
	}
	for i, tamper := range Tampers {
		t.Run("redis/"+tamper.Name, func(t *testing.T) {
			t.Parallel()
			url, prefix := redistest.Shared(t)
			check(inhabited(t, url, prefix), tamper)
		})
		if i%12 != 0 {
			continue
		}
		t.Run("miniredis/"+tamper.Name, func(t *testing.T) {
			t.Parallel()
			_, url := redistest.Mini(t)
			check(inhabited(t, url, "t:"), tamper)
		})
	}
}

// tampersOfStates change counts, states and queued jobs.
var tampersOfStates = []Tamper{
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
}

// tampersOfCounts returns one tamper for each count of a group: it adds 1 to this count.
func tampersOfCounts() (all []Tamper) {
	for _, name := range []string{"waiting", "non_ready", "ready", "in_flight", "done", "failed", "cancelled"} {
		all = append(all, Tamper{"count " + name, func(w *World) []string {
			w.Incr(w.All().Group("all"), name, 1)
			return []string{Whole(lawConservation, "all"), Whole(lawStates, "all")}
		}})
	}
	return all
}
