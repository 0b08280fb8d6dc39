package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

var operationsBenchmark = benchmark{
	"operations", "One operation retries the failed jobs of many groups, and its owner is killed: do others wait longer",
	func(f *flags) runner {
		var groups, rate, kills int
		f.int(&groups, "groups", 20_000, 100, 0, "groups with a failed job")
		f.int(&rate, "rate", 40, 1, 0, "groups of others, of one job, a second")
		f.int(&kills, "kills", 2, 0, 9, "how often the owner of the operation is killed")
		f.redis()
		return func(ctx context.Context, o options) (any, error) {
			return retryMany(ctx, o, groups, rate, kills), nil
		}
	},
}

// phaseSeconds is how long the operation runs and is paused, by turns: so a machine that is not quiet is
// the same for both. What comes within a second after a pause counts for neither.
const phaseSeconds = 5

// retryMany retries the failed jobs of many groups by one operation, while others submit small groups,
// and compares the start delays of these while the operation runs with those while it is paused.
func retryMany(ctx context.Context, o options, n, rate, kills int) values {
	o.replicas = map[string]int{"watcher": kills + 1}
	x := startWithAPI(ctx, o, true, nil, noGlobalLimit)
	defer x.close()
	failing := smallGroups(x.name+"-f", n, 1, func(i int) string { return fmt.Sprintf("failed-%d", i%10) },
		func(int) []byte { return []byte(`{"payload":{"fail":"permanent"}}`) })
	check(x.submit(ctx, failing...))
	check(x.awaitEnded(ctx, failing))

	op := must(x.api.StartOperation(ctx, api.OperationRequest{
		Do: api.OpRetry, Filter: api.OperationFilter{Prefix: x.name + "-f", FailedJobs: new(true)},
	}))
	working, stop := context.WithCancel(ctx)
	defer stop()
	var others []group
	sending := make(chan error, 1)
	go func() { sending <- attempt("others", func() { others = x.others(ctx, rate, working.Err) }) }()
	kill := make([]int64, 0, kills) // when the owner was killed, in groups that were changed
	running, ran, since := true, 0.0, time.Now()
	phases := []phase{{must(x.now(ctx)), running}}
	check(x.await(ctx, "the operation", 50*time.Millisecond, func() (int, error) {
		if time.Since(since) > phaseSeconds*time.Second {
			do := map[bool]api.OperationCommand{true: api.PauseOperation, false: api.ResumeOperation}[running]
			if _, err := x.api.ControlOperation(ctx, op.ID, do); err == nil { // otherwise it has ended
				if running {
					ran += time.Since(since).Seconds()
				}
				running, since = !running, time.Now()
				phases = append(phases, phase{must(x.now(ctx)), running})
			}
		}
		now, err := x.api.Operation(ctx, op.ID)
		if err != nil || now.State == api.OperationCompleted {
			op = now
			return 0, err
		}
		if len(kill) < kills && running && now.Progress > float64(len(kill)+1)/float64(kills+1) {
			owner := strings.Split(must(x.conn.Cmd.HGet(ctx, x.space.Partition(0).Watch(), "owner").Result()), "-")
			pid := must(strconv.Atoi(owner[len(owner)-2]))
			x.kill(func(p process) bool { return p.PID() == pid })
			kill = append(kill, now.Changed)
		}
		return n + 1 - int(now.Changed), nil
	}))
	ran += time.Since(since).Seconds()
	phases = append(phases, phase{must(x.now(ctx)), false})
	check(x.awaitEnded(ctx, failing))
	stop()
	check(<-sending)

	rounds := 0
	for chunk := range slices.Chunk(failing, 500) {
		for _, g := range must(x.states(ctx, chunk)) {
			if round := must(x.conn.Cmd.HGet(ctx, x.space.OfTenant(g.tenant).Group(g.id), "round").Result()); round == "2" {
				rounds++
			}
		}
	}
	states := must(x.awaitDone(ctx, "", others))
	report := must(audit.Run(ctx, x.conn, x.space, audit.Options{}))
	x.readJournals()
	started, delays := x.log.firstStarts(), map[bool][]float64{}
	for _, g := range states {
		i := len(phases) - 1
		for i > 0 && phases[i].from.After(g.Created) {
			i--
		}
		if p := phases[i]; p.running || g.Created.Sub(p.from) > time.Second {
			delays[p.running] = append(delays[p.running], float64(started[g.id]-g.Created.UnixMicro())/1000)
		}
	}
	p := func(running bool, q float64) float64 {
		ms := append(delays[running], 0) // the operation may end before its first pause
		slices.Sort(ms)
		return round2(ms[min(len(ms)-1, int(q*float64(len(ms))))])
	}
	return values{
		"groups": n, "matched": op.Matched, "changed": op.Changed, "skipped": op.Skipped, "in_round_2": rounds,
		"operation_seconds": round2(ran), "killed_at": kill, "audit_ok": report.OK,
		"others_alone": len(delays[false]), "others_beside": len(delays[true]),
		"alone_p50_ms": p(false, 0.5), "alone_p99_ms": p(false, 0.99), "beside_p50_ms": p(true, 0.5), "beside_p99_ms": p(true, 0.99),
		"p99_ratio": ratio(p(true, 0.99), p(false, 0.99)), "overrides": x.overrides,
	}
}

// phase says whether the operation ran or was paused from a time on.
type phase struct {
	from    time.Time
	running bool
}

// others submits groups of one job, rate a second, until ended returns an error, and returns them.
func (r *run) others(ctx context.Context, rate int, ended func() error) (groups []group) {
	began := time.Now()
	for i := 0; ended() == nil; i++ {
		g := group{id: fmt.Sprintf("%s-o-%d", r.name, i), tenant: fmt.Sprintf("other-%d", i%10), jobs: 1}
		check(r.publishSingle(ctx, g, 0))
		groups = append(groups, g)
		check(redisx.Sleep(ctx, time.Until(began.Add(time.Duration(i+1)*time.Second/time.Duration(rate)))))
	}
	return groups
}

// awaitEnded waits until all these groups have ended.
func (r *run) awaitEnded(ctx context.Context, groups []group) error {
	left := slices.Clone(groups)
	return r.await(ctx, "groups to end", 200*time.Millisecond, func() (int, error) {
		now, err := r.states(ctx, left[:min(len(left), 500)])
		ended := 0
		for ended < len(now) && now[ended].Status.Ended() {
			ended++
		}
		left = left[ended:]
		return len(left), err
	})
}
