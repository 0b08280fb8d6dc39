package bench

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisproc"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// AdmitCost compares what admitting a job costs Redis while few, more and very many tenants have
// waiting jobs.
type AdmitCost struct {
	AdmitCost []TenantsCost `json:"admit_cost"`
	// Redis's CPU time for a job with the most tenants / that with the fewest
	AdmitCostRatio float64 `json:"admit_cost_ratio"`
	// the most jobs that one call of the script admits
	AdmitBatch int `json:"admit_batch"`
}

// TenantsCost is the cost of admitting a job with one number of tenants.
type TenantsCost struct {
	Tenants int `json:"tenants"`
	Waiting int `json:"jobs_per_tenant"`
	Jobs    int `json:"jobs"` // jobs that were admitted while the cost was measured
	// CPU time of the redis-server for a job, with everything it does
	RedisUSJob float64 `json:"redis_cpu_us_per_job"`
	// duration of the script for a job by Redis's commandstats; includes time in which the server
	// had no CPU
	ScriptUS float64 `json:"script_us_per_job"`
}

const (
	// waiting jobs of each tenant, at least; a few tenants get more, so that none runs out of jobs
	costJobs    = 20
	costAdmits  = 10_000 // jobs that are admitted while the cost is measured
	costWarm    = 1000   // jobs that are admitted before the cost is measured
	costBatch   = 50     // the most jobs that a call admits: the default of FETCH_BATCH_SIZE
	costClients = 16     // goroutines that fill the queues
)

var costTenants = []int{10, 1000, 100_000}

func runCost(ctx context.Context, o FairnessOptions, out *Fairness) (map[string]string, error) {
	cost := &AdmitCost{AdmitBatch: costBatch}
	for _, n := range costTenants {
		c, err := measureAdmitCost(ctx, o, n)
		if err != nil {
			return nil, fmt.Errorf("%d tenants: %w", n, err)
		}
		cost.AdmitCost = append(cost.AdmitCost, c)
	}
	cost.AdmitCostRatio = ratio(cost.AdmitCost[len(cost.AdmitCost)-1].RedisUSJob, cost.AdmitCost[0].RedisUSJob)
	out.AdmitCost = cost
	return map[string]string{}, nil
}

// tenantQueues fills and admits from the fair queue of a private redis-server on which no role
// runs. Each tenant has one group of waiting jobs.
type tenantQueues struct {
	conn      *redisx.Conn
	partition keyspace.Partition
	tenants   int
	limit     ledger.Limit
}

func measureAdmitCost(ctx context.Context, o FairnessOptions, tenants int) (TenantsCost, error) {
	server, err := redisproc.Start(ctx, redisproc.Options{})
	if err != nil {
		return TenantsCost{}, err
	}
	defer server.Close() //nolint:errcheck // it holds nothing to keep
	conn, err := redisx.Connect(ctx, redisx.Config{
		URL:            server.URL(),
		PoolMaxActive:  2 * costClients,
		CommandTimeout: 10 * time.Second,
	})
	if err != nil {
		return TenantsCost{}, err
	}
	defer conn.Close() //nolint:errcheck // it holds nothing to keep
	space, err := keyspace.New("bulk-action:", 1)
	if err != nil {
		return TenantsCost{}, err
	}
	// The limit is never reached. It is counted all the same, as in an installation with defaults.
	rate := ledger.Rate{
		RPS:     1_000_000_000,
		Window:  time.Second,
		Limiter: ledger.LimiterFixed,
		Share:   ledger.ShareElastic,
	}
	q := &tenantQueues{conn, space.Partition(0), tenants, rate.Of(0, 1)}
	part := fmt.Sprintf("cost, %d tenants", tenants)
	progress := func(done int) { o.progress(part, int64(done), int64(tenants)) }
	out := TenantsCost{Tenants: tenants, Waiting: max(costJobs, 2*(costWarm+costAdmits)/tenants)}
	if err := q.fill(ctx, out.Waiting, progress); err != nil {
		return out, err
	}
	if _, _, err := q.measureAdmits(ctx, costWarm); err != nil { // also loads the script into Redis
		return out, err
	}
	spent, jobs, err := q.measureAdmits(ctx, costAdmits)
	if err != nil {
		return out, err
	}
	out.Jobs = jobs
	out.RedisUSJob = round2(float64(spent.cpu.Microseconds()) / float64(jobs))
	out.ScriptUS = round2(float64(spent.script.Microseconds()) / float64(jobs))
	return out, nil
}

