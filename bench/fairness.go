package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

// fairness measures how tenants, weights and lanes share the workers.
type fairness struct {
	options
	noisyJobs int
	seed      uint64 // of the random times at which small groups are submitted
	overrides values // by part; see options.overrides
}

var fairnessBenchmark = benchmark{
	"fairness", "Small tenants beside a noisy one, weights, lanes, and what fairness costs",
	func(f *flags) runner {
		x := &fairness{overrides: values{}}
		f.int(&x.noisyJobs, "noisy-jobs", 200_000, 2000, 0, "jobs of the noisy tenant, which run as long as the small groups")
		f.Uint64Var(&x.seed, "seed", 1, "seed of the random times at which small tenants submit")
		parts := f.parts(
			part{"noisy", x.noisy}, part{"long", x.long}, part{"weights", x.weights}, part{"lanes", x.lanes},
			part{"behind", x.behind}, part{"cost", x.cost}, part{"idle", x.idle}, part{"retry-after", x.retryAfter})
		f.redis()
		return func(ctx context.Context, o options) (any, error) {
			x.options = o
			out, err := runParts(ctx, o, parts(), true)
			return out.with(values{"overrides": x.overrides}), err
		}
	},
}

// experiment runs an experiment of a part, and stores the settings of its fleet.
func (x *fairness) experiment(ctx context.Context, part string, workers int, load func(*run), env ...string) *run {
	o := x.options
	o.replicas = map[string]int{"worker": workers}
	r := o.experiment(ctx, part, load, env...)
	if _, first := x.overrides[part]; !first {
		x.overrides[part] = r.overrides
	}
	return r
}

// Size of the small groups, which is the same in all parts.
const (
	smallJobs    = 20
	smallSleepMS = 10
)

func (r *run) smallGroup(kind string, i int, tenant string) group {
	return group{
		id: fmt.Sprintf("%s-%s-%d", r.name, kind, i), tenant: tenant, jobs: smallJobs, job: sleeping(smallSleepMS),
	}
}

// runOneByOne submits n small groups, each when the previous one is completed. It returns the
// seconds that each took from its acceptance to COMPLETED. kind becomes part of the groups' ids.
func (r *run) runOneByOne(ctx context.Context, kind string, n int, tenant func(i int) string) []float64 {
	took := make([]float64, n)
	for i := range took {
		g := r.smallGroup(kind, i, tenant(i))
		check(r.submit(ctx, g))
		took[i] = must(r.awaitDone(ctx, "alone", []group{g}))[0].seconds()
	}
	return took
}

// runAlone returns the seconds that each of n small groups takes when they run one after the other
// and nothing else runs. It runs a few more groups first, to warm up.
func (r *run) runAlone(ctx context.Context, kind string, n int, tenant func(i int) string) []float64 {
	const warm = 3
	return r.runOneByOne(ctx, kind, warm+n, tenant)[warm:]
}

const (
	smallTenants = 99
	longFactor   = 50
	longJobs     = 800 // noisy jobs for each worker process
	// longProcesses is the number of worker processes in the part with long jobs. A single one has
	// so few slots that long jobs would leave hardly any to other tenants.
	longProcesses = 4
)

// noisyRun has the figures of one run: the seconds that small groups took alone and beside the
// noisy tenant, each in ascending order, and the jobs a second of all groups. Of two measurements
// of groups alone, before and after, that with the lower p99 counts: other work on the machine may
// have slowed down the other one, and the ratio would be too small.
type noisyRun struct {
	alone, beside []float64
	jobsPerSecond float64
}

func (n noisyRun) p99s() (beside, alone, ratioOf float64) {
	beside, alone = percentile(n.beside, 99), percentile(n.alone, 99)
	return beside, alone, ratio(beside, alone)
}

func (x *fairness) besideNoisy(ctx context.Context, part string, noisyJobs, sleepMS, workers int) (out noisyRun) {
	var ended []groupState
	alone := func(i int) string { return fmt.Sprintf("alone-%d", i) }
	x.experiment(ctx, part, workers, func(r *run) {
		first := r.runAlone(ctx, "alone", smallTenants, alone)
		earlier := len(r.groups)
		check(r.submit(ctx, group{id: r.name + "-noisy", tenant: "noisy", jobs: noisyJobs, job: sleeping(sleepMS)}))
		lasts := time.Duration(noisyJobs*sleepMS/r.workerSlots()/workers) * time.Millisecond
		check(r.submitWhenDue(ctx, smallGroupsAtRandom(r, lasts, x.seed)))
		ended = must(r.awaitDone(ctx, part, r.groups[earlier:]))
		second := r.runAlone(ctx, "again", smallTenants, alone)
		out.alone = slices.MinFunc([][]float64{first, second}, func(a, b []float64) int {
			return cmp.Compare(percentile(a, 99), percentile(b, 99))
		})
	}, noGlobalLimit)
	if last := lastEnded(ended); last.tenant != "noisy" {
		failf("group %s ended after the noisy group, so it did not run beside it all the time: raise --noisy-jobs", last.id)
	}
	for _, g := range ended[1:] {
		out.beside = append(out.beside, g.seconds())
	}
	slices.Sort(out.beside)
	slices.Sort(out.alone)
	out.jobsPerSecond = float64(noisyJobs+smallTenants*smallJobs) / makespan(ended)
	return out
}

