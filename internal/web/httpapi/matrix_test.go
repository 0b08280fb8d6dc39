package httpapi_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/calls/webhook"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/internal/web/gateway"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// installation is a gateway that asks for API keys, on a real Redis.
type installation struct {
	*stagetest.World
	url   string
	store *apikey.Store
	auth  *apikey.Authenticator
	next  int // the last number of an id or an address
}

func newInstallation(t testing.TB) *installation {
	t.Helper()
	w := stagetest.Shared(t)
	master := filepath.Join(t.TempDir(), "master")
	require.NoError(t, os.WriteFile(master, []byte(strings.Repeat("k", 32)), 0o600))
	signing, err := webhook.ReadKeys(master)
	require.NoError(t, err)
	w.Store = w.NewStore(groups.Config{
		Meter: ledger.Meter{Limiter: "fixed", Window: time.Second}, Callbacks: groups.Callbacks{Keys: signing},
	})
	in := &installation{World: w, store: keyStore(w, time.Now)}
	in.auth = apikey.New(apikey.Options{Store: keyStore(w, time.Now), Log: telemetry.Nop().Log, Now: time.Now})
	p := stagetest.Process(w, "in")
	g, err := gateway.New(context.WithoutCancel(t.Context()), p, gateway.Config{
		Addr: "127.0.0.1:0", Store: w.Store, Guards: guard.New(p.Conn.Cmd, guard.Prefix(p.Space.Prefix())), Keys: in.auth,
		KeyStore: in.store, Proxies: auth.Proxies{netip.MustParsePrefix("127.0.0.0/8")}, Rooms: apitest.NewRooms(),
	})
	require.NoError(t, err)
	w.Run(g)
	in.url = "http://" + g.Addr()
	return in
}

func keyStore(w *stagetest.World, now func() time.Time) *apikey.Store {
	return apikey.NewStore(w.Conn.Cmd, w.Space, auth.Hasher{}, now)
}

// key creates a key, and lets the process read it.
func (in *installation) key(role auth.Role, tenant string) apikey.NewKey {
	in.T.Helper()
	k, err := in.store.Create(in.T.Context(), apikey.Request{Role: role, Tenant: tenant})
	require.NoError(in.T, err)
	_, err = in.auth.Step(in.T.Context())
	require.NoError(in.T, err)
	return k
}

// reply is what a client sees of an answer.
type reply struct {
	status int
	header http.Header
	body   string
}

// send sends a request with a token; "": without one. from is the client's address; "": a new
// address for each request.
func (in *installation) send(token, method, path, body, from string) reply {
	in.T.Helper()
	if from == "" {
		in.next++
		from = fmt.Sprintf("10.%d.%d.%d", in.next>>16, in.next>>8&255, in.next&255)
	}
	req, err := http.NewRequestWithContext(in.T.Context(), method, in.url+path, strings.NewReader(body))
	require.NoError(in.T, err)
	req.Header.Set("X-Forwarded-For", from)
	req.Header.Set("X-Request-Id", "matrix")
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if strings.HasSuffix(path, "/jobs") {
		req.Header.Set("Content-Type", "application/x-ndjson")
	}
	resp, err := http.DefaultClient.Do(req)
	require.NoError(in.T, err)
	defer resp.Body.Close()
	a := reply{status: resp.StatusCode, header: resp.Header}
	if resp.Header.Get("Content-Type") != "text/event-stream" {
		all, err := io.ReadAll(resp.Body)
		require.NoError(in.T, err)
		a.body = string(all)
	}
	return a
}

// group submits a group of a tenant and returns its id.
func (in *installation) group(tenant string) string {
	in.T.Helper()
	in.next++
	id := fmt.Sprintf("g-%06d", in.next)
	_, err := in.Store.Submit(stagetest.Trusted(in.T), &messages.SubmitGroup{
		ID: id, Tenant: tenant, Type: "T", Jobs: stagetest.Numbered(1),
	}, groups.Origin{At: time.Now()})
	require.NoError(in.T, err)
	return id
}

// The kinds of objects in the matrix: own belongs to the tenant of the keys that have a tenant,
// foreign belongs to another tenant, and unknown does not exist.
const own, foreign, unknown = "own", "foreign", "unknown"

var tenants = map[string]string{own: "acme", foreign: "globex", unknown: "nobody"}

