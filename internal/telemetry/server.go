package telemetry

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// Requests is the name of the histogram of HTTP requests. It is the one that other systems use, too, so
// it has no [NamePrefix].
const Requests = "http_server_request_duration_seconds"

// ServerMetrics are the metrics of the servers of a process: the API, the console and the waiting room.
type ServerMetrics struct {
	duration metric.Float64Histogram
	failures metric.Int64Counter
	series   sync.Map // the options of each series, by request: a set of attributes is costly to make
}

type request struct {
	route, method string
	status        int
}

// NewServerMetrics creates the instruments of servers.
func NewServerMetrics(meter metric.Meter) *ServerMetrics {
	m := &ServerMetrics{
		duration: must(meter.Float64Histogram(Requests, metric.WithUnit("s"),
			metric.WithDescription("Time from a request to the end of its answer."),
			metric.WithExplicitBucketBoundaries(.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10))),
		failures: must(meter.Int64Counter(NamePrefix+"api_auth_failures_total",
			metric.WithDescription("Requests without a valid API key, or with one that may not make this call."))),
	}
	for _, reason := range []string{AuthMissing, AuthUnknown, AuthExpired, AuthRole, AuthTooMany} {
		m.failures.Add(context.Background(), 0, metric.WithAttributes(attribute.String("reason", reason)))
	}
	return m
}

// Served records a request that has ended. Its labels have few values: the route is the pattern of
// [http.ServeMux] by which the handler was found, and never the path. The status is 0 if the client
// went away before the answer.
func (m *ServerMetrics) Served(r *http.Request, status int, took time.Duration) {
	if m == nil {
		return
	}
	route := r.Pattern
	if _, path, ok := strings.Cut(route, " "); ok { // a pattern may begin with the method
		route = path
	}
	q := request{strings.TrimSuffix(route, "{$}"), r.Method, status}
	if route == "" || route == "/" || route == "/ui/" { // no handler
		q.route = Other
	}
	switch q.method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete:
	default:
		q.method = Other
	}
	if q.status == 0 {
		q.status = 499 // as proxies name it
	}
	series, known := m.series.Load(q)
	if !known {
		series, _ = m.series.LoadOrStore(q, []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(
			attribute.String("route", q.route), attribute.String("method", q.method), attribute.Int("status", q.status)))})
	}
	m.duration.Record(context.Background(), took.Seconds(), series.([]metric.RecordOption)...)
}

// The reasons for which a caller is refused.
const (
	AuthMissing = "missing"  // there is no key
	AuthUnknown = "unknown"  // the key is none, or was revoked
	AuthExpired = "expired"  // the key has expired
	AuthRole    = "role"     // keys of this role may not make this call
	AuthTooMany = "too_many" // there were too many failures before
)

// AuthFailed counts a caller who was refused.
func (m *ServerMetrics) AuthFailed(reason string) {
	if m != nil {
		m.failures.Add(context.Background(), 1, metric.WithAttributes(attribute.String("reason", reason)))
	}
}

// ShowBuild shows that this process runs a role, and with which version.
func ShowBuild(meter metric.Meter, version, role string) {
	g := must(meter.Int64Gauge(NamePrefix+"build_info", metric.WithDescription("1 for each role of the process.")))
	g.Record(context.Background(), 1, metric.WithAttributes(attribute.String("version", version), attribute.String("role", role)))
}
