package audittest

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// Tamper is a kind of damage to the data that no script causes. Do causes it, and returns the
// violations that an audit must then find, as Summary writes them.
type Tamper struct {
	Name string
	Do   func(w *World) []string
}

// Laws, by the names in the audit's violations, that a tamper of a single job may break.
const (
	lawLocation = "location"
	lawResults  = "results"
)

// maxReported is the most violations of one law in one group that the audit reports one by one; a
// summary counts the others.
const maxReported = 100

// Tampers lists at least one tamper for each statement of each law. A test applies each one to a
// fresh world that Inhabit has filled.
var Tampers = slices.Concat(
	tampersByCommand(), tampersOfStates(), tampersOfQueues, tampersOfLocations, tampersOfResults, tampersOfGroups,
	tampersOfLists,
)

// EachTamper calls check for each of the tampers, in a parallel subtest, with a fresh world of three
// partitions that Inhabit has filled, on a redis-server. For each twelfth tamper it calls check
// with a world on miniredis too, which is enough to see that miniredis behaves like Redis.
func EachTamper(t *testing.T, tampers []Tamper, check func(*World, Tamper)) {
	url, from := redistest.Shared(t)
	model := New(t, url, from, 3)
	Inhabit(model)
	keys, err := model.C.Keys(t.Context(), from+"*").Result()
	model.OK(err)
	for i, tamper := range tampers {
		t.Run("redis/"+tamper.Name, func(t *testing.T) {
			t.Parallel()
			_, prefix := redistest.Shared(t)
			w := New(t, url, prefix, 3)
			w.did(w.C.Pipelined(t.Context(), func(pipe redis.Pipeliner) error { // faster than Inhabit
				for _, key := range keys {
					pipe.Copy(t.Context(), key, prefix+strings.TrimPrefix(key, from), 0, true)
				}
				return nil
			}))
			check(w, tamper)
		})
		if i%12 != 0 {
			continue
		}
		t.Run("miniredis/"+tamper.Name, func(t *testing.T) {
			t.Parallel()
			_, url := redistest.Mini(t)
			w := New(t, url, "t:", 3)
			Inhabit(w)
			check(w, tamper)
		})
	}
}

// part is a short name of keyspace.Partition, whose methods return the keys of a partition.
type part = keyspace.Partition

// listOf adapts a method that returns a partition's key without an owner (group, tenant or type) to
// the field key of commandTampers; it ignores the owner.
func listOf(key func(part) string) func(part, string) string {
	return func(p part, _ string) string { return key(p) }
}

// queueOfT and queueOfU return the key of a group's queue for jobs of type T or U.
func queueOfT(p part, group string) string { return p.Queue(group, "T") }
func queueOfU(p part, group string) string { return p.Queue(group, "U") }