// mayUse lists, for each scope, the callers who may make its calls, as the table in
// docs/security.md does.
var mayUse = map[auth.Scope]string{
	"open":           "none bad admin operator reader reader@acme producer@acme producer@* metrics service",
	auth.Read:        "admin operator reader reader@acme producer@acme producer@*",
	auth.ReadSystem:  "admin operator reader",
	auth.ReadMetrics: "admin operator reader metrics",
	auth.Submit:      "admin producer@acme producer@*",
	auth.Control:     "admin operator producer@acme producer@*",
	auth.Tenants:     "admin operator",
	auth.System:      "admin",
	auth.EntryTokens: "admin service",
}

// wants has the status of each call for a caller who may make it; 200 for routes that are not
// listed.
var wants = map[string]int{
	"POST /v1/groups":                              202,
	"POST /v1/groups/{id}/seal":                    202,
	"POST /v1/groups/{id}/cancel":                  202,
	"POST /v1/groups/{id}/jobs/{ordinal}/cancel":   202,
	"POST /v1/groups/{id}/retry":                   409, // the group has not ended
	"POST /v1/groups/{id}/pause":                   202,
	"POST /v1/groups/{id}/resume":                  202,
	"POST /v1/tenants/{id}/pause":                  202,
	"POST /v1/tenants/{id}/resume":                 202,
	"POST /v1/types/{type}/pause":                  202,
	"POST /v1/types/{type}/resume":                 202,
	"GET /v1/scale":                                422, // without a type
	"POST /v1/operations":                          201,
	"POST /v1/callbacks/redeliver":                 202,
	"POST /v1/callbacks/{callback}/redeliver":      202,
	"POST /v1/tenants/{id}/callback/secret/rotate": 202,
	"POST /v1/operations/{id}/pause":               202,
	"POST /v1/operations/{id}/resume":              202,
	"POST /v1/operations/{id}/cancel":              202,
	"PATCH /v1/limits":                             202, // no fetcher runs
	"PATCH /v1/types/{type}":                       202,
	"PUT /v1/workers/{id}":                         404, // there is none
	"GET /v1/guards/{name}":                        404, // there is none
	"GET /v1/guards/health":                        200,
	"POST /v1/keys":                                201,
	"DELETE /v1/keys/{id}":                         404, // there is none
	"POST /v1/guards/{name}/members/*":             404, // there is none
}

// bodies has the request bodies of the calls that need one. ID and TENANT are replaced by those of
// the object.
var bodies = map[string]string{
	"POST /v1/groups":                     `{"id":"ID","tenant":"TENANT","type":"T"}`,
	"POST /v1/groups/{id}/jobs":           `{"payload":1}`,
	"PUT /v1/tenants/{id}":                `{"weight":2}`,
	"PATCH /v1/tenants/{id}":              `{"weight":2}`,
	"PUT /v1/tenants/{id}/callback":       `{"url":"https://example.com/hook"}`,
	"POST /v1/callbacks/redeliver":        `{"tenant":"TENANT"}`,
	"POST /v1/operations":                 `{"do":"pause","filter":{"tenant":"TENANT"}}`,
	"PATCH /v1/limits":                    `{"global":{"rps":5}}`,
	"PATCH /v1/types/{type}":              `{"rps":5}`,
	"PUT /v1/workers/{id}":                `{"workers":1}`,
	"POST /v1/keys":                       `{"role":"metrics"}`,
	"PUT /v1/events/{event}":              `{"capacity":1}`,
	"POST /v1/events/{event}/recalibrate": `{"capacity":1}`,
	"POST /v1/entry-tokens/verify":        `{"token":"t"}`,
	"POST /v1/entry-tokens/renew":         `{"token":"t"}`,
	"POST /v1/entry-tokens/complete":      `{"token":"t"}`,
}

// want returns the status that the route must answer to caller, a name in mayUse. which says
// whether the call is about an own, foreign or unknown object.
func want(rt httpapi.Route, caller, which string) int {
	may := slices.Contains(strings.Fields(mayUse[rt.Scope]), caller)
	_, tenant, _ := strings.Cut(caller, "@")
	notTheirs := tenant == "acme" && which != own
	// Every tenant has a secret, but an endpoint that does not exist can't be deleted.
	missing := which == unknown && (rt.Method == "GET" && !strings.HasSuffix(rt.Path, "/secret") || rt.Method == "DELETE")
	switch {
	case !may && (caller == "none" || caller == "bad"):
		return 401
	case !may:
		return 403
	case rt.Object == "tenant in the body" && notTheirs:
		return 403
	case slices.Contains([]string{"group", "operation", "callback"}, rt.Object) && (notTheirs || which == unknown):
		return 404
	case rt.Object == "tenant" && (notTheirs || missing):
		return 404
	}
	call := rt.Method + " " + rt.Path
	if strings.Contains(call, "/members/") {
		call = "POST /v1/guards/{name}/members/*"
	}
	if status, ok := wants[call]; ok {
		return status
	}
	return 200
}

