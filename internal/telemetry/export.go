package telemetry

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
)

// spanQueue is how many ended spans wait for export at most, unless OTEL_BSP_MAX_QUEUE_SIZE is set;
// further ones are lost. One burst of batches would fill the SDK's default of 2,048.
const spanQueue = 16384

// spanExporter returns the exporter that the OTEL_* variables name; nil when they ask for no
// traces. Without this check the SDK would connect to localhost:4318.
func spanExporter(ctx context.Context) (sdktrace.SpanExporter, error) {
	if !wanted("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") {
		return nil, nil
	}
	exporter, err := autoexport.NewSpanExporter(ctx)
	if err != nil {
		return nil, fmt.Errorf("create trace exporter from OTEL_TRACES_EXPORTER and OTEL_EXPORTER_OTLP_*: %w", err)
	}
	if autoexport.IsNoneSpanExporter(exporter) {
		return nil, nil
	}
	return exporter, nil
}

// metricReader returns the reader that pushes metrics as the OTEL_* variables say; nil when they
// ask for no push.
func metricReader(ctx context.Context) (sdkmetric.Reader, error) {
	if !wanted("OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") {
		return nil, nil
	}
	reader, err := autoexport.NewMetricReader(ctx)
	if err != nil {
		return nil, fmt.Errorf("create metrics exporter from OTEL_METRICS_EXPORTER and OTEL_EXPORTER_OTLP_*: %w", err)
	}
	if autoexport.IsNoneMetricReader(reader) {
		return nil, nil
	}
	return reader, nil
}

func wanted(exporter, endpoint string) bool {
	if disabled, _ := strconv.ParseBool(os.Getenv("OTEL_SDK_DISABLED")); disabled {
		return false
	}
	return os.Getenv(exporter) != "" || os.Getenv(endpoint) != "" || os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != ""
}

func batcherOptions() []sdktrace.BatchSpanProcessorOption {
	if os.Getenv("OTEL_BSP_MAX_QUEUE_SIZE") != "" {
		return nil
	}
	return []sdktrace.BatchSpanProcessorOption{sdktrace.WithMaxQueueSize(spanQueue)}
}

// samplerFromEnv returns the sampler that OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG name. The
// SDK reads the same variables but does not export its sampler; [Telemetry.NewJobTrace] needs the
// sampler to decide before it builds a span.
func samplerFromEnv() (sdktrace.Sampler, error) {
	const byDefault = "parentbased_always_on"
	name := cmp.Or(strings.ToLower(strings.TrimSpace(os.Getenv("OTEL_TRACES_SAMPLER"))), byDefault)
	var sampler sdktrace.Sampler
	root, followsParent := strings.CutPrefix(name, "parentbased_")
	switch root {
	case "always_on":
		sampler = sdktrace.AlwaysSample()
	case "always_off":
		sampler = sdktrace.NeverSample()
	case "traceidratio":
		ratio, err := samplerRatio()
		if err != nil {
			return nil, err
		}
		sampler = sdktrace.TraceIDRatioBased(ratio)
	default:
		return nil, fmt.Errorf(
			"OTEL_TRACES_SAMPLER=%q: must be always_on, always_off, traceidratio, or one of these after parentbased_",
			name)
	}
	if followsParent {
		sampler = sdktrace.ParentBased(sampler)
	}
	return sampler, nil
}

func samplerRatio() (float64, error) {
	arg := strings.TrimSpace(os.Getenv("OTEL_TRACES_SAMPLER_ARG"))
	if arg == "" {
		return 1, nil
	}
	ratio, err := strconv.ParseFloat(arg, 64)
	if err != nil || !(ratio >= 0 && ratio <= 1) {
		return 0, fmt.Errorf("OTEL_TRACES_SAMPLER_ARG=%q: must be a number from 0 to 1", arg)
	}
	return ratio, nil
}

func newResource(ctx context.Context, o Options) (*resource.Resource, error) {
	attrs := []attribute.KeyValue{semconv.ServiceName(o.Service), semconv.ServiceInstanceID(o.Instance)}
	if o.Version != "" {
		attrs = append(attrs, semconv.ServiceVersion(o.Version))
	}
	res, err := resource.New(ctx, resource.WithTelemetrySDK(),
		resource.WithAttributes(attrs...), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("read OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	return res, nil
}
