package httpapi_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

func TestPauseAndResumeAGroup(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g")
	h := httpapi.New(options(f))
	for _, verb := range []string{"pause", "pause", "resume", "resume"} { // repeated commands succeed too
		rec := call(t, h, "POST", "/v1/groups/g/"+verb, "")
		require.Equal(t, 202, rec.Code, rec.Body.String())
		a := decode[api.Accepted](t, rec)
		require.Equal(t, map[string]string{"self": "/v1/groups/g", "events": "/v1/groups/g/events"}, a.Links)
		require.Equal(t, "/v1/groups/g", rec.Header().Get("Location"))
		require.Equal(t, verb == "pause", decode[api.Group](t, call(t, h, "GET", "/v1/groups/g", "")).Paused)
		requireProblem(t, call(t, h, "POST", "/v1/groups/none/"+verb, ""), 404, "")
	}
	f.Err = fmt.Errorf("group g is COMPLETED: %w", api.ErrConflict)
	requireProblem(t, call(t, h, "POST", "/v1/groups/g/pause", ""), 409, "")
}

func TestPauseAndResumeTenantsAndTypes(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	var want []string
	for _, kind := range []string{"tenant", "type"} {
		for _, verb := range []string{"pause", "pause", "resume"} {
			rec := call(t, h, "POST", "/v1/"+kind+"s/a.b-c_1/"+verb, "")
			require.Equal(t, 202, rec.Code, rec.Body.String())
			root := "/v1/" + kind + "s/a.b-c_1/"
			require.Equal(t, api.Paused{ID: "a.b-c_1", Paused: verb == "pause", Links: map[string]string{"pause": root + "pause", "resume": root + "resume"}}, decode[api.Paused](t, rec))
			want = append(want, verb+" "+kind+" a.b-c_1")
		}
	}
	require.Equal(t, want, f.Calls)
	requireProblem(t, call(t, h, "POST", "/v1/tenants/a%7Bb/pause", ""), 422, "id")
	requireProblem(t, call(t, h, "POST", "/v1/types/a%2Fb/resume", ""), 422, "type")
	requireProblem(t, call(t, h, "POST", "/v1/types/T/pause", `{"for":"1h"}`, "Content-Type", httpapi.JSONType), 422, "for")
	requireProblem(t, call(t, h, "POST", "/v1/groups/g/seal", `{"total":1,"total":2}`, "Content-Type", httpapi.JSONType), 422, "total")
	requireProblem(t, call(t, h, "POST", "/v1/tenants/t/pause", "", "Origin", "https://evil.example"), 403, "")
	requireProblem(t, call(t, h, "GET", "/v1/types/T/pause", ""), 405, "")
	require.Equal(t, want, f.Calls, "a refused request must not reach the backend")
	f.Err = api.ErrUnavailable
	requireProblem(t, call(t, h, "POST", "/v1/types/T/pause", ""), 503, "")
}

func TestResizeWorker(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	put := func(path, body string) *httptest.ResponseRecorder {
		return call(t, h, "PUT", path, body, "Content-Type", httpapi.JSONType)
	}
	for _, n := range []int{0, 10_000} {
		rec := put("/v1/workers/w-1", fmt.Sprintf(`{"workers":%d}`, n))
		require.Equal(t, 202, rec.Code, rec.Body.String())
		require.Equal(t, api.PoolSize{ID: "w-1", Workers: n}, decode[api.PoolSize](t, rec))
	}
	want := []string{"resize worker w-1 0", "resize worker w-1 10000"}
	require.Equal(t, want, f.Calls)
	for _, bad := range []string{``, `{}`, `{"workers":-1}`, `{"workers":10001}`} {
		requireProblem(t, put("/v1/workers/w-1", bad), 422, "workers")
	}
	requireProblem(t, put("/v1/workers/w-1", `{"workers":1,"id":"x"}`), 422, "id")
	requireProblem(t, put("/v1/workers/a%7Bb", `{"workers":1}`), 422, "id")
	require.Equal(t, want, f.Calls)
}

