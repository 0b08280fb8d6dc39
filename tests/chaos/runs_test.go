package chaos

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
)

// execution is one run of a job, as the worker process recorded it in its file.
type execution struct {
	process string
	attempt int
	began   time.Time
	how     string // end, fail, cut or crash; "" if the file does not say more
	ended   time.Time
}

// readRuns reads the files in which workers record what they ran: evidence that does not depend on
// Redis. It returns the runs by job.
func readRuns(folder string) (map[string][]execution, error) {
	files, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	jobs := map[string][]execution{}
	for _, f := range files {
		if err := readFile(jobs, folder, f.Name()); err != nil {
			return nil, fmt.Errorf("read runs of %s: %w", f.Name(), err)
		}
	}
	return jobs, nil
}

func readFile(jobs map[string][]execution, folder, name string) error {
	f, err := os.Open(filepath.Join(folder, name))
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var what, job string
		var attempt int
		var nano int64
		if _, err := fmt.Sscan(lines.Text(), &what, &job, &attempt, &nano); err != nil {
			return fmt.Errorf("line %q: %w", lines.Text(), err)
		}
		at := time.Unix(0, nano)
		if what == "start" {
			jobs[job] = append(jobs[job], execution{process: name, attempt: attempt, began: at})
			continue
		}
		runs := jobs[job]
		i := slices.IndexFunc(runs, func(r execution) bool { return r.process == name && r.attempt == attempt && r.how == "" })
		if i < 0 {
			return fmt.Errorf("line %q: its start is missing", lines.Text())
		}
		runs[i].how, runs[i].ended = what, at
	}
	return lines.Err()
}

// recoveries returns, for each run that was interrupted and did not count, the time from the loss
// of its process to the next start of the job. Without a next start it returns nothing for the run.
func recoveries(jobs map[string][]execution, spans []span) []time.Duration {
	lost := map[string][]span{}
	for _, s := range spans {
		lost[s.process] = append(lost[s.process], s)
	}
	var all []time.Duration
	for _, runs := range jobs {
		for _, r := range runs {
			at, ok := interrupted(r, lost[r.process])
			if !ok {
				continue
			}
			var next time.Time
			for _, other := range runs {
				if other.began.After(at) && (next.IsZero() || other.began.Before(next)) {
					next = other.began
				}
			}
			went := r.how == "end" || r.how == "fail"              // the run continued when its process did
			if !next.IsZero() && (!went || next.Before(r.ended)) { // otherwise its outcome counted, or its attempt had been taken back
				all = append(all, next.Sub(at))
			}
		}
	}
	return all
}

// interrupted returns whether a run was interrupted, by a crash or because its process was killed
// or suspended, and when.
func interrupted(r execution, spans []span) (time.Time, bool) {
	if r.how == "crash" {
		return r.ended, true
	}
	for _, s := range spans {
		if r.began.Before(s.from) && (r.how == "" || r.ended.After(s.from)) {
			return s.from, true
		}
	}
	return time.Time{}, false
}

// percentile returns the value that the given share (0 to 1) of the values does not exceed; 0
// without values. It sorts the values in place.
func percentile(all []time.Duration, share float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[min(len(all)-1, int(share*float64(len(all))))]
}

var errTooFew = errors.New("there are fewer")

// setting returns the environment variables of all processes. Leases and waits are short, so that
// many of them end during a run.
func setting(lease time.Duration, more map[string]string) map[string]string {
	env := map[string]string{
		"BULKACTION_LEASE": lease.String(),
		// MAX_DELIVERIES is high, because a fault that cuts off a worker for a whole lease counts
		// like a crash, against a job that runs alone. With a fault a second, a job of five seconds
		// loses its worker in every second or third run. Only jobs that always crash may reach this
		// maximum.
		"BULKACTION_MAX_DELIVERIES":               "10",
		"BULKACTION_WORKER_COUNT":                 "8",
		"BULKACTION_WORKER_TIMEOUT":               "200ms",
		"BULKACTION_REDIS_COMMAND_TIMEOUT":        "1s",
		"BULKACTION_REDIS_DIAL_TIMEOUT":           "1s",
		"BULKACTION_REDIS_POOL_MIN_IDLE":          "1",
		"BULKACTION_BACKPRESSURE_GLOBAL_RPS":      "0",
		"BULKACTION_BACKPRESSURE_DEFAULT_BACKOFF": "100ms",
		"BULKACTION_CONGESTION_BASE_BACKOFF":      "100ms",
		"BULKACTION_SHUTDOWN_GRACE_PERIOD":        "10s",
		"BULKACTION_LOG_LEVEL":                    "warn",
	}
	maps.Copy(env, more)
	return env
}

// many is the number of processes of each role. There are more workers than others, because each
// job that was in flight in a lost worker runs alone in a process afterwards (isolation).
var many = map[string]int{"aggregator": 2, "watcher": 2, "worker": 6, "dispatcher": 2, "fetcher": 2, "ingest": 2}

