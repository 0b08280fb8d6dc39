package integration

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// secret is a text in payloads and results. It must not occur in spans.
const secret = "s3cr3t-of-the-customer"

// traced starts a system that sends its spans to a receiver.
func traced(t *testing.T, opts ...option) (*system, *traceReceiver) {
	t.Helper()
	r := newTraceReceiver(t)
	return start(t, append([]option{
		env("OTEL_EXPORTER_OTLP_ENDPOINT", r.Endpoint()), env("OTEL_METRICS_EXPORTER", "none"), env("OTEL_BSP_SCHEDULE_DELAY", "50"),
	}, opts...)...), r
}

// parentOf returns a traceparent header and its two ids.
func parentOf(n int, flags string) (header, traceID, spanID string) {
	traceID, spanID = fmt.Sprintf("%032x", 0xabc000+n), fmt.Sprintf("%016x", 0xdef000+n)
	return "00-" + traceID + "-" + spanID + "-" + flags, traceID, spanID
}

// awaitTrace waits until a trace ends with a span reduce, fail or cancel, and returns its spans
// from the root on: each is the parent of the next. parent is the parent id of the first span; ""
// if it has none. Spans that a producer outside of the system has made are not included.
func awaitTrace(t *testing.T, r *traceReceiver, traceID, parent string) []exportedSpan {
	t.Helper()
	of := func(all []exportedSpan) []exportedSpan {
		return slices.DeleteFunc(all, func(s exportedSpan) bool { return s.TraceID != traceID })
	}
	var path []exportedSpan
	r.WaitFor(t, patience, func(all []exportedSpan) bool {
		spans, at := of(all), parent
		path = path[:0]
		for {
			i := slices.IndexFunc(spans, func(s exportedSpan) bool { return s.ParentID == at })
			if i < 0 {
				break
			}
			path, at = append(path, spans[i]), spans[i].SpanID
			spans = slices.Delete(spans, i, i+1)
		}
		return len(spans) == 0 && len(path) > 0 && slices.Contains([]string{"reduce", "fail", "cancel"}, path[len(path)-1].Name)
	})
	for i := 1; i < len(path); i++ {
		// Scripts measure time in whole milliseconds.
		require.False(t, path[i].Start.Before(path[i-1].Start.Add(-2*time.Millisecond)), "%s starts before %s", path[i].Name, path[i-1].Name)
	}
	return path
}

// names returns the names of spans, in their order.
func names(spans []exportedSpan) []string {
	all := make([]string, len(spans))
	for i, s := range spans {
		all[i] = s.Name
	}
	return all
}

var kindOf = map[string]string{
	"send ingest": "producer", "ingest": "consumer", "admit": "internal", "promote": "internal", "process NOOP": "consumer", "reduce": "consumer",
}

// describes requires that each span of a job's trace has the right kind and the right attributes of
// messaging, tenant and group; from admit on also the job, and at process NOOP the attempt and
// three wait times.
func describes(t *testing.T, s *system, path []exportedSpan, tenant, group string, ordinal int) {
	t.Helper()
	destination := map[string]string{
		"send ingest": s.space.Ingest(), "ingest": s.space.Ingest(), "admit": s.space.OfTenant(tenant).Ready("NOOP"),
		"promote": s.space.OfTenant(tenant).NonReady(), "process NOOP": s.space.OfTenant(tenant).Ready("NOOP"), "reduce": s.space.OfTenant(tenant).ResultStream(),
	}
	operation := map[string]string{"send ingest": "send", "ingest": "receive", "admit": "process", "promote": "process", "process NOOP": "process", "reduce": "process"}
	for _, span := range path {
		a := span.Attributes
		require.Equal(t, kindOf[span.Name], span.Kind, span.Name)
		require.Equal(t, "redis", a["messaging.system"], span.Name)
		require.Equal(t, operation[span.Name], a["messaging.operation.type"], span.Name)
		require.NotEmpty(t, a["messaging.operation.name"], span.Name)
		require.Equal(t, destination[span.Name], a["messaging.destination.name"], span.Name)
		require.Equal(t, tenant, a["bulkaction.tenant"], span.Name)
		require.Equal(t, group, a["bulkaction.group"], span.Name)
		if span.Name != "send ingest" && span.Name != "ingest" {
			require.Equal(t, fmt.Sprint(group, ".", ordinal), a["bulkaction.job"], span.Name)
		}
		if span.Name == "process NOOP" {
			require.GreaterOrEqual(t, a["bulkaction.attempt"], int64(1))
			for _, wait := range []string{"fairness", "rate", "congestion"} {
				require.Contains(t, a, "bulkaction.wait."+wait+"_ms")
			}
		}
	}
}