func TestBodiesOfCommandsAreRefusedInWords(t *testing.T) {
	h := httpapi.New(options(apitest.NewBackend().WithGroup("g")))
	for _, c := range []struct{ method, path, body, detail string }{
		{"POST", "/v1/groups/g/seal", `{"total":"x"}`, "total: must be a whole number from 0 to 10000000"},
		{"POST", "/v1/groups/g/seal", `{"total":1.5}`, "total: must be a whole number from 0 to 10000000"},
		{"POST", "/v1/groups/g/seal", `{"totl":3}`, "totl: not a known field; known is total"},
		{"POST", "/v1/groups/g/seal", `[]`, "body: must be a JSON object"},
		{"POST", "/v1/groups/g/cancel", `{"force":true}`, "force: not a known field; the body has none"},
		{"POST", "/v1/groups/g/retry", `{"codes":[7],"jobs":["1"]}`, "2 fields are wrong: " +
			"codes: must be an array of error codes, which are strings; jobs: must be an array of ordinals of jobs, whole numbers from 0"},
		{"PUT", "/v1/workers/x", `{"slots":5}`, "slots: not a known field; known is workers"},
		{"PUT", "/v1/workers/x", `{"workers":"x"}`, "workers: must be a whole number from 0 to 10000"},
	} {
		p := requireProblem(t, call(t, h, c.method, c.path, c.body, "Content-Type", httpapi.JSONType), 422, "")
		require.Equal(t, c.detail, p.Detail)
		require.NotEmpty(t, p.Fields)
	}
}

func TestTenants(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	require.JSONEq(t, `{"tenants":[]}`, call(t, h, "GET", "/v1/tenants", "").Body.String())
	l := decode[api.TenantList](t, call(t, h, "GET", "/v1/tenants?cursor=acme&limit=7", ""))
	require.Equal(t, "acme", l.Tenants[0].ID)
	call(t, h, "GET", "/v1/tenants?groups=true", "")
	require.Equal(t, []string{"tenants  50 false", "tenants acme 7 false", "tenants  50 true"}, f.Calls)
	requireProblem(t, call(t, h, "GET", "/v1/tenants?groups=yes", ""), 422, "groups")
	requireProblem(t, call(t, h, "GET", "/v1/tenants?limit=0", ""), 422, "limit")
	requireProblem(t, call(t, h, "GET", "/v1/tenants/none", ""), 404, "")
	requireProblem(t, call(t, h, "GET", "/v1/tenants/a%20b", ""), 422, "id")
	requireProblem(t, call(t, h, "PUT", "/v1/tenants/a%20b", "{}", "Content-Type", httpapi.JSONType), 422, "id")
}

func TestBusiestTenants(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	l := decode[api.TenantList](t, call(t, h, "GET", "/v1/tenants?sort=backlog", ""))
	require.Equal(t, "busy", l.Tenants[0].ID)
	require.Equal(t, 2026, l.AsOf.Year())
	call(t, h, "GET", "/v1/tenants?sort=backlog&limit=7", "")
	require.Equal(t, []string{"busiest 100", "busiest 7"}, f.Calls)
	for query, field := range map[string]string{
		"sort=name": "sort", "sort=backlog&cursor=a": "cursor", "sort=backlog&groups=true": "groups", "sort=backlog&limit=x": "limit",
	} {
		requireProblem(t, call(t, h, "GET", "/v1/tenants?"+query, ""), 422, field)
	}
}

// TestScale: types have commas between them, and what is no type or no drain time is refused.
func TestScale(t *testing.T) {
	h := httpapi.New(options(apitest.NewBackend()))
	require.Equal(t, api.Scale{Type: "A", SlotsWanted: 60}, decode[api.Scale](t, call(t, h, "GET", "/v1/scale?type=A", "")))
	require.Equal(t, api.Scale{Type: "A,B", SlotsWanted: 300},
		decode[api.Scale](t, call(t, h, "GET", "/v1/scale?type=B,A,B&drain=5m", "")))
	for query, field := range map[string]string{
		"": "type", "type=": "type", "type=A,": "type", "type=a%20b": "type", "type=" + strings.Repeat("A,", 100) + "B": "type",
		"type=A&drain=60": "drain", "type=A&drain=0s": "drain", "type=A&drain=25h": "drain",
	} {
		requireProblem(t, call(t, h, "GET", "/v1/scale?"+query, ""), 422, field)
	}
}