// smallGroupsAtRandom returns the groups of the small tenants, each with a random time of
// submission while the noisy tenant has work. lasts is the least time that its work takes. The same
// seed gives the same times.
func smallGroupsAtRandom(r *run, lasts time.Duration, seed uint64) []delayedGroup {
	random := rand.New(rand.NewPCG(seed, seed))
	out := make([]delayedGroup, smallTenants)
	for i := range out {
		after := time.Duration((0.05 + 0.85*random.Float64()) * float64(lasts))
		out[i] = delayedGroup{after, r.smallGroup("small", i, fmt.Sprintf("small-%d", i))}
	}
	slices.SortFunc(out, byTime)
	return out
}

// noisy compares how long groups of small tenants take beside a noisy tenant, whose backlog keeps
// all workers busy, and alone. Times are from accepted to COMPLETED.
func (x *fairness) noisy(ctx context.Context) values {
	n := x.besideNoisy(ctx, "noisy", x.noisyJobs, smallSleepMS, 1)
	jobs := x.noisyJobs + smallTenants*smallJobs
	// The same number of jobs in one group, alone: fairness has nothing to do.
	r := x.options.experiment(ctx, "unfair", func(r *run) {
		r.runAlone(ctx, "alone", 1, named("warm"))
		check(r.submit(ctx, group{id: r.name + "-alone", tenant: "alone", jobs: jobs, job: sleeping(smallSleepMS)}))
	}, noGlobalLimit)
	oneGroup := float64(jobs) / makespan(r.ended[len(r.ended)-1:])
	beside, alone, ratioOf := n.p99s()
	return values{
		"noisy_jobs": x.noisyJobs, "small_tenants": smallTenants,
		"small_p50_seconds": percentile(n.beside, 50), "small_p99_seconds": beside,
		"small_solo_p50_seconds": percentile(n.alone, 50), "small_solo_p99_seconds": alone,
		"small_ratio":     ratioOf,
		"jobs_per_second": round2(n.jobsPerSecond), "unfair_jobs_per_second": round2(oneGroup),
		"throughput_ratio": ratio(n.jobsPerSecond, oneGroup),
		"small_seconds":    n.beside, "small_solo_seconds": n.alone, // of each small group, in ascending order
	}
}

// long is like noisy, but each job of the noisy tenant takes 50 times as long as a job of a small
// one. It runs again with one worker process and a quarter of the noisy jobs.
func (x *fairness) long(ctx context.Context) values {
	n := x.besideNoisy(ctx, "long", longJobs*longProcesses, longFactor*smallSleepMS, longProcesses)
	_, _, ratioOne := x.besideNoisy(ctx, "long", longJobs, longFactor*smallSleepMS, 1).p99s()
	beside, alone, ratioOf := n.p99s()
	return values{
		"long_worker_processes": longProcesses, "long_noisy_jobs": longJobs * longProcesses,
		"long_small_p50_seconds": percentile(n.beside, 50), "long_small_p99_seconds": beside,
		"long_small_solo_p99_seconds": alone, "long_ratio": ratioOf, "long_ratio_one_process": ratioOne,
		"long_small_seconds": n.beside, "long_small_solo_seconds": n.alone,
	}
}

// spanMargin is cut off at both ends of the time in which all groups have work, before starts are
// counted.
const spanMargin = time.Second

// busySpan is the time, from and to (µs), in which all groups have work, and how many jobs of each
// group started in it.
type busySpan struct {
	from, to int64
	counts   []int64
}

