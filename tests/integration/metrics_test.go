package integration

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// nameMeter is a meter of OpenTelemetry that measures nothing and stores the names of the
// instruments which are created.
type nameMeter struct {
	noop.Meter
	names map[string]bool
}

func (m *nameMeter) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	m.names[name] = true
	return noop.Int64Counter{}, nil
}

func (m *nameMeter) Float64Histogram(
	name string, _ ...metric.Float64HistogramOption,
) (metric.Float64Histogram, error) {
	m.names[name] = true
	return noop.Float64Histogram{}, nil
}

func (m *nameMeter) Int64ObservableGauge(
	name string, _ ...metric.Int64ObservableGaugeOption,
) (metric.Int64ObservableGauge, error) {
	m.names[name] = true
	return noop.Int64ObservableGauge{}, nil
}

func (m *nameMeter) Float64ObservableGauge(
	name string, _ ...metric.Float64ObservableGaugeOption,
) (metric.Float64ObservableGauge, error) {
	m.names[name] = true
	return noop.Float64ObservableGauge{}, nil
}

func (m *nameMeter) Int64ObservableCounter(
	name string, _ ...metric.Int64ObservableCounterOption,
) (metric.Int64ObservableCounter, error) {
	m.names[name] = true
	return noop.Int64ObservableCounter{}, nil
}

// documented returns the metrics that a part of a document lists, in alphabetical order: the names
// in backticks in the first columns of its tables, without labels. The part lies between the lines
// from and to.
func documented(t *testing.T, file, from, to string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, "docs", file))
	require.NoError(t, err)
	_, part, found := strings.Cut(string(text), "\n"+from+"\n")
	require.True(t, found, from)
	part, _, found = strings.Cut(part, "\n"+to+"\n")
	require.True(t, found, to)
	names := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]*) \\|").FindAllStringSubmatch(part, -1) {
		for _, name := range regexp.MustCompile("`([a-z_]+)[^`]*`").FindAllStringSubmatch(row[1], -1) {
			names[name[1]] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// TestDocumentedMetrics requires that the documents list exactly the metrics that the code creates
// for the fetcher, dispatcher, worker and watcher, for the waiting room, and for guards.
func TestDocumentedMetrics(t *testing.T) {
	t.Parallel()
	named := func(prefix string, create func(metric.Meter)) []string {
		m := &nameMeter{names: map[string]bool{}}
		create(m)
		var names []string
		for name := range m.names {
			short, prefixed := strings.CutPrefix(name, prefix)
			require.True(t, prefixed, name)
			names = append(names, short)
		}
		slices.Sort(names)
		return names
	}
	require.Equal(t, named(telemetry.NamePrefix, func(m metric.Meter) {
		telemetry.NewFetcherMetrics(m)
		telemetry.NewDispatcherMetrics(m)
		telemetry.NewWorkerMetrics(m)
		telemetry.NewWatcherMetrics(m)
	}), documented(t, "metrics.md", "## Fetcher", "## Others"))
	require.Equal(t, named(telemetry.NamePrefix+"room_", func(m metric.Meter) {
		telemetry.NewRoomMetrics(m).ShowGauges(m, nil)
	}), documented(t, "operations.md", "### Metrics of the waiting room", "### Alerts of the waiting room"))
	require.Equal(t, named("", func(m metric.Meter) {
		c := guard.New(redistest.Server(t).Client(), guard.Meter(m))
		require.NoError(t, c.Close(t.Context()))
	}), documented(t, "guards.md", "## Metrics", "## Accounts and hosts in the pipeline"))
}
