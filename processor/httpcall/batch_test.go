package httpcall_test

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
	"github.com/bulkaction/bulkaction/processor/httpcall"
)

// jobsOf returns jobs of the type HTTP_BATCH with these payloads.
func jobsOf(payloads ...string) []processor.Job {
	jobs := make([]processor.Job, len(payloads))
	for i, p := range payloads {
		jobs[i] = processor.Job{
			Tenant: "acme", Group: "sync", Ordinal: int64(i), Type: httpcall.BatchType, Attempt: 1, RetriesLeft: 3, Payload: json.RawMessage(p),
		}
	}
	return jobs
}

// batcherOf returns the batcher of the last of these types, which is HTTP_BATCH.
func batcherOf(types []processor.Runner) processor.Batcher {
	return types[len(types)-1].(processor.Batcher)
}

// outcomesOf makes a call as a worker does.
func outcomesOf(ctx context.Context, b processor.Batcher, jobs []processor.Job) []processor.Outcome[any] {
	outcomes := make([]processor.Outcome[any], len(jobs))
	gated, ok := b.(processor.GatedBatcher)
	if !ok {
		outcomes, _ = processor.RunBatch(ctx, b, jobs)
		return outcomes
	}
	pass, n, err := gated.AdmitBatch(ctx, jobs)
	for i := range jobs {
		if outcomes[i].Err = err; err == nil && i >= n {
			outcomes[i].Err = errors.New("not admitted")
		}
	}
	if err != nil {
		return outcomes
	}
	if pass != nil {
		ctx = pass.Into(ctx)
	}
	got, err := processor.RunBatch(ctx, b, jobs[:n])
	if pass != nil {
		pass.Return(err)
	}
	return append(got, outcomes[n:]...)
}

// said is what an outcome means for its job, in one line.
func said(o processor.Outcome[any]) string {
	if o.Err == nil {
		return fmt.Sprintf("done %s", o.Result)
	}
	v := processor.Classify(o.Err)
	return fmt.Sprintf("%s %s %s: %s", v.Kind, v.Code, v.After, v.Message)
}

func allSaid(outcomes []processor.Outcome[any]) (texts []string) {
	for _, o := range outcomes {
		texts = append(texts, said(o))
	}
	return texts
}

// TestBatchRequest: jobs with one URL, method and headers share a request, which has the id, the
// attempt and the key of each; others have requests of their own. Payloads that make no request fail
// alone.
func TestBatchRequest(t *testing.T) {
	var mu sync.Mutex
	bodies, headers := map[string]string{}, map[string]http.Header{}
	server := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		key := r.Method + " " + r.URL.Path + " " + r.Header.Get("X-Shop")
		bodies[key], headers[key] = string(body), r.Header
		var items []struct{ ID string }
		_ = json.Unmarshal(body, &items)
		var answers []string
		for _, item := range items {
			answers = append(answers, `{"result":"`+item.ID+`"}`)
		}
		_, _ = io.WriteString(w, "["+strings.Join(answers, ",")+"]")
	})
	url := func(rest string) string { return `{"url":"` + server.URL + rest + `}` }
	jobs := jobsOf(
		url(`/a","body":{"n": 1}`), url(`/b","body":"text"`), url(`/a","method":"post"`), url(`/a","method":"put"`),
		url(`/a","headers":{"X-Shop":"7"}`), url(`/a","method":"GET"`), `{"url":"ftp://a"}`, `7`, url(`/a","headers":{"Connection":"close"}`),
	)
	jobs[0].Key, jobs[2].Attempt = "Bo ☃", 4
	jobs = append(jobs, jobs[0])
	jobs[9].Tenant, jobs[9].Ordinal = "globex", 9
	jobs[9].Payload = json.RawMessage(url(`/b","body":"text"`))
	outcomes := outcomesOf(t.Context(), batcherOf(start(t, nil).Types()), jobs)
	require.Equal(t, []string{
		`done "sync.0"`, `done "sync.1"`, `done "sync.2"`, `done "sync.3"`, `done "sync.4"`,
		"fail INVALID_PAYLOAD 0s: read HTTP payload: method is not one of POST, PUT, PATCH",
		"fail INVALID_PAYLOAD 0s: read HTTP payload: url is not an absolute http or https URL",
		"fail INVALID_PAYLOAD 0s: read HTTP payload: must be an object, not a number",
		"fail INVALID_PAYLOAD 0s: read HTTP payload: headers has Connection, which belongs to the connection",
		`done "sync.9"`,
	}, allSaid(outcomes))
	require.Len(t, bodies, 4)
	require.JSONEq(t, `[{"id":"sync.0","attempt":1,"retries_left":3,"key":"Bo ☃","body":{"n":1}},
		{"id":"sync.2","attempt":4,"retries_left":3,"body":null}]`, bodies["POST /a "])
	require.JSONEq(t, `[{"id":"sync.3","attempt":1,"retries_left":3,"body":null}]`, bodies["PUT /a "])
	require.Equal(t, []string{"HTTP_BATCH"}, headers["POST /a "]["Bulkaction-Type"])
	require.Equal(t, []string{"acme"}, headers["POST /a "]["Bulkaction-Tenant"])
	require.Equal(t, []string{"application/json"}, headers["POST /a 7"]["Content-Type"])
	require.NotContains(t, headers["POST /a "], "Idempotency-Key", "a call has no key of its own")
	require.NotContains(t, headers["POST /a "], "Webhook-Signature")
}