// silent requires that no span contains the text secret.
func silent(t *testing.T, spans []exportedSpan) {
	t.Helper()
	for _, s := range spans {
		text, err := json.Marshal([]any{s.Name, s.Attributes, s.Events, s.StatusMessage})
		require.NoError(t, err)
		require.NotContains(t, string(text), secret)
	}
}

// awaitBatches waits until, for each span in jobs, a span with this name, such as "admit batch",
// links to it.
func awaitBatches(t *testing.T, r *traceReceiver, name string, jobs []exportedSpan) {
	t.Helper()
	r.WaitFor(t, patience, func(all []exportedSpan) bool {
		linked := map[string]bool{}
		for _, s := range all {
			if s.Name == name {
				for _, l := range s.Links {
					linked[l.TraceID+l.SpanID] = true
				}
			}
		}
		return !slices.ContainsFunc(jobs, func(s exportedSpan) bool { return !linked[s.TraceID+s.SpanID] })
	})
}

var wholeWay = []string{"send ingest", "ingest", "admit", "process NOOP", "reduce"}

func payload() json.RawMessage { return json.RawMessage(`{"result":{"token":"` + secret + `"}}`) }

func TestTraceOfOneJob(t *testing.T) {
	t.Parallel()
	s, r := traced(t, apart)
	body := func(id string) string {
		return `{"id":"` + id + `","tenant":"acme","type":"NOOP","seal":true,"jobs":[{"payload":` + string(payload()) + `}]}`
	}

	t.Run("over HTTP it continues the request's trace", func(t *testing.T) {
		header, traceID, parent := parentOf(1, "01")
		status, answer := s.call("POST", s.url(0)+"/v1/groups", body("http"), "traceparent", header)
		require.Equal(t, 202, status, string(answer))
		path := awaitTrace(t, r, traceID, parent)
		require.Equal(t, wholeWay, names(path))
		describes(t, s, path, "acme", "http", 0)
		awaitBatches(t, r, "admit batch", path[2:3])
		awaitBatches(t, r, "reduce batch", path[4:])
	})
	t.Run("by the Go producer it follows its span", func(t *testing.T) {
		recorder := tracetest.NewSpanRecorder()
		p, err := producer.New(t.Context(), s.redis.URL(), producer.WithTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder))))
		require.NoError(t, err)
		defer p.Close()
		_, err = p.Submit(t.Context(), client.Submission{ID: "produced", Tenant: "acme", Type: "NOOP", Jobs: []client.NewJob{{Payload: payload()}}, Seal: true})
		require.NoError(t, err)
		require.Len(t, recorder.Ended(), 1)
		send := recorder.Ended()[0]
		require.Equal(t, "send ingest", send.Name())
		path := awaitTrace(t, r, send.SpanContext().TraceID().String(), send.SpanContext().SpanID().String())
		require.Equal(t, wholeWay[1:], names(path))
		describes(t, s, path, "acme", "produced", 0)
	})
	t.Run("by XADD it continues the entry's trace", func(t *testing.T) {
		header, traceID, parent := parentOf(2, "01")
		s.xadd(s.space.Ingest(), "type", "group.submit", "traceparent", header, "data", body("raw"))
		path := awaitTrace(t, r, traceID, parent)
		require.Equal(t, wholeWay[1:], names(path))
		describes(t, s, path, "acme", "raw", 0)
	})
	t.Run("unsampled it stays so", func(t *testing.T) {
		header, traceID, _ := parentOf(3, "00")
		status, answer := s.call("POST", s.url(0)+"/v1/groups", body("unsampled-http"), "traceparent", header)
		require.Equal(t, 202, status, string(answer))
		s.xadd(s.space.Ingest(), "type", "group.submit", "traceparent", header, "data", body("unsampled-raw"))
		s.wait("unsampled-http")
		s.wait("unsampled-raw")
		for _, span := range everything(s, r) {
			require.NotEqual(t, traceID, span.TraceID, span.Name)
			require.NotContains(t, fmt.Sprint(span.Attributes), "unsampled-")
		}
	})
	silent(t, r.Spans())
}

// everything stops all processes, so that they send their buffered spans, and returns all spans.
func everything(s *system, r *traceReceiver) []exportedSpan {
	s.stopAll()
	return r.Spans()
}

