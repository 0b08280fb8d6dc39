package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

var boundsBenchmark = benchmark{
	"bounds",
	"Bounds of jobs in flight and the rate of a type, and a downstream that answers 429, by the log of the service that the jobs call",
	func(f *flags) runner {
		var seconds float64
		f.float(&seconds, "seconds", 8, 1, 3600, "length of each run, about")
		only := f.String("only", "", "inflight, rate or refused; empty: all")
		f.redis()
		return func(ctx context.Context, o options) (any, error) {
			out := values{"seconds": seconds}
			if *only == "" || *only == "inflight" {
				out["inflight"] = inFlightRuns(ctx, o, seconds)
			}
			if *only == "" || *only == "rate" {
				out["rate"] = []values{typeRate(ctx, o, 1, seconds), typeRate(ctx, o, 4, seconds)}
			}
			if *only == "" || *only == "refused" {
				out["refused"] = refused(ctx, o, seconds)
			}
			return out, nil
		}
	},
}

// service is an HTTP service that the jobs call. It logs the calls.
type service struct {
	url    string
	server *http.Server
	hold   time.Duration // how long a call takes
	// most is how many calls a second it takes; it refuses the others with 429. 0: all
	most int

	mu      sync.Mutex
	changes []change // of the number of calls that run
	running int
	peak    int
	refused int
	taken   map[string]int // by tenant
	second  int64
	inIt    int // calls taken in this second
}

// change is a time (by the clock of this process) at which the number of running calls became n.
type change struct {
	at time.Time
	n  int
}

func startService(hold time.Duration, most int) *service {
	s := &service{hold: hold, most: most, taken: map[string]int{}}
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	s.url, s.server = "http://"+l.Addr().String()+"/", &http.Server{Handler: s, ReadHeaderTimeout: time.Minute}
	go func() { _ = s.server.Serve(l) }()
	return s
}

// close stops the service.
func (s *service) close() { _ = s.server.Close() }

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	if !s.begin(r.Header.Get("Bulkaction-Tenant")) {
		w.WriteHeader(http.StatusTooManyRequests)
		return
	}
	defer s.count(-1)
	_ = redisx.Sleep(r.Context(), s.hold) // it ends when the caller has gone
}

func (s *service) begin(tenant string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now().Unix(); now != s.second {
		s.second, s.inIt = now, 0
	}
	if s.inIt++; s.most > 0 && s.inIt > s.most {
		s.refused++
		return false
	}
	s.taken[tenant]++
	s.add(1)
	return true
}

func (s *service) count(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.add(n)
}

func (s *service) add(n int) {
	s.running += n
	s.peak = max(s.peak, s.running)
	s.changes = append(s.changes, change{time.Now(), s.running})
}

// mean returns the mean number of calls that ran between two times.
func (s *service) mean(from, to time.Time) float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	sum, at, n := 0.0, from, 0
	for _, c := range append(slices.Clone(s.changes), change{to, 0}) {
		if c.at.After(to) {
			c.at = to
		}
		if c.at.After(at) {
			sum += float64(n) * c.at.Sub(at).Seconds()
			at = c.at
		}
		n = c.n
	}
	return sum / to.Sub(from).Seconds()
}

// reaches returns the first time after `after` at which n calls run; zero if that never happened.
func (s *service) reaches(n int, after time.Time) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.changes {
		if c.n >= n && c.at.After(after) {
			return c.at
		}
	}
	return time.Time{}
}

// begins counts the calls that began in each second from the first one on.
func (s *service) begins() (all []time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := 0
	for _, c := range s.changes {
		if c.n > last {
			all = append(all, c.at)
		}
		last = c.n
	}
	return all
}

// calling returns n jobs' group that calls the service.
func (s *service) calling(name, tenant string, n int) group {
	body := []byte(`{"payload":{"url":` + strconv.Quote(s.url) + `}}`)
	return group{id: name, tenant: tenant, jobs: n, job: func(int) []byte { return body }, fields: map[string]any{"type": "HTTP"}}
}

const (
	bound        = 20
	boundWorkers = 4
	boundLease   = 3 * time.Second
)

func boundEnv(slots int) []string {
	return []string{
		"BULKACTION_WORKER_TYPES=HTTP,NOOP", "BULKACTION_WORKER_COUNT=" + strconv.Itoa(slots),
		"BULKACTION_LEASE=" + boundLease.String(), "BULKACTION_HTTP_PROCESSOR_ALLOWED_CIDRS=127.0.0.0/8",
	}
}

func inFlightRuns(ctx context.Context, o options, seconds float64) (runs []values) {
	for _, of := range []string{"type", "tenant"} {
		for _, hold := range []time.Duration{10 * time.Millisecond, 50 * time.Millisecond, 200 * time.Millisecond} {
			for _, partitions := range []int{1, 4} {
				runs = append(runs, inFlight(ctx, o, of, hold, partitions, seconds))
			}
		}
	}
	return runs
}

