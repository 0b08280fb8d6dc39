package bench

import (
	"context"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/bench/measure"
)

// GuardsOptions say how thoroughly the benchmark measures package guard.
type GuardsOptions struct {
	Options
	Quick   bool     // shorter measurements
	Rounds  int      // measurements of each part
	Seconds float64  // duration of each measurement of speed or latency; 0: 2, or 0.5 if Quick
	Only    []string // names of parts, see GuardsParts; empty: all
}

// Guards has the figures of package guard. The parts that were not measured are nil.
type Guards struct {
	Quick  bool `json:"quick"`
	Rounds int  `json:"rounds"`
	CPUs   int  `json:"cpus"`
	*GuardTakes
	*GuardPairs
	*GuardLocks
	*GuardHandovers
	*GuardWaiting
	*GuardCosts
	*GuardLimits
	*GuardOrder
	*GuardProbes
	*GuardMemory
	*GuardPipeline
	*GuardPush
	// Overrides has the settings of the fleets of the part pipeline (the run with rates) and the
	// part push, by part; see Options.overrides. The other parts run no roles.
	Overrides map[string]map[string]string `json:"overrides"`
}

// GuardTakes has the speed of Limiter.Take: 4 processes, 1,000 keys, no limit reached.
type GuardTakes struct {
	// TakePerSecond (token bucket) and SlidingTakePerSecond are measured with 16 goroutines in each
	// process, each of which calls again at once.
	TakePerSecond        float64 `json:"take_per_second"`
	SlidingTakePerSecond float64 `json:"sliding_take_per_second"`
	// TakeP99MS is the 99th percentile of the time of Limiter.Take (token bucket), in ms, at 5,000
	// calls a second of all processes together. The time of a call begins when the call is due,
	// which may be before it is made.
	TakeP99MS float64 `json:"take_p99_ms"`
}

// GuardPairs has the number of pairs of Pool.Acquire and Release a second, from 4 processes with 8
// goroutines each. Members have a token bucket and a breaker; no limit is reached.
type GuardPairs struct {
	PairsPerSecond float64 `json:"pairs_per_second"` // of a pool of 40
	// speed with 40 members / speed with 10,000, measured in turn
	Pairs10000Ratio float64 `json:"pairs_10000_ratio"`
	// members without limiter and breaker
	PlainPairsPerSecond float64 `json:"plain_pairs_per_second"`
}

// GuardLocks has the speed of locking and unlocking, from 4 processes, with 1,000 locks. Only one
// goroutine at a time uses a lock, so that no call waits.
type GuardLocks struct {
	LockPairsPerSecond float64 `json:"lock_pairs_per_second"` // 16 goroutines in each process
	// LockP99MS is measured at 1,000 pairs of lock and unlock a second: from the time at which the
	// pair was due until it is unlocked.
	LockP99MS float64 `json:"lock_p99_ms"`
}

// GuardHandovers has the time from the release of a lock, by Redis's clock, until the call of the
// next holder returns. 64 calls of 8 processes wait for one lock; each holds it for 1 ms.
type GuardHandovers struct {
	HandoverP50MS float64 `json:"handover_p50_ms"`
	HandoverP99MS float64 `json:"handover_p99_ms"`
}

// GuardWaiting has the number of Redis scripts that a process runs each second only because calls
// wait: 1,000 calls of 8 processes wait for one lock.
type GuardWaiting struct {
	WaitingPerSecond float64 `json:"waiting_commands_per_second"`
}

// GuardCosts has the CPU time (µs) of one call, with 40 calls at a time: that of Redis, from INFO,
// and that of this process.
type GuardCosts struct {
	RedisUS   CallCosts `json:"redis_us"`
	ProcessUS CallCosts `json:"process_us"`
}

// CallCosts has the CPU time (µs) of one call, in Redis or in this process. Take takes a permit of
// a token bucket; Acquire gets a lease of a member of a pool, and Settle releases it. The pool has
// 40 members with a token bucket and a breaker.
type CallCosts struct {
	Take    float64 `json:"take"`
	Acquire float64 `json:"acquire"`
	Settle  float64 `json:"settle"`
	// Acquire10000 and Settle10000 are Acquire and Settle with a pool of 10,000 members.
	Acquire10000 float64 `json:"acquire_10000"`
	Settle10000  float64 `json:"settle_10000"`
}

// GuardLimits says whether limits hold. 8 processes call through a proxy that drops 5% of Redis's
// replies; then 8 processes call without it.
type GuardLimits struct {
	// Overdraws is the number of calls that exceed a limit: a token bucket, a sliding window, or
	// the rate of a pool's members. Leases of a pool are counted at their grant, and again when
	// their holder works. Leases beyond a member's concurrency count too.
	Overdraws int `json:"overdraws"`
	// calls that were allowed while replies were lost
	Allowed int `json:"allowed_under_faults"`
	Dropped int `json:"dropped_replies"`
	// LimitUsedRatio is the granted leases / the leases that the limit allows, while more calls
	// wait, without faults.
	LimitUsedRatio float64 `json:"limit_used_ratio"`
}

// GuardOrder counts the calls for a lock that were granted after a call that stood behind them in
// the queue. Before the first grant, calls are cancelled or time out, and one of 8 processes is
// killed.
type GuardOrder struct {
	FIFOInversions int `json:"fifo_inversions"`
	FIFOGrants     int `json:"fifo_grants"`
}

// GuardProbes counts the probes of a breaker beyond Successes in one opening, while all calls fail.
type GuardProbes struct {
	ProbesOver int `json:"probes_over"`
	Probes     int `json:"probes"`
}

