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

// AdmitCost is what it costs to admit a job while so many tenants have waiting jobs.
type AdmitCost struct {
	AdmitCost      []TenantsCost `json:"admit_cost"`
	AdmitCostRatio float64       `json:"admit_cost_ratio"` // of the most tenants to the fewest
	AdmitBatch     int           `json:"admit_batch"`      // jobs a script
}

// TenantsCost is the cost with one number of tenants.
type TenantsCost struct {
	Tenants    int     `json:"tenants"`
	Waiting    int     `json:"jobs_per_tenant"`
	Jobs       int     `json:"jobs"`                 // that were admitted
	RedisUSJob float64 `json:"redis_cpu_us_per_job"` // CPU time of the whole redis-server
	// what the script took by Redis's statistics, waits for a CPU included
	ScriptUS float64 `json:"script_us_per_job"`
}

const (
	costJobs    = 20     // of each tenant at least; few tenants have more, so that none runs out of them
	costAdmits  = 10_000 // jobs
	costWarm    = 1000   // before them
	costBatch   = 50     // FETCH_BATCH_SIZE
	costClients = 16     // that build the queues at the same time
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

// tenantQueues are tenants with a group of waiting jobs each, on a private redis-server
// without any process.
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
	defer server.Close() //nolint:errcheck // nothing is lost with it
	conn, err := redisx.Connect(ctx, redisx.Config{
		URL:            server.URL(),
		PoolMaxActive:  2 * costClients,
		CommandTimeout: 10 * time.Second,
	})
	if err != nil {
		return TenantsCost{}, err
	}
	defer conn.Close() //nolint:errcheck // nothing is lost with it
	space, err := keyspace.New("bulk-action:", 1)
	if err != nil {
		return TenantsCost{}, err
	}
	// The limit is counted, as it is by default, but never reached.
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
	if _, _, err := q.measureAdmits(ctx, costWarm); err != nil { // Redis learns the script, too
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

// fill gives every tenant a group of so many jobs.
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

// redisTime is time that Redis has spent.
type redisTime struct{ cpu, script time.Duration }

// measureAdmits admits jobs and says what Redis has spent on it.
func (q *tenantQueues) measureAdmits(ctx context.Context, most int) (spent redisTime, jobs int, err error) {
	before, err := q.redisTime(ctx)
	if err != nil {
		return redisTime{}, 0, err
	}
	for jobs < most {
		n, err := q.admit(ctx)
		if err != nil {
			return redisTime{}, 0, err
		}
		if n == 0 {
			return redisTime{}, 0, fmt.Errorf("admit: nothing was admitted from full queues after %d jobs", jobs)
		}
		jobs += n
	}
	after, err := q.redisTime(ctx)
	if err != nil {
		return redisTime{}, 0, err
	}
	return redisTime{after.cpu - before.cpu, after.script - before.script}, jobs, nil
}

func (q *tenantQueues) redisTime(ctx context.Context) (redisTime, error) {
	stats, err := q.conn.Cmd.Info(ctx, "commandstats").Result()
	if err != nil {
		return redisTime{}, fmt.Errorf("read Redis's statistics: %w", err)
	}
	cpu, err := q.conn.Cmd.Info(ctx, "cpu").Result()
	if err != nil {
		return redisTime{}, fmt.Errorf("read Redis's statistics: %w", err)
	}
	return redisTime{
		cpu:    seconds(cpu, "used_cpu_user") + seconds(cpu, "used_cpu_sys"),
		script: time.Duration(commandTime(stats, "evalsha")) * time.Microsecond,
	}, nil
}

// commandTime reads µs from lines like cmdstat_evalsha:calls=3,usec=120,usec_per_call=40.00,…
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