func TestHistory(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	got := decode[api.History](t, call(t, h, "GET", "/v1/history", ""))
	require.Equal(t, 2.5, got.Points[0].Done)
	require.EqualValues(t, 7, got.Points[0].Pool)
	call(t, h, "GET", "/v1/history?minutes=15", "")
	call(t, h, "GET", "/v1/history?minutes=1440", "")
	require.Equal(t, []string{"history 60", "history 15", "history 1440"}, f.Calls)
	for _, bad := range []string{"14", "1441", "-60", "1h", "1e2"} {
		requireProblem(t, call(t, h, "GET", "/v1/history?minutes="+bad, ""), 422, "minutes")
	}
}

func TestAuditState(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	got := decode[api.AuditState](t, call(t, h, "GET", "/v1/audit", ""))
	require.False(t, got.OK)
	require.Equal(t, "w-1", got.Partitions[0].Leader)
	require.Nil(t, got.Partitions[1].LookedAt)
	require.Equal(t, map[string]int64{"location": 1}, got.ByLaw)
	f.Err = api.ErrUnavailable
	requireProblem(t, call(t, h, "GET", "/v1/audit", ""), 503, "")
}

func TestTenantIsSetAsAWhole(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	put := func(body string) api.Tenant {
		t.Helper()
		rec := call(t, h, "PUT", "/v1/tenants/acme", body, "Content-Type", httpapi.JSONType)
		require.Equal(t, 200, rec.Code, rec.Body.String())
		require.Equal(t, rec.Body.String(), call(t, h, "GET", "/v1/tenants/acme", "").Body.String(), "as GET shows it")
		return decode[api.Tenant](t, rec)
	}
	full := put(`{"rps": 2.5, "weight": 0.001, "base_priority": -1e15, "in_flight": 20}`)
	require.EqualValues(t, 20, *full.InFlight)
	require.Equal(t, 2.5, *full.RPS)
	require.Equal(t, 0.001, full.Weight)
	require.EqualValues(t, -1_000_000_000_000_000, *full.BasePriority)
	require.EqualValues(t, 1_000_000_000, *put(`{"rps": 1000000000, "weight": 1000, "base_priority": 1000000000000000}`).RPS)
	for _, body := range []string{"{}", ` {"rps": null, "weight": null, "base_priority": null} `} {
		put(`{"rps": 1, "weight": 3, "base_priority": 7}`)
		cleared := put(body)
		require.Nil(t, cleared.RPS)
		require.Nil(t, cleared.BasePriority)
		require.EqualValues(t, 1, cleared.Weight)
	}
	require.Contains(t, call(t, h, "GET", "/v1/tenants/acme", "").Body.String(), `"rps":null,"weight":1,"base_priority":null`)
}