// GuardMemory has the bytes of Redis memory that a member, a lease, a waiter and an entry of a
// limiter take.
type GuardMemory struct {
	Bytes GuardBytes `json:"bytes"`
}

// GuardBytes has bytes of Redis memory: of one of 10,000 used members, of one of 10,000 leases, and
// of one of 2,000 waiting calls. Entry is one entry of a sliding limit, which counts the permits of
// a 64th of its window.
type GuardBytes struct {
	Member float64 `json:"member"`
	Lease  float64 `json:"lease"`
	Waiter float64 `json:"waiter"`
	Entry  float64 `json:"sliding_entry"`
}

// GuardsParts returns the names of the parts of the benchmark, which GuardsOptions.Only can choose.
func GuardsParts() []string {
	return []string{
		"take", "pairs", "lock", "handover", "waiting", "costs", "limits", "order", "probes", "memory", "pipeline",
		"push",
	}
}

// guardProcesses is the number of processes that make calls.
const guardProcesses = 8

// guardBench is one run of the benchmark of package guard: a Redis, and child processes that call
// guards on it.
type guardBench struct {
	GuardsOptions
	*guardLoaders
}

// RunGuards measures the chosen parts one after the other, with the same child processes; pipeline
// and push run on fleets of their own. The first error ends it; the parts that were measured before
// are returned.
func RunGuards(ctx context.Context, o GuardsOptions) (_ Guards, err error) {
	out := Guards{Quick: o.Quick, Rounds: o.Rounds, CPUs: runtime.NumCPU()}
	out.Overrides = map[string]map[string]string{}
	if o.Seconds == 0 {
		o.Seconds = 2
		if o.Quick {
			o.Seconds = 0.5
		}
	}
	b := &guardBench{o, &guardLoaders{program: o.Role[0], prefix: "guard:"}}
	if o.RedisURL != "" { // other data may be there
		b.prefix = "bulk-action-bench-" + strconv.FormatInt(time.Now().UnixNano(), 36) + ":"
	}
	if b.fleet, err = startRedis(ctx, o.Options, 20); err != nil {
		return out, err
	}
	defer b.close()
	if err := b.startLoaders(ctx, guardProcesses); err != nil {
		return out, err
	}
	for _, part := range GuardsParts() {
		if len(o.Only) > 0 && !slices.Contains(o.Only, part) {
			continue
		}
		switch part {
		case "take":
			out.GuardTakes, err = inRounds(ctx, b, part, b.takes)
		case "pairs":
			out.GuardPairs, err = inRounds(ctx, b, part, b.pairs)
		case "lock":
			out.GuardLocks, err = inRounds(ctx, b, part, b.locks)
		case "handover":
			out.GuardHandovers, err = inRounds(ctx, b, part, b.handovers)
		case "waiting":
			out.GuardWaiting, err = measured(b.waiting(ctx))
		case "costs":
			out.GuardCosts, err = inRounds(ctx, b, part, b.costs)
		case "limits":
			out.GuardLimits, err = measured(b.limits())
		case "order":
			out.GuardOrder, err = measured(b.order(ctx))
		case "probes":
			out.GuardProbes, err = measured(b.probes(ctx))
		case "memory":
			out.GuardMemory, err = measured(b.memory(ctx))
		case "pipeline":
			out.GuardPipeline, err = measured(b.pipeline(ctx))
			if err == nil {
				out.Overrides[part] = out.Pipeline.overrides
			}
		case "push":
			out.GuardPush, err = measured(b.push(ctx))
			if err == nil {
				out.Overrides[part] = out.Push.overrides
			}
		}
		if err != nil {
			return out, fmt.Errorf("%s: %w", part, err)
		}
		o.progress(part, 1, 1)
	}
	return out, nil
}

func (b *guardBench) close() {
	for _, l := range b.loaders {
		l.Kill()
		_ = l.out.Close()
	}
	if b.RedisURL != "" {
		_ = b.removeKeys(context.Background(), b.prefix)
	}
	_ = b.fleet.close()
}

// newPrefix returns a prefix of keys that nothing uses yet.
func (b *guardLoaders) newPrefix() string {
	b.parts++
	return b.prefix + strconv.Itoa(b.parts) + ":"
}

// inRounds measures a part o.Rounds times and returns the medians of its figures.
func inRounds[T any](
	ctx context.Context, b *guardBench, part string, once func(context.Context) (T, error),
) (*T, error) {
	rounds := make([]reflect.Value, b.Rounds)
	for i := range rounds {
		figures, err := once(ctx)
		if err != nil {
			return nil, err
		}
		rounds[i] = reflect.ValueOf(figures)
		b.progress(part, i+1, b.Rounds)
	}
	var out T
	setMedians(reflect.ValueOf(&out).Elem(), rounds)
	return &out, nil
}

// setMedians sets each number of the struct out, nested structs included, to the median of the
// rounds.
func setMedians(out reflect.Value, rounds []reflect.Value) {
	for i := range out.NumField() {
		fields := make([]reflect.Value, len(rounds))
		for k := range rounds {
			fields[k] = rounds[k].Field(i)
		}
		if out.Field(i).Kind() == reflect.Struct {
			setMedians(out.Field(i), fields)
			continue
		}
		values := make([]float64, len(fields))
		for k := range fields {
			values[k] = fields[k].Float()
		}
		out.Field(i).SetFloat(measure.Round4(measure.Median(values)))
	}
}