// TestEveryCallerAtEveryRoute: each route answers nine callers, for each kind of object, with the
// status that follows from mayUse and wants; and one of five invalid keys with 401, unless it is
// open. A key of a tenant gets one answer for foreign and unknown groups and tenants.
func TestEveryCallerAtEveryRoute(t *testing.T) {
	t.Parallel()
	in := newInstallation(t)
	revoked := in.key(auth.Admin, "")
	require.NoError(t, in.store.Revoke(t.Context(), revoked.ID))
	past := keyStore(in.World, func() time.Time { return time.Now().Add(-time.Hour) })
	expired, err := past.Create(t.Context(), apikey.Request{Role: auth.Admin, Lifetime: 2 * time.Minute})
	require.NoError(t, err)
	admin := in.key(auth.Admin, "").Token
	wrongChecksum := admin[:len(admin)-1] + string(admin[len(admin)-1]^1)
	bad := []string{"garbage", wrongChecksum, revoked.Token, expired.Token, auth.NewToken(auth.Admin)}
	callers := map[string]string{"none": "", "admin": admin}
	for _, c := range []string{"operator", "reader", "reader@acme", "producer@acme", "producer@*", "metrics", "service"} {
		role, tenant, _ := strings.Cut(c, "@")
		callers[c] = in.key(auth.Role(role), tenant).Token
	}
	tried := 0
	for _, rt := range httpapi.Routes() {
		require.Contains(t, mayUse, rt.Scope, "%s %s", rt.Method, rt.Path)
		for caller, token := range callers {
			answers := map[string]reply{}
			for _, which := range []string{own, foreign, unknown} {
				a := in.call(rt, token, which)
				require.Equal(t, want(rt, caller, which), a.status, "%s %s as %s, %s: %s", rt.Method, rt.Path, caller, which, a.body)
				require.Equal(t, a.status == 401, a.header.Get("WWW-Authenticate") == "Bearer")
				answers[which] = a
				tried++
			}
			if strings.HasSuffix(caller, "@acme") && slices.Contains([]string{"group", "tenant", "operation", "callback"}, string(rt.Object)) {
				require.Equal(t, answers[unknown], answers[foreign], "%s %s as %s", rt.Method, rt.Path, caller)
			}
		}
		token := bad[tried%len(bad)] // so many failures in a second would be refused
		require.Equal(t, want(rt, "bad", own), in.call(rt, token, own).status, "%s %s", rt.Method, rt.Path)
	}
	for _, token := range bad {
		require.Equal(t, 401, in.send(token, "GET", "/v1/groups", "", "").status)
	}
	require.Greater(t, tried, 1000)
}

