package telemetry

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	nooptrace "go.opentelemetry.io/otel/trace/noop"
	collectortrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var testOptions = Options{Service: "bulkaction-test", Instance: "test-1", Version: "v1.2.3", LogWriter: io.Discard}

func setup(t *testing.T, o Options) *Telemetry {
	t.Helper()
	tel, err := Setup(t.Context(), o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, tel.Shutdown(context.Background())) })
	return tel
}

// clearOTel empties, for the time of the test, all OTEL_* variables of the environment in which the
// tests run.
func clearOTel(t *testing.T) {
	t.Helper()
	for _, variable := range os.Environ() {
		if name, _, _ := strings.Cut(variable, "="); strings.HasPrefix(name, "OTEL_") {
			t.Setenv(name, "")
		}
	}
}

func TestTracingIsOffUnlessAskedFor(t *testing.T) {
	cases := map[string]struct {
		environ map[string]string
		on      bool
	}{
		"nothing set":      {nil, false},
		"none":             {map[string]string{"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, false},
		"disabled":         {map[string]string{"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "console"}, false},
		"only metrics":     {map[string]string{"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1"}, false},
		"console":          {map[string]string{"OTEL_TRACES_EXPORTER": "console"}, true},
		"general endpoint": {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_METRICS_EXPORTER": "none"}, true},
		"traces endpoint":  {map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, true},
		"over gRPC":        {map[string]string{"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			clearOTel(t)
			for k, v := range c.environ {
				t.Setenv(k, v)
			}
			tel := setup(t, testOptions)
			require.Equal(t, c.on, tel.sampler != nil)
			_, off := tel.TracerProvider.(nooptrace.TracerProvider)
			require.Equal(t, !c.on, off)
		})
	}
}

func TestMetricsArePushedOnlyWhenAskedFor(t *testing.T) {
	cases := map[string]struct {
		name, value string
		on          bool
	}{
		"nothing set":      {"OTEL_METRICS_EXPORTER", "", false},
		"none":             {"OTEL_METRICS_EXPORTER", "none", false},
		"otlp":             {"OTEL_METRICS_EXPORTER", "otlp", true},
		"metrics endpoint": {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://127.0.0.1:1", true},
		"general endpoint": {"OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1", true},
		"traces endpoint":  {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1", false},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			clearOTel(t)
			t.Setenv(c.name, c.value)
			reader, err := metricReader(t.Context())
			require.NoError(t, err)
			require.Equal(t, c.on, reader != nil)
			if reader != nil {
				require.NoError(t, reader.Shutdown(t.Context()))
			}
		})
	}
}

func TestSetupRefuses(t *testing.T) {
	cases := map[string]struct {
		options Options
		environ map[string]string
		want    string
	}{
		"log level":  {options: Options{LogLevel: "loud"}, want: `log level "loud": must be debug, info, warn or error`},
		"log format": {options: Options{LogFormat: "xml"}, want: `log format "xml": must be json or text`},
		"exporter":   {environ: map[string]string{"OTEL_TRACES_EXPORTER": "carrier-pigeon"}, want: "OTEL_TRACES_EXPORTER"},
		"metrics":    {environ: map[string]string{"OTEL_METRICS_EXPORTER": "carrier-pigeon"}, want: "OTEL_METRICS_EXPORTER"},
		"sampler":    {environ: map[string]string{"OTEL_TRACES_EXPORTER": "console", "OTEL_TRACES_SAMPLER": "sometimes"}, want: `OTEL_TRACES_SAMPLER="sometimes"`},
		"sampler argument": {environ: map[string]string{
			"OTEL_TRACES_EXPORTER": "console", "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "NaN",
		}, want: `OTEL_TRACES_SAMPLER_ARG="NaN": must be a number from 0 to 1`},
		"endpoint":            {environ: map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, want: "OTEL_EXPORTER_OTLP_ENDPOINT: must be a URL such as http://collector:4318"},
		"endpoint of traces":  {environ: map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "ftp://c"}, want: "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: must be a URL"},
		"endpoint of metrics": {environ: map[string]string{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://"}, want: "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT: must be a URL"},
		"headers":             {environ: map[string]string{"OTEL_EXPORTER_OTLP_HEADERS": "a=b,sesame"}, want: "OTEL_EXPORTER_OTLP_HEADERS: header 2 is malformed"},
		"name of a header":    {environ: map[string]string{"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "s e=sesame"}, want: "OTEL_EXPORTER_OTLP_TRACES_HEADERS: header 1 is malformed"},
		"value of a header":   {environ: map[string]string{"OTEL_EXPORTER_OTLP_METRICS_HEADERS": "a=sesame%zz"}, want: "OTEL_EXPORTER_OTLP_METRICS_HEADERS: header 1 is malformed"},
		"resource":            {environ: map[string]string{"OTEL_RESOURCE_ATTRIBUTES": "nonsense"}, want: "OTEL_RESOURCE_ATTRIBUTES"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			clearOTel(t)
			for k, v := range c.environ {
				t.Setenv(k, v)
			}
			c.options.LogWriter = io.Discard
			_, err := Setup(t.Context(), c.options)
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "sesame", "headers hold credentials")
		})
	}
}

// TestWhatTheSDKReportsIsLogged: what the SDK reports while it reads its variables is a line of our
// log, not a line of text beside it.
func TestWhatTheSDKReportsIsLogged(t *testing.T) {
	clearOTel(t)
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
	t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
	var log bytes.Buffer
	tel, err := Setup(t.Context(), Options{LogFormat: "json", LogWriter: &log})
	require.NoError(t, err)
	require.Contains(t, log.String(), `"level":"ERROR"`)
	require.Contains(t, log.String(), `"input":"soon"`)
	require.NoError(t, tel.Shutdown(t.Context()), "there was nothing to export")
}

func TestSamplerFromEnv(t *testing.T) {
	cases := []struct {
		name, arg string
		want      sdktrace.Sampler
	}{
		{"", "", sdktrace.ParentBased(sdktrace.AlwaysSample())},
		{"parentbased_always_on", "", sdktrace.ParentBased(sdktrace.AlwaysSample())},
		{"parentbased_always_off", "", sdktrace.ParentBased(sdktrace.NeverSample())},
		{"ALWAYS_ON", "", sdktrace.AlwaysSample()},
		{"always_off", "", sdktrace.NeverSample()},
		{"traceidratio", "", sdktrace.TraceIDRatioBased(1)},
		{"traceidratio", "0.25", sdktrace.TraceIDRatioBased(0.25)},
		{"parentbased_traceidratio", " 0.01 ", sdktrace.ParentBased(sdktrace.TraceIDRatioBased(0.01))},
	}
	for _, c := range cases {
		t.Run(c.name+c.arg, func(t *testing.T) {
			t.Setenv("OTEL_TRACES_SAMPLER", c.name)
			t.Setenv("OTEL_TRACES_SAMPLER_ARG", c.arg)
			got, err := samplerFromEnv()
			require.NoError(t, err)
			require.Equal(t, c.want.Description(), got.Description())
		})
	}
}

// TestSpansAreFlushedOverOTLP: Shutdown exports an ended span over OTLP, under the name in
// OTEL_SERVICE_NAME or the process's own.
func TestSpansAreFlushedOverOTLP(t *testing.T) {
	for name, service := range map[string]string{"": "bulkaction-test", "shop-mailer": "shop-mailer"} {
		t.Run("OTEL_SERVICE_NAME="+name, func(t *testing.T) {
			received := make(chan *collectortrace.ExportTraceServiceRequest, 1)
			collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				request := new(collectortrace.ExportTraceServiceRequest)
				if proto.Unmarshal(body, request) == nil && r.URL.Path == "/v1/traces" {
					received <- request
				}
			}))
			defer collector.Close()
			clearOTel(t)
			t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
			t.Setenv("OTEL_METRICS_EXPORTER", "none")
			t.Setenv("OTEL_SERVICE_NAME", name)
			tel, err := Setup(t.Context(), testOptions)
			require.NoError(t, err)

			_, span := tel.Tracer.Start(t.Context(), "admit")
			span.End()
			require.NoError(t, tel.Shutdown(t.Context()))

			spans := (<-received).ResourceSpans[0]
			require.Equal(t, "admit", spans.ScopeSpans[0].Spans[0].Name)
			attrs := map[string]string{}
			for _, kv := range spans.Resource.Attributes {
				attrs[kv.Key] = kv.Value.Value.(*commonpb.AnyValue_StringValue).StringValue
			}
			require.Equal(t, service, attrs["service.name"])
			require.Equal(t, "test-1", attrs["service.instance.id"])
			require.Equal(t, "v1.2.3", attrs["service.version"])
		})
	}
}

func TestLogs(t *testing.T) {
	clearOTel(t)
	t.Run("JSON, from info on", func(t *testing.T) {
		var out bytes.Buffer
		o := testOptions
		o.LogWriter = &out
		tel := setup(t, o)
		tel.Log.Debug("hidden")
		tel.Log.Info("job done", "group", "g1")
		var line map[string]any
		require.NoError(t, json.Unmarshal(out.Bytes(), &line), out.String())
		delete(line, "time")
		require.Equal(t, map[string]any{"level": "INFO", "msg": "job done", "group": "g1", "service": "bulkaction-test", "instance": "test-1"}, line)
	})
	t.Run("text, from debug on", func(t *testing.T) {
		var out bytes.Buffer
		tel := setup(t, Options{Service: "s", Instance: "i", LogLevel: "debug", LogFormat: "text", LogWriter: &out})
		tel.Log.Debug("job done")
		require.Contains(t, out.String(), `level=DEBUG msg="job done" service=s instance=i`)
	})
}

func TestNop(t *testing.T) {
	tel := Nop()
	tel.Log.Error("unheard")
	NewFetcherMetrics(tel.Meter).Allowed("acme", 1)
	require.Empty(t, tel.NewJobTrace(ParseTraceParent(sampledParent), "ingest", time.Now(), nil))
	require.Empty(t, tel.ContinueJobTrace(sampledParent, "ingest", time.Now(), nil))
	_, span := tel.StartJob(t.Context(), JobSpan{Parent: sampledParent, Name: "admit"}, nil)
	require.False(t, span.SpanContext().IsValid())
	require.NoError(t, tel.Shutdown(t.Context()))
}

func ExampleFormatTraceParent() {
	sc := ParseTraceParent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	fmt.Println(sc.IsRemote(), sc.IsSampled(), FormatTraceParent(sc))
	// Output: true true 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
}

const (
	sampledParent   = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	unsampledParent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
)

// traced returns telemetry and a recorder that holds its ended spans.
func traced(t testing.TB, sampler sdktrace.Sampler) (*Telemetry, *tracetest.SpanRecorder) {
	t.Helper()
	recorder := tracetest.NewSpanRecorder()
	tel := Nop()
	tel.useTraces(resource.Empty(), sampler, recorder)
	t.Cleanup(func() { require.NoError(t, tel.Shutdown(context.Background())) })
	return tel, recorder
}

func always() sdktrace.Sampler { return sdktrace.ParentBased(sdktrace.AlwaysSample()) }

func jobAttrs() []attribute.KeyValue { return JobAttributes("acme", "g1", 7, 2) }

func TestStartJobRecordsAStepOfTheTrace(t *testing.T) {
	tel, recorder := traced(t, always())
	start := time.UnixMilli(1_700_000_000_000)
	link := trace.Link{SpanContext: ParseTraceParent("00-11111111111111111111111111111111-2222222222222222-01")}

	ctx, span := tel.StartJob(t.Context(), JobSpan{
		Parent: sampledParent, Name: "admit", Kind: trace.SpanKindConsumer, ID: "00000000000000aa", Start: start, Links: []trace.Link{link},
	}, jobAttrs)
	_, child := tel.Tracer.Start(ctx, "redis admit")
	child.End()
	span.End(trace.WithTimestamp(start.Add(time.Second)))

	spans := recorder.Ended()
	require.Len(t, spans, 2)
	inner, step := spans[0], spans[1]
	require.Equal(t, "0af7651916cd43dd8448eb211c80319c", step.SpanContext().TraceID().String())
	require.Equal(t, "00000000000000aa", step.SpanContext().SpanID().String())
	require.Equal(t, "b7ad6b7169203331", step.Parent().SpanID().String())
	require.Equal(t, trace.SpanKindConsumer, step.SpanKind())
	require.Equal(t, []attribute.KeyValue{
		attribute.String("bulkaction.tenant", "acme"), attribute.String("bulkaction.group", "g1"),
		attribute.String("bulkaction.job", "g1.7"), attribute.Int("bulkaction.attempt", 2),
	}, step.Attributes())
	require.Equal(t, link.SpanContext.TraceID(), step.Links()[0].SpanContext.TraceID())
	require.Equal(t, start, step.StartTime())
	require.Equal(t, start.Add(time.Second), step.EndTime())
	require.Equal(t, step.SpanContext().SpanID(), inner.Parent().SpanID())
	require.NotEqual(t, step.SpanContext().SpanID(), inner.SpanContext().SpanID(), "a preset id is for one span")
}

func TestStartJobIgnoresJobsThatAreNotSampled(t *testing.T) {
	tel, recorder := traced(t, always())
	for _, parent := range []string{"", "nonsense", unsampledParent} {
		ctx, span := tel.StartJob(t.Context(), JobSpan{Parent: parent, Name: "admit"}, func() []attribute.KeyValue {
			t.Error("attributes were built")
			return nil
		})
		require.Equal(t, t.Context(), ctx)
		require.False(t, span.IsRecording())
		span.End()
	}
	require.Empty(t, recorder.Started())
}

func TestUnsampledJobsAllocateNothing(t *testing.T) {
	for name, sampler := range map[string]sdktrace.Sampler{
		"never": sdktrace.ParentBased(sdktrace.NeverSample()),
		"ratio": sdktrace.ParentBased(sdktrace.TraceIDRatioBased(1e-15)),
	} {
		t.Run(name, func(t *testing.T) {
			tel, recorder := traced(t, sampler)
			ctx, link, now := t.Context(), ParseTraceParent(sampledParent), time.Now()
			tenant, group, ordinal := "acme", "g1", int64(0)
			run := func() {
				ordinal++
				attrs := func() []attribute.KeyValue { return JobAttributes(tenant, group, ordinal, 1) }
				parent := tel.NewJobTrace(link, "ingest", now, attrs)
				_, span := tel.StartJob(ctx, JobSpan{Parent: parent, Name: "admit", Start: now}, attrs)
				span.End()
				_, span = tel.StartJob(ctx, JobSpan{Parent: unsampledParent, Name: "admit", Start: now}, attrs)
				span.End()
				if tel.ContinueJobTrace(unsampledParent, "ingest", now, attrs) != "" {
					t.Error("an unsampled parent was followed")
				}
			}
			require.Zero(t, testing.AllocsPerRun(1000, run))
			require.Empty(t, recorder.Started())
		})
	}
}

func TestNewJobTraceBeginsALinkedTrace(t *testing.T) {
	tel, recorder := traced(t, always())
	at := time.Now().Add(-time.Second)
	got := tel.NewJobTrace(ParseTraceParent(sampledParent), "ingest", at, jobAttrs)

	span := recorder.Ended()[0]
	require.Equal(t, FormatTraceParent(span.SpanContext()), got)
	require.NotEqual(t, "0af7651916cd43dd8448eb211c80319c", span.SpanContext().TraceID().String())
	require.False(t, span.Parent().IsValid())
	require.Equal(t, "b7ad6b7169203331", span.Links()[0].SpanContext.SpanID().String())
	require.Equal(t, "ingest", span.Name())
	require.Equal(t, trace.SpanKindConsumer, span.SpanKind())
	require.Len(t, span.Attributes(), 4)
	require.True(t, span.StartTime().Equal(at))
	require.True(t, span.EndTime().After(at))

	require.NotEmpty(t, tel.NewJobTrace(trace.SpanContext{}, "ingest", at, nil))
	require.Empty(t, recorder.Ended()[1].Links(), "an empty link is none")
}

// TestNewJobTraceSamplesTheRatio: with the ratio 0.25, NewJobTrace samples 800 to 1200 of 4000
// jobs, and the SDK records one span for each of these, and no other.
func TestNewJobTraceSamplesTheRatio(t *testing.T) {
	tel, recorder := traced(t, sdktrace.ParentBased(sdktrace.TraceIDRatioBased(0.25)))
	sampled := 0
	for range 4000 {
		if parent := tel.NewJobTrace(trace.SpanContext{}, "ingest", time.Now(), nil); parent != "" {
			require.True(t, ParseTraceParent(parent).IsSampled())
			sampled++
		}
	}
	require.InDelta(t, 1000, sampled, 200, "six standard deviations of 27 are 164")
	require.Len(t, recorder.Ended(), sampled)
}

func TestContinueJobTrace(t *testing.T) {
	t.Run("a sampled parent is followed", func(t *testing.T) {
		tel, recorder := traced(t, sdktrace.ParentBased(sdktrace.NeverSample()))
		got := tel.ContinueJobTrace(sampledParent, "ingest", time.Now(), jobAttrs)
		span := recorder.Ended()[0]
		require.Equal(t, FormatTraceParent(span.SpanContext()), got)
		require.Equal(t, "0af7651916cd43dd8448eb211c80319c", span.SpanContext().TraceID().String())
		require.Equal(t, "b7ad6b7169203331", span.Parent().SpanID().String())
		require.Empty(t, span.Links())
	})
	t.Run("an unsampled parent is not", func(t *testing.T) {
		tel, recorder := traced(t, sdktrace.AlwaysSample())
		require.Empty(t, tel.ContinueJobTrace(unsampledParent, "ingest", time.Now(), nil))
		require.Empty(t, recorder.Started())
	})
	t.Run("the configured sampler may still refuse", func(t *testing.T) {
		tel, recorder := traced(t, sdktrace.NeverSample())
		require.Empty(t, tel.ContinueJobTrace(sampledParent, "ingest", time.Now(), nil))
		require.Empty(t, recorder.Ended())
	})
	t.Run("without a parent a trace begins", func(t *testing.T) {
		tel, recorder := traced(t, always())
		require.NotEmpty(t, tel.ContinueJobTrace("", "ingest", time.Now(), nil))
		require.False(t, recorder.Ended()[0].Parent().IsValid())
	})
}

func TestWithSpanID(t *testing.T) {
	tel, _ := traced(t, always())
	id := trace.SpanID{1, 2, 3}
	t.Run("for a root span", func(t *testing.T) {
		_, span := tel.Tracer.Start(WithSpanID(t.Context(), id), "root")
		require.Equal(t, id, span.SpanContext().SpanID())
		require.True(t, span.SpanContext().TraceID().IsValid())
	})
	t.Run("an invalid id is random", func(t *testing.T) {
		_, span := tel.Tracer.Start(WithSpanID(t.Context(), trace.SpanID{}), "root")
		require.True(t, span.SpanContext().SpanID().IsValid())
	})
	t.Run("ids differ without it", func(t *testing.T) {
		seen := map[trace.SpanID]bool{}
		for range 1000 {
			seen[idGenerator{}.NewSpanID(t.Context(), trace.TraceID{})] = true
		}
		require.Len(t, seen, 1000)
	})
}

func TestMessagingAttributes(t *testing.T) {
	got := append(MessagingAttributes(OpProcess, "process", "ready:SEND_EMAIL"), MessageID("g1.7"), MessageCount(3))
	require.Equal(t, []attribute.KeyValue{
		attribute.String("messaging.system", "redis"), attribute.String("messaging.operation.type", "process"),
		attribute.String("messaging.operation.name", "process"), attribute.String("messaging.destination.name", "ready:SEND_EMAIL"),
		attribute.String("messaging.message.id", "g1.7"), attribute.Int("messaging.batch.message_count", 3),
	}, got)
	require.Equal(t, []attribute.KeyValue{
		attribute.Int64("bulkaction.wait.fairness_ms", 1), attribute.Int64("bulkaction.wait.rate_ms", 2000), attribute.Int64("bulkaction.wait.congestion_ms", 0),
	}, WaitAttributes(time.Millisecond, 2*time.Second, 0))
	require.Equal(t, []attribute.KeyValue{attribute.String("bulkaction.tenant", "acme"), attribute.String("bulkaction.group", "g1")},
		JobAttributes("acme", "g1", -1, 0), "what is not known yet is left out")
}

// FuzzParseTraceParent compares the parser with OpenTelemetry's. OpenTelemetry's parser accepts a
// dash at the end of version 0, against the specification; that case is excluded.
func FuzzParseTraceParent(f *testing.F) {
	for _, seed := range []string{
		sampledParent, unsampledParent, "", "00-", sampledParent + "-", sampledParent + "x",
		"01" + sampledParent[2:] + "-later", "01" + sampledParent[2:] + "later", "ff" + sampledParent[2:], "cc" + sampledParent[2:53] + "ff",
		"00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "00-00000000000000000000000000000000-b7ad6b7169203331-01",
		"00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", sampledParent[:53] + "03", sampledParent[:53] + "04", sampledParent[:53] + "0g",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		ctx := propagation.TraceContext{}.Extract(context.Background(), propagation.MapCarrier{"traceparent": s})
		want, got := trace.SpanContextFromContext(ctx), ParseTraceParent(s)
		if len(s) == len(sampledParent)+1 && strings.HasPrefix(s, "00") {
			want = trace.SpanContext{}
		}
		require.True(t, want.Equal(got), "want %v, got %v", want, got)
		if !got.IsValid() {
			require.Empty(t, FormatTraceParent(got))
			return
		}
		carrier := propagation.MapCarrier{}
		propagation.TraceContext{}.Inject(ctx, carrier)
		require.Equal(t, carrier["traceparent"], FormatTraceParent(got))
	})
}

func BenchmarkUnsampledJob(b *testing.B) {
	tel, _ := traced(b, sdktrace.ParentBased(sdktrace.TraceIDRatioBased(1e-15)))
	ctx, now := b.Context(), time.Now()
	b.ReportAllocs()
	for b.Loop() {
		parent := tel.NewJobTrace(trace.SpanContext{}, "ingest", now, jobAttrs)
		_, span := tel.StartJob(ctx, JobSpan{Parent: parent, Name: "admit", Start: now}, jobAttrs)
		span.End()
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "jobs/s")
}

func BenchmarkSampledStep(b *testing.B) {
	tel := Nop()
	tel.useTraces(resource.Empty(), always(), sdktrace.NewSimpleSpanProcessor(tracetest.NewNoopExporter()))
	ctx, now := b.Context(), time.Now()
	b.ReportAllocs()
	for b.Loop() {
		_, span := tel.StartJob(ctx, JobSpan{Parent: sampledParent, Name: "admit", ID: "00000000000000aa", Start: now}, jobAttrs)
		span.End()
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "jobs/s")
}
