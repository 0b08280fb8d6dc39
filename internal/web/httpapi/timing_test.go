package httpapi_test

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/internal/web/gateway"
)

// timed sends a request, checks the status of the answer, and returns how long the answer took.
func timed(b *testing.B, token, method, url, body string, status int) time.Duration {
	b.Helper()
	req, err := http.NewRequestWithContext(b.Context(), method, url, strings.NewReader(body))
	require.NoError(b, err)
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set("Content-Type", "application/json")
	if strings.HasSuffix(url, "/jobs") {
		req.Header.Set("Content-Type", "application/x-ndjson")
	}
	start := time.Now()
	resp, err := http.DefaultClient.Do(req)
	require.NoError(b, err)
	_, _ = io.Copy(io.Discard, resp.Body)
	took := time.Since(start)
	_ = resp.Body.Close()
	require.Equal(b, status, resp.StatusCode)
	return took
}

// reportRatio calls two functions in turn, and reports the median time of the first divided by that
// of the second. Because they alternate, other work of the machine slows both alike.
func reportRatio(b *testing.B, unit string, both [2]func() time.Duration) {
	var took [2][]time.Duration
	for n := 0; b.Loop(); n++ {
		for turn := range both {
			which := (n + turn) % 2
			took[which] = append(took[which], both[which]())
		}
	}
	var medians [2]float64
	for i := range took {
		slices.Sort(took[i])
		medians[i] = float64(took[i][len(took[i])/2])
	}
	b.ReportMetric(medians[0]/medians[1], unit)
}

// BenchmarkForeignOrUnknown compares how long answers take for an object of another tenant and for
// one that does not exist. A difference would tell callers which ids exist. Run it with -benchtime
// 1000x.
func BenchmarkForeignOrUnknown(b *testing.B) {
	in := newInstallation(b)
	defer http.DefaultClient.CloseIdleConnections()
	token := in.key(auth.Producer, "acme").Token
	group := in.group("globex")
	for _, call := range []struct{ name, method, path, foreign, unknown, body string }{
		{"group", "GET", "/v1/groups/%s", group, "g-x00000", ""},
		{"job", "GET", "/v1/groups/%s/jobs/0", group, "g-x00000", ""},
		{"cancel", "POST", "/v1/groups/%s/cancel", group, "g-x00000", ""},
		{"append", "POST", "/v1/groups/%s/jobs", group, "g-x00000", `{"payload":1}`},
		{"tenant", "GET", "/v1/tenants/%s", "globex", "nobody", ""},
	} {
		b.Run(call.name, func(b *testing.B) {
			ask := func(id string) func() time.Duration {
				url := in.url + fmt.Sprintf(call.path, id)
				return func() time.Duration { return timed(b, token, call.method, url, call.body, 404) }
			}
			reportRatio(b, "foreign/unknown", [2]func() time.Duration{ask(call.foreign), ask(call.unknown)})
		})
	}
}

// BenchmarkAuthentication compares how long calls take with and without API keys. Run it with
// -benchtime 1000x.
func BenchmarkAuthentication(b *testing.B) {
	in := newInstallation(b)
	defer http.DefaultClient.CloseIdleConnections()
	token := in.key(auth.Producer, "acme").Token
	g, err := gateway.New(b.Context(), stagetest.Process(in.World, "off"), gateway.Config{Addr: "127.0.0.1:0", Store: in.Store})
	require.NoError(b, err)
	in.Run(g)
	urls := [2]string{in.url, "http://" + g.Addr()}
	group := in.group("acme")
	for name, call := range map[string]func(url string) time.Duration{
		"group": func(url string) time.Duration { return timed(b, token, "GET", url+"/v1/groups/"+group, "", 200) },
		"submit": func(url string) time.Duration {
			return timed(b, token, "POST", url+"/v1/groups", `{"tenant":"acme","type":"T","jobs":[{"payload":1}]}`, 202)
		},
	} {
		b.Run(name, func(b *testing.B) {
			reportRatio(b, "keys/off", [2]func() time.Duration{
				func() time.Duration { return call(urls[0]) },
				func() time.Duration { return call(urls[1]) },
			})
		})
	}
}