func TestTenantIsPatched(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	put := func(body string) { call(t, h, "PUT", "/v1/tenants/acme", body, "Content-Type", httpapi.JSONType) }
	for _, c := range []struct{ patch, want string }{
		{`{}`, `{"rps":1.5,"weight":2,"base_priority":-3}`},
		{`{"in_flight":1e6}`, `{"rps":1.5,"weight":2,"base_priority":-3,"in_flight":1000000}`},
		{`{"rps":50}`, `{"rps":50,"weight":2,"base_priority":-3}`},
		{`{"rps":null}`, `{"weight":2,"base_priority":-3}`},
		{`{"weight":null,"base_priority":7}`, `{"rps":1.5,"base_priority":7}`},
		{`{"rps":null,"weight":null,"base_priority":null}`, `{}`},
		{` {"rps":0.5,"weight":0.001,"base_priority":-1e15} `, `{"rps":0.5,"weight":0.001,"base_priority":-1000000000000000}`},
	} {
		for _, typ := range []string{httpapi.MergePatchType, httpapi.JSONType} {
			put(`{"rps":1.5,"weight":2,"base_priority":-3}`)
			rec := call(t, h, "PATCH", "/v1/tenants/acme", c.patch, "Content-Type", typ)
			require.Equal(t, 200, rec.Code, rec.Body.String())
			got, err := json.Marshal(f.Settings["acme"])
			require.NoError(t, err)
			require.JSONEq(t, c.want, string(got), c.patch)
			require.Equal(t, rec.Body.String(), call(t, h, "GET", "/v1/tenants/acme", "").Body.String(), "as GET shows it")
		}
	}
	before := f.Settings["acme"]
	for patch, fields := range map[string]string{
		`{"rps":0,"weight":1001,"base_priority":0.5,"wieght":null}`: "base_priority rps weight wieght",
		`{"in_flight":0}`:       "in_flight",
		`{"in_flight":1000001}`: "in_flight",
		`{"in_flight":"2"}`:     "in_flight",
		`{"rps":1,"rps":null}`:  "rps",
		`null`:                  "body",
		`[]`:                    "body",
		`{"rps":1`:              "body",
		``:                      "body",
	} {
		p := requireProblem(t, call(t, h, "PATCH", "/v1/tenants/acme", patch, "Content-Type", httpapi.MergePatchType), statusOfBad(patch), "")
		var named []string
		for _, b := range p.Fields {
			named = append(named, b.Field)
		}
		require.Equal(t, fields, strings.Join(named, " "), patch)
	}
	requireProblem(t, call(t, h, "PATCH", "/v1/tenants/acme", "{}", "Content-Type", "application/json-patch+json"), 415, "")
	requireProblem(t, call(t, h, "PATCH", "/v1/tenants/a%20b", "{}", "Content-Type", httpapi.JSONType), 422, "id")
	requireProblem(t, call(t, h, "PATCH", "/v1/tenants/acme", "{}", "Content-Type", httpapi.JSONType, "Origin", "https://evil.example"), 403, "")
	require.Equal(t, before, f.Settings["acme"], "a refused patch changes nothing")
	f.Err = api.ErrUnavailable
	requireProblem(t, call(t, h, "PATCH", "/v1/tenants/acme", "{}", "Content-Type", httpapi.JSONType), 503, "")
}

func TestBadSettingsAreAllNamed(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	for body, fields := range map[string]string{
		`{"rps":0,"weight":0,"base_priority":0.5}`:                 "base_priority rps weight",
		`{"rps":-1,"weight":-1,"base_priority":1000000000000001}`:  "base_priority rps weight",
		`{"rps":1000000000.5,"weight":1000.1,"base_priority":"1"}`: "base_priority rps weight",
		`{"rps":"5","weight":true,"base_priority":[]}`:             "base_priority rps weight",
		`{"rps":1e999,"weight":0.0009,"base_priority":-1e300}`:     "base_priority rps weight",
		`{"RPS":1,"rps":{},"burst":null,"weight":1}`:               "RPS burst rps",
		`{"rps":1,"rps":2}`: "rps",
		`null`:              "body",
		`[]`:                "body",
		`7`:                 "body",
		`"rps"`:             "body",
		`{"rps":1}{}`:       "body",
		`{"rps":1`:          "body",
		`{"rps":NaN}`:       "body",
		"   ":               "body",
		`{"weight": 1,}`:    "body",
		`{"rps": 1} null`:   "body",
	} {
		rec := call(t, h, "PUT", "/v1/tenants/acme", body, "Content-Type", httpapi.JSONType)
		p := requireProblem(t, rec, statusOfBad(body), "")
		var named []string
		for _, b := range p.Fields {
			named = append(named, b.Field)
		}
		require.Equal(t, fields, strings.Join(named, " "), body)
	}
	requireProblem(t, call(t, h, "PUT", "/v1/tenants/acme", "", "Content-Type", httpapi.JSONType), 422, "body")
	requireProblem(t, call(t, h, "PUT", "/v1/tenants/acme", "{}"), 415, "")
	requireProblem(t, call(t, h, "PUT", "/v1/tenants/acme", strings.Repeat(" ", httpapi.SmallBody+1), "Content-Type", httpapi.JSONType), 413, "")
	requireProblem(t, call(t, h, "PUT", "/v1/tenants/acme", "{}", "Content-Type", httpapi.JSONType, "Origin", "https://evil.example"), 403, "")
	require.Empty(t, f.Settings, "nothing was set")

	many := "{"
	for i := range 150 {
		many += fmt.Sprintf(`"x%03d":1,`, i)
	}
	p := requireProblem(t, call(t, h, "PUT", "/v1/tenants/acme", strings.TrimSuffix(many, ",")+"}", "Content-Type", httpapi.JSONType), 422, "x000")
	require.Len(t, p.Fields, 100)
}

