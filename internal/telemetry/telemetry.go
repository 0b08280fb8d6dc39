// Package telemetry provides the logs, traces and metrics of a process. It hides the
// OpenTelemetry SDK, the choice of exporters by the standard OTEL_* variables, and how a job's
// trace context travels as a W3C traceparent without cost for unsampled jobs. Only
// OpenTelemetry's error handler is global.
package telemetry

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/otlptranslator"
	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	promexporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	noopmetric "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/exemplar"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	nooptrace "go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/net/http/httpguts"
)

const scope = "github.com/bulkaction/bulkaction"

// Telemetry holds the logs, traces and metrics of one process; all roles of the process share it.
type Telemetry struct {
	Log    *slog.Logger
	Tracer trace.Tracer
	Meter  metric.Meter

	// TracerProvider and Propagator are for libraries that create their own spans, such as HTTP
	// middleware.
	TracerProvider trace.TracerProvider
	Propagator     propagation.TextMapPropagator

	sampler  sdktrace.Sampler // nil: tracing is off
	registry *prometheus.Registry
	shutdown []func(context.Context) error // functions that Shutdown calls, in this order
}

// Options name the process in its telemetry and choose the form and destination of its logs.
type Options struct {
	Service   string    // service.name, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES name another
	Instance  string    // service.instance.id
	Version   string    // service.version; left out when empty
	LogLevel  string    // debug, info (also when empty), warn or error
	LogFormat string    // json (also when empty) or text
	LogWriter io.Writer // os.Stderr when nil
}

// Setup starts the telemetry of a process, and sets OpenTelemetry's global error handler. Traces
// and pushed metrics are off, and nothing connects to a collector, unless OTEL_* variables name an
// exporter or an endpoint. [Telemetry.MetricsHandler] always serves the metrics. An error names the
// wrong option or variable.
func Setup(ctx context.Context, o Options) (*Telemetry, error) {
	log, err := newLogger(o)
	if err != nil {
		return nil, err
	}
	res, err := newResource(ctx, o)
	if err != nil {
		return nil, err
	}
	if err := checkOTLP(); err != nil {
		return nil, err
	}
	// The SDK reports what it can't read of its variables while the exporters are created.
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Error("telemetry failed", "error", err) }))
	otel.SetLogger(logr.FromSlogHandler(log.Handler()))
	t := Nop()
	t.Log = log
	if err := errors.Join(t.startTraces(ctx, res), t.startMetrics(ctx, res)); err != nil {
		return nil, errors.Join(err, t.Shutdown(ctx))
	}
	return t, nil
}

// Given returns telemetry that uses the logger and the providers of the program in which this one
// is embedded. Shutdown does not stop them. It reads no environment variables. If tracers is nil,
// there are no spans. If meters is nil, only the MetricsHandler shows metrics; otherwise the
// MetricsHandler shows none.
func Given(log *slog.Logger, tracers trace.TracerProvider, meters metric.MeterProvider) (*Telemetry, error) {
	t := Nop()
	t.Log = log
	if tracers != nil {
		// The provider decides by its own sampler, too.
		t.sampler = sdktrace.ParentBased(sdktrace.AlwaysSample())
		t.TracerProvider, t.Tracer = tracers, tracers.Tracer(scope)
	}
	if meters != nil {
		t.Meter = meters.Meter(scope)
		return t, nil
	}
	return t, t.serveMetrics(nil)
}

// Nop returns telemetry that discards everything, for tests and for a process before Setup.
func Nop() *Telemetry {
	tracers := nooptrace.NewTracerProvider()
	return &Telemetry{
		Log:            slog.New(slog.DiscardHandler),
		Tracer:         tracers.Tracer(scope),
		Meter:          noopmetric.NewMeterProvider().Meter(scope),
		TracerProvider: tracers,
		Propagator:     propagation.TraceContext{},
		registry:       prometheus.NewRegistry(),
	}
}

// Shutdown exports the remaining spans and metrics and stops, within ctx. Nothing is recorded
// afterwards.
func (t *Telemetry) Shutdown(ctx context.Context) error {
	var errs []error
	for _, stop := range t.shutdown {
		errs = append(errs, stop(ctx))
	}
	t.shutdown = nil
	return errors.Join(errs...)
}

// MetricsHandler returns the handler that serves the metrics in Prometheus's text format.
// OpenMetrics is not offered: it would rename the counters whose names do not end in _total.
func (t *Telemetry) MetricsHandler() http.Handler {
	return promhttp.HandlerFor(t.registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
}

func (t *Telemetry) startTraces(ctx context.Context, res *resource.Resource) error {
	exporter, err := spanExporter(ctx)
	if err != nil || exporter == nil {
		return err
	}
	sampler, err := samplerFromEnv()
	if err != nil {
		return errors.Join(err, exporter.Shutdown(ctx))
	}
	t.useTraces(res, sampler, sdktrace.NewBatchSpanProcessor(exporter, batcherOptions()...))
	return nil
}

func (t *Telemetry) useTraces(res *resource.Resource, sampler sdktrace.Sampler, processor sdktrace.SpanProcessor) {
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithResource(res),
		sdktrace.WithSampler(sampler),
		sdktrace.WithIDGenerator(idGenerator{}),
		sdktrace.WithSpanProcessor(processor),
	)
	t.shutdown = append(t.shutdown, func(ctx context.Context) error {
		return wrap("flush traces", provider.Shutdown(ctx))
	})
	t.sampler, t.TracerProvider, t.Tracer = sampler, provider, provider.Tracer(scope)
}

