package ledger

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var fairLanes = [3]string{"high", "normal", "low"}

// Most tenants of a set, and groups of a tenant in a lane, that SetRunnable looks at, and about the most
// queues of groups in all.
const (
	maxTenantsRead = 200
	maxGroupsRead  = 200
	maxQueuesRead  = 20_000
)

// WaitingJobs describes the waiting jobs of a type in one partition.
type WaitingJobs struct{ Sets []WaitingSet }

// WaitingSet has all tenants of one set, or a random sample of them. A tenant may be in the sets of
// several lanes.
type WaitingSet struct {
	Limited bool  // they have no permit or place now
	Size    int64 // tenants in the set
	Tenants []WaitingTenant
}

// WaitingTenant is a tenant with waiting jobs of a type.
type WaitingTenant struct {
	Lanes    float64 // in how many sets it is
	Jobs     float64 // its waiting jobs in all lanes; not those of scheduled and paused groups; 0 if it is paused
	Variance float64 // of Jobs; not 0 if it has too many groups to look at each
	RPS      float64 // its own rate; 0: none
	InFlight float64 // most of its jobs in flight; 0: no bound
}

// Estimate returns the sum of a set's n values of which those in values are a random sample, and the
// variance of that sum (Cochran, Sampling Techniques, 1977, section 2.6).
func Estimate(values []float64, n int64) (sum, variance float64) {
	k, size := float64(len(values)), float64(n)
	if k == 0 {
		return 0, 0
	}
	for _, v := range values {
		sum += v
	}
	if k >= size {
		return sum, 0
	}
	mean := sum / k
	for _, v := range values {
		variance += (v - mean) * (v - mean)
	}
	return mean * size, size * size * (1 - k/size) * variance / max(1, k-1) / k
}

// readWaiting makes three round trips.
func readWaiting(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, types []string, limited bool,
) ([]WaitingJobs, error) {
	failed := func(err error) error { return fmt.Errorf("read queues of partition %d: %w", p.Index(), err) }
	out := make([]WaitingJobs, len(types))
	type set struct {
		typ     int
		limited bool
		key     string
	}
	var sets []set
	for i, typ := range types {
		for _, lane := range fairLanes {
			sets = append(sets, set{i, false, p.FairLane(typ, lane)}, set{i, false, p.FairOver(typ, lane)})
		}
		if limited {
			sets = append(sets, set{i, true, p.RateLimited(typ)})
		}
	}
	type sample struct {
		size    *redis.IntCmd
		members *redis.StringSliceCmd
	}
	take := func(pipe redis.Pipeliner, key string, most int) sample {
		return sample{pipe.ZCard(ctx, key), pipe.ZRandMember(ctx, key, most)}
	}
	tenantsOf, err := pipelined(ctx, c, sets, func(pipe redis.Pipeliner, s set) sample { return take(pipe, s.key, maxTenantsRead) })
	if err != nil {
		return nil, failed(err)
	}
	type member struct {
		set    int
		tenant string
	}
	var members []member
	for i, of := range tenantsOf {
		for _, tenant := range of.members.Val() {
			members = append(members, member{i, tenant})
		}
	}
	mostGroups := min(maxGroupsRead, max(10, maxQueuesRead/max(1, len(members))))
	type tenantRead struct {
		paused *redis.BoolCmd
		limits *redis.SliceCmd
		groups [3]sample // by lane
	}
	read, err := pipelined(ctx, c, members, func(pipe redis.Pipeliner, m member) (r tenantRead) {
		r.paused = pipe.HExists(ctx, p.Pauses(), pauseOfTenant+m.tenant)
		r.limits = pipe.HMGet(ctx, p.Tenant(m.tenant), tenantRPS, tenantInFlight)
		for i, lane := range fairLanes {
			r.groups[i] = take(pipe, p.FairTenant(types[sets[m.set].typ], lane, m.tenant), mostGroups)
		}
		return r
	})
	if err != nil {
		return nil, failed(err)
	}
	var queues []string
	for i, m := range members {
		for _, of := range read[i].groups {
			for _, group := range of.members.Val() {
				queues = append(queues, p.Queue(group, types[sets[m.set].typ]))
			}
		}
	}
	lengths, err := pipelined(ctx, c, queues, func(pipe redis.Pipeliner, key string) *redis.IntCmd { return pipe.LLen(ctx, key) })
	if err != nil {
		return nil, failed(err)
	}
	at, next := -1, 0
	for i, m := range members {
		w := &out[sets[m.set].typ]
		if m.set != at {
			at = m.set
			w.Sets = append(w.Sets, WaitingSet{Limited: sets[at].limited, Size: tenantsOf[at].size.Val()})
		}
		limits := values(read[i].limits.Val())
		t := WaitingTenant{RPS: limits.decimal(0), InFlight: limits.decimal(1)}
		for _, of := range read[i].groups {
			var jobs []float64
			for range of.members.Val() {
				jobs = append(jobs, float64(lengths[next].Val()))
				next++
			}
			sum, variance := Estimate(jobs, of.size.Val())
			t.Jobs, t.Variance = t.Jobs+sum, t.Variance+variance
			if len(jobs) > 0 {
				t.Lanes++
			}
		}
		if sets[at].limited {
			t.Lanes = min(t.Lanes, 1)
		}
		if read[i].paused.Val() {
			t.Jobs, t.Variance = 0, 0
		}
		last := &w.Sets[len(w.Sets)-1]
		last.Tenants = append(last.Tenants, t)
	}
	return out, nil
}

