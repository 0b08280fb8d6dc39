package httpcall_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
	"github.com/bulkaction/bulkaction/processor/httpcall"
)

// TestHandlersExplainTheirErrors: code and text of an answer are those of the error.
func TestHandlersExplainTheirErrors(t *testing.T) {
	const asJSON, problem, plain = "application/json", "application/problem+json; charset=utf-8", "text/plain"
	nest := `{"statusCode":422,"message":["to must be an email","name is empty"],"error":"Unprocessable Entity"}`
	for name, tt := range map[string]struct {
		media, code, body string
		wantCode, text    string
	}{
		"nothing":             {"", "", "", "HTTP_422", ""},
		"error":               {asJSON, "", `{"error": "no such customer"}`, "HTTP_422", ": no such customer"},
		"message":             {asJSON, "", `{"message": "no such customer", "code": "NO_CUSTOMER"}`, "NO_CUSTOMER", ": no such customer"},
		"problem":             {problem, "", `{"type":"about:blank","title":"Refused","detail":"no such customer","status":422}`, "HTTP_422", ": no such customer"},
		"title alone":         {problem, "", `{"title":"Refused", "detail": ""}`, "HTTP_422", ": Refused"},
		"error object":        {asJSON, "", `{"error":{"code":"card_declined","message":"declined","param":"x"}}`, "card_declined", ": declined"},
		"OAuth":               {asJSON, "", `{"error":"invalid_grant","error_description":"expired"}`, "HTTP_422", ": expired"},
		"list of messages":    {asJSON, "", nest, "HTTP_422", ": to must be an email; name is empty"},
		"errors":              {asJSON, "", `{"errors":[{"detail":"a"},{"message":"b"},"c",7]}`, "HTTP_422", ": a; b; c"},
		"JSON string":         {asJSON, "", `"no such customer"`, "HTTP_422", ": no such customer"},
		"JSON as plain text":  {plain, "", `{"error":"no such customer"}`, "HTTP_422", ": no such customer"},
		"other JSON":          {asJSON, "", `{"error":true,"message":null,"code":7}`, "HTTP_422", ""},
		"text":                {plain, "", "no such\r\n customer \n", "HTTP_422", ": no such customer"},
		"HTML":                {"text/html", "", "<html>no such customer</html>", "HTTP_422", ""},
		"HTML without a type": {"", "", "<!DOCTYPE html>", "HTTP_422", ""},
		"binary":              {"application/octet-stream", "", "\x00\x01", "HTTP_422", ""},
		"header":              {asJSON, "GONE", `{"error":"x","code":"OTHER"}`, "GONE", ": x"},
		"header is no code":   {asJSON, "no code", `{"error":"x","code":"OTHER"}`, "OTHER", ": x"},
		"body has no code":    {asJSON, "", `{"error":"x","code":"no code"}`, "HTTP_422", ": x"},
		"too long a code":     {asJSON, "", `{"code":"` + strings.Repeat("a", 65) + `"}`, "HTTP_422", ""},
		"control characters":  {asJSON, "", `{"error":"a\u001b[31m\u0000b\u202ec"}`, "HTTP_422", ": a [31m b c"},
		"not UTF-8":           {plain, "", "a\xff", "HTTP_422", ": a\ufffd"},
		"long":                {plain, "", strings.Repeat("ü", 1000), "HTTP_422", ": " + strings.Repeat("ü", 256) + "…"},
		"endless":             {asJSON, "", `{"error":"` + strings.Repeat("x", 200_000), "HTTP_422", ""},
	} {
		t.Run(name, func(t *testing.T) {
			server := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header()["Content-Type"] = []string{tt.media}
				if tt.code != "" {
					w.Header().Set("Bulkaction-Code", tt.code)
				}
				w.WriteHeader(422)
				_, _ = io.WriteString(w, tt.body)
			})
			_, err := start(t, nil).Process(t.Context(), job(`{"url":"`+server.URL+`"}`))
			v := processor.Classify(err)
			require.Equal(t, processor.Fail, v.Kind)
			require.Equal(t, tt.wantCode, v.Code)
			require.Equal(t, "call 127.0.0.1: status 422 Unprocessable Entity"+tt.text, v.Message)
			require.True(t, utf8.ValidString(v.Message))
		})
	}
}

