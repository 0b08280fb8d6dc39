package ledger_test

import (
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// act is a function that calls one script once.
type act func() error

// scene is a call of a script, with the state that it finds.
type scene struct {
	name      string // name of the script, and the state that it finds
	takesMore bool   // the script takes work in, so it is refused when memory is full
	prepare   func(w *world) act
}

// scenes are calls of the scripts that write data of groups, jobs, tenants and limits. Together
// they are meant to execute every write of these scripts. A scene prepares a partition and returns
// the call. Tests of common properties, such as that a script without memory is refused or
// completes, run them all.
var scenes = slices.Concat(lifeScenes, flowScenes)

var lifeScenes = []scene{
	{"create", true, func(w *world) act {
		return func() error {
			_, err := ledger.Create(w.Context(), w.c, w.p, ledger.CreateArgs{Group: "g", Tenant: "acme", Type: "T", Hash: "h"})
			return err
		}
	}},
	{"append several types, the last of a total", true, func(w *world) act {
		w.create("g", "acme", "T", "total", "4")
		return w.appending(ledger.AppendArgs{Group: "g", Limit: 10, Request: "r", Mode: ledger.AppendLast, Jobs: []ledger.NewJob{
			{Payload: []byte("1")}, {Type: "U", Payload: []byte("2")}, {Payload: large}, {Type: "V", Payload: []byte("4"), RunAt: new(time.Now().Add(time.Hour))},
		}})
	}},
	{"append an entry of the ingest stream", true, func(w *world) act {
		w.create("g", "acme", "T")
		return w.appending(ledger.AppendArgs{Group: "g", Limit: 10, Request: ledger.EntryRequest("1700000000000-0"), Jobs: jobs(1)})
	}},
	{"append to a group with unique keys", true, func(w *world) act {
		w.create("g", "acme", "T", "unique_keys", "1")
		keyed := jobs(3)
		keyed[0].Key, keyed[1].Key, keyed[2].Key = "a", "a", "b"
		return w.appending(ledger.AppendArgs{Group: "g", Request: "r#0", Limit: 10, Jobs: keyed})
	}},
	{"append to a group that is held", true, func(w *world) act {
		w.create("g", "acme", "T", "run_at", inAnHour())
		return w.appending(ledger.AppendArgs{Group: "g", Limit: 10, Jobs: jobs(1)})
	}},
	{"append only jobs for later", true, func(w *world) act {
		w.create("g", "acme", "T")
		return w.appending(ledger.AppendArgs{Group: "g", Limit: 10, Jobs: []ledger.NewJob{{Payload: []byte("1"), RunAt: new(time.Now().Add(time.Hour))}}})
	}},
	{"seal", true, func(w *world) act {
		w.create("g", "acme", "T")
		return w.sealing("g", nil)
	}},
	{"seal with a total", true, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 2)
		total := int64(2)
		return w.sealing("g", &total)
	}},
	{"schedule", false, func(w *world) act {
		w.hold("g", 2)
		return func() error {
			_, _, err := ledger.Schedule(w.Context(), w.c, w.p, 10)
			return err
		}
	}},
	{"admit", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 2)
		return w.admitting(limit(5))
	}},
	{"admit the head of a tenant without a permit", false, func(w *world) act {
		w.spent("acme")
		return w.admitting(limit(20))
	}},
	{"admit a tenant whose permit has come", false, func(w *world) act {
		w.spent("acme")
		w.admit("T", 1, limit(20))
		w.c.ZAdd(w.Context(), w.p.RateLimited("T"), redis.Z{Score: 1, Member: "acme"})
		w.c.HSet(w.Context(), w.p.Rate(), "w", 0, "n", 1000) // the tenant returns to the queue, and admits nothing
		return w.admitting(limit(20))
	}},
	{"admit what can't be read", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 1)
		w.c.LPush(w.Context(), w.p.Queue("g", "T"), "nonsense")
		return w.admitting(noLimit)
	}},
	{"admit after a group was cancelled elsewhere", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 1)
		w.c.Del(w.Context(), w.p.Queue("g", "T"))
		return w.admitting(noLimit)
	}},
	{"promote", false, func(w *world) act {
		w.nonReady("g", 2)
		return w.promoting(limit(5))
	}},
	{"promote a marker", false, func(w *world) act {
		w.spent("acme")
		w.admit("T", 1, limit(20))
		w.overdue("acme")
		return w.promoting(noLimit)
	}},
	{"promote jobs of a cancelled group", false, func(w *world) act {
		w.nonReady("g", 2)
		w.cancel("g")
		return w.promoting(limit(5))
	}},
	{"promote what can't be read", false, func(w *world) act {
		w.nonReady("g", 1)
		w.c.ZAdd(w.Context(), w.p.NonReadyOf("acme"), redis.Z{Score: 1, Member: "nonsense"})
		return w.promoting(noLimit)
	}},
	{"start", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 2)
		w.admit("T", 2, noLimit)
		return w.starting(w.read("T", "c"))
	}},
	{"start jobs of a cancelled group", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 1)
		w.admit("T", 1, noLimit)
		jobs := w.read("T", "c")
		w.cancel("g")
		return w.starting(jobs)
	}},
	{"renew", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 1)
		j := w.begin("T", "c1", 1)[0]
		return func() error {
			_, err := ledger.Renew(w.Context(), w.c, w.p, "T", "c2", []ledger.Held{{Entry: j.entry, Group: "g", Attempt: int(j.token)}})
			return err
		}
	}},
	{"outcome", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Mode: ledger.AppendSeal, Jobs: append(jobs(5), ledger.NewJob{Payload: large})})
		run := w.begin("T", "c", 6)
		report := done(run[0], run[5])
		for i, kind := range []ledger.OutcomeKind{ledger.OutcomeRetry, ledger.OutcomeThrottled, ledger.OutcomeFailed, ledger.OutcomeReleased} {
			report[0].Others = append(report[0].Others, other(kind, run[i+1], 0)[0].Others...)
		}
		return w.reporting(report)
	}},
	{"outcome of a job that was not started", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 1)
		w.admit("T", 1, noLimit)
		return w.reporting(other(ledger.OutcomeUnstarted, w.read("T", "c")[0], 0))
	}},
	{"outcome of deferred jobs, one of them not started", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 2)
		report := other(ledger.OutcomeDeferred, w.begin("T", "c", 1)[0], time.Hour)
		w.admit("T", 1, noLimit)
		report[0].Others = append(report[0].Others, other(ledger.OutcomeDeferred, w.read("T", "c")[0], time.Hour)[0].Others...)
		return w.reporting(report)
	}},
	{"outcome of a done job, and of one that is retried", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 2)
		run := w.begin("T", "c", 2)
		report := done(run[0])
		report[0].Others = other(ledger.OutcomeRetry, run[1], 0)[0].Others
		return w.reporting(report)
	}},
	{"outcome of jobs that had errors before", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 3)
		run := w.retried("T", w.begin("T", "c", 3)...)
		report := done(run[0])
		for i, kind := range []ledger.OutcomeKind{ledger.OutcomeRetry, ledger.OutcomeFailed} {
			report[0].Others = append(report[0].Others, other(kind, run[i+1], 0)[0].Others...)
		}
		return w.reporting(report)
	}},
	{"outcome of a group's last job", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Mode: ledger.AppendSeal, Jobs: jobs(1)})
		return w.reporting(done(w.begin("T", "c", 1)...))
	}},
	{"reclaim", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 2)
		w.begin("T", "c", 1)
		w.admit("T", 1, noLimit)
		w.read("T", "c")
		return w.reclaiming(3)
	}},
	{"reclaim a job that lost too many workers", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Mode: ledger.AppendSeal, Jobs: jobs(1)})
		w.begin("T", "c", 1)
		return w.reclaiming(0)
	}},
	{"reclaim what can't be read", false, func(w *world) act {
		w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: w.p.Ready("T"), Values: []string{"j", "nonsense"}})
		w.consumerGroup(w.p.Ready("T"), keyspace.GroupWorkers)
		w.c.XReadGroup(w.Context(), &redis.XReadGroupArgs{Group: keyspace.GroupWorkers, Consumer: "c", Streams: []string{w.p.Ready("T"), ">"}})
		return w.reclaiming(3)
	}},
	{"reduce", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Mode: ledger.AppendSeal, Jobs: jobs(2)})
		w.outcome("T", done(w.begin("T", "c", 2)...))
		return w.reducing(w.readResults(1)[0])
	}},
	{"reduce a group that is gone", false, func(w *world) act {
		w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: w.p.ResultStream(), Values: []string{"g", "gone", "l", `{"ordinal":0}`, "t", ""}})
		return w.reducing(w.readResults(1)[0])
	}},
	{"advance", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.seal("g")
		fence := w.fence()
		w.c.SAdd(w.Context(), w.p.Active(), "acme") // a state that a torn script may leave
		w.c.HSet(w.Context(), w.p.Tenant("acme"), "active", 1)
		return func() error {
			_, err := ledger.Advance(w.Context(), w.c, w.p, "g", fence)
			return err
		}
	}},
	{"reduce failures", false, func(w *world) act {
		w.create("g", "acme", "T", "reduce_failures", "1")
		w.append("g", 1)
		w.seal("g")
		w.outcome("T", other(ledger.OutcomeFailed, w.begin("T", "c", 1)[0], 0))
		w.advance("g")
		return func() error {
			a := ledger.AdvanceReply{Failures: 1, Round: 1}
			return ledger.ReduceFailures(w.Context(), w.c, w.p, "g", a, []byte("state"))
		}
	}},
	{"cancel", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: append(jobs(2), ledger.NewJob{Type: "U", Payload: []byte("1")})})
		return func() error { return ledger.Cancel(w.Context(), w.c, w.p, "g") }
	}},
	{"cancel a group that is held", false, func(w *world) act {
		w.hold("g", 2)
		return func() error { return ledger.Cancel(w.Context(), w.c, w.p, "g") }
	}},
	{"sweep the states", false, func(w *world) act {
		w.everywhere("g")
		w.cancel("g")
		return w.sweeping("g")
	}},
	{"sweep what is non-ready", false, func(w *world) act {
		w.everywhere("g")
		w.cancel("g")
		require.NoError(w, w.sweeping("g")())
		return w.sweeping("g")
	}},
	{"reopen", true, func(w *world) act {
		w.failed("g", 2)
		return func() error {
			_, err := ledger.Reopen(w.Context(), w.c, w.p, "g", "", ledger.RetryChoice{})
			return err
		}
	}},
	{"requeue", true, func(w *world) act {
		w.failed("g", 2)
		_, err := ledger.Reopen(w.Context(), w.c, w.p, "g", "", ledger.RetryChoice{})
		require.NoError(w, err)
		return func() error {
			_, err := ledger.Requeue(w.Context(), w.c, w.p, "g")
			return err
		}
	}},
	{"requeue jobs that had errors before", true, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 1)
		w.seal("g")
		w.outcome("T", other(ledger.OutcomeFailed, w.retried("T", w.begin("T", "c", 1)...)[0], 0))
		w.advance("g")
		_, err := ledger.Reopen(w.Context(), w.c, w.p, "g", "", ledger.RetryChoice{})
		require.NoError(w, err)
		return func() error {
			_, err := ledger.Requeue(w.Context(), w.c, w.p, "g")
			return err
		}
	}},
	{"lead", false, func(w *world) act {
		return func() error {
			_, err := ledger.Lead(w.Context(), w.c, w.p, "w1", time.Minute)
			return err
		}
	}},
	{"expire", false, func(w *world) act {
		w.failed("g", 2)
		fence := w.fence()
		w.c.SAdd(w.Context(), w.p.Dirty(), "g")
		w.c.SAdd(w.Context(), w.p.Active(), "acme")
		return func() error { return ledger.Expire(w.Context(), w.c, w.p, "g", fence, false) }
	}},
	{"expire results", false, func(w *world) act {
		w.failed("g", 2)
		fence := w.fence()
		return func() error { return ledger.Expire(w.Context(), w.c, w.p, "g", fence, true) }
	}},
	{"retire", false, func(w *world) act {
		w.failed("g", 1)
		w.c.Del(w.Context(), w.p.Ready("T"))
		return func() error {
			_, err := ledger.Retire(w.Context(), w.c, w.p, "T", time.Now().Add(time.Hour))
			return err
		}
	}},
}
