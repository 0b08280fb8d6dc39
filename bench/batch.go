package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/processor"
	runworker "github.com/bulkaction/bulkaction/run"
)

var batchBenchmark = benchmark{
	"batch",
	"Batch processors: speed with a bulk API, failures and a killed worker, two tenants, cost of no-op jobs, a poison item",
	func(f *flags) runner {
		var jobs, singles int
		f.int(&jobs, "jobs", 100_000, 100, 0, "jobs of a, c and d; b has a fifth of them, e a hundredth")
		f.int(&singles, "singles", 2000, 1, 0, "jobs of a that are sent one by one")
		var o options
		chosen := f.parts(
			part{"a", func(ctx context.Context) values { return values{"a": batchSpeed(ctx, o, jobs, singles)} }},
			part{"b", func(ctx context.Context) values { return values{"b": batchFaults(ctx, o, jobs/5)} }},
			part{"c", func(ctx context.Context) values { return values{"c": batchTenants(ctx, o, jobs)} }},
			part{"d", func(ctx context.Context) values { return values{"d": batchCost(ctx, o, jobs)} }},
			part{"e", func(ctx context.Context) values { return values{"e": batchPoison(ctx, o, jobs/100)} }},
		)
		return func(ctx context.Context, given options) (any, error) {
			o = given
			o.worker = []string{must(os.Executable()), batchWorkerCommand}
			return runParts(ctx, o, chosen(), false)
		}
	},
}

// batchWorkerCommand is the argument with which this program runs as a worker process.
const batchWorkerCommand = "batch-worker"

const (
	batchSize = 100
	batchHold = 200 * time.Millisecond // of a call of the fake API
	bulkAPI   = "BENCH_BULK_API"       // environment variable of the worker: URL of the fake API
)

// bulkItem is an item of a call of the fake API, and, without ID and Retries, the payload of a job.
type bulkItem struct {
	ID      string `json:"id,omitempty"`
	Retries int    `json:"retries,omitempty"`
	Fails   int    `json:"fails,omitempty"`  // the item fails until its job has had as many retries
	Poison  bool   `json:"poison,omitempty"` // a call with it is refused
}

var errRefused, errItem = errors.New("the API refuses the call"), errors.New("this item fails")

// batchWorker is the main function of a worker process. BULK sends 100 jobs in a call, BULK_ONE one.
func batchWorker() {
	os.Args = os.Args[:1]
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}}
	send := func(ctx context.Context, jobs []processor.BatchJob[bulkItem]) ([]processor.Outcome[any], error) {
		items := make([]bulkItem, len(jobs))
		for i, j := range jobs {
			items[i] = j.Payload
			items[i].ID, items[i].Retries = j.ID(), j.Retries
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, os.Getenv(bulkAPI), bytes.NewReader(must(json.Marshal(items))))
		check(err)
		request.Header.Set("Process", strconv.Itoa(os.Getpid()))
		response, err := client.Do(request)
		if err != nil {
			return nil, err
		}
		defer response.Body.Close()
		switch {
		case response.StatusCode == http.StatusOK:
		case len(jobs) == 1:
			return nil, processor.Permanent("POISON", errRefused)
		default:
			return nil, processor.Retry(processor.CodeBatchRejected, errRefused)
		}
		var failed []bool
		if err := json.NewDecoder(response.Body).Decode(&failed); err != nil {
			return nil, err
		}
		outcomes := make([]processor.Outcome[any], len(failed))
		for i, f := range failed {
			if f {
				outcomes[i].Err = errItem
			}
		}
		return outcomes, nil
	}
	runworker.Worker(
		processor.Batch("BULK", processor.BatchOptions{Size: batchSize}, send),
		processor.Batch("BULK_ONE", processor.BatchOptions{Size: 1}, send),
		processor.Batch("NOOP_BATCH", processor.BatchOptions{Size: batchSize},
			func(_ context.Context, jobs []processor.BatchJob[bulkItem]) ([]processor.Outcome[any], error) {
				return make([]processor.Outcome[any], len(jobs)), nil
			}),
		processor.Typed("NOOP", func(context.Context, processor.Job, bulkItem) (any, error) { return nil, nil }),
	)
}

// bulkService is the fake API. An answer has for each item whether it failed.
type bulkService struct {
	url    string
	server *http.Server
	stuck  int // each so many calls has its effects and gets no answer; 0: none

	mu           sync.Mutex
	calls, alone int                  // alone: with one item
	effects      map[string]int       // by id
	last         map[string]time.Time // the last effect of each id
	running      map[int]bulkCall     // by number
}

