package bench

import (
	"context"
	"fmt"
	"strconv"
	"time"
)

// CongestionOptions say how much runs into which limit.
type CongestionOptions struct {
	Options
	Jobs, Tenants int
	RPS           int // permits a second in all
}

// Congestion is what came of it: how close a backlog that is far above the limit comes to the
// limit, and how often jobs were sent to non-ready for it.
type Congestion struct {
	Jobs             int     `json:"jobs"`
	Tenants          int     `json:"tenants"`
	RPS              int     `json:"rps"`
	IdealSeconds     float64 `json:"ideal_seconds"`
	MakespanSeconds  float64 `json:"makespan_seconds"` // first accepted to last job ended
	MakespanRatio    float64 `json:"makespan_ratio"`
	ThrottlesPerJob  float64 `json:"throttles_per_job"`
	Windows          int     `json:"windows"` // aligned ones, from the first permit to the last
	WindowsOverLimit int     `json:"windows_over_limit"`
	MaxOver          float64 `json:"max_over"` // permits beyond the limit, at worst
	LimitUsedRatio   float64 `json:"limit_used_ratio"`
	Permits          int64   `json:"permits"`
	// in which more jobs started than a window has permits; for information
	StartWindowsOver int               `json:"start_windows_over"`
	TenantSeconds    []float64         `json:"tenant_seconds"` // when each tenant's last job had ended
	PerSecond        []SecondOfTenants `json:"per_second,omitempty"`
	Overrides        map[string]string `json:"overrides"`
}

// SecondOfTenants are the permits that were spent in one second of the run, and the jobs
// that started.
type SecondOfTenants struct {
	Second  int   `json:"second"`
	Permits int64 `json:"permits"`
	Starts  int64 `json:"starts"`
}

// RunCongestion has a few tenants, a group each, share a small global limit.
func RunCongestion(ctx context.Context, o CongestionOptions) (Congestion, error) {
	out := Congestion{
		Jobs:         o.Jobs,
		Tenants:      o.Tenants,
		RPS:          o.RPS,
		IdealSeconds: round4(float64(o.Jobs) / float64(o.RPS)),
	}
	x, err := startExperiment(ctx, o.Options, setup{
		env: map[string]string{"BULKACTION_BACKPRESSURE_GLOBAL_RPS": strconv.Itoa(o.RPS)},
	})
	if err != nil {
		return out, err
	}
	defer x.close()
	out.Overrides = x.overrides
	groups := make([]group, o.Tenants)
	for i := range groups {
		groups[i] = group{
			id:     fmt.Sprintf("%s-%d", x.name, i),
			tenant: fmt.Sprintf("tenant-%d", i),
			jobs:   o.Jobs*(i+1)/o.Tenants - o.Jobs*i/o.Tenants,
		}
	}
	if err := x.submit(ctx, groups...); err != nil {
		return out, err
	}
	ended, log, err := x.finish(ctx, "congestion")
	if err != nil {
		return out, err
	}
	permits, starts := permitEvents(log, nil), startEvents(log, nil)
	if len(permits) == 0 {
		return out, errNoPermits
	}
	out.MakespanSeconds = makespan(ended)
	out.MakespanRatio = ratio(out.MakespanSeconds, out.IdealSeconds)
	var throttles int64
	first := ended[0].created
	for _, g := range ended {
		throttles += g.throttles
		first = min(first, g.created)
	}
	for _, g := range ended {
		out.TenantSeconds = append(out.TenantSeconds, float64(g.ended-first)/1e3)
	}
	out.ThrottlesPerJob = ratio(float64(throttles), float64(o.Jobs))
	limit, err := x.limitRule(o.RPS)
	if err != nil {
		return out, err
	}
	out.Windows, out.Permits = limit.windowCount(permits), sumEvents(permits)
	out.WindowsOverLimit, out.MaxOver = limit.windowsOver(permits)
	// All jobs were there before the first permit, and some waited until the last.
	used, _ := limit.usedRatio(permits, permits[0].at, permits[len(permits)-1].at)
	out.LimitUsedRatio = round4(used)
	out.StartWindowsOver, _ = limit.windowsOver(starts)
	out.PerSecond = perSecond(permits, starts)
	return out, nil
}

// perSecond is the run by aligned seconds, for plots.
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
