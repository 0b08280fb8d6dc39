package lua

import "time"

// Rate is the limit of the whole installation: RPS permits a second, counted in windows. 0 is no limit.
type Rate struct {
	RPS    int64
	Window time.Duration
}

// PerWindow is the permits of one window of all partitions together, at least 1.
func (r Rate) PerWindow() int64 {
	if r.RPS <= 0 {
		return 0
	}
	return max(1, r.RPS*r.Window.Milliseconds()/1000)
}

// Of is the part of one partition, counted from 0. The parts add up to the whole, which must be at least 1 for each:
// a part of 0 would be no limit. The configuration is refused otherwise.
func (r Rate) Of(partition, partitions int) Limit {
	n, i := int64(partitions), int64(partition)
	all := r.PerWindow()
	return Limit{Window: r.Window, Permits: all*(i+1)/n - all*i/n}
}

// RPSOf is the permits a second of one partition, for estimates.
func (r Rate) RPSOf(partitions int) int64 {
	if r.RPS <= 0 {
		return 0
	}
	return max(1, r.RPS/int64(partitions))
}