type bulkCall struct {
	process string
	items   []bulkItem
}

func startBulkService(stuck int) *bulkService {
	s := &bulkService{stuck: stuck, effects: map[string]int{}, last: map[string]time.Time{}, running: map[int]bulkCall{}}
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	s.url, s.server = "http://"+l.Addr().String()+"/", &http.Server{Handler: s, ReadHeaderTimeout: time.Minute}
	go func() { _ = s.server.Serve(l) }()
	return s
}

func (s *bulkService) close() { _ = s.server.Close() }

func (s *bulkService) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := bulkCall{process: r.Header.Get("Process")}
	_ = json.NewDecoder(r.Body).Decode(&c.items) // a broken request has no items
	s.mu.Lock()
	s.calls++
	n := s.calls
	s.running[n] = c
	if len(c.items) == 1 {
		s.alone++
	}
	s.mu.Unlock()
	<-time.After(batchHold) // also if the caller dies meanwhile
	failed, poison := s.end(n, c.items)
	switch {
	case s.stuck > 0 && n%s.stuck == 0:
		<-r.Context().Done()
	case poison:
		w.WriteHeader(http.StatusUnprocessableEntity)
	default:
		_ = json.NewEncoder(w).Encode(failed)
	}
}

func (s *bulkService) end(n int, items []bulkItem) (failed []bool, poison bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.running, n)
	if slices.ContainsFunc(items, func(i bulkItem) bool { return i.Poison }) {
		return nil, true
	}
	for _, item := range items {
		fails := item.Retries < item.Fails
		if failed = append(failed, fails); !fails {
			s.effects[item.ID]++
			s.last[item.ID] = time.Now()
		}
	}
	return failed, false
}

// bulkGroup returns a group of n jobs of a type. Each so many fail once; 0: none.
func bulkGroup(id, tenant, typ string, n, failing int) group {
	return group{id: id, tenant: tenant, jobs: n, fields: map[string]any{"type": typ}, job: func(i int) []byte {
		if failing > 0 && i%failing == failing-1 {
			return []byte(`{"payload":{"fails":1}}`)
		}
		return []byte(`{"payload":{}}`)
	}}
}

// bulkRun runs what load submits with a fake API, waits for the end of all groups and audits them.
func bulkRun(ctx context.Context, o options, s *bulkService, types string, load func(*run), env ...string) *run {
	x := start(ctx, o, false, append(env, noGlobalLimit, bulkAPI+"="+s.url, "BULKACTION_WORKER_TYPES="+types)...)
	defer x.close()
	load(x)
	x.end(ctx, types)
	return x
}

// batchSpeed compares calls with 100 items with calls of one.
func batchSpeed(ctx context.Context, o options, jobs, singles int) values {
	s := startBulkService(0)
	defer s.close()
	speed := func(typ string, n int) (float64, *run) {
		x := bulkRun(ctx, o, s, typ, func(x *run) { check(x.submit(ctx, bulkGroup(x.name, "tenant", typ, n, 0))) })
		return float64(n) / makespan(x.ended), x
	}
	batches, x := speed("BULK", jobs)
	calls := s.calls
	one, _ := speed("BULK_ONE", singles)
	most := float64(x.workerSlots()*batchSize) / batchHold.Seconds()
	return values{
		"jobs": jobs, "jobs_per_second": round2(batches), "ideal_ratio": ratio(batches, most), "items_per_call": ratio(jobs, calls),
		"single_jobs_per_second": round2(one), "times": ratio(batches, one), "overrides": x.overrides,
	}
}

const (
	batchLease   = 2 * time.Second
	batchTimeout = 2 * time.Second // of a job, and so of each hundredth call
)