// TestTextsOfHandlersHaveNoSecrets: a handler that repeats the secrets of the request, as text, in
// JSON or as its code, does not bring them into the error.
func TestTextsOfHandlersHaveNoSecrets(t *testing.T) {
	for _, form := range []string{"%s", `{"error":%q}`, `{"detail":"x","code":%q}`} {
		server := serve(t, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(400)
			_, _ = fmt.Fprintf(w, form, strings.Join([]string{r.Header.Get("Authorization"), r.Header.Get("X-Api-Key"), r.RequestURI}, "-"))
		})
		host := strings.TrimPrefix(server.URL, "http://")
		for _, payload := range []string{
			`{"url":"http://` + host + `/?access_token=secret-1&id=shown","headers":{"Authorization":"Bearer secret-2","x-api-key":"secret-3"}}`,
			`{"url":"http://user:secret-4@` + host + `/"}`,
		} {
			_, err := start(t, nil).Process(t.Context(), job(payload))
			v := processor.Classify(err)
			require.NotContains(t, v.Message+v.Code, "secret")
			require.NotContains(t, v.Message+v.Code, base64.StdEncoding.EncodeToString([]byte("user:secret-4")))
			require.Equal(t, form == `{"detail":"x","code":%q}` || strings.Contains(payload, "user:"), !strings.Contains(v.Message, "id=shown"), v.Message)
		}
		p := startGuarded(t, newFolder(t).config(t, file(line("a", host))))
		_, err := processor.Run(t.Context(), p, call(server.URL))
		require.Error(t, err)
		require.NotContains(t, err.Error(), token)
	}
}

// TestHandlersDecide: the header Bulkaction-Outcome decides about the job, whatever the status, and
// about the credential and the host. An unknown outcome is none.
func TestHandlersDecide(t *testing.T) {
	outcome := func(k credential.Kind, after time.Duration) credential.Outcome {
		return credential.Outcome{Kind: k, After: after}
	}
	neutral, throttled := outcome(credential.Neutral, 0), outcome(credential.Throttled, 90*time.Second)
	for said, tt := range map[string]struct {
		kind    processor.Kind
		code    string
		after   time.Duration
		outcome credential.Outcome
	}{
		"permanent": {processor.Fail, "MINE", 0, neutral},
		"Retry":     {processor.RetryLater, "MINE", 0, neutral},
		"defer":     {processor.Defer, "RESOURCE_BUSY", 90 * time.Second, neutral},
		"throttle":  {processor.Throttle, "API_THROTTLED", 90 * time.Second, throttled},
	} {
		for _, status := range []int{200, 302, 401, 404, 429, 500, 503} {
			t.Run(fmt.Sprint(said, status), func(t *testing.T) {
				server := serve(t, func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Bulkaction-Outcome", said)
					w.Header().Set("Retry-After", "90")
					w.WriteHeader(status)
					_, _ = io.WriteString(w, `{"code":"MINE","message":"because"}`)
				})
				all := lenders{}
				c := newFolder(t).config(t, file(line("a", hostOf(server))))
				p := startGuarded(t, c, httpcall.WithChoice(all.choose), httpcall.WithHosts(all.host))
				_, guarded := processor.Run(t.Context(), p, call(server.URL))
				_, alone := start(t, nil).Process(t.Context(), call(server.URL))
				for _, err := range []error{guarded, alone} {
					v := processor.Classify(err)
					require.Equal(t, []any{tt.kind, tt.code, tt.after}, []any{v.Kind, v.Code, v.After})
					require.Contains(t, v.Message, ": because")
				}
				require.Equal(t, []credential.Outcome{tt.outcome}, all[hostOf(server)].took(t), "host")
				require.Equal(t, []credential.Outcome{tt.outcome}, all["http."+strings.ReplaceAll(hostOf(server), ":", "_")].took(t), "credential")
			})
		}
	}
	server := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Bulkaction-Outcome", "done") })
	_, err := start(t, nil).Process(t.Context(), call(server.URL))
	require.NoError(t, err)
}