// inFlight shows whether a bound of jobs in flight is kept, how much of it is used, and how soon after
// the death of a worker it is used again. Half way through, a group is cancelled and a worker killed.
func inFlight(ctx context.Context, o options, of string, hold time.Duration, partitions int, seconds float64) values {
	o.partitions, o.replicas = partitions, map[string]int{"worker": boundWorkers}
	s := startService(hold, 0)
	defer s.close()
	x := startWithAPI(ctx, o, true, nil, append(boundEnv(bound), noGlobalLimit)...)
	defer x.close()
	jobs := int((seconds + boundLease.Seconds() + 5) * bound / hold.Seconds())
	const tenants = 4
	if of == "type" {
		must(x.api.PatchType(ctx, "HTTP", api.TypePatch{InFlight: api.SetTo[int64](bound)}))
	} else {
		check(x.setTenant(ctx, "tenant-0", ledger.TenantSettings{InFlight: new(int64(bound))}))
	}
	for i := range tenants {
		tenant := "tenant-0"
		if of == "type" {
			tenant = fmt.Sprintf("tenant-%d", i)
		}
		check(x.submit(ctx, s.calling(fmt.Sprintf("%s-%d", x.name, i), tenant, jobs/tenants)))
	}
	cancelled := s.calling(x.name+"-cancelled", x.groups[0].tenant, jobs)
	check(x.create(ctx, []group{cancelled}, perMessage))
	check(x.fill(ctx, []group{cancelled}, perMessage))
	check(x.await(ctx, "the first calls", 20*time.Millisecond, func() (int, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		return max(0, bound/2-s.peak), nil
	}))
	check(redisx.Sleep(ctx, 2*time.Second)) // the places move to the partitions that need them
	from := time.Now()
	check(redisx.Sleep(ctx, time.Duration(seconds/3*float64(time.Second))))
	to := time.Now()
	_ = must(x.api.Cancel(ctx, cancelled.id))
	x.kill(func(p process) bool { return p.role == "worker" })
	killed := time.Now()
	check(redisx.Sleep(ctx, boundLease+2*time.Second))
	again := s.reaches(bound, killed.Add(50*time.Millisecond))
	x.finish(ctx, fmt.Sprint(of, " ", hold))
	out := values{
		"of": of, "hold_ms": hold.Milliseconds(), "partitions": partitions, "bound": bound, "most": s.peak,
		"used": round4(s.mean(from, to) / bound), "overrides": x.overrides,
	}
	if !again.IsZero() {
		out["full_again_seconds"] = round4(again.Sub(killed).Seconds())
	}
	return out
}

// typeRate shows whether the rate of a type is kept by the log of the service that its jobs call, and
// that jobs of another type use the rest of the global limit.
func typeRate(ctx context.Context, o options, partitions int, seconds float64) values {
	const rps, global = 20, 500
	o.partitions, o.replicas = partitions, map[string]int{"worker": boundWorkers}
	run := func(limited bool) (x *run, s *service, other float64) {
		s = startService(10*time.Millisecond, 0)
		defer s.close()
		x = startWithAPI(ctx, o, true, nil, append(boundEnv(10), globalLimit(global))...)
		defer x.close()
		must(x.api.PatchType(ctx, "HTTP", api.TypePatch{RPS: api.SetTo[int64](rps)}))
		for i := range 4 {
			check(x.submit(ctx, group{id: fmt.Sprint(x.name, "-noop-", i), tenant: fmt.Sprint("noop-", i), jobs: int(seconds * global / 4)}))
			if limited {
				check(x.submit(ctx, s.calling(fmt.Sprint(x.name, "-http-", i), fmt.Sprint("http-", i), int(seconds*rps/4))))
			}
		}
		if limited {
			check(redisx.Sleep(ctx, time.Duration(seconds/2*float64(time.Second))))
			x.kill(func(p process) bool { return p.role == "worker" })
		}
		x.finish(ctx, "rate of a type")
		permits := x.log.permitEvents(func(p permitEvent) bool { return len(p.tenant) > 4 && p.tenant[:4] == "noop" })
		took := float64(permits[len(permits)-1].at-permits[0].at) / 1e6
		return x, s, float64(sumEvents(permits)) / took
	}
	_, _, alone := run(false)
	x, s, beside := run(true)
	rule := newLimitRule("fixed", rps, time.Second)
	permits := x.log.spent(func(p permitEvent) bool { return p.tenant[:4] == "http" })
	over, most := rule.windowsOver(permits)
	begins, burst := s.begins(), 0
	for i := range begins {
		n := 0
		for j := i; j < len(begins) && begins[j].Sub(begins[i]) < time.Second; j++ {
			n++
		}
		burst = max(burst, n)
	}
	return values{
		"partitions": partitions, "rps": rps, "global_rps": global, "windows_over_limit": over, "max_over": most,
		"most_calls_in_a_second": burst, // a span of two windows may have twice the rate
		"other_per_second":       round4(beside), "other_alone": round4(alone), "ratio": round4((beside + rps) / alone),
		"overrides": x.overrides,
	}
}

// refused shows how the congestion formula works with many tenants and a service that takes 100 calls
// a second and answers 429 to the others.
func refused(ctx context.Context, o options, seconds float64) values {
	const most, tenants = 100, 20
	s := startService(5*time.Millisecond, most)
	defer s.close()
	jobs := int(2 * seconds * most)
	o.replicas = map[string]int{"worker": 2}
	x := o.experiment(ctx, "refused", func(x *run) {
		for i := range tenants {
			check(x.submit(ctx, s.calling(fmt.Sprintf("%s-%d", x.name, i), fmt.Sprintf("tenant-%d", i), jobs/tenants)))
		}
	}, append(boundEnv(20), globalLimit(2*most), "BULKACTION_MAX_THROTTLES=1000")...) // the limit is set too high
	took, ideal := makespan(x.ended), float64(jobs)/most
	first, last := x.ended[0].JobsEnded, x.ended[0].JobsEnded
	for _, g := range x.ended {
		if g.JobsEnded.Before(first) {
			first = g.JobsEnded
		}
		if g.JobsEnded.After(last) {
			last = g.JobsEnded
		}
	}
	return values{
		"tenants": tenants, "jobs": jobs, "calls_per_second": most, "makespan_seconds": took,
		"makespan_ratio": ratio(took, ideal), "refused_per_job": ratio(s.refused, jobs),
		"spread_seconds": round4(last.Sub(first).Seconds()), // between the first tenant's end and the last one's
		"overrides":      x.overrides,
	}
}
