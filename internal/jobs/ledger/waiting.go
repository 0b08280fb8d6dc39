package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
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

// WaitingJobs describes the waiting, or the due non-ready, jobs of a type in one partition.
type WaitingJobs struct {
	Sets  []WaitingSet
	whole bool // too many tenants or groups to look at each
}

// WaitingSet has all tenants of one set, or of a part of it, or a random sample of them. A tenant may be in the sets of
// several lanes.
type WaitingSet struct {
	Limited bool  // they have no permit or place now
	Size    int64 // tenants in the set
	Tenants []WaitingTenant
}

// WaitingTenant is a tenant with waiting jobs of a type.
type WaitingTenant struct {
	ID       string
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

// sample is the size of a set, and members of it by chance; all of a small set.
type sample struct {
	size    *redis.IntCmd
	members *redis.StringSliceCmd
}

func take(ctx context.Context, pipe redis.Pipeliner, key string, most int) sample {
	return sample{pipe.ZCard(ctx, key), pipe.ZRandMember(ctx, key, most)}
}

// stratum is a part of a set of tenants, of which some are looked at.
type stratum struct {
	set     int
	size    int64
	tenants []string
}

// strata takes a random sample of each set that is large. Those of the tenants top that are in it are
// a stratum of their own, so that none of them is missed. The sample comes from the others.
func strata(ctx context.Context, c redis.Cmdable, keys, top []string) ([]stratum, error) {
	sets, err := pipelined(ctx, c, keys, func(pipe redis.Pipeliner, key string) sample {
		return take(ctx, pipe, key, maxTenantsRead)
	})
	if err != nil {
		return nil, err
	}
	var out []stratum
	for i, of := range sets {
		size, rest := of.size.Val(), of.members.Val()
		if size > maxTenantsRead {
			// Each reply has its own error: not all of them are in the set.
			scores, _ := pipelined(ctx, c, top, func(pipe redis.Pipeliner, tenant string) *redis.FloatCmd {
				return pipe.ZScore(ctx, keys[i], tenant)
			})
			var known []string
			for j, score := range scores {
				if err := score.Err(); err == nil {
					known = append(known, top[j])
				} else if !errors.Is(err, redis.Nil) {
					return nil, err
				}
			}
			out = append(out, stratum{i, int64(len(known)), known})
			size -= int64(len(known))
			rest = slices.DeleteFunc(rest, func(tenant string) bool { return slices.Contains(known, tenant) })
		}
		out = append(out, stratum{i, size, rest})
	}
	return out, nil
}

// readWaiting makes three round trips, and one for each large set. With limited it reads a tenant's
// limits and lanes, and looks at a sample of many tenants, otherwise at none of too many.
func readWaiting(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, types, top []string, limited bool,
) ([]WaitingJobs, error) {
	failed := func(err error) error { return fmt.Errorf("read queues of partition %d: %w", p.Index(), err) }
	out := make([]WaitingJobs, len(types))
	type set struct {
		typ     int
		lanes   []string // to look at
		limited bool
	}
	var sets []set
	var keys []string
	for i, typ := range types {
		for j, lane := range fairLanes {
			lanes := fairLanes[j : j+1]
			if limited {
				lanes = fairLanes[:]
			}
			sets = append(sets, set{i, lanes, false}, set{i, lanes, false})
			keys = append(keys, p.FairLane(typ, lane), p.FairOver(typ, lane))
		}
		if limited {
			sets, keys = append(sets, set{i, fairLanes[:], true}), append(keys, p.RateLimited(typ))
		}
	}
	parts, err := strata(ctx, c, keys, top)
	if err != nil {
		return nil, failed(err)
	}
	if !limited {
		number := make([]int64, len(types))
		for _, part := range parts {
			typ := sets[part.set].typ
			number[typ] += part.size
			out[typ].whole = number[typ] > maxTenantsRead
		}
		parts = slices.DeleteFunc(parts, func(part stratum) bool { return out[sets[part.set].typ].whole })
	}
	type member struct {
		part   int
		tenant string
	}
	var members []member
	for i, part := range parts {
		for _, tenant := range part.tenants {
			members = append(members, member{i, tenant})
		}
	}
	mostGroups := maxGroupsRead
	if limited {
		mostGroups = min(maxGroupsRead, max(10, maxQueuesRead/max(1, len(members))))
	}
	type tenantRead struct {
		tenant *redis.SliceCmd
		groups []sample // by lane
	}
	read, err := pipelined(ctx, c, members, func(pipe redis.Pipeliner, m member) (r tenantRead) {
		r.tenant = pipe.HMGet(ctx, p.Tenant(m.tenant), tenantRPS, tenantInFlight, tenantPaused)
		of := sets[parts[m.part].set]
		for _, lane := range of.lanes {
			r.groups = append(r.groups, take(ctx, pipe, p.FairTenant(types[of.typ], lane, m.tenant), mostGroups))
		}
		return r
	})
	if err != nil {
		return nil, failed(err)
	}
	var queues []string
	for i, m := range members {
		typ := sets[parts[m.part].set].typ
		for _, of := range read[i].groups {
			out[typ].whole = out[typ].whole || of.size.Val() > int64(mostGroups)
			for _, group := range of.members.Val() {
				queues = append(queues, p.Queue(group, types[typ]))
			}
		}
	}
	lengths, err := pipelined(ctx, c, queues, func(pipe redis.Pipeliner, key string) *redis.IntCmd { return pipe.LLen(ctx, key) })
	if err != nil {
		return nil, failed(err)
	}
	at, next := -1, 0
	for i, m := range members {
		part := parts[m.part]
		w := &out[sets[part.set].typ]
		if m.part != at {
			at = m.part
			w.Sets = append(w.Sets, WaitingSet{Limited: sets[part.set].limited, Size: part.size})
		}
		t, paused := tenantOf(m.tenant, read[i].tenant)
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
		if sets[part.set].limited {
			t.Lanes = min(t.Lanes, 1)
		}
		if paused {
			t.Jobs, t.Variance = 0, 0
		}
		last := &w.Sets[len(w.Sets)-1]
		last.Tenants = append(last.Tenants, t)
	}
	return out, nil
}

func tenantOf(id string, read *redis.SliceCmd) (t WaitingTenant, paused bool) {
	v := values(read.Val())
	return WaitingTenant{ID: id, RPS: v.decimal(0), InFlight: v.decimal(1)}, v.str(2) != ""
}

// typesOfDue is how many due jobs of a tenant are looked at to estimate of which types they are.
const typesOfDue = 5

// DueJobs returns the non-ready jobs that are due of each of the types, whose other fields Loads has
// set. For paused and top see SetRunnable.
func DueJobs(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, types []api.TypeStats, paused, top []string,
) ([]WaitingJobs, error) {
	out := make([]WaitingJobs, len(types))
	if !slices.ContainsFunc(types, func(t api.TypeStats) bool { return t.NonReady > 0 }) {
		return out, nil
	}
	failed := func(err error) error { return fmt.Errorf("read due jobs of partition %d: %w", p.Index(), err) }
	at, err := c.Time(ctx).Result()
	if err != nil {
		return nil, failed(err)
	}
	now := strconv.FormatInt(at.UnixMilli(), 10)
	parts, err := strata(ctx, c, []string{p.NonReady()}, top)
	if err != nil {
		return nil, failed(err)
	}
	type tenantRead struct {
		tenant *redis.SliceCmd
		due    *redis.IntCmd
		some   *redis.StringSliceCmd
	}
	for _, part := range parts {
		read, err := pipelined(ctx, c, part.tenants, func(pipe redis.Pipeliner, tenant string) tenantRead {
			key := p.NonReadyOf(tenant)
			return tenantRead{
				pipe.HMGet(ctx, p.Tenant(tenant), tenantRPS, tenantInFlight, tenantPaused), pipe.ZCount(ctx, key, "-inf", now),
				pipe.ZRevRangeByScore(ctx, key, &redis.ZRangeBy{Min: "-inf", Max: now, Count: typesOfDue}),
			}
		})
		if err != nil {
			return nil, failed(err)
		}
		for i, typ := range types {
			if slices.Contains(paused, typ.Type) {
				continue
			}
			set := WaitingSet{Size: part.size}
			for j, tenant := range part.tenants {
				t, held := tenantOf(tenant, read[j].tenant)
				some := read[j].some.Val()
				for _, blob := range some {
					if job, err := ParseJob(blob); err == nil && job.Type == typ.Type && !held {
						t.Jobs += float64(read[j].due.Val()) / float64(len(some))
					}
				}
				set.Tenants = append(set.Tenants, t)
			}
			out[i].Sets = append(out[i].Sets, set)
		}
	}
	return out, nil
}

// Within returns how many of the tenant's jobs may start within some seconds: by its own limits, or by
// share, in permits a second, if it has no rate of its own; 0: no share. Its other jobs get some of the
// permits: spent. meanRun is in seconds; 0: not known.
func (t WaitingTenant) Within(seconds, share, spent, meanRun float64) float64 {
	jobs := t.Jobs
	if rps := cmp.Or(t.RPS, share); rps > 0 {
		jobs = min(jobs, max(0, rps*seconds-spent))
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
// paused are the types that are paused: nothing of them waits. With limited it looks at the
// tenants top, the busiest, and at a sample of the others if there are too many; otherwise all waiting
// jobs are runnable then.
func SetRunnable(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, types []api.TypeStats, paused, top []string, limited bool,
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
	read, err := readWaiting(ctx, c, p, names, top, limited)
	for i, w := range read {
		jobs, _ := w.Sum(false, func(t WaitingTenant) float64 { return t.Jobs })
		t := &types[of[i]]
		if w.whole && !limited {
			jobs = float64(t.Waiting)
		}
		t.Runnable += min(int64(math.Round(jobs)), t.Waiting)
		waiting[of[i]] = w
	}
	return waiting, err
}