// TestCallsTellTheirJob: each call names its job. Text that is not ASCII is escaped.
func TestCallsTellTheirJob(t *testing.T) {
	var got http.Header
	server := serve(t, func(_ http.ResponseWriter, r *http.Request) { got = r.Header })
	j := call(server.URL)
	j.Key, j.Attempt, j.RetriesLeft = "Bo \u2603@example.com", 2, 1
	_, err := start(t, nil).Process(t.Context(), j)
	require.NoError(t, err)
	for name, want := range map[string]string{
		"Tenant": "acme", "Group": "sync", "Ordinal": "3", "Type": "HTTP", "Attempt": "2", "Retries-Left": "1",
		"Key": "Bo%20%E2%98%83@example.com",
	} {
		require.Equal(t, []string{want}, got["Bulkaction-"+name], name)
	}
	j.Key = ""
	_, err = start(t, nil).Process(t.Context(), j)
	require.NoError(t, err)
	require.Empty(t, got["Bulkaction-Key"])
	require.Empty(t, got["Webhook-Signature"])
}

// TestCallsAreSigned: calls to the hosts of a signer carry the signature of Standard Webhooks by
// each of its secrets, calls to others none. The payload can't forge it.
func TestCallsAreSigned(t *testing.T) {
	secrets := [][]byte{[]byte(strings.Repeat("a", 24)), []byte(strings.Repeat("b", 64))}
	var header http.Header
	var body []byte
	handler := func(_ http.ResponseWriter, r *http.Request) {
		header = r.Header
		body, _ = io.ReadAll(r.Body)
	}
	signed, other := serve(t, handler), serve(t, handler)
	f := newFolder(t)
	f.write(t, "whsec", "whsec_"+base64.StdEncoding.EncodeToString(secrets[0])+"\r\nwhsec_"+base64.StdEncoding.EncodeToString(secrets[1])+"\n")
	p := startGuarded(t, f.config(t, "signing:\n  - {hosts: [\""+hostOf(signed)+"\"], secret_file: whsec}\n"))
	for _, payload := range []string{
		`{"url":"` + signed.URL + `"}`, `{"url":"` + signed.URL + `","body":{"a": "ü"}}`,
		`{"url":"` + signed.URL + `","body":"text","headers":{"webhook-signature":"v1,forged","webhook-id":"x"}}`,
	} {
		_, err := processor.Run(t.Context(), p, job(payload))
		require.NoError(t, err)
		require.Equal(t, []string{"sync.3"}, header["Webhook-Id"])
		seconds, err := strconv.ParseInt(header.Get("Webhook-Timestamp"), 10, 64)
		require.NoError(t, err)
		require.WithinDuration(t, time.Now(), time.Unix(seconds, 0), time.Minute)
		var want []string
		for _, secret := range secrets {
			mac := hmac.New(sha256.New, secret)
			_, _ = fmt.Fprintf(mac, "sync.3.%d.%s", seconds, body)
			want = append(want, "v1,"+base64.StdEncoding.EncodeToString(mac.Sum(nil)))
		}
		require.Equal(t, []string{strings.Join(want, " ")}, header["Webhook-Signature"])
	}
	_, err := processor.Run(t.Context(), p, call(other.URL))
	require.NoError(t, err)
	require.Empty(t, header["Webhook-Signature"])
}