func TestTracesOfManyJobs(t *testing.T) {
	t.Parallel()
	s, r := traced(t)

	// One of three jobs has its own traceparent.
	header, traceID, parent := parentOf(1, "01")
	all := []client.NewJob{{Payload: payload()}, {Payload: payload(), TraceParent: header}, {Payload: payload()}}
	s.submit(client.Submission{ID: "three", Tenant: "acme", Type: "NOOP", Jobs: all, Seal: true})
	own := awaitTrace(t, r, traceID, parent)
	require.Equal(t, wholeWay, names(own))
	describes(t, s, own, "acme", "three", 1)

	// A message with 50 jobs that have no trace of their own: each job begins a trace, which links
	// to the span of the message.
	const n = 50
	message, messageTrace, messageSpan := parentOf(2, "01")
	data, err := json.Marshal(client.Submission{ID: "many", Tenant: "acme", Type: "NOOP", Jobs: slices.Repeat([]client.NewJob{{Payload: payload()}}, n), Seal: true})
	require.NoError(t, err)
	s.xadd(s.space.Ingest(), "type", "group.submit", "traceparent", message, "data", data)
	roots := map[string]exportedSpan{}
	r.WaitFor(t, patience, func(spans []exportedSpan) bool {
		clear(roots)
		for _, span := range spans {
			if span.Name == "ingest" && slices.Contains(span.Links, spanLink{TraceID: messageTrace, SpanID: messageSpan}) {
				roots[span.TraceID] = span
			}
		}
		return len(roots) == n
	})
	seen, admits := map[int64]bool{}, []exportedSpan(nil)
	for id, root := range roots {
		require.Empty(t, root.ParentID)
		path := awaitTrace(t, r, id, "")
		require.Equal(t, wholeWay[1:], names(path))
		var ordinal int64
		_, err := fmt.Sscanf(path[1].Attributes["bulkaction.job"].(string), "many.%d", &ordinal)
		require.NoError(t, err)
		seen[ordinal] = true
		describes(t, s, path, "acme", "many", int(ordinal))
		admits = append(admits, path[1])
	}
	require.Len(t, seen, n, "each job has one trace")
	awaitBatches(t, r, "admit batch", admits)

	// Of the request over HTTP, ingest itself records the span "send ingest". Both jobs without a
	// traceparent link to that one span, which counts three jobs.
	linked := map[string]int{}
	for _, span := range r.Spans() {
		if span.Name == "ingest" && span.Attributes["bulkaction.group"] == "three" && span.ParentID == "" {
			linked[span.Links[0].TraceID+span.Links[0].SpanID]++
		}
	}
	require.Len(t, linked, 1)
	for span, jobs := range linked {
		require.Equal(t, 2, jobs)
		require.True(t, slices.ContainsFunc(r.Spans(), func(s exportedSpan) bool {
			return s.TraceID+s.SpanID == span && s.Name == "send ingest" && s.Kind == "producer" && s.Attributes["messaging.batch.message_count"] == int64(3)
		}))
	}
	silent(t, everything(s, r))
}

func TestTraceOfADeniedAndARetriedJob(t *testing.T) {
	t.Parallel()
	s, r := traced(t, replicas("fetcher", 0), env("BACKPRESSURE_SHARE", "static"), env("BACKPRESSURE_GLOBAL_RPS", "15"), env("BACKPRESSURE_RATE_LIMIT_WINDOW", "200ms"),
		env("BACKPRESSURE_DEFAULT_BACKOFF", "10ms"), env("CONGESTION_BASE_BACKOFF", "10ms"))
	// Two tenants with static shares have three permits a window, so each gets one. Each has three
	// jobs; at least one job must become non-ready as RATE_LIMITED.
	const n = 3
	for at, tenant := range []string{"a", "b"} {
		g := client.Submission{ID: "of-" + tenant, Tenant: tenant, Type: "NOOP", Seal: true}
		for i := range n {
			header, _, _ := parentOf(10*at+i, "01")
			g.Jobs = append(g.Jobs, client.NewJob{TraceParent: header, Payload: map[string]any{"fail": "retry", "fail_times": 1, "result": secret}})
		}
		s.submit(g)
	}
	s.add("fetcher")
	denied := 0
	for at, tenant := range []string{"a", "b"} {
		for i := range n {
			_, traceID, parent := parentOf(10*at+i, "01")
			path := awaitTrace(t, r, traceID, parent)
			describes(t, s, path, tenant, "of-"+tenant, i)
			got := strings.Join(names(path), " → ")
			first, second := path[len(path)-4], path[len(path)-2]
			require.Equal(t, "Error", first.StatusCode)
			require.EqualValues(t, 1, first.Attributes["bulkaction.attempt"])
			require.EqualValues(t, 2, second.Attributes["bulkaction.attempt"])
			require.Positive(t, second.Attributes["bulkaction.wait.congestion_ms"])
			require.Equal(t, "TRANSIENT_ERROR", path[len(path)-3].Attributes["bulkaction.non_ready.reason"])
			if path[3].Name != "promote" {
				require.Equal(t, "send ingest → ingest → admit → process NOOP → promote → process NOOP → reduce", got)
				continue
			}
			denied++
			require.Equal(t, "send ingest → ingest → admit → promote → process NOOP → promote → process NOOP → reduce", got)
			require.Equal(t, "RATE_LIMITED", path[3].Attributes["bulkaction.non_ready.reason"])
			require.Positive(t, first.Attributes["bulkaction.wait.rate_ms"])
			awaitBatches(t, r, "promote batch", path[3:4])
		}
	}
	require.Positive(t, denied)
	silent(t, everything(s, r))
}

