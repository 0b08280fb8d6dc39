package console

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
)

// JobMap has two jobs in each bucket, all done but one of the first bucket, which is failed.
func (f *fakeBackend) JobMap(_ context.Context, id string, buckets int) (api.JobMap, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mapReads++
	m := api.JobMap{Jobs: f.groups[id].Counts.Accepted}
	for from := int64(0); from < m.Jobs && len(m.Buckets) < buckets; from += 2 {
		b := api.MapBucket{From: from, To: from + 1, Done: 2}
		if from == 0 {
			b.Done, b.Failed = 1, 1
		}
		m.Buckets = append(m.Buckets, b)
	}
	return m, f.err
}

func TestJobMap(t *testing.T) {
	t.Parallel()
	w := newTestConsole(t)
	d := w.page("/ui/groups/failed-1")
	require.Contains(t, d.text, "Job 0 on the left, job 999 on the right, 2 jobs a column.")
	shapes := map[string]string{}
	for _, path := range d.all("path") {
		shapes[attribute(path, "class")] = attribute(path, "d")
	}
	require.Equal(t, map[string]string{
		"fill-done":   "M0 24h2v24h-2zM2 0h998v48h-998z",
		"fill-failed": "M0 0h2v24h-2z",
	}, shapes)
	require.Contains(t, w.page("/ui/groups/other-1").text, "The group has no jobs yet.")
	require.Contains(t, w.page("/ui/groups/other-1").text, "bulkaction append other-1")
}

// TestJobMapInterval: of three reads of a group's data in a row, all have the map of its jobs, and
// only one asks the backend for it.
func TestJobMapInterval(t *testing.T) {
	t.Parallel()
	w := newTestConsole(t)
	read := groupPages{w.backend}.reader("failed-1")
	ctx := auth.Trust(t.Context())
	for range 3 {
		data, err := read(ctx)
		require.NoError(t, err)
		require.NotNil(t, data.(groupData).Map)
	}
	require.Equal(t, 1, w.backend.mapReads)
}
