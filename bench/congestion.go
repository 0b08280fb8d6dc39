package bench

import (
	"context"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/bench/measure"
)

// CongestionOptions say how many jobs of how many tenants compete for which limit.
type CongestionOptions struct {
	Options
	Jobs, Tenants int
	RPS           int // global limit: permits a second
}

// Congestion shows how close a run whose backlog is far above the global limit comes to the ideal
// time (jobs / limit), and how often its jobs were throttled.
type Congestion struct {
	Jobs         int     `json:"jobs"`
	Tenants      int     `json:"tenants"`
	RPS          int     `json:"rps"`
	IdealSeconds float64 `json:"ideal_seconds"`
	// MakespanSeconds is the time from the acceptance of the first group to the end of the last
	// job.
	MakespanSeconds  float64 `json:"makespan_seconds"`
	MakespanRatio    float64 `json:"makespan_ratio"` // makespan / ideal time
	ThrottlesPerJob  float64 `json:"throttles_per_job"`
	Windows          int     `json:"windows"` // aligned windows from the first permit to the last
	WindowsOverLimit int     `json:"windows_over_limit"`
	MaxOver          float64 `json:"max_over"` // the largest number of permits beyond the limit
	// LimitUsedRatio is the permits that were spent / the permits that the limit gives, in the
	// whole windows between the first permit and the last.
	LimitUsedRatio float64 `json:"limit_used_ratio"`
	Permits        int64   `json:"permits"`
	// StartWindowsOver is the number of windows in which more jobs started than the limit has
	// permits. That is no error: jobs start some time after their permit.
	StartWindowsOver int `json:"start_windows_over"`
	// TenantSeconds has a duration for each tenant: from the acceptance of the first group of all
	// tenants to the end of the tenant's last job.
	TenantSeconds []float64         `json:"tenant_seconds"`
	PerSecond     []SecondOfTenants `json:"per_second,omitempty"`
	Overrides     map[string]string `json:"overrides"`
}

// SecondOfTenants has the number of permits that all tenants together spent in one second of the
// run, and the number of jobs that started in it.
type SecondOfTenants struct {
	Second  int   `json:"second"`
	Permits int64 `json:"permits"`
	Starts  int64 `json:"starts"`
}

// RunCongestion submits one group for each of o.Tenants tenants, which share a small global limit,
// waits until the groups have ended, and audits the data.
func RunCongestion(ctx context.Context, o CongestionOptions) (Congestion, error) {
	out := Congestion{
		Jobs:         o.Jobs,
		Tenants:      o.Tenants,
		RPS:          o.RPS,
		IdealSeconds: measure.Round4(float64(o.Jobs) / float64(o.RPS)),
	}
	x, err := o.experiment(ctx, "congestion", func(x *run) error {
		return x.submit(ctx, divideJobs(x.name, o.Jobs, o.Tenants, 1, nil)...)
	}, globalLimit(o.RPS))
	if err != nil {
		return out, err
	}
	out.Overrides = x.overrides
	limit, err := x.limitRule(o.RPS)
	if err != nil {
		return out, err
	}
	permits, starts := permitEvents(x.log, nil), startEvents(x.log, nil)
	if len(permits) == 0 {
		return out, errNoPermits
	}
	out.MakespanSeconds = makespan(x.ended)
	out.MakespanRatio = measure.Ratio(out.MakespanSeconds, out.IdealSeconds)
	first := slices.MinFunc(x.ended, func(a, b groupState) int { return a.Created.Compare(b.Created) })
	for _, g := range x.ended {
		out.TenantSeconds = append(out.TenantSeconds, g.JobsEnded.Sub(first.Created).Seconds())
	}
	out.ThrottlesPerJob = measure.Ratio(float64(sumThrottles(x.ended)), float64(o.Jobs))
	out.Windows, out.Permits = limit.windowCount(permits), sumEvents(permits)
	out.WindowsOverLimit, out.MaxOver = limit.windowsOver(permits)
	// Jobs were waiting all the time from the first permit to the last one, so all windows between
	// these two count.
	used, _ := limit.usedRatio(permits, permits[0].at, permits[len(permits)-1].at)
	out.LimitUsedRatio = measure.Round4(used)
	out.StartWindowsOver, _ = limit.windowsOver(starts)
	out.PerSecond = perSecond(permits, starts)
	return out, nil
}

// perSecond counts the permits and the starts of jobs in each second of a run, for plots. It begins
// with the second of the first permit and ends with that of the last permit or start. permits may
// not be empty.
func perSecond(permits, starts []event) []SecondOfTenants {
	const second = int64(time.Second / time.Microsecond)
	begin := permits[0].at / second
	end := permits[len(permits)-1].at / second
	if len(starts) > 0 {
		end = max(end, starts[len(starts)-1].at/second)
	}
	out := make([]SecondOfTenants, end-begin+1)
	for i := range out {
		out[i].Second = i
	}
	for _, e := range permits {
		out[e.at/second-begin].Permits += e.n
	}
	for _, e := range starts {
		if i := e.at/second - begin; i >= 0 {
			out[i].Starts += e.n
		}
	}
	return out
}