// findBusySpan finds the span in which all groups have work: from the first start of the group that
// begins last to the last start of the group that ends first. It cuts spanMargin off at both ends.
func findBusySpan(log journalLog, groups []group) (busySpan, error) {
	s := busySpan{from: math.MinInt64, to: math.MaxInt64}
	starts := make([][]event, len(groups))
	for i, g := range groups {
		starts[i] = log.startEvents(g.id)
		if len(starts[i]) == 0 {
			return s, fmt.Errorf("count starts of group %s: no start was logged", g.id)
		}
		s.from, s.to = max(s.from, starts[i][0].at), min(s.to, starts[i][len(starts[i])-1].at)
	}
	s.from, s.to = s.from+spanMargin.Microseconds(), s.to-spanMargin.Microseconds()
	if s.to <= s.from {
		return s, errors.New("count starts: the groups had work at the same time for less than two seconds")
	}
	for i := range groups {
		s.counts = append(s.counts, sumBetween(starts[i], s.from, s.to))
	}
	return s, nil
}

// competing runs groups of 4,000 jobs that compete for the workers; prepare sets what is each one's
// own. It returns how many jobs of each started while all had work.
func (x *fairness) competing(ctx context.Context, part string, n int, prepare func(r *run, i int, g *group)) []int64 {
	r := x.experiment(ctx, part, 1, func(r *run) {
		groups := divideJobs(r.name, 4000*n, n, 1, sleeping(smallSleepMS))
		for i := range groups {
			prepare(r, i, &groups[i])
		}
		check(r.submit(ctx, groups...))
	}, noGlobalLimit)
	return must(findBusySpan(r.log, r.groups)).counts
}

// weights measures the shares that three tenants with the weights 1, 2 and 4 get of the starts of
// jobs while all of them have work. weight_error is the largest relative deviation from the share
// that its weight gives.
func (x *fairness) weights(ctx context.Context) values {
	weights := []float64{1, 2, 4}
	counts := x.competing(ctx, "weights", len(weights), func(r *run, i int, g *group) {
		check(r.setTenant(ctx, g.tenant, ledger.TenantSettings{Weight: &weights[i]}))
	})
	shares, starts := sharesOf(counts)
	return values{
		"weight_error": worstDeviation(counts, weights), "weight_shares": shares, "weight_starts": starts,
	}
}

// lanes measures the shares that the lanes high, normal and low get, as weights does.
func (x *fairness) lanes(ctx context.Context) values {
	counts := x.competing(ctx, "lanes", 3, func(_ *run, i int, g *group) {
		g.fields = values{"priority": []string{"high", "normal", "low"}[i]}
	})
	shares, starts := sharesOf(counts)
	return values{
		"lane_error": worstDeviation(counts, []float64{6, 3, 1}), "lane_shares": shares, "lane_starts": starts,
		"low_lane_starts": counts[2],
	}
}

// behind measures how long small groups take when a huge group of the same tenant was submitted
// before them.
func (x *fairness) behind(ctx context.Context) values {
	const smallGroups, hugeJobs = 20, 100_000
	var alone, behind []float64
	var left int64
	x.experiment(ctx, "behind", 1, func(r *run) {
		alone = r.runAlone(ctx, "alone", smallGroups, named("one"))
		huge := group{id: r.name + "-huge", tenant: "one", jobs: hugeJobs, job: sleeping(1)}
		check(r.submit(ctx, huge))
		must(r.awaitAccepted(ctx, huge))
		behind = r.runOneByOne(ctx, "behind", smallGroups, named("one"))
		now := must(r.states(ctx, []group{huge}))
		if left = now[0].Counts.Accepted - now[0].Counts.Done; left == 0 {
			failf("the huge group ended before the small groups, so they did not run behind it")
		}
	}, noGlobalLimit)
	return values{
		"behind_huge_jobs":   hugeJobs,
		"behind_p50_seconds": percentile(behind, 50), "behind_max_seconds": slices.Max(behind),
		"behind_solo_max_seconds": slices.Max(alone), "behind_ratio": ratio(slices.Max(behind), slices.Max(alone)),
		"behind_huge_jobs_left": left, // when the last small group ended
		"behind_seconds":        behind, "behind_solo_seconds_each": alone,
	}
}

const (
	costAdmits  = 10_000 // jobs that are admitted while the cost is measured
	costWarm    = 1000   // jobs that are admitted before
	costBatch   = 50     // the default of FETCH_BATCH_SIZE
	costClients = 16     // goroutines that fill the queues
)

// cost compares what admitting a job costs Redis while few, more and very many tenants have waiting
// jobs.
func (x *fairness) cost(ctx context.Context) values {
	var all []values
	var costs []float64
	for _, tenants := range []int{10, 1000, 100_000} {
		// With few tenants each gets more jobs, so that no queue runs empty.
		waiting := max(20, 2*(costWarm+costAdmits)/tenants)
		c := x.costOf(ctx, tenants, waiting)
		costs = append(costs, c)
		all = append(all, values{"tenants": tenants, "jobs_per_tenant": waiting, "redis_cpu_us_per_job": c})
	}
	x.overrides["cost"] = values{}
	return values{"admit_cost": all, "admit_cost_ratio": ratio(costs[2], costs[0]), "admit_batch": costBatch}
}

