package ledger

import (
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/internal/ledger/layout"
)

// GroupFields are the fields of a group that a submission chooses.
type GroupFields struct {
	Lane             string
	Name             string
	BasePriority     float64
	MaxRetries       *int          // nil: the worker's default
	JobTimeout       time.Duration // 0: the worker's default
	RunAt            *time.Time    // nil: at once
	FailureThreshold *float64      // nil: 1
	Total            *int64        // nil: not announced
	Aggregate        string        // the aggregates that were asked for, as JSON; "": none
}

// Encode returns the fields as the group's hash stores them, for [CreateArgs].
func (g *GroupFields) Encode() map[string]string {
	f := map[string]string{
		layout.GroupLane:         g.Lane,
		layout.GroupName:         g.Name,
		layout.GroupBasePriority: strconv.FormatFloat(g.BasePriority, 'f', -1, 64),
	}
	if g.MaxRetries != nil {
		f[layout.GroupMaxRetries] = strconv.Itoa(*g.MaxRetries)
	}
	if g.JobTimeout > 0 {
		f[layout.GroupJobTimeout] = strconv.FormatInt(g.JobTimeout.Milliseconds(), 10)
	}
	if g.RunAt != nil {
		f[layout.GroupRunAt] = strconv.FormatInt(g.RunAt.UnixMilli(), 10)
	}
	if g.FailureThreshold != nil {
		f[layout.GroupFailureThreshold] = strconv.FormatFloat(*g.FailureThreshold, 'f', -1, 64)
	}
	if g.Total != nil {
		f[layout.GroupTotal] = strconv.FormatInt(*g.Total, 10)
	}
	if g.Aggregate != "" {
		f[layout.GroupAggregate] = g.Aggregate
	}
	return f
}