// TestTracesOfFailedAndCancelledJobs: the trace of a job that fails permanently ends with the span
// fail; those of a waiting and of a non-ready job whose groups are cancelled end with cancel.
func TestTracesOfFailedAndCancelledJobs(t *testing.T) {
	t.Parallel()
	s, r := traced(t)
	group := func(n int, id, fields string) (traceID, parent string) {
		header, traceID, parent := parentOf(n, "01")
		body := `{"id":"` + id + `","tenant":"acme","type":"NOOP","seal":true,` + fields + `}`
		status, answer := s.call("POST", s.url(0)+"/v1/groups", body, "traceparent", header)
		require.Equal(t, 202, status, string(answer))
		return traceID, parent
	}
	traceID, parent := group(1, "failing", `"jobs":[{"payload":{"fail":"permanent"}}]`)
	failed := awaitTrace(t, r, traceID, parent)
	require.Equal(t, []string{"send ingest", "ingest", "admit", "process NOOP", "fail"}, names(failed))
	require.Equal(t, "Error", failed[4].StatusCode)
	require.NotEmpty(t, failed[4].Attributes["error.type"])
	require.Equal(t, "failing.0", failed[4].Attributes["bulkaction.job"])

	for i, fields := range []string{
		`"run_at":"2031-01-01T00:00:00Z","jobs":[{"payload":1}]`, // its job is waiting
		`"jobs":[{"payload":1,"run_at":"2031-01-01T00:00:00Z"}]`, // its job is non-ready
	} {
		id := fmt.Sprint("later-", i)
		traceID, parent := group(2+i, id, fields)
		s.call("POST", s.url(0)+"/v1/groups/"+id+"/cancel", "")
		require.Equal(t, []string{"send ingest", "ingest", "cancel"}, names(awaitTrace(t, r, traceID, parent)))
	}
}

func TestTracesCanBeOff(t *testing.T) {
	t.Parallel()
	for name, sampler := range map[string][]option{
		"always_off": {env("OTEL_TRACES_SAMPLER", "always_off")},
		"ratio of 0": {env("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), env("OTEL_TRACES_SAMPLER_ARG", "0")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, r := traced(t, sampler...)
			s.submit(client.Submission{ID: "many", Type: "NOOP", Jobs: jobs(20, `{}`), Seal: true})
			s.submit(client.Submission{ID: "one", Type: "NOOP", Jobs: jobs(1, `{}`), Seal: true})
			s.wait("many")
			s.wait("one")
			require.Empty(t, everything(s, r))
		})
	}
}

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

func (m *nameMeter) Int64Gauge(name string, _ ...metric.Int64GaugeOption) (metric.Int64Gauge, error) {
	m.names[name] = true
	return noop.Int64Gauge{}, nil
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
// for the fetcher, dispatcher, worker and watcher, for callbacks, servers, for the waiting room, and for guards.
func TestDocumentedMetrics(t *testing.T) {
	t.Parallel()
	named := func(prefix string, create func(metric.Meter)) []string {
		m := &nameMeter{names: map[string]bool{}}
		create(m)
		var names []string
		for name := range m.names {
			if name == telemetry.Requests {
				names = append(names, name)
				continue
			}
			short, prefixed := strings.CutPrefix(name, prefix)
			require.True(t, prefixed, name)
			names = append(names, short)
		}
		slices.Sort(names)
		return names
	}
	require.Equal(t, named(telemetry.NamePrefix, func(m metric.Meter) {
		telemetry.NewFetcherMetrics(m)
		telemetry.NewSubmissionMetrics(m)
		telemetry.NewDispatcherMetrics(m)
		telemetry.NewWorkerMetrics(m)
		telemetry.NewWatcherMetrics(m)
		telemetry.NewCallbackMetrics(m)
		telemetry.NewServerMetrics(m)
		telemetry.ShowBuild(m, "", "")
	}), documented(t, "metrics.md", "## Fetcher", "## Others"))
	require.Equal(t, named(telemetry.NamePrefix+"room_", func(m metric.Meter) {
		telemetry.NewRoomMetrics(m).ShowGauges(m, nil)
	}), documented(t, "operations.md", "### Metrics of the waiting room", "### Alerts of the waiting room"))
	require.Equal(t, named("", func(m metric.Meter) {
		c := guard.New(redistest.Server(t).Client(), guard.Meter(m))
		require.NoError(t, c.Close(t.Context()))
	}), documented(t, "guards.md", "## Metrics", "## Accounts and hosts in the pipeline"))
}