// costOf fills the fair queue of a private redis-server without roles: each tenant gets a group of
// waiting jobs. Then it admits jobs, and returns the CPU time (µs) of Redis for each.
func (x *fairness) costOf(ctx context.Context, tenants, waiting int) float64 {
	f := startRedis(ctx, options{})
	defer f.close()
	partition := must(keyspace.New("bulk-action:", 1)).Partition(0)
	clients, filling := errgroup.WithContext(ctx)
	clients.SetLimit(costClients)
	for i := range tenants {
		if i%1000 == 0 {
			x.show("cost", i, tenants)
		}
		clients.Go(func() error {
			group := "group-" + strconv.Itoa(i)
			_, err := ledger.Create(filling, f.conn.Cmd, partition, ledger.CreateArgs{
				Group: group, Tenant: "tenant-" + strconv.Itoa(i), Type: "NOOP", Hash: "-",
				Fields: map[string]string{"lane": "normal"},
			})
			for left := waiting; left > 0 && err == nil; left -= ledger.MaxAppend {
				jobs := slices.Repeat([]ledger.NewJob{{Payload: []byte("{}")}}, min(left, ledger.MaxAppend))
				_, err = ledger.Append(filling, f.conn.Cmd, partition, ledger.AppendArgs{Group: group, Limit: 1 << 30, Jobs: jobs})
			}
			return err
		})
	}
	check(clients.Wait())
	// The global limit is never reached. Permits are counted against it all the same, as in an
	// installation with default settings.
	meter := ledger.Meter{Window: time.Second}
	must(ledger.SetParts(ctx, f.conn.Cmd, partition, ledger.Order{}, meter, []ledger.Limit{{Total: 1_000_000_000}},
		ledger.Terms{Share: ledger.ShareElastic, Partitions: 1, To: []ledger.Increase{{To: 1_000_000_000}}}))
	admit := func(least int) (jobs int) {
		for jobs < least {
			r := must(ledger.Admit(ctx, f.conn.Cmd, partition, ledger.AdmitArgs{
				Type: "NOOP", Most: costBatch, Cap: 1 << 30, Meter: meter, Seed: "00000000", LaneWeights: [3]int{6, 3, 1},
			}))
			if jobs += r.Moved; r.Moved == 0 {
				failf("admit: no job was admitted from full queues after %d jobs", jobs)
			}
		}
		return jobs
	}
	admit(costWarm) // also loads the script into Redis
	var jobs int
	u := f.measure(ctx, func() { jobs = admit(costAdmits) })
	return perJob(u.redis.cpu, jobs)
}

// idle counts the commands a second that idle role processes send to Redis; in all, those of the
// process that sends the most.
func (x *fairness) idle(ctx context.Context) values {
	const settle, span = 3 * time.Second, 10 * time.Second
	byRole, most := map[string]float64{}, 0.0
	x.experiment(ctx, "idle", 1, func(r *run) {
		// One small group runs first: a worker that has run jobs behaves differently while idle
		// than one that never has.
		r.runOneByOne(ctx, "warm", 1, named("warm"))
		check(redisx.Sleep(ctx, settle))
		// The names of clients are read twice, for connections that are opened in between.
		names := map[string]string{}
		check(clientNames(ctx, r.conn, names))
		counts := countCommands(ctx, r.url, span)
		check(clientNames(ctx, r.conn, names))
		for _, p := range r.procs { // one process of each role
			n := 0
			for c, count := range counts {
				if strings.Contains(names[c.addr], fmt.Sprintf("-%d-", p.PID())) {
					n += count
				}
			}
			byRole[p.role] = round2(float64(n) / span.Seconds())
			most = max(most, byRole[p.role])
		}
		if most == 0 {
			failf("count commands: no process sent any")
		}
	})
	return values{"idle_commands_per_second": most, "idle_commands_per_second_by_role": byRole}
}

// clientNames reads the list of Redis's clients, and adds to names the name of each, by its
// address.
func clientNames(ctx context.Context, conn *redisx.Conn, names map[string]string) error {
	return conn.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		list, err := shard.ClientList(ctx).Result()
		for line := range strings.Lines(list) {
			fields := map[string]string{}
			for field := range strings.FieldsSeq(line) {
				name, value, _ := strings.Cut(field, "=")
				fields[name] = value
			}
			names[fields["addr"]] = fields["name"]
		}
		return err
	})
}