// TestTypesOfTheFile: the payload of a type of the file is the body of the call; the file has the
// rest. A change of the file changes it, but not which types there are.
func TestTypesOfTheFile(t *testing.T) {
	var got []string
	server := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got = []string{r.Method, r.URL.Path, r.Header.Get("X-Shop"), r.Header.Get("Content-Type"), r.Header.Get("Bulkaction-Type"), string(body)}
	})
	content := func(path string) string {
		return "types:\n  ORDERS: {url: " + server.URL + path + ", method: put, headers: {X-Shop: 7}}\n  PING: {url: " + server.URL + "}\n"
	}
	f := newFolder(t)
	p := startGuarded(t, f.config(t, content("/orders")))
	types := p.Types()
	require.Len(t, types, 3)
	require.Equal(t, []string{"ORDERS", "PING", httpcall.BatchType}, []string{types[0].Type(), types[1].Type(), types[2].Type()})
	run := func(typ processor.Processor, payload string) []string {
		j := job(payload)
		j.Type = typ.Type()
		_, err := processor.Run(t.Context(), typ, j)
		require.NoError(t, err)
		return got
	}
	require.Equal(t, []string{"PUT", "/orders", "7", "application/json", "ORDERS", `{"url":"x"}`}, run(types[0].(processor.Processor), `{"url":"x"}`))
	require.Equal(t, []string{"POST", "/", "", "text/plain; charset=utf-8", "PING", "text"}, run(types[1].(processor.Processor), `"text"`))
	_, err := processor.Run(t.Context(), p, call(server.URL+"/plain"))
	require.NoError(t, err)
	require.Equal(t, []string{"POST", "/plain", "", "", "HTTP", ""}, got)

	f.write(t, "credentials.yaml", content("/moved"))
	_, err = p.Reload()
	require.NoError(t, err)
	require.Equal(t, "/moved", run(types[0].(processor.Processor), `1`)[1])
	f.write(t, "credentials.yaml", content("/gone")+"  NEW: {url: "+server.URL+"}\n")
	_, err = p.Reload()
	require.ErrorContains(t, err, "types: [NEW ORDERS PING] instead of [ORDERS PING]: restart the worker to add or remove types")
	require.Equal(t, "/moved", run(types[0].(processor.Processor), `1`)[1])
}

func TestMistakesInSigningAndTypes(t *testing.T) {
	f := newFolder(t)
	f.write(t, "short", "whsec_AAAA\n")
	f.write(t, "none", "\n")
	f.write(t, "good", "whsec_"+base64.StdEncoding.EncodeToString(make([]byte, 32)))
	_, err := httpcall.NewGuarded(f.config(t, `
credentials:
  - {id: a, hosts: [a.example.com], header: Webhook-Signature, value_file: token}
  - {id: b, hosts: [b.example.com], header: bulkaction-tenant, value_file: token}
signing:
  - {hosts: [a.example.com], secret_file: short}
  - {hosts: ["*"], secret_file: none}
  - {hosts: [c.example.com, c.example.com], secret_file: good}
  - {hosts: [C.example.com], secret_file: good}
  - {secret_file: good}
  - {hosts: [d.example.com]}
types:
  HTTP: {url: "https://a.example.com"}
  NOWHERE: {method: PUT}
  BAD: {url: "https://a.example.com", headers: {Connection: close}}
`))
	for _, want := range []string{
		"account a: header: Webhook-Signature can't have a secret", "account b: header: Bulkaction-Tenant can't have a secret",
		"signing entry 1: secret_file: has a line that is not whsec_ and the base64 of 24 to 64 bytes",
		"signing entry 2: secret_file: is empty", `signing entry 2: hosts: "*" is neither`,
		"signing entry 4: hosts: c.example.com is also in another entry of signing",
		"signing entry 5: hosts is missing", "signing entry 6: secret_file is missing",
		"types: HTTP: the name is taken", "types: NOWHERE: url is not an absolute http or https URL",
		"types: BAD: headers has Connection, which belongs to the connection",
	} {
		require.ErrorContains(t, err, want)
	}
	require.NotContains(t, err.Error(), "entry 3")
	var joined interface{ Unwrap() []error }
	require.ErrorAs(t, err, &joined)
	require.Len(t, joined.Unwrap(), 11)
}