// call sends a request to a route about an own, foreign or unknown object. It replaces ids in the
// answer, so that the answers about foreign and unknown objects can be compared.
func (in *installation) call(rt httpapi.Route, token, which string) reply {
	in.T.Helper()
	tenant, id := tenants[which], "x-000000"
	switch {
	case rt.Object == "tenant":
		if id = tenant; which == unknown { // a new one each time, since some calls make a tenant known
			in.next++
			id = fmt.Sprintf("n%05d", in.next)
		} else {
			in.group(tenant)
			_, err := in.Store.SetCallback(stagetest.Trusted(in.T), tenant, api.CallbackSettings{URL: "https://example.com/hook"})
			require.NoError(in.T, err)
		}
	case rt.Object == "tenant in the body":
		in.next++
		id = fmt.Sprintf("g-%06d", in.next)
	case rt.Object == "group" && which != unknown:
		id = in.group(tenant)
	case rt.Object == "callback" && which != unknown:
		group := in.group(tenant)
		id = group + ".1.completed"
		_, errs, err := ledger.AddCallbacks(in.T.Context(), in.Conn.Cmd, in.Space.OfTenant(tenant), []ledger.NewCallback{{
			ID: id, Tenant: tenant, Group: group, Type: "group.completed", At: time.Now(),
		}})
		require.NoError(in.T, errors.Join(append(errs, err)...))
	case rt.Object == "callback":
		id = "x-000000.1.completed"
	case rt.Object == "operation" && which != unknown:
		in.next++
		id = fmt.Sprintf("o-%06d", in.next)
		ctx := auth.With(in.T.Context(), auth.Principal{Role: auth.Producer, Tenant: tenant})
		_, err := in.Store.StartOperation(ctx, id, api.OperationRequest{Do: api.OpPause, Filter: api.OperationFilter{All: true}})
		require.NoError(in.T, err)
		defer func() { _, _ = in.Store.ControlOperation(ctx, id, api.CancelOperation) }() // so that there are not too many
	}
	path := strings.NewReplacer("{$}", "", "{id}", id, "{callback}", id, "{ordinal}", "0", "{name}", "pool%2Fp", "{type}", "T",
		"{event}", "e", "{user}", "u").Replace(rt.Path)
	body := strings.NewReplacer("ID", id, "TENANT", tenant).Replace(bodies[rt.Method+" "+rt.Path])
	a := in.send(token, rt.Method, path, body, "")
	a.body = strings.ReplaceAll(a.body, strings.TrimSuffix(id, ".1.completed"), "ID")
	a.header.Del("Date")
	return a
}

// counted counts the commands that a client sends to Redis.
type counted struct {
	redistest.NoHook
	commands atomic.Int64
}

func (c *counted) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.commands.Add(1)
		return next(ctx, cmd)
	}
}

func (c *counted) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.commands.Add(int64(len(cmds)))
		return next(ctx, cmds)
	}
}

// TestFloodOfWrongKeys: 50,000 requests with 1000 wrong keys in five seconds cost Redis less than
// 30 commands. All get 401 or 429, and a valid key gets 200 after each hundred of them, from their
// address.
func TestFloodOfWrongKeys(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	k, err := keyStore(w, time.Now).Create(t.Context(), apikey.Request{Role: auth.Reader})
	require.NoError(t, err)
	conn := w.Connect()
	var sent counted
	conn.Cmd.AddHook(&sent)
	var passed atomic.Int64 // of the clock, in milliseconds
	start := time.Now()
	keys := apikey.New(apikey.Options{
		Store: apikey.NewStore(conn.Cmd, w.Space, auth.Hasher{}, time.Now), Log: telemetry.Nop().Log,
		Now: func() time.Time { return start.Add(time.Duration(passed.Load()) * time.Millisecond) },
	})
	h := httpapi.New(httpapi.Options{Backend: apitest.NewBackend(), Keys: keys, Rooms: apitest.NewRooms()})
	send := func(token string) int {
		req := httptest.NewRequest("GET", "/v1/events", nil)
		req.Header.Set("Authorization", "Bearer "+token)
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, req)
		return rec.Code
	}
	const flood = 50_000
	wrong := make([]string, 1000)
	for i := range wrong {
		wrong[i] = auth.NewToken(auth.Reader)
	}
	answers := map[int]int{}
	for i := range flood {
		answers[send(wrong[i%len(wrong)])]++
		if i%100 == 0 {
			require.Equal(t, 200, send(k.Token), "after %d wrong keys", i)
			passed.Add(10) // 10,000 wrong keys a second
		}
	}
	require.Equal(t, flood, answers[401]+answers[429], answers)
	require.Less(t, answers[401], 25, "20 at once and 10 a minute")
	require.Less(t, sent.commands.Load(), int64(30), "one read of all keys a second for five seconds")
}

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

var document = apitest.NewDocument(httpapi.OpenAPIDocument)

// requireDocumented checks an answer against the OpenAPI document. A request that the document does
// not describe must be answered with an error, unless its method is HEAD.
func requireDocumented(t *testing.T, req *http.Request, rec *httptest.ResponseRecorder) {
	t.Helper()
	if !document.Describes(t, req, rec) && req.Method != http.MethodHead {
		require.GreaterOrEqual(t, rec.Code, 400, "%s %s is not documented", req.Method, req.URL.Path)
	}
}