// Within returns how many of the tenant's jobs may start within some seconds: by its own limits, or by
// share, in permits a second, if it has no rate of its own; 0: no share. meanRun is in seconds; 0: not
// known.
func (t WaitingTenant) Within(seconds, share, meanRun float64) float64 {
	jobs := t.Jobs
	if rps := cmp.Or(t.RPS, share); rps > 0 {
		jobs = min(jobs, rps*seconds)
	}
	if t.InFlight > 0 && meanRun > 0 {
		jobs = min(jobs, t.InFlight*seconds/meanRun)
	}
	return jobs
}

// Size returns the number of tenants in the sets, and of those that were looked at.
func (w WaitingJobs) Size() (tenants, lookedAt int64) {
	for _, set := range w.Sets {
		tenants, lookedAt = tenants+set.Size, lookedAt+int64(len(set.Tenants))
	}
	return tenants, lookedAt
}

// Sum returns the sum of what jobs returns for each tenant of the sets, and its variance.
func (w WaitingJobs) Sum(limited bool, jobs func(WaitingTenant) float64) (sum, variance float64) {
	for _, set := range w.Sets {
		if set.Limited && !limited {
			continue
		}
		var each []float64
		for _, t := range set.Tenants {
			each = append(each, jobs(t)/max(1, t.Lanes))
			if n := float64(len(set.Tenants)); t.Jobs > 0 {
				variance += t.Variance * float64(set.Size) / n / max(1, t.Lanes*t.Lanes)
			}
		}
		of, spread := Estimate(each, set.Size)
		sum, variance = sum+of, variance+spread
	}
	return sum, variance
}

// MeanRuns returns the mean run time of the jobs of each of the types in one partition; 0: not known.
func MeanRuns(ctx context.Context, c redis.Cmdable, p keyspace.Partition, types []string) ([]time.Duration, error) {
	reads, err := pipelined(ctx, c, types, func(pipe redis.Pipeliner, typ string) *redis.SliceCmd {
		return pipe.HMGet(ctx, p.Load(typ), loadMeanRun)
	})
	means := make([]time.Duration, len(types))
	for i, read := range reads {
		means[i] = time.Duration(values(read.Val()).decimal(0) * float64(time.Millisecond))
	}
	return means, err
}

// SetRunnable sets the field Runnable of each of the types, whose other fields Loads has set, and
// returns their waiting jobs, with limited also those of tenants that have no permit or place now.
// paused are the types that are paused: nothing of them waits.
func SetRunnable(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, types []api.TypeStats, paused []string, limited bool,
) ([]WaitingJobs, error) {
	var names []string
	var of []int
	for i := range types {
		t := &types[i]
		if slices.Contains(paused, t.Type) {
			continue
		}
		if t.Runnable = t.Ready; t.Waiting > 0 {
			names, of = append(names, t.Type), append(of, i)
		}
	}
	waiting := make([]WaitingJobs, len(types))
	read, err := readWaiting(ctx, c, p, names, limited)
	for i, w := range read {
		jobs, _ := w.Sum(false, func(t WaitingTenant) float64 { return t.Jobs })
		t := &types[of[i]]
		t.Runnable += min(int64(math.Round(jobs)), t.Waiting)
		waiting[of[i]] = w
	}
	return waiting, err
}
