package console

import (
	"context"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web/console/chart"
)

const (
	mapBuckets = 500
	// mapInterval is how often an open page of a group reads the map of its jobs. The store reads
	// the states of all jobs for a map, and caches the map for the same time.
	mapInterval = 2 * time.Second
)

// jobMap is a chart of a group's jobs: each column shows the states of a range of ordinals.
type jobMap struct {
	Jobs  int64
	Last  int64 // the last ordinal
	Each  int64 // the most jobs of a column
	Chart chart.Map
}

// mapReader returns a function that reads the map of a group at most once per mapInterval. The
// function returns nil while the group has no jobs.
func (p groupPages) mapReader(id string) func(context.Context) (*jobMap, error) {
	return every(mapInterval, func(ctx context.Context) (*jobMap, error) {
		m, err := p.backend.JobMap(ctx, id, mapBuckets)
		return newJobMap(m), err
	})
}

func newJobMap(m api.JobMap) *jobMap {
	if m.Jobs == 0 || len(m.Buckets) == 0 {
		return nil
	}
	j := &jobMap{Jobs: m.Jobs}
	var columns [][]chart.Value
	for _, b := range m.Buckets {
		j.Last, j.Each = b.To, max(j.Each, b.To-b.From+1)
		columns = append(columns, values(api.Counts{
			Done: b.Done, Failed: b.Failed, Cancelled: b.Cancelled, InFlight: b.InFlight,
			Ready: b.Ready, NonReady: b.NonReady, Waiting: b.Waiting,
		}))
	}
	j.Chart = chart.NewMap(barWidth, 48, columns)
	return j
}
