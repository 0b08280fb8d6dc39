package telemetry

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRequestLabels: routes are patterns, and what clients invent adds no series.
func TestRequestLabels(t *testing.T) {
	clearOTel(t)
	tel := setup(t, testOptions)
	m := NewServerMetrics(tel.Meter)
	mux := http.NewServeMux()
	mux.HandleFunc("/", http.NotFound)
	mux.HandleFunc("GET /v1/groups/{id}", func(http.ResponseWriter, *http.Request) {})
	for _, q := range []string{"GET /v1/groups/a", "GET /v1/groups/b", "BREW /v1/x", "GET /v1/y/z"} {
		method, path, _ := strings.Cut(q, " ")
		r := httptest.NewRequest(method, path, nil)
		mux.ServeHTTP(httptest.NewRecorder(), r)
		m.Served(r, 200, time.Millisecond)
	}
	m.Served(httptest.NewRequest(http.MethodGet, "/", nil), 0, time.Second)
	NewServerMetrics(tel.Meter).AuthFailed(AuthExpired)
	var counts []string
	response := httptest.NewRecorder()
	tel.MetricsHandler().ServeHTTP(response, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for line := range strings.Lines(response.Body.String()) {
		if strings.HasPrefix(line, Requests+"_count") || strings.HasPrefix(line, NamePrefix+"api_auth") && !strings.HasSuffix(line, " 0\n") {
			counts = append(counts, strings.TrimSpace(line))
		}
	}
	require.ElementsMatch(t, []string{
		`http_server_request_duration_seconds_count{method="GET",route="/v1/groups/{id}",status="200"} 2`,
		`http_server_request_duration_seconds_count{method="GET",route="other",status="200"} 1`,
		`http_server_request_duration_seconds_count{method="other",route="other",status="200"} 1`,
		`http_server_request_duration_seconds_count{method="GET",route="other",status="499"} 1`,
		`bulk_action_api_auth_failures_total{reason="expired"} 1`,
	}, counts)
}

func BenchmarkServed(b *testing.B) {
	tel, err := Setup(b.Context(), testOptions)
	require.NoError(b, err)
	m := NewServerMetrics(tel.Meter)
	r := httptest.NewRequest(http.MethodGet, "/v1/groups/a", nil)
	r.Pattern = "/v1/groups/{id}"
	b.ReportAllocs()
	for b.Loop() {
		m.Served(r, 200, time.Millisecond)
	}
	require.NoError(b, tel.Shutdown(b.Context()))
}
