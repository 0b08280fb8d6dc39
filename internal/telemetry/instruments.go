package telemetry

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// instruments creates OpenTelemetry instruments with the names of the metrics contract.
// OpenTelemetry returns the same instrument for the same name, so the roles of one process can
// share instruments. The only possible error is an invalid name, which is a bug in this package: it
// panics.
type instruments struct{ meter metric.Meter }

// NamePrefix begins the names of all metrics.
const NamePrefix = "bulk_action_"

// counter is one series of a counter: a name with fixed attributes. Recording needs no context:
// only exemplars would use it, and the Prometheus text format has none.
type counter struct {
	c    metric.Int64Counter
	opts []metric.AddOption
}

// counter creates a counter. Its series exists from the start, with value 0.
func (i instruments) counter(name, description string, attrs ...attribute.KeyValue) counter {
	c := must(i.meter.Int64Counter(NamePrefix+name, metric.WithDescription(description)))
	series := counter{c: c}
	if len(attrs) > 0 {
		series.opts = []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(attrs...))}
	}
	c.Add(context.Background(), 0, series.opts...)
	return series
}

func (c counter) add(n int) {
	if n > 0 {
		c.c.Add(context.Background(), int64(n), c.opts...)
	}
}

// histogram records durations in milliseconds.
type histogram struct{ h metric.Float64Histogram }

func (i instruments) histogram(name, description string, bounds ...float64) histogram {
	return histogram{must(i.meter.Float64Histogram(NamePrefix+name,
		metric.WithDescription(description), metric.WithUnit("ms"), metric.WithExplicitBucketBoundaries(bounds...)))}
}

func (h histogram) record(d time.Duration) {
	h.h.Record(context.Background(), float64(max(d, 0))/float64(time.Millisecond))
}

func (i instruments) gauge(name, description string) metric.Int64ObservableGauge {
	return must(i.meter.Int64ObservableGauge(NamePrefix+name, metric.WithDescription(description)))
}

func (i instruments) observableCounter(name, description string) metric.Int64ObservableCounter {
	return must(i.meter.Int64ObservableCounter(NamePrefix+name, metric.WithDescription(description)))
}

// observe registers f, which is called at each collection of metrics.
func (i instruments) observe(f func(metric.Observer), observed ...metric.Observable) {
	must(i.meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		f(o)
		return nil
	}, observed...))
}

func must[T any](v T, err error) T {
	if err != nil {
		panic("telemetry: " + err.Error())
	}
	return v
}