func (t *Telemetry) startMetrics(ctx context.Context, res *resource.Resource) error {
	pushed, err := metricReader(ctx)
	if err != nil {
		return err
	}
	options := []sdkmetric.Option{sdkmetric.WithResource(res)}
	if pushed != nil {
		options = append(options, sdkmetric.WithReader(pushed))
	}
	return t.serveMetrics(options)
}

// serveMetrics creates the meter. Its metrics go to the MetricsHandler, and to the readers among
// the options.
func (t *Telemetry) serveMetrics(options []sdkmetric.Option) error {
	scraped, err := promexporter.New(
		promexporter.WithRegisterer(t.registry),
		promexporter.WithTranslationStrategy(otlptranslator.UnderscoreEscapingWithoutSuffixes),
		promexporter.WithoutScopeInfo(),
		promexporter.WithoutTargetInfo(),
	)
	if err != nil {
		return fmt.Errorf("create metrics exporter: %w", err)
	}
	// Turn exemplars off: instruments record without a context, so the SDK would search for spans
	// in vain.
	options = append(options, sdkmetric.WithReader(scraped), sdkmetric.WithExemplarFilter(exemplar.AlwaysOffFilter))
	t.registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	provider := sdkmetric.NewMeterProvider(options...)
	t.shutdown = append(t.shutdown, func(ctx context.Context) error {
		return wrap("flush metrics", provider.Shutdown(ctx))
	})
	t.Meter = provider.Meter(scope)
	return nil
}

func newLogger(o Options) (*slog.Logger, error) {
	levels := map[string]slog.Level{
		"debug": slog.LevelDebug,
		"":      slog.LevelInfo,
		"info":  slog.LevelInfo,
		"warn":  slog.LevelWarn,
		"error": slog.LevelError,
	}
	level, ok := levels[o.LogLevel]
	if !ok {
		return nil, fmt.Errorf("log level %q: must be debug, info, warn or error", o.LogLevel)
	}
	w := o.LogWriter
	if w == nil {
		w = os.Stderr
	}
	var handler slog.Handler
	switch o.LogFormat {
	case "", "json":
		handler = slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level})
	case "text":
		handler = slog.NewTextHandler(w, &slog.HandlerOptions{Level: level})
	default:
		return nil, fmt.Errorf("log format %q: must be json or text", o.LogFormat)
	}
	return slog.New(handler).With("service", o.Service, "instance", o.Instance), nil
}

func wrap(action string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", action, err)
}

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

// checkOTLP checks what the SDK would only log, with the value of a header, and then ignore. An error
// names the variable and quotes no header, because headers hold credentials.
func checkOTLP() error {
	var errs []error
	for _, signal := range []string{"", "TRACES_", "METRICS_"} {
		name := "OTEL_EXPORTER_OTLP_" + signal + "ENDPOINT"
		if text := strings.TrimSpace(os.Getenv(name)); text != "" {
			u, err := url.Parse(text)
			if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
				errs = append(errs, fmt.Errorf("%s: must be a URL such as http://collector:4318", name))
			}
		}
		name = "OTEL_EXPORTER_OTLP_" + signal + "HEADERS"
		for i, header := range strings.Split(os.Getenv(name), ",") {
			key, value, ok := strings.Cut(header, "=")
			_, err := url.PathUnescape(value)
			key = strings.TrimSpace(key)
			valid := ok && err == nil && httpguts.ValidHeaderFieldName(key) && httpguts.ValidHeaderFieldValue(value)
			if strings.TrimSpace(os.Getenv(name)) != "" && !valid {
				errs = append(errs, fmt.Errorf("%s: header %d is malformed: write name=value,name=value, "+
					"with special characters of a value as %%2C", name, i+1))
			}
		}
	}
	return errors.Join(errs...)
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

type presetKey struct{}

// preset holds ids that are chosen before their span starts, as a value of the context. Only the
// first span that starts with the context gets them: its children inherit the context, and must not
// get the same ids.
type preset struct {
	trace trace.TraceID // zero: the generator chooses
	span  trace.SpanID
	taken atomic.Bool
}

// WithSpanID gives the next span that is started with ctx, or with a context derived from it, the
// given id. Lua scripts choose the ids of spans that the process creates after the script has run.
func WithSpanID(ctx context.Context, id trace.SpanID) context.Context {
	if !id.IsValid() {
		return ctx
	}
	return context.WithValue(ctx, presetKey{}, &preset{span: id})
}

func withTraceID(ctx context.Context, id trace.TraceID) context.Context {
	return context.WithValue(ctx, presetKey{}, &preset{trace: id})
}

// idGenerator makes the ids of spans for the SDK: random ones, or those of the preset in the
// context.
type idGenerator struct{}

var _ sdktrace.IDGenerator = idGenerator{}

func (idGenerator) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	p := takePreset(ctx)
	tid, sid := p.trace, p.span
	if !tid.IsValid() {
		tid = randomTraceID()
	}
	if !sid.IsValid() {
		sid = randomSpanID()
	}
	return tid, sid
}

func (idGenerator) NewSpanID(ctx context.Context, _ trace.TraceID) trace.SpanID {
	if p := takePreset(ctx); p.span.IsValid() {
		return p.span
	}
	return randomSpanID()
}

var noPreset preset

func takePreset(ctx context.Context) *preset {
	p, ok := ctx.Value(presetKey{}).(*preset)
	if !ok || !p.taken.CompareAndSwap(false, true) {
		return &noPreset
	}
	return p
}

func randomTraceID() (id trace.TraceID) {
	for !id.IsValid() {
		binary.NativeEndian.PutUint64(id[:8], rand.Uint64())
		binary.NativeEndian.PutUint64(id[8:], rand.Uint64())
	}
	return id
}

func randomSpanID() (id trace.SpanID) {
	for !id.IsValid() {
		binary.NativeEndian.PutUint64(id[:], rand.Uint64())
	}
	return id
}