// commandTampers are tampers that run Redis commands on one key, in the partition of a tenant. of
// is the group, tenant or type that the key belongs to. The key is inserted after the name of each
// command. want lists the violations as Whole and Of write them.
var commandTampers = []struct {
	name, tenant  string
	key           func(p part, of string) string
	of            string
	command, want string
}{
	{"count waiting", "acme", part.Group, "all", "HINCRBY waiting 1", "conservation all, states all"},
	{"count non_ready", "acme", part.Group, "all", "HINCRBY non_ready 1", "conservation all, states all"},
	{"count ready", "acme", part.Group, "all", "HINCRBY ready 1", "conservation all, states all"},
	{"count in_flight", "acme", part.Group, "all", "HINCRBY in_flight 1", "conservation all, states all"},
	{"count done", "acme", part.Group, "all", "HINCRBY done 1", "conservation all, states all"},
	{"count failed", "acme", part.Group, "all", "HINCRBY failed 1", "conservation all, states all"},
	{"count cancelled", "acme", part.Group, "all", "HINCRBY cancelled 1", "conservation all, states all"},
	{"accepted", "acme", part.Group, "all", "HINCRBY accepted 1", "conservation all, states all"},
	{"reduced", "acme", part.Group, "all", "HINCRBY reduced -1", "states all"},
	{"two counts whose errors cancel out", "acme", part.Group, "all", "HINCRBY ready 1; HINCRBY done -1",
		"states all"},
	{"count of an ended group", "globex", part.Group, "completed", "HINCRBY done -1",
		"conservation completed, states completed"},
	{"no states", "globex", part.States, "scheduled", "DEL",
		"states scheduled, location scheduled 0, location scheduled 1, location scheduled 2, location scheduled 3, " +
			"location scheduled 4"},
	{"queue gone", "globex", queueOfT, "scheduled", "DEL",
		"location scheduled 0, location scheduled 1, location scheduled 2, location scheduled 3, location scheduled 4"},
	{"unknown job queued", "acme", queueOfU, "all", "RPUSH 99999|1||{}", "location all 99999"},

	{"unreadable ready entry", "acme", part.Ready, "T", "XADD * k v", "location"},
	{"unreadable non-ready job", "acme", part.NonReadyOf, "acme", "ZADD 1e15 rubbish", "location"},
	{"code", "acme", part.Codes, "all", "HINCRBY BOOM 1", "location all"},
	{"unreadable results entry", "acme", listOf(part.ResultStream), "", "XADD * g all l rubbish", "results"},
	{"result lines deleted, not expired", "globex", part.Results, "completed", "DEL",
		"results completed 0, results completed 1, results completed 2, results completed 3, results completed 4, " +
			"results completed 5, results completed 6, results completed 7, results completed 8, results completed 9"},
	{"partial aggregate gone", "acme", part.Aggregate, "all", "HDEL partial:7", "results all"},
	{"unreadable partial aggregate", "acme", part.Aggregate, "all", "HSET partial:7 rubbish", "results all"},

	{"waiting counter of a type", "acme", part.Load, "T", "HINCRBY waiting -1", "counters"},
	{"non-ready counter of a type", "acme", part.Load, "T", "HINCRBY non_ready 1", "counters"},
	{"unfinished", "acme", part.Tenant, "acme", "HINCRBY unfinished 1", "counters"},
	{"congested", "acme", part.Tenant, "acme", "HINCRBY congested 1", "counters"},
	{"active", "umbrella", part.Tenant, "umbrella", "HINCRBY active 1", "counters"},
	{"counter of a tenant whose groups have ended", "initech", part.Tenant, "initech", "HINCRBY unfinished -1",
		"counters"},
	{"places", "acme", part.Tenant, "acme", "HINCRBY places 1", "places"},
	{"no places", "acme", part.Tenant, "acme", "HDEL places", "places"},
	{"active tenant not in the active set", "acme", listOf(part.Active), "", "SREM acme", "counters"},
	{"unknown tenant in the active set", "acme", listOf(part.Active), "", "SADD unknown", "counters"},
	{"not on its tenant's list", "globex", part.GroupsOf, "globex", "ZREM completed", "registry completed"},
	{"listed, but deleted", "globex", part.Group, "completed", "DEL", "registry completed"},

	{"failed below its threshold", "initech", part.Group, "partly",
		"HSET status FAILED at:failed 9999999999999; HDEL at:completed", "lifecycle partly"},
	{"unknown status", "globex", part.Group, "empty", "HSET status ODD", "lifecycle empty"},
	{"no time of a state", "initech", part.Group, "partly", "HDEL at:running", "lifecycle partly"},
	{"time of a later state", "globex", part.Group, "empty", "HSET at:running 9000000000000", "lifecycle empty"},
	{"times out of order", "initech", part.Group, "partly", "HSET at:running 1", "lifecycle partly"},
	{"ended and not on the list", "initech", listOf(part.Ended), "", "ZREM partly", "lifecycle partly"},
	{"ended and open", "initech", listOf(part.Open), "", "ZADD 1 partly", "lifecycle partly"},
	{"failed list without the group", "acme", listOf(part.Failed), "", "ZREM failed", "lifecycle failed"},
	{"completed and on the failed list", "initech", listOf(part.Failed), "", "ZADD 1 partly", "lifecycle partly"},
	{"unsealed", "initech", part.Group, "partly", "HDEL sealed", "lifecycle partly"},
	{"swept, but not completely", "hooli", part.Group, "sweeping", "HDEL sweep", "lifecycle sweeping"},
	{"ready to end, but not dirty", "globex", listOf(part.Dirty), "", "SREM ending", "lifecycle ending"},
}

func tampersByCommand() (all []Tamper) {
	for _, c := range commandTampers {
		all = append(all, Tamper{c.name, func(w *World) []string {
			p := w.Space.OfTenant(c.tenant)
			for command := range strings.SplitSeq(c.command, "; ") {
				args := []any{}
				for _, word := range strings.Fields(command) {
					args = append(args, word)
				}
				w.OK(w.C.Do(w.Context(), slices.Insert(args, 1, any(c.key(p, c.of)))...).Err())
			}
			return strings.Split(c.want, ", ")
		}})
	}
	return all
}