// patched sends a merge patch and returns the answer.
func patched(t *testing.T, h http.Handler, path, body string) *httptest.ResponseRecorder {
	t.Helper()
	return call(t, h, "PATCH", path, body, "Content-Type", httpapi.MergePatchType)
}

func TestLimitsAreShownAndPatched(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	rec := call(t, h, "GET", "/v1/limits", "")
	require.Equal(t, 200, rec.Code)
	require.Contains(t, rec.Body.String(), `"types":{}`)
	require.Contains(t, rec.Body.String(), `"processes_that_differ":[]`)
	for _, c := range []struct{ patch, want string }{
		{`{"global":{"rps":5000,"share":"static","default_backoff":"2s","max_backoff":"60s"}}`, `{"rps":5000,"share":"static","default_backoff":"2s","max_backoff":"60s"}`},
		{`{"global":{"rps":0}}`, `{"rps":0,"share":"static","default_backoff":"2s","max_backoff":"60s"}`},
		{`{"global":{"share":null,"max_backoff":null}}`, `{"rps":0,"share":null,"default_backoff":"2s","max_backoff":null}`},
		{` {"global":{"rps":1e9,"default_backoff":"24h","max_backoff":"1ms"}} `, `{"rps":1000000000,"share":null,"default_backoff":"24h","max_backoff":"1ms"}`},
	} {
		rec := patched(t, h, "/v1/limits", c.patch)
		require.Equal(t, 200, rec.Code, rec.Body.String())
		got, err := json.Marshal(f.Global)
		require.NoError(t, err)
		require.JSONEq(t, c.want, string(got), c.patch)
		require.Equal(t, rec.Body.String(), call(t, h, "GET", "/v1/limits", "").Body.String(), "as GET shows it")
	}
	require.Equal(t, api.LimitSetting[int64]{Configured: 10_000, Effective: 1_000_000_000, Source: api.SourceAPI},
		decode[api.Limits](t, call(t, h, "GET", "/v1/limits", "")).Global.RPS)
	require.Equal(t, 200, call(t, h, "PATCH", "/v1/limits", `{"global":{"rps":1}}`, "Content-Type", httpapi.JSONType).Code)

	f.Pending = []int{0, 2}
	rec = patched(t, h, "/v1/limits", `{"global":{"rps":7}}`)
	require.Equal(t, 202, rec.Code, "not all partitions have answered")
	require.Equal(t, []int{0, 2}, decode[api.Limits](t, rec).PendingPartitions)
	require.Equal(t, 202, patched(t, h, "/v1/types/T", `{"rps":7}`).Code)
	require.Equal(t, 200, call(t, h, "GET", "/v1/limits", "").Code)
}

func TestTypeIsPatched(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	for _, c := range []struct{ patch, want string }{
		{`{"rps":1,"in_flight":1000000}`, `{"HTTP":{"rps":1,"in_flight":1000000,"in_flight_now":0}}`},
		{`{"in_flight":20}`, `{"HTTP":{"rps":1,"in_flight":20,"in_flight_now":0}}`},
		{`{"rps":null}`, `{"HTTP":{"in_flight":20,"in_flight_now":0}}`},
		{`{"in_flight":null}`, `{}`},
	} {
		rec := patched(t, h, "/v1/types/HTTP", c.patch)
		require.Equal(t, 200, rec.Code, rec.Body.String())
		got, err := json.Marshal(decode[api.Limits](t, rec).Types)
		require.NoError(t, err)
		require.JSONEq(t, c.want, string(got), c.patch)
	}
	require.Len(t, f.Calls, 4)
	requireProblem(t, patched(t, h, "/v1/types/a%20b", `{"rps":1}`), 422, "type")
	require.Len(t, f.Calls, 4)
}