// TestBatchAnswers: what an answer to two jobs, and to one, means for them.
func TestBatchAnswers(t *testing.T) {
	type answer struct {
		status int
		header string // Name: value
		body   string
	}
	var now answer
	server := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		if name, value, ok := strings.Cut(now.header, ": "); ok {
			w.Header().Set(name, value)
		}
		w.WriteHeader(now.status)
		_, _ = io.WriteString(w, now.body)
	})
	b := batcherOf(start(t, func(c *httpcall.Config) { c.MaxResponseBytes = 100 }).Types())
	payload := `{"url":"` + server.URL + `?token=s3cret"}`
	same := func(s string) []string { return []string{s, s} }
	for name, tt := range map[string]struct {
		answer answer
		want   []string
	}{
		"results":    {answer{200, "", `[{"result":{"n":1}},{"result":null}]`}, []string{`done {"n":1}`, "done null"}},
		"errors":     {answer{207, "", `[{"error":"no\nstock s3cret","code":"NO_STOCK"},{"error":""}]`}, []string{"retry NO_STOCK 0s: no stock ******", "retry ERROR 0s: the answer names no reason"}},
		"permanent":  {answer{200, "", `[{"outcome":"permanent","code":"BAD"},{"outcome":"Permanent","error":"no","result":1}]`}, []string{"fail BAD 0s: BAD", "fail ERROR 0s: no"}},
		"times":      {answer{200, "", `[{"outcome":"throttle","retry_after":1.5,"error":"slow"},{"outcome":"defer","retry_after":1e300}]`}, []string{"throttle API_THROTTLED 1.5s: slow", "defer RESOURCE_BUSY 24h0m0s: the answer names no reason"}},
		"no outcome": {answer{200, "", `[{},{"outcome":"failed","result":1}]`}, same("retry INVALID_OUTCOME 0s: call 127.0.0.1: an item of the answer is not an outcome")},
		"no object":  {answer{200, "", `[null,{"code":7,"error":"a"}]`}, same("retry INVALID_OUTCOME 0s: call 127.0.0.1: an item of the answer is not an outcome")},
		"short":      {answer{200, "", `[{"result":1}]`}, same("retry BATCH_LENGTH 0s: call 127.0.0.1: the answer has 1 outcomes for 2 jobs")},
		"no array":   {answer{200, "", `{"ok":true}`}, same("retry BATCH_LENGTH 0s: call 127.0.0.1: the answer is not a JSON array of outcomes")},
		"nothing":    {answer{204, "", ""}, same("retry BATCH_LENGTH 0s: call 127.0.0.1: the answer is not a JSON array of outcomes")},
		"large":      {answer{200, "", "[" + strings.Repeat(" ", 3000)}, same("retry BATCH_LENGTH 0s: call 127.0.0.1: the answer has more than 2248 bytes")},
		"rejected":   {answer{422, "", `{"message":"item 1 is bad","code":"BAD"}`}, same("retry BATCH_REJECTED 0s: call 127.0.0.1: status 422 Unprocessable Entity: item 1 is bad")},
		"too large":  {answer{413, "", ""}, same("retry BATCH_REJECTED 0s: call 127.0.0.1: status 413 Request Entity Too Large")},
		"bad":        {answer{400, "", ""}, same("retry BATCH_REJECTED 0s: call 127.0.0.1: status 400 Bad Request")},
		"not found":  {answer{404, "", ""}, same("fail HTTP_404 0s: call 127.0.0.1: status 404 Not Found")},
		"broken":     {answer{500, "", ""}, same("retry HTTP_500 0s: call 127.0.0.1: status 500 Internal Server Error")},
		"throttled":  {answer{429, "Retry-After: 7", ""}, same("throttle API_THROTTLED 7s: call 127.0.0.1: status 429 Too Many Requests")},
		"away":       {answer{503, "Retry-After: 7", ""}, same("throttle API_THROTTLED 7s: call 127.0.0.1: status 503 Service Unavailable")},
		"redirect":   {answer{307, "Location: /b", ""}, same("fail HTTP_307 0s: call 127.0.0.1: status 307 Temporary Redirect")},
		"header":     {answer{422, "Bulkaction-Outcome: permanent", ""}, same("fail HTTP_422 0s: call 127.0.0.1: status 422 Unprocessable Entity")},
	} {
		now = tt.answer
		require.Equal(t, tt.want, allSaid(outcomesOf(t.Context(), b, jobsOf(payload, payload))), name)
	}
	now = answer{422, "", `{"message":"bad","code":"BAD"}`}
	require.Equal(t, []string{"fail BAD 0s: call 127.0.0.1: status 422 Unprocessable Entity: bad"},
		allSaid(outcomesOf(t.Context(), b, jobsOf(payload))), "alone, it is the item's own error")

	refused := batcherOf(start(t, func(c *httpcall.Config) { c.AllowedCIDRs = nil }).Types())
	require.Contains(t, said(outcomesOf(t.Context(), refused, jobsOf(payload))[0]), "fail ADDRESS_REFUSED 0s")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, outcomesOf(ctx, b, jobsOf(payload))[0].Err, context.Canceled)
}