// requireSchema checks a JSON document against a schema of the OpenAPI document.
func requireSchema(t *testing.T, name string, doc []byte) {
	t.Helper()
	var v any
	require.NoError(t, json.Unmarshal(doc, &v))
	require.NoError(t, document.Components.Schemas[name].Value.VisitJSON(v), string(doc))
}

func TestDocumentIsValidAndServed(t *testing.T) {
	require.NoError(t, document.Validate(t.Context()))
	rec := call(t, httpapi.New(options(apitest.NewBackend())), "GET", "/openapi.yaml", "")
	require.Equal(t, httpapi.OpenAPIDocument, rec.Body.Bytes())
}

func TestDocumentAndRoutesAgree(t *testing.T) {
	var served []string
	for _, rt := range httpapi.Routes() {
		call := rt.Method + " " + strings.TrimSuffix(rt.Path, "{$}")
		for _, name := range rt.Query {
			served = append(served, call+" ?"+name)
		}
		served = append(served, call)
	}
	require.ElementsMatch(t, served, document.Calls(t))
}

// TestDocumentAndTypesAgree: each schema in the table has the JSON fields of its Go type, and no
// others. Schemas of answers require the fields that are never omitted.
func TestDocumentAndTypesAgree(t *testing.T) {
	for _, c := range []struct {
		schema  string
		value   any
		request bool
	}{
		{"SubmitGroup", messages.SubmitGroup{}, true}, {"SubmitJob", messages.Job{}, true}, {"Aggregate", messages.Aggregate{}, true},
		{"Accepted", api.Accepted{}, false}, {"Appended", api.Appended{}, false}, {"AppendProblem", api.AppendProblem{}, false},
		{"Counts", api.Counts{}, false}, {"DeadLetter", api.DeadLetter{}, false}, {"DeadLetterList", api.DeadLetterList{}, false},
		{"Event", api.Event{}, false}, {"Failure", api.Failure{}, false}, {"FieldError", api.FieldError{}, false},
		{"Group", api.Group{}, false}, {"GroupList", api.GroupList{}, false}, {"Job", api.Job{}, false}, {"JobError", api.JobError{}, false},
		{"LineError", api.LineError{}, false}, {"Problem", api.Problem{}, false}, {"RateLimit", api.RateLimit{}, false},
		{"Result", api.Result{}, false}, {"StageStatus", api.StageStatus{}, false}, {"Stats", api.Stats{}, false},
		{"Why", api.Why{}, false}, {"WhyLimit", api.WhyLimit{}, false}, {"Paused", api.Paused{}, false},
		{"TenantSettings", api.TenantSettings{}, true}, {"Tenant", api.Tenant{}, false}, {"TenantList", api.TenantList{}, false},
		{"Limits", api.Limits{}, false}, {"GlobalLimits", api.GlobalLimits{}, false}, {"TypeLimits", api.TypeLimits{}, false},
		{"NumberSetting", api.LimitSetting[int64]{}, false}, {"TextSetting", api.LimitSetting[string]{}, false},
		{"ProcessLimits", api.ProcessLimits{}, false}, {"ConfiguredLimits", api.ConfiguredLimits{}, false}, {"LimitsPatch", api.LimitsPatch{}, true}, {"GlobalPatch", api.GlobalPatch{}, true},
		{"TypePatch", api.TypePatch{}, true},
		{"TenantWindow", api.TenantWindow{}, false}, {"TenantCongestion", api.TenantCongestion{}, false},
		{"Guard", api.Guard{}, false}, {"GuardList", api.GuardList{}, false}, {"GuardSummary", api.GuardSummary{}, false},
		{"GuardSpec", api.GuardSpec{}, false}, {"GuardMember", api.GuardMember{}, false}, {"GuardQueue", api.GuardQueue{}, false},
		{"GuardAction", api.GuardAction{}, false},
		{"RejectedMessage", api.RejectedMessage{}, false}, {"RejectedList", api.RejectedList{}, false},
		{"EventSettings", api.EventSettings{}, true}, {"RoomEvent", api.RoomEvent{}, false}, {"RoomEventList", api.RoomEventList{}, false},
		{"EventSlots", api.EventSlots{}, false}, {"Recalibration", api.Recalibration{}, true}, {"EventRemoval", api.EventRemoval{}, false},
		{"UserRemoval", api.UserRemoval{}, false}, {"EntryTokenCompletion", api.EntryTokenCall{}, true}, {"EntryToken", api.EntryToken{}, false},
		{"EntryTokenState", api.EntryTokenState{}, false}, {"EntryTokenDone", api.EntryTokenDone{}, false},
		{"Activity", api.Activity{}, false}, {"ActivityList", api.ActivityList{}, false},
		{"JobMap", api.JobMap{}, false}, {"MapBucket", api.MapBucket{}, false}, {"FailureSummary", api.FailureSummary{}, false},
		{"FailureCode", api.FailureCode{}, false}, {"FailureFingerprint", api.FailureFingerprint{}, false}, {"FailureSample", api.FailureSample{}, false},
		{"RoleStatus", api.RoleStatus{}, false},
		{"History", api.History{}, false}, {"HistoryPoint", api.HistoryPoint{}, false}, {"RedisMemory", api.RedisMemory{}, false},
		{"TenantHistory", api.TenantHistory{}, false}, {"TenantHistoryPoint", api.TenantHistoryPoint{}, false}, {"JobTotals", api.JobTotals{}, false},
		{"Key", api.Key{}, false}, {"KeyList", api.KeyList{}, false}, {"NewKey", api.NewKey{}, false}, {"KeyRequest", api.KeyRequest{}, true},
		{"KeyRevoked", api.KeyRevoked{}, false}, {"AuditState", api.AuditState{}, false}, {"AuditedPartition", api.AuditedPartition{}, false},
		{"CallbackSettings", api.CallbackSettings{}, true}, {"TenantCallback", api.TenantCallback{}, false}, {"CallbackRemoval", api.CallbackRemoval{}, false},
		{"CallbackSecret", api.CallbackSecret{}, false}, {"Callback", api.Callback{}, false}, {"CallbackList", api.CallbackList{}, false},
		{"Redelivered", api.Redelivered{}, false}, {"WebhookEvent", api.WebhookEvent{}, false},
		{"TypeStats", api.TypeStats{}, false}, {"WorkerStatus", api.WorkerStatus{}, false},
		{"Scale", api.Scale{}, false},
	} {
		document.Agrees(t, c.schema, c.value, !c.request)
	}
}