// batchFaults kills one of two workers, and starts it again, while 5% of the items fail once and 1% of
// the calls get no answer. The suspects are the items of the calls that ran at the kill.
func batchFaults(ctx context.Context, o options, jobs int) values {
	s := startBulkService(100)
	defer s.close()
	o.replicas = map[string]int{"worker": 2}
	var killed time.Time
	suspects := map[string]bool{}
	x := bulkRun(ctx, o, s, "BULK", func(x *run) {
		check(x.submit(ctx, bulkGroup(x.name, "tenant", "BULK", jobs, 20)))
		check(x.await(ctx, "a fifth of the effects", pollInterval, func() (int, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			return max(0, jobs/5-len(s.effects)), nil
		}))
		s.mu.Lock()
		x.kill(func(p process) bool {
			for _, c := range s.running {
				for _, item := range c.items {
					if c.process == strconv.Itoa(p.PID()) {
						suspects[item.ID] = true
					}
				}
			}
			return p.role == "worker"
		})
		killed = time.Now()
		s.mu.Unlock()
		x.startRole(o, "worker", 2, x.overrides, "")
	}, "BULKACTION_LEASE="+batchLease.String(), "BULKACTION_JOB_TIMEOUT="+batchTimeout.String())
	most, done := 0, killed
	for id, n := range s.effects {
		most = max(most, n)
		if suspects[id] && s.last[id].After(done) {
			done = s.last[id]
		}
	}
	bound := time.Duration(len(suspects)) * (99*batchHold + batchTimeout) / 100 / 2 // of two processes
	return values{
		"jobs": jobs, "without_effect": jobs - len(s.effects), "most_effects": most, "calls": s.calls, "seconds": makespan(x.ended),
		"suspects": len(suspects), "suspects_seconds": round2((done.Sub(killed) - batchLease).Seconds()), "bound_seconds": bound.Seconds(),
		"overrides": x.overrides,
	}
}

// batchTenants measures groups of 100 jobs of one tenant, alone and beside a flood of another one.
func batchTenants(ctx context.Context, o options, jobs int) values {
	s := startBulkService(0)
	defer s.close()
	times := map[bool]float64{}
	for _, flood := range []bool{false, true} {
		bulkRun(ctx, o, s, "BULK", func(x *run) {
			if flood {
				check(x.submit(ctx, bulkGroup(x.name, "large", "BULK", jobs, 0)))
				check(redisx.Sleep(ctx, time.Second))
			}
			var all []float64
			for i := range 9 {
				small := bulkGroup(fmt.Sprint(x.name, "-", i), "small", "BULK", batchSize, 0)
				check(x.submit(ctx, small))
				took := makespan(must(x.awaitDone(ctx, "", []group{small})))
				if flood && must(x.states(ctx, x.groups[:1]))[0].Counts.Ended() == int64(jobs) {
					break // it was not beside the flood for all of its time
				}
				all = append(all, took)
			}
			if len(all) == 0 {
				failf("the large group ended before the first small one: it needs more --jobs")
			}
			times[flood] = median(all)
		})
	}
	return values{"small_alone_seconds": round4(times[false]), "small_seconds": round4(times[true]), "ratio": ratio(times[true], times[false])}
}

// batchCost compares the CPU time of the worker for no-op jobs in batches and one by one.
func batchCost(ctx context.Context, o options, jobs int) values {
	cost := map[string]float64{}
	s := &bulkService{}
	for _, typ := range []string{"NOOP", "NOOP_BATCH"} {
		bulkRun(ctx, o, s, typ, func(x *run) {
			warm := bulkGroup(x.name+"-warm", "tenant", typ, warmJobs, 0)
			check(x.submit(ctx, warm))
			must(x.awaitDone(ctx, "", []group{warm}))
			used := x.measure(ctx, func() {
				g := bulkGroup(x.name, "tenant", typ, jobs, 0)
				check(x.submit(ctx, g))
				must(x.awaitDone(ctx, typ, []group{g}))
			})
			cost[typ] = used.roles["worker"].Seconds() * 1e6 / float64(jobs)
		})
	}
	return values{"cpu_us_per_job": round2(cost["NOOP_BATCH"]), "single_cpu_us_per_job": round2(cost["NOOP"]), "ratio": ratio(cost["NOOP_BATCH"], cost["NOOP"])}
}

// batchPoison has one item that makes the API refuse the whole call.
func batchPoison(ctx context.Context, o options, jobs int) values {
	s := startBulkService(0)
	defer s.close()
	x := bulkRun(ctx, o, s, "BULK", func(x *run) {
		g := bulkGroup(x.name, "tenant", "BULK", jobs, 0)
		g.fails, g.job = 1, func(i int) []byte {
			return fmt.Appendf(nil, `{"payload":{"poison":%t}}`, i == jobs/2)
		}
		check(x.submit(ctx, g))
	})
	return values{"jobs": jobs, "failed": x.ended[0].Counts.Failed, "calls": s.calls, "alone": s.alone, "seconds": makespan(x.ended),
		"overrides": x.overrides}
}