// endWithin is how long groups may take to end after all faults have ended.
const endWithin = 60 * time.Second

// world has all parts of a phase: a fleet on a Redis, the producers, the oracle and the breaker. On
// a Redis Cluster or with Sentinel there are no proxies and breaker is nil; see elsewhere.
type world struct {
	t         testing.TB
	breaker   *breaker
	fleet     *fleet
	oracle    *oracle
	producers *producers
	phase     *phase
	began     time.Time
}

// scene is the set-up of a world.
type scene struct {
	name     string
	bins     binaries
	lease    time.Duration
	proxies  int               // proxies in front of Redis
	replicas map[string]int    // processes of each role
	env      map[string]string // settings of all processes, beside those of setting
}

// newWorld starts the parts of a phase on a new redis-server with an append-only file.
func newWorld(t testing.TB, s scene) *world {
	t.Helper()
	server, err := redisproc.Start(t.Context(), proctest.Apply(redisproc.Options{AOF: true}, proctest.Users(t)))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Close()) })
	b, err := newBreaker(server, s.lease, s.proxies)
	require.NoError(t, err)
	t.Cleanup(b.close)
	w := &world{t: t, breaker: b, phase: newPhase(s.name), began: time.Now()}
	w.start(s, b.url, server.URL(), 1)
	b.fleet = w.fleet
	b.admin = newAdministrator(w, s.lease)
	b.clients = &misbehaving{admin: b.admin, producers: w.producers, answers: map[string]int{}}
	return w
}

// start starts the roles, the producers and the oracle. url returns the Redis URL of the i-th
// process; direct is the URL without a proxy, for the oracle.
func (w *world) start(s scene, url func(int) string, direct string, partitions int) {
	w.t.Helper()
	w.fleet = startFleet(w.t, s.bins, s.replicas, setting(s.lease, s.env), url)
	var err error
	w.oracle, err = newOracle(w.t.Context(), w.fleet, direct, partitions)
	require.NoError(w.t, err)
	w.t.Cleanup(func() { _ = w.oracle.conn.Close() })
	stream, err := producer.New(w.t.Context(), proctest.AsUser("producer", url(0)))
	require.NoError(w.t, err)
	w.t.Cleanup(func() { _ = stream.Close() })
	w.producers = &producers{fleet: w.fleet, stream: stream, receipts: map[string]int{}}
}

// produce submits groups in the background. wait waits until all are accepted or given up, and
// returns the errors.
func (w *world) produce(ctx context.Context, groups []*group) (wait func() error) {
	done := make(chan error, 1)
	go func() { done <- w.producers.submit(ctx, groups) }()
	return func() error { return <-done }
}

// settle is called when the faults have ended. It waits, up to patience, until all groups have
// ended, runs the audit, judges the groups, and stops the fleet. All that is wrong becomes a
// violation of the phase.
func (w *world) settle(groups []*group, patience time.Duration) *phase {
	w.t.Helper()
	healed := time.Now()
	open := w.oracle.awaitEnded(w.t.Context(), groups, patience, false)
	w.phase.EndedWithin = max(w.phase.EndedWithin, time.Since(healed).Seconds())
	for _, g := range open {
		w.phase.violate("group %s has not ended %s after healing", g.id, patience)
	}
	if w.phase.EndedWithin > endWithin.Seconds() {
		w.phase.violate("it took %.1f s after healing until all had ended", w.phase.EndedWithin)
	}
	require.NoError(w.t, w.oracle.judgeAudit(w.t.Context(), w.phase, w.receipts()))
	w.fleetEnds(groups)
	return w.phase
}

// fleetEnds judges the groups, stops the processes, and adds the violations that occurred while
// they stopped. It requires that Redis has denied no command to a Redis user. It completes the
// phase's number of faults and duration.
func (w *world) fleetEnds(groups []*group) {
	w.t.Helper()
	require.NoError(w.t, w.oracle.judge(w.t.Context(), w.phase, groups))
	w.fleet.shutDown()
	require.NoError(w.t, w.oracle.conn.Shards(w.t.Context(), func(_ context.Context, shard redis.UniversalClient) error {
		proctest.RequireNoDenial(w.t, shard)
		return nil
	}))
	w.phase.Violations = append(w.phase.Violations, w.fleet.violations...)
	if w.breaker != nil {
		for kind, n := range w.breaker.done {
			w.phase.Faults[kind] += n
		}
	}
	w.phase.Seconds = time.Since(w.began).Seconds()
}