// stateTampers are tampers that overwrite one byte of a job's state. The job is the n-th job of its
// group, from 0, with this state letter. In want, # stands for its ordinal.
var stateTampers = []struct {
	name, group string
	letter      ledger.Letter
	n, at       int // at is 0 for the letter, 1 for the attempt mark
	to          byte
	want        string
}{
	{"unknown state letter", "all", 'W', 0, 0, 'x', "states all, states all #, location all #"},
	{"waiting to non-ready", "all", 'W', 1, 0, 'N', "states all, location all #"},
	{"reduced to done", "all", 'A', 1, 0, 'D', "states all, results all, results all #"},
	{"done to reduced", "all", 'D', 0, 0, 'A', "states all, results all, results all #"},
	{"failed to cancelled", "all", 'F', 0, 0, 'C', "states all, location all, location all #"},
	{"reduced to waiting in an ended group", "completed", 'A', 3, 0, 'W',
		"states completed, lifecycle completed, results completed, results completed #, location completed #"},
	{"attempt of a ready job", "all", 'R', 0, 1, attemptMark(40), "location all #"},
	{"attempt of a failed job", "all", 'F', 0, 1, attemptMark(40), "location all #"},
}

func tampersOfStates() (all []Tamper) {
	for _, c := range stateTampers {
		all = append(all, Tamper{c.name, func(w *World) []string {
			n := w.JobIn(c.group, c.letter, c.n)
			w.setState(c.group, n, c.at, c.to)
			return strings.Split(strings.ReplaceAll(c.want, "#", strconv.FormatInt(n, 10)), ", ")
		}})
	}
	return all
}

// ofJob returns a tamper of the n-th job, from 0, of the group "all" with this state letter. do
// damages it; the only violation is of this law by this job.
func ofJob(name string, letter ledger.Letter, n int, law string, do func(w *World, ordinal int64)) Tamper {
	return Tamper{name, func(w *World) []string {
		ordinal := w.JobIn("all", letter, n)
		do(w, ordinal)
		return []string{Of(law, "all", ordinal)}
	}}
}

// ofNonReady returns a tamper of a job of the group "all" that is non-ready for a retry. The only
// violation is by this job. blob is its member in the tenant's sorted set.
func ofNonReady(name string, do func(w *World, blob string, ordinal int64)) Tamper {
	return Tamper{name, func(w *World) []string {
		blob, ordinal := w.nonReady()
		do(w, blob, ordinal)
		return []string{Of(lawLocation, "all", ordinal)}
	}}
}

// tampersOfQueues change counts, states and queued jobs.
var tampersOfQueues = []Tamper{
	{"negative count", func(w *World) []string {
		w.OK(w.C.HSet(w.Context(), w.All().Group("all"), "cancelled", -1, "waiting", w.count("all", 'W')+1).Err())
		return []string{"conservation all", "states all"}
	}},
	{"one state too many", func(w *World) []string {
		n := int64(len(w.statesOf("all")) / 2)
		w.OK(w.C.Append(w.Context(), w.All().States("all"), "W!").Err())
		return []string{"states all", Of(lawLocation, "all", n)}
	}},
	ofNonReady("attempt of a non-ready job", func(w *World, blob string, n int64) {
		w.setState("all", n, 1, attemptMark(40))
	}),
	{"queued job gone", func(w *World) []string {
		blob, err := w.C.LPop(w.Context(), w.All().Queue("all", "T")).Result()
		w.OK(err)
		n, _ := ledger.QueuedOrdinal(blob)
		return []string{Of(lawLocation, "all", n)}
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
	{"unreadable queued job", func(w *World) []string {
		w.OK(w.C.RPush(w.Context(), w.All().Queue("all", "U"), "rubbish", "").Err())
		return []string{"location all"}
	}},
	ofJob("ready job queued too", 'R', 0, lawLocation, func(w *World, n int64) {
		w.OK(w.C.RPush(w.Context(), w.All().Queue("all", "T"), fmt.Sprintf("%d|1||{}", n)).Err())
	}),
	{"queue of a cancelled group", func(w *World) []string {
		n := w.JobIn("sweeping", 'W', 0)
		w.OK(w.C.RPush(w.Context(), w.Part("sweeping").Queue("sweeping", "sweeping"), fmt.Sprintf("%d|1||{}", n)).Err())
		return []string{Of(lawLocation, "sweeping", n)}
	}},
}