const (
	retryClients = 40
	retryBatches = 6 // groups of each client
)

// tryResult is the answer to one try of a client.
type tryResult struct {
	afterWait  bool // the client has waited as a refusal asked
	accepted   bool
	retryAfter time.Duration
}

// retryAfter shows whether a client that was refused with 429 is accepted on its next try if it
// waits exactly as long as Retry-After says. The workers' speed falls if clients are told to wait
// too long, because workers are idle then.
func (x *fairness) retryAfter(ctx context.Context) values {
	const maxBacklog = 2000
	addr := childproc.FreeAddr()
	var tries []tryResult
	r := x.experiment(ctx, "retry-after", 1, func(r *run) {
		r.api = client.NewAPI("http://"+addr, client.WithRetry(1, 0))
		check(r.awaitHTTP(ctx, "http://"+addr+"/v1/stats"))
		// A small group runs first: ingest computes Retry-After from the speed of the workers,
		// which it knows only after they have run jobs.
		r.runOneByOne(ctx, "warm", 1, named("warm"))
		var mu sync.Mutex // of tries and r.groups
		clients, sending := errgroup.WithContext(ctx)
		for i := range retryClients {
			clients.Go(func() error {
				random := rand.New(rand.NewPCG(x.seed, uint64(i)))
				return r.submitPatiently(sending, fmt.Sprintf("client-%d", i), random, func(g group, t tryResult) {
					mu.Lock()
					defer mu.Unlock()
					if tries = append(tries, t); t.accepted {
						r.groups = append(r.groups, g)
					}
				})
			})
		}
		check(clients.Wait())
	}, "BULKACTION_API_ADDR="+addr, fmt.Sprintf("BULKACTION_INGEST_MAX_BACKLOG=%d", maxBacklog))
	out := countTries(tries)
	if out["retry_after_tries"] == 0 {
		failf("no client was refused: the backlog was never full")
	}
	jobs := 0
	for _, g := range r.groups[1:] {
		jobs += g.jobs
	}
	out["retry_after_max_backlog"] = maxBacklog
	out["retry_after_jobs_per_second"] = round2(float64(jobs) / makespan(r.ended[1:]))
	return out
}

// submitPatiently submits groups over HTTP. When it is refused, it waits as long as Retry-After says
// and tries again. It calls note with each try.
func (r *run) submitPatiently(ctx context.Context, tenant string, random *rand.Rand, note func(group, tryResult)) error {
	for b := range retryBatches {
		wait := time.Duration(random.IntN(1000)) * time.Millisecond
		g := group{
			id: fmt.Sprintf("%s-%s-%d", r.name, tenant, b), tenant: tenant, jobs: 50 + random.IntN(100),
			job: sleeping(smallSleepMS),
		}
		for t := (tryResult{}); !t.accepted; wait = t.retryAfter {
			if err := redisx.Sleep(ctx, wait); err != nil {
				return err
			}
			after := t.retryAfter > 0
			var err error
			if t, err = r.try(ctx, g); err != nil {
				return fmt.Errorf("post group %s: %w", g.id, err)
			}
			t.afterWait = after
			note(g, t)
		}
	}
	return nil
}

// try submits a group over HTTP, once.
func (r *run) try(ctx context.Context, g group) (tryResult, error) {
	body, err := g.complete(0)
	if err != nil {
		return tryResult{}, err
	}
	_, err = r.api.SubmitJSON(ctx, body)
	refused, ok := errors.AsType[*client.Error](err)
	if !ok || refused.Status != http.StatusTooManyRequests {
		return tryResult{accepted: true}, err
	}
	if refused.RetryAfter < time.Second {
		return tryResult{}, fmt.Errorf("refused with a Retry-After of %s", refused.RetryAfter)
	}
	return tryResult{retryAfter: refused.RetryAfter}, nil
}

func countTries(all []tryResult) values {
	accepted, tries, first, refused := 0, 0, 0, 0
	var waits []float64
	for _, t := range all {
		if !t.accepted {
			waits = append(waits, t.retryAfter.Seconds())
		}
		switch {
		case t.afterWait:
			if tries++; t.accepted {
				accepted++
			}
		default:
			if first++; !t.accepted {
				refused++
			}
		}
	}
	return values{
		"retry_after_accepted_ratio": ratio(accepted, tries), "retry_after_tries": tries,
		"retry_after_first_tries_refused": refused, "retry_after_first_tries": first,
		"retry_after_p50_seconds": percentile(waits, 50), "retry_after_max_seconds": percentile(waits, 100),
	}
}