// TestRequestsOfACallAreBounded: of the requests of one call, ten run at a time, and all are made.
func TestRequestsOfACallAreBounded(t *testing.T) {
	arrived, answer := make(chan struct{}, 100), make(chan struct{})
	server := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		arrived <- struct{}{}
		<-answer
		_, _ = io.WriteString(w, `[{"result":1}]`)
	})
	var payloads []string
	for i := range 25 {
		payloads = append(payloads, fmt.Sprintf(`{"url":"%s/%d"}`, server.URL, i))
	}
	done := make(chan []processor.Outcome[any])
	go func() { done <- outcomesOf(t.Context(), batcherOf(start(t, nil).Types()), jobsOf(payloads...)) }()
	for range 10 {
		<-arrived
	}
	require.Empty(t, arrived)
	close(answer)
	for _, o := range <-done {
		require.Equal(t, "done 1", said(o))
	}
}

// TestBatchesOfTheFile: a type of the file with batches has the URL there, its payloads are the bodies
// and its requests are signed. HTTP_BATCH's are, too.
func TestBatchesOfTheFile(t *testing.T) {
	secret := []byte(strings.Repeat("a", 24))
	var header http.Header
	var body []byte
	server := serve(t, func(w http.ResponseWriter, r *http.Request) {
		header = r.Header
		body, _ = io.ReadAll(r.Body)
		_, _ = io.WriteString(w, `[{"result":1},{"result":2}]`)
	})
	f := newFolder(t)
	f.write(t, "whsec", "whsec_"+base64.StdEncoding.EncodeToString(secret))
	content := "signing:\n  - {hosts: [\"" + hostOf(server) + "\"], secret_file: whsec}\ntypes:\n  ORDERS: {url: " + server.URL +
		"/orders, headers: {X-Shop: 7}, batch: {size: 20, wait: 200ms}}\n  PLAIN: {url: " + server.URL + ", batch: {}}\n" +
		file(line("a", "secret.example.com"))
	p := startGuarded(t, f.config(t, content))
	types := p.Types()
	require.Len(t, types, 3)
	orders, plain := types[0].(processor.Batcher), types[1].(processor.Batcher)
	require.Equal(t, processor.BatchOptions{Size: 20, Wait: 200 * time.Millisecond}, orders.Options())
	require.Equal(t, processor.BatchOptions{Size: 100}, plain.Options(), "the worker has the default wait")

	jobs := jobsOf(`{"n":1}`, `"text"`)
	jobs[0].Type, jobs[1].Type = "ORDERS", "ORDERS"
	require.Equal(t, []string{"done 1", "done 2"}, allSaid(outcomesOf(t.Context(), orders, jobs)))
	require.JSONEq(t, `[{"id":"sync.0","attempt":1,"retries_left":3,"body":{"n":1}},{"id":"sync.1","attempt":1,"retries_left":3,"body":"text"}]`, string(body))
	require.Equal(t, "7", header.Get("X-Shop"))
	signed := func() string {
		id := header.Get("Webhook-Id")
		seconds, err := strconv.ParseInt(header.Get("Webhook-Timestamp"), 10, 64)
		require.NoError(t, err)
		mac := hmac.New(sha256.New, secret)
		_, _ = fmt.Fprintf(mac, "%s.%d.%s", id, seconds, body)
		require.Equal(t, []string{"v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))}, header["Webhook-Signature"])
		return id
	}
	first := signed()
	outcomesOf(t.Context(), orders, jobs)
	require.Equal(t, first, signed(), "the same attempts")
	jobs[1].Attempt++
	outcomesOf(t.Context(), orders, jobs)
	require.NotEqual(t, first, signed(), "a receiver must not take a retry for a repeated message")
	payload := `{"url":"` + server.URL + `"}`
	outcomesOf(t.Context(), batcherOf(types), jobsOf(payload, payload))
	signed()

	f.write(t, "credentials.yaml", strings.Replace(content, ", batch: {}", "", 1))
	_, err := p.Reload()
	require.ErrorContains(t, err, "types: [ORDERS (batch) PLAIN] instead of [ORDERS (batch) PLAIN (batch)]")
	for mistake, says := range map[string]string{
		"{url: \"https://a.example.com\", batch: {size: 2000}}":       "types: X: batch: option Size 2000: must be 1 to 1000",
		"{url: \"https://a.example.com\", method: get, batch: {}}":    "types: X: method is not one of POST, PUT, PATCH",
		"{url: \"https://a.example.com\", batch: {most: 1}}":          "unknown field most",
		"{url: \"https://a.example.com\", batch: {wait: 2s}}":         "types: X: batch: option Wait 2s: must be at most 1s",
		"{url: \"https://a.example.com\"}\n  HTTP_BATCH: {url: \"\"}": "types: HTTP_BATCH: ",
	} {
		_, err := httpcall.NewGuarded(f.config(t, file(line("a", "secret.example.com"))+"types:\n  X: "+mistake+"\n"))
		require.ErrorContains(t, err, says)
	}
}

// TestBatchesNeedPermissions: with credentials and guards of hosts, a call is one request, which gets a
// credential and a permission before, and tells both how it went.
func TestBatchesNeedPermissions(t *testing.T) {
	status, sent := http.StatusOK, ""
	handler := func(w http.ResponseWriter, r *http.Request) {
		sent = r.Header.Get("Authorization")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, `[{"result":"`+token+`"},{"result":2}]`)
	}
	server, other := serve(t, handler), serve(t, handler)
	all, pool := lenders{}, "http."+strings.Replace(hostOf(server), ":", "_", 1)
	p := startGuarded(t, newFolder(t).config(t, file(line("a", hostOf(server)))), httpcall.WithChoice(all.choose), httpcall.WithHosts(all.host))
	b := batcherOf(p.Types())
	payload, elsewhere := `{"url":"`+server.URL+`"}`, `{"url":"`+other.URL+`"}`
	require.Equal(t, []string{`done "` + strings.Repeat("*", len(token)) + `"`, "done 2", "retry ERROR 0s: not admitted"},
		allSaid(outcomesOf(t.Context(), b, jobsOf(payload, payload, elsewhere))))
	require.Equal(t, "Bearer "+token, sent)
	require.Equal(t, []credential.Outcome{{Kind: credential.Success}}, all[pool].took(t))
	require.Equal(t, []credential.Outcome{{Kind: credential.Success}}, all[hostOf(server)].took(t))
	for code, want := range map[int]struct {
		account, host credential.Kind
		says          string
	}{
		401: {credential.Failure, credential.Neutral, "retry HTTP_401"}, 422: {credential.Neutral, credential.Success, "retry BATCH_REJECTED"},
		500: {credential.Neutral, credential.Failure, "retry HTTP_500"}, 429: {credential.Throttled, credential.Throttled, "throttle API_THROTTLED"},
	} {
		status = code
		require.Contains(t, said(outcomesOf(t.Context(), b, jobsOf(payload, payload))[1]), want.says)
		require.Equal(t, []credential.Outcome{{Kind: want.account}}, all[pool].took(t), code)
		require.Equal(t, []credential.Outcome{{Kind: want.host}}, all[hostOf(server)].took(t), code)
	}
	status = 200
	require.Equal(t, "done 2", said(outcomesOf(t.Context(), b, jobsOf(elsewhere, elsewhere))[1]))
	require.Empty(t, sent)
	require.Empty(t, all[pool].took(t))

	all[pool].err = &credential.DeniedError{Guard: "g", After: time.Second, Reason: "rate limit"}
	require.Contains(t, said(outcomesOf(t.Context(), b, jobsOf(payload, payload))[1]), "defer RESOURCE_BUSY 1s")
	outcomes, _ := processor.RunBatch(t.Context(), b, jobsOf(payload))
	require.Contains(t, said(outcomes[0]), "the credentials of the job's host have changed", "never without the credential")
	require.Contains(t, said(outcomesOf(t.Context(), b, jobsOf(`{"url":"`+server.URL+`","headers":{"authorization":"x"}}`))[0]),
		"fail INVALID_PAYLOAD 0s: read HTTP payload: headers or url has Authorization, which the host's credential sets")
}

// TestBatchesOfHostsWithoutACredential: a call may have several requests if none needs a permission.
func TestBatchesOfHostsWithoutACredential(t *testing.T) {
	server := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `[{"result":1}]`) })
	b := batcherOf(startGuarded(t, newFolder(t).config(t, file(line("a", "secret.example.com")))).Types())
	require.Equal(t, []string{"done 1", "fail INVALID_PAYLOAD 0s: read HTTP payload: must be an object, not a number", "done 1", "retry ERROR 0s: not admitted"},
		allSaid(outcomesOf(t.Context(), b, jobsOf(`{"url":"`+server.URL+`/a"}`, "7", `{"url":"`+server.URL+`/b"}`, `{"url":"https://secret.example.com"}`))))
}