// single runs a phase on one redis-server. It causes the faults in kinds during m.during.
func single(t testing.TB, s scene, rng *rand.Rand, m mix, kinds counts) *phase {
	w := newWorld(t, s)
	groups := plan(rng, "single", m)
	produced := w.produce(t.Context(), groups)
	require.NoError(t, w.breaker.run(t.Context(), schedule(rng, kinds, m.during)))
	require.NoError(t, produced())
	r := w.settle(groups, 2*endWithin)
	if r.red() {
		t.Logf("faults:\n%s", strings.Join(w.breaker.log, "\n"))
		rejected, err := w.oracle.conn.Cmd.XRangeN(t.Context(), w.oracle.space.Rejected(), "-", "+", 10).Result()
		t.Logf("rejected messages: %.2000v, %v", rejected, err)
	}
	return r
}

// lossy runs a phase in which the proxies drop 5% of Redis's replies until all groups have ended,
// which may take 5 minutes.
func lossy(t testing.TB, s scene, rng *rand.Rand, m mix) *phase {
	w := newWorld(t, s)
	for i, p := range w.breaker.proxies {
		p.DropReplies(0.05, rand.New(rand.NewPCG(rng.Uint64(), uint64(i))))
	}
	groups := plan(rng, "lossy", m)
	require.NoError(t, w.produce(t.Context(), groups)())
	open := w.oracle.awaitEnded(t.Context(), groups, 5*time.Minute, false)
	require.Empty(t, open, "not ended while replies are lost")
	for _, p := range w.breaker.proxies {
		w.phase.Faults["lost_replies"] += p.Dropped()
		p.Heal()
	}
	return w.settle(groups, 2*endWithin)
}

// rolling runs a phase in which, several times under load, one process of every role is replaced at
// the same time, with SIGTERM. Each process must end within the constant grace, with exit code 0.
// In the end there may be one connection for each slot more than at the start.
func rolling(t testing.TB, s scene, rng *rand.Rand, m mix, rounds int) *phase {
	w := newWorld(t, s)
	before := w.connections()
	groups := plan(rng, "rolling", m)
	produced := w.produce(t.Context(), groups)
	for round := range rounds {
		w.replaceAll(round)
	}
	require.NoError(t, produced())
	require.Empty(t, w.oracle.awaitEnded(t.Context(), groups, 2*endWithin, false), "not ended after the last restart")
	// Connection pools grow under load, so two processes of each role, which are all but some
	// workers, are replaced once more. The idle processes may then have as many connections as at
	// the start, and one for each process.
	for place := range 2 {
		w.replaceAll(place)
	}
	require.NoError(t, redisx.Sleep(t.Context(), time.Second))
	if after := w.connections(); after > before+len(w.fleet.slots) { // every stopped process would have leaked
		w.phase.violate("%d connections to Redis are open after all restarts, %d were before", after, before)
	}
	return w.settle(groups, 2*endWithin)
}

// replaceAll replaces one process of each role.
func (w *world) replaceAll(round int) {
	w.t.Helper()
	var under sync.WaitGroup
	var mu sync.Mutex
	byRole := map[string]int{}
	for _, s := range w.fleet.slots {
		place := byRole[s.role]
		byRole[s.role]++
		if place != round%many[s.role] {
			continue
		}
		under.Go(func() {
			took, err := s.replace(w.t.Context())
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				w.phase.violate("replace a %s: %v", s.role, err)
			}
			w.phase.Faults[replaceRole]++
			w.phase.SlowestStop = max(w.phase.SlowestStop, took.Seconds())
		})
	}
	under.Wait()
}

// replace stops the slot's process with SIGTERM, starts another, and returns how long the stop
// took. A process that still runs after grace is killed. In that case, or if the exit code is not
// 0, it starts no other process and returns an error.
func (s *slot) replace(ctx context.Context) (time.Duration, error) {
	p := s.running(ctx)
	if p == nil {
		return 0, ctx.Err()
	}
	s.mu.Lock()
	p.replaced = true
	s.mu.Unlock()
	asked := time.Now()
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return 0, err
	}
	select {
	case <-p.Done():
	case <-time.After(grace):
		p.Kill()
		return time.Since(asked), fmt.Errorf("%s still ran after %s: %s", p.name, grace, p.log)
	}
	took := time.Since(asked)
	if code := p.State().ExitCode(); code != 0 {
		return took, fmt.Errorf("%s ended with code %d: %s", p.name, code, p.log)
	}
	return took, s.start()
}

// connections returns the largest number of connections that all role processes together had open
// to Redis during two seconds. It recognizes them by their client names.
func (w *world) connections() (most int) {
	w.t.Helper()
	for range 20 {
		list, err := w.breaker.rdb.ClientList(w.t.Context()).Result()
		require.NoError(w.t, err)
		most = max(most, strings.Count(list, " name=")-strings.Count(list, " name= ")-strings.Count(list, " name=bulkaction-producer"))
		require.NoError(w.t, redisx.Sleep(w.t.Context(), 100*time.Millisecond))
	}
	return most
}