// TestListsHaveOneForm: all calls whose operation id begins with list have the parameters cursor
// and limit and answer in one form. Of the other calls, only streamFailures has a cursor.
func TestListsHaveOneForm(t *testing.T) {
	lists := 0
	for path, item := range document.Paths.Map() {
		for method, op := range item.Operations() {
			if op.OperationID == "streamFailures" { // its pages are lines, and the cursor is in the header Link
				continue
			}
			schema := answerSchema(op)
			var paging []string
			for _, p := range slices.Concat(item.Parameters, op.Parameters) {
				if p.Value.Name == "cursor" || p.Value.Name == "limit" {
					paging = append(paging, p.Ref)
				}
			}
			isList := strings.HasPrefix(op.OperationID, "list")
			require.Equal(t, isList, len(paging) > 0, "%s %s", method, path)
			require.Equal(t, isList, schema != nil && schema.Properties["cursor"] != nil, "%s %s", method, path)
			if !isList {
				continue
			}
			lists++
			require.Equal(t, http.MethodGet, method, path)
			const components = "#/components/"
			require.ElementsMatch(t, []string{components + "parameters/Cursor", components + "parameters/Limit"}, paging, path)
			name := strings.ReplaceAll(path[strings.LastIndex(path, "/")+1:], "-", "_")
			properties, required := 2, []string{name}
			if schema.Properties["scanned"] != nil { // a list that looks at more than it returns
				properties, required = 3, []string{name, "scanned"}
			}
			if schema.Properties["as_of"] != nil { // a list that was made before
				properties++
			}
			require.Len(t, schema.Properties, properties, path)
			require.Equal(t, required, schema.Required, path)
			require.True(t, schema.Properties[name].Value.Type.Is("array"), path)
			require.Equal(t, components+"schemas/NextCursor", schema.Properties["cursor"].Ref, path)
			require.NotNil(t, op.Responses.Value("422"), path)
		}
	}
	require.GreaterOrEqual(t, lists, 7)
}

// answerSchema returns the schema of the JSON that a call answers with status 200. It returns nil
// if the call has no such answer.
func answerSchema(op *openapi3.Operation) *openapi3.Schema {
	answer := op.Responses.Value("200")
	if answer == nil || answer.Value.Content["application/json"] == nil {
		return nil
	}
	return answer.Value.Content["application/json"].Schema.Value
}
