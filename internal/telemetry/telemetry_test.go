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
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
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
		"resource": {environ: map[string]string{"OTEL_RESOURCE_ATTRIBUTES": "nonsense"}, want: "OTEL_RESOURCE_ATTRIBUTES"},
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
		})
	}
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