// TestBadLimitsAreAllNamed: a patch with a bad field is refused, and its answer names all of them.
// Those of an object have its name before them.
func TestBadLimitsAreAllNamed(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	long := strings.Repeat("x", 400)
	for _, c := range []struct{ path, body, fields string }{
		{"limits", `{}`, "global"},
		{"limits", `{"global":{}}`, "global"},
		{"limits", `{"global":null}`, "global"},
		{"limits", `{"global":[{"rps":1}]}`, "global"},
		{"limits", `{"rps":1}`, "rps"},
		{"limits", `{"global":{"rps":1},"types":{}}`, "types"},
		{"limits", `{"global":{"rps":1},"global":{"rps":2}}`, "global"},
		{"limits", `{"global":{"rps":1,"rps":2}}`, "global.rps"},
		{"limits", `{"global":{"rps":-1,"share":"equal","default_backoff":"0s","max_backoff":"25h"}}`, "global.default_backoff global.max_backoff global.rps global.share"},
		{"limits", `{"global":{"rps":0.5,"share":1,"default_backoff":500,"max_backoff":"soon","rsp":null},"x":1}`, "global.default_backoff global.max_backoff global.rps global.rsp global.share x"},
		{"limits", `{"global":{"rps":1000000001}}`, "global.rps"},
		{"limits", `{"global":{"rps":"5"}}`, "global.rps"},
		{"limits", `{"global":{"rps":1e999}}`, "global.rps"},
		{"limits", `{"global":{"` + long + `":1}}`, "global." + long[:293] + "…"},
		{"limits", `null`, "body"},
		{"limits", `{"global":{"rps":1}`, "body"},
		{"types/T", `{}`, "body"},
		{"types/T", `[]`, "body"},
		{"types/T", `{"rps":0,"in_flight":0}`, "in_flight rps"},
		{"types/T", `{"rps":1000000001,"in_flight":1000001,"weight":1}`, "in_flight rps weight"},
		{"types/T", `{"rps":1.5,"in_flight":"3"}`, "in_flight rps"},
		{"types/T", `{"rps":1,"rps":null}`, "rps"},
	} {
		p := requireProblem(t, patched(t, h, "/v1/"+c.path, c.body), statusOfBad(c.body), "")
		var named []string
		for _, b := range p.Fields {
			named = append(named, b.Field)
		}
		require.Equal(t, c.fields, strings.Join(named, " "), c.body)
	}
	for body, detail := range map[string]string{
		`{"global":{"rps":-1}}`:           "global.rps: must be a whole number from 0 to 1000000000",
		`{"global":{"max_backoff":"2d"}}`: "global.max_backoff: must be a duration from 1ms to 24h, such as 500ms or 1m30s",
		`{"global":{"rsp":1}}`:            "global.rsp: not a known field; known are default_backoff, max_backoff, rps and share",
	} {
		require.Equal(t, detail, requireProblem(t, patched(t, h, "/v1/limits", body), 422, "").Detail)
	}
	for _, path := range []string{"/v1/limits", "/v1/types/T"} {
		body := map[string]string{"/v1/limits": `{"global":{"rps":1}}`, "/v1/types/T": `{"rps":1}`}[path]
		requireProblem(t, call(t, h, "PATCH", path, body), 415, "")
		requireProblem(t, call(t, h, "PATCH", path, body, "Content-Type", httpapi.JSONType, "Origin", "https://evil.example"), 403, "")
		requireProblem(t, patched(t, h, path, strings.Repeat(" ", httpapi.SmallBody+1)), 413, "")
	}
	require.Empty(t, f.Calls, "nothing was changed")
	f.Err = api.ErrUnavailable
	requireProblem(t, patched(t, h, "/v1/limits", `{"global":{"rps":1}}`), 503, "")
	requireProblem(t, call(t, h, "GET", "/v1/limits", ""), 503, "")
}

func TestWhy(t *testing.T) {
	h := httpapi.New(options(apitest.NewBackend().WithGroup("g")))
	w := decode[api.Why](t, call(t, h, "GET", "/v1/groups/g/why", ""))
	require.Equal(t, api.WhyRate, w.Reason)
	require.EqualValues(t, 3, *w.Position)
	require.Equal(t, 2.5, w.Limit.RPS)
	requireProblem(t, call(t, h, "GET", "/v1/groups/none/why", ""), 404, "")
	requireProblem(t, call(t, h, "GET", "/v1/groups/a%20b/why", ""), 422, "id")
}