// fill gives each tenant one group with this number of waiting jobs.
func (q *tenantQueues) fill(ctx context.Context, jobs int, progress func(int)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, costClients)
	for c := range errs {
		wg.Go(func() {
			for i := int(next.Add(1) - 1); i < q.tenants && ctx.Err() == nil; i = int(next.Add(1) - 1) {
				if err := q.addTenant(ctx, strconv.Itoa(i), jobs); err != nil {
					errs[c] = err
					cancel()
					return
				}
				if i%1000 == 0 {
					progress(i)
				}
			}
		})
	}
	wg.Wait()
	if err := firstCause(errs); err != nil {
		return fmt.Errorf("fill the queues: %w", err)
	}
	return ctx.Err()
}

func (q *tenantQueues) addTenant(ctx context.Context, name string, jobs int) error {
	group := "group-" + name
	_, err := ledger.Create(ctx, q.conn.Cmd, q.partition, ledger.CreateArgs{
		Group:  group,
		Tenant: "tenant-" + name,
		Type:   "NOOP",
		Hash:   "-",
		Fields: map[string]string{"lane": "normal"},
	})
	for left := jobs; left > 0 && err == nil; left -= ledger.MaxAppend {
		more := slices.Repeat([]ledger.NewJob{{Payload: []byte("{}")}}, min(left, ledger.MaxAppend))
		_, err = ledger.Append(ctx, q.conn.Cmd, q.partition, ledger.AppendArgs{
			Group: group,
			Limit: 1 << 30,
			Jobs:  more,
		})
	}
	return err
}

func (q *tenantQueues) admit(ctx context.Context) (int, error) {
	r, err := ledger.Admit(ctx, q.conn.Cmd, q.partition, ledger.AdmitArgs{
		Type: "NOOP", Most: costBatch, Cap: 1 << 30, Limit: q.limit, Seed: "00000000", LaneWeights: [3]int{6, 3, 1},
	})
	return r.Moved, err
}

// redisUse is time that Redis has spent: CPU time of the server, and the duration of scripts.
type redisUse struct{ cpu, script time.Duration }

// measureAdmits admits at least most jobs. It returns what Redis spent on them and how many they
// are. It is an error if a call admits no job.
func (q *tenantQueues) measureAdmits(ctx context.Context, most int) (spent redisUse, jobs int, err error) {
	before, err := q.redisUse(ctx)
	if err != nil {
		return redisUse{}, 0, err
	}
	for jobs < most {
		n, err := q.admit(ctx)
		if err != nil {
			return redisUse{}, 0, err
		}
		if n == 0 {
			return redisUse{}, 0, fmt.Errorf("admit: no job was admitted from full queues after %d jobs", jobs)
		}
		jobs += n
	}
	after, err := q.redisUse(ctx)
	if err != nil {
		return redisUse{}, 0, err
	}
	return redisUse{after.cpu - before.cpu, after.script - before.script}, jobs, nil
}

func (q *tenantQueues) redisUse(ctx context.Context) (redisUse, error) {
	stats, err := q.conn.Cmd.Info(ctx, "commandstats").Result()
	if err != nil {
		return redisUse{}, fmt.Errorf("read Redis's statistics: %w", err)
	}
	cpu, err := q.conn.Cmd.Info(ctx, "cpu").Result()
	if err != nil {
		return redisUse{}, fmt.Errorf("read Redis's statistics: %w", err)
	}
	return redisUse{
		cpu:    seconds(cpu, "used_cpu_user") + seconds(cpu, "used_cpu_sys"),
		script: time.Duration(commandTime(stats, "evalsha")) * time.Microsecond,
	}, nil
}

// commandTime returns the total µs of a command from the text of INFO commandstats; 0 if no line
// names it. The line of a command looks like this:
// cmdstat_evalsha:calls=3,usec=120,usec_per_call=40.00,…
func commandTime(info, command string) int64 {
	for line := range strings.Lines(info) {
		fields, ok := strings.CutPrefix(strings.TrimSpace(line), "cmdstat_"+command+":")
		if !ok {
			continue
		}
		for field := range strings.SplitSeq(fields, ",") {
			if v, ok := strings.CutPrefix(field, "usec="); ok {
				n, _ := strconv.ParseInt(v, 10, 64)
				return n
			}
		}
	}
	return 0
}
