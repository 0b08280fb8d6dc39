package bench

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// AdmitCost compares what admitting a job costs Redis while few, more and very many tenants have
// waiting jobs.
type AdmitCost struct {
	AdmitCost []TenantsCost `json:"admit_cost"`
	// AdmitCostRatio is Redis's CPU time per admitted job with the most tenants, divided by that
	// with the fewest.
	AdmitCostRatio float64 `json:"admit_cost_ratio"`
	// the most jobs that one call of the script admits
	AdmitBatch int `json:"admit_batch"`
}

// TenantsCost has the cost of admitting a job while a given number of tenants have waiting jobs.
type TenantsCost struct {
	Tenants int `json:"tenants"`
	Waiting int `json:"jobs_per_tenant"`
	Jobs    int `json:"jobs"` // jobs that were admitted while the cost was measured
	// RedisUSJob is the CPU time (µs) of the redis-server per admitted job, with all its other
	// work.
	RedisUSJob float64 `json:"redis_cpu_us_per_job"`
	// ScriptUS is the duration (µs) of the script admit per job, by Redis's commandstats. It
	// includes time in which the server had no CPU.
	ScriptUS float64 `json:"script_us_per_job"`
}

const (
	// costJobs is the least number of waiting jobs of each tenant. With few tenants each gets more,
	// so that no queue runs empty.
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
	cost.AdmitCostRatio = measure.Ratio(cost.AdmitCost[len(cost.AdmitCost)-1].RedisUSJob, cost.AdmitCost[0].RedisUSJob)
	out.AdmitCost = cost
	return map[string]string{}, nil
}

// tenantQueues is a fair queue on a private redis-server without roles. Its methods fill the queue,
// with one group of waiting jobs for each tenant, and admit jobs from it.
type tenantQueues struct {
	*fleet
	partition keyspace.Partition
	tenants   int
	limit     ledger.Limit
}

func measureAdmitCost(ctx context.Context, o FairnessOptions, tenants int) (TenantsCost, error) {
	out := TenantsCost{Tenants: tenants, Waiting: max(costJobs, 2*(costWarm+costAdmits)/tenants)}
	f, err := startRedis(ctx, Options{}, 2*costClients)
	if err != nil {
		return out, err
	}
	defer f.close() //nolint:errcheck // it holds nothing to keep
	space, err := keyspace.New("bulk-action:", 1)
	if err != nil {
		return out, err
	}
	// The global limit is so high that it is never reached. Permits are counted against it all the
	// same, as in an installation with default settings.
	rate := ledger.Rate{
		RPS:     1_000_000_000,
		Window:  time.Second,
		Limiter: ledger.LimiterFixed,
		Share:   ledger.ShareElastic,
	}
	q := &tenantQueues{f, space.Partition(0), tenants, rate.Of(0, 1)}
	part := fmt.Sprintf("cost, %d tenants", tenants)
	if err := q.fill(ctx, out.Waiting, func(done int) { o.progress(part, done, tenants) }); err != nil {
		return out, fmt.Errorf("fill the queues: %w", err)
	}
	if _, err := q.admitJobs(ctx, costWarm); err != nil { // also loads the script into Redis
		return out, err
	}
	u, err := q.measure(ctx, func() (err error) {
		out.Jobs, err = q.admitJobs(ctx, costAdmits)
		return err
	})
	if err != nil {
		return out, err
	}
	spent := u.redisTotal()
	out.RedisUSJob = measure.PerJob(spent.CPU, out.Jobs)
	out.ScriptUS = measure.Round2(float64(spent.ByName["evalsha"].US) / float64(out.Jobs))
	return out, nil
}

// fill gives each tenant one group with the given number of waiting jobs.
func (q *tenantQueues) fill(ctx context.Context, jobs int, progress func(int)) error {
	clients, ctx := errgroup.WithContext(ctx)
	for c := range costClients {
		clients.Go(func() error {
			for i := c; i < q.tenants; i += costClients {
				if err := q.addTenant(ctx, strconv.Itoa(i), jobs); err != nil {
					return err
				}
				if i%1000 == 0 {
					progress(i)
				}
			}
			return nil
		})
	}
	return clients.Wait()
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

// admitJobs calls the script admit until at least `least` jobs are admitted, and returns how many
// are. It is an error if a call admits no job.
func (q *tenantQueues) admitJobs(ctx context.Context, least int) (jobs int, err error) {
	for jobs < least {
		r, err := ledger.Admit(ctx, q.conn.Cmd, q.partition, ledger.AdmitArgs{
			Type: "NOOP", Most: costBatch, Cap: 1 << 30, Limit: q.limit, Seed: "00000000", LaneWeights: [3]int{6, 3, 1},
		})
		if err != nil {
			return jobs, err
		}
		if r.Moved == 0 {
			return jobs, fmt.Errorf("admit: no job was admitted from full queues after %d jobs", jobs)
		}
		jobs += r.Moved
	}
	return jobs, nil
}
