package httpapi_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const ndjson = "application/x-ndjson"

func postJobs(t *testing.T, h http.Handler, typ, body string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	return call(t, h, "POST", "/v1/groups/g/jobs", body, append(header, "Content-Type", typ)...)
}

// numbered returns a body of n lines of NDJSON. The payload of each line is its number, from 0.
func numbered(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `{"payload":%d}`+"\n", i)
	}
	return b.String()
}

func TestAppendNDJSON(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g")
	rec := postJobs(t, httpapi.New(options(f)), ndjson, "\xef\xbb\xbf"+`{"payload":{"a":1}}`+"\n\n  \r\n"+`{"payload":2}`+"\r\nnonsense\n{}\n"+`{"payload":3}`,
		"Traceparent", traceparent)
	require.Equal(t, 200, rec.Code, rec.Body.String())
	a := decode[api.Appended](t, rec)
	require.EqualValues(t, 3, a.Accepted)
	require.EqualValues(t, 2, a.RejectedTotal)
	require.EqualValues(t, 5, a.Rejected[0].Line)
	require.EqualValues(t, 6, a.Rejected[1].Line)
	require.NotEmpty(t, a.Rejected[0].Error)
	require.Equal(t, []string{`{"a":1}`, `2`, `3`}, f.Payloads("g"))
	require.Equal(t, traceparent, f.Appends[0].TraceParent)
	require.True(t, api.ValidID(f.Appends[0].RequestID))
}

func TestAppendCSV(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g")
	rec := postJobs(t, httpapi.New(options(f)), "text/csv; charset=utf-8", "\xef\xbb\xbfto,name\na@example.com,\"A, B\"\nonly-one\nc@example.com,C\n")
	require.Equal(t, 200, rec.Code, rec.Body.String())
	require.Equal(t, api.Appended{Accepted: 2, RejectedTotal: 1, Rejected: []api.LineError{{Line: 3, Error: "has 1 of the header's 2 columns: column 2 (name) is missing"}}},
		decode[api.Appended](t, rec))
	require.Equal(t, []string{`{"to":"a@example.com","name":"A, B"}`, `{"to":"c@example.com","name":"C"}`}, f.Payloads("g"))

	requireProblem(t, postJobs(t, httpapi.New(options(f)), "text/csv", ""), 422, "header")
}

func TestAppendNothing(t *testing.T) {
	h := httpapi.New(options(apitest.NewBackend().WithGroup("g")))
	for typ, body := range map[string]string{ndjson: "", "text/csv": "a\n"} {
		rec := postJobs(t, h, typ, body)
		require.JSONEq(t, `{"accepted":0,"rejected":[],"rejected_total":0}`, rec.Body.String())
	}
	rec := call(t, h, "POST", "/v1/groups/none/jobs", "nonsense", "Content-Type", ndjson)
	require.Equal(t, 404, rec.Code, "an unknown group is reported although all lines are rejected")
}

func TestAppendBatches(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g")
	var sizes []int
	h := httpapi.New(options(batchRecorder{f, &sizes}))
	require.EqualValues(t, 1203, decode[api.Appended](t, postJobs(t, h, ndjson, numbered(1203))).Accepted)
	require.Equal(t, []int{500, 500, 203}, sizes)
	seen := map[string]bool{}
	for _, opt := range f.Appends {
		seen[opt.RequestID] = true
	}
	require.Len(t, seen, 3, "each batch must have its own request id")

	sizes = nil
	large := `{"payload":"` + strings.Repeat("x", 200<<10) + `"}` + "\n"
	require.EqualValues(t, 5, decode[api.Appended](t, postJobs(t, h, ndjson, strings.Repeat(large, 5))).Accepted)
	require.Equal(t, []int{2, 2, 1}, sizes)
}

// batchRecorder is a fake backend that records the number of jobs of each batch.
type batchRecorder struct {
	*apitest.Backend
	sizes *[]int
}

func (r batchRecorder) Append(ctx context.Context, id string, jobs []messages.Job, opt httpapi.AppendOptions) error {
	*r.sizes = append(*r.sizes, len(jobs))
	return r.Backend.Append(ctx, id, jobs, opt)
}

func TestRejectedLinesAreBounded(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g")
	body := strings.Repeat("x\n", 3000) + numbered(10) + strings.Repeat("x", 1<<20) + "\n"
	a := decode[api.Appended](t, postJobs(t, httpapi.New(options(f)), ndjson, body))
	require.EqualValues(t, 10, a.Accepted)
	require.EqualValues(t, 3001, a.RejectedTotal)
	require.Len(t, a.Rejected, httpapi.MaxListedLines)
	require.EqualValues(t, httpapi.MaxListedLines, a.Rejected[httpapi.MaxListedLines-1].Line)
}

func TestBodySentAgainAddsNothingTwice(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g").WithGroup("other")
	h := httpapi.New(options(f))
	body := numbered(700) + "nonsense\n" + numbered(700)
	first := postJobs(t, h, ndjson, body, "Idempotency-Key", "import-1")
	f.ByID["g"].View.Sealed = true
	second := postJobs(t, h, ndjson, body, "Idempotency-Key", `"import-1"`)
	require.Equal(t, 200, second.Code)
	require.JSONEq(t, first.Body.String(), second.Body.String())
	require.Len(t, f.Payloads("g"), 1400)
	f.ByID["g"].View.Sealed = false

	postJobs(t, h, ndjson, body, "Idempotency-Key", "import-2")
	require.Len(t, f.Payloads("g"), 2800, "under another key the same body is added again")
	postJobs(t, h, ndjson, body)
	require.Len(t, f.Payloads("g"), 4200, "without a key the same body is added again")
	call(t, h, "POST", "/v1/groups/other/jobs", body, "Content-Type", ndjson, "Idempotency-Key", "import-1")
	require.Len(t, f.Payloads("other"), 1400, "the same key of another group adds the body there")
}

// TestBrokenBodyIsCompletedByItsRepetition: a body that broke off is sent again from the beginning,
// with the same Idempotency-Key. Each job must be stored once, wherever the body broke off.
func TestBrokenBodyIsCompletedByItsRepetition(t *testing.T) {
	body := numbered(1700)
	for _, cut := range []int{0, 1, 500, 9000, 18_000, len(body) - 1} {
		t.Run(fmt.Sprint(cut), func(t *testing.T) {
			f := apitest.NewBackend().WithGroup("g")
			h := httpapi.New(options(f))
			req := httptest.NewRequest("POST", "/v1/groups/g/jobs",
				io.MultiReader(strings.NewReader(body[:cut]), iotest.ErrReader(io.ErrUnexpectedEOF)))
			req.Header.Set("Content-Type", ndjson)
			req.Header.Set("Idempotency-Key", "k")
			rec := httptest.NewRecorder()
			h.ServeHTTP(rec, req)
			require.Equal(t, 400, rec.Code)
			require.Equal(t, "close", rec.Header().Get("Connection"))
			p := decode[api.AppendProblem](t, rec)
			require.EqualValues(t, len(f.Payloads("g")), p.Accepted)
			require.EqualValues(t, p.Accepted+1, p.NextLine)
			require.Zero(t, p.Accepted%httpapi.MaxBatchLines)
			require.Equal(t, 200, postJobs(t, h, ndjson, body, "Idempotency-Key", "k").Code)
			require.Len(t, f.Payloads("g"), 1700)
			require.Equal(t, "1699", f.Payloads("g")[1699])
		})
	}
}

func TestErrorInTheMiddleOfAnAppendReportsWhatIsStored(t *testing.T) {
	for name, c := range map[string]struct {
		err        error
		status     int
		retryAfter string
	}{
		"sealed":       {fmt.Errorf("append to group g: %w", api.ErrSealed), 409, ""},
		"cancelled":    {fmt.Errorf("append to group g: cancelled: %w", api.ErrConflict), 409, ""},
		"backpressure": {&api.BackpressureError{RetryAfter: 5 * time.Second, Reason: "backlog"}, 429, "5"},
		"unavailable":  {api.ErrUnavailable, 503, "1"},
		"unexpected":   {errors.New("boom"), 500, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := apitest.NewBackend().WithGroup("g")
			f.OnAppend = func(call int) error {
				if call == 2 {
					return c.err
				}
				return nil
			}
			rec := postJobs(t, httpapi.New(options(f)), ndjson, "x\n"+numbered(1200)+"y\n"+numbered(1000))
			require.Equal(t, c.status, rec.Code)
			require.Equal(t, c.retryAfter, rec.Header().Get("Retry-After"))
			p := decode[api.AppendProblem](t, rec)
			require.EqualValues(t, 999, p.Accepted)
			require.EqualValues(t, 1, p.RejectedTotal, "rejected lines of the batch that failed are not counted")
			require.EqualValues(t, 1001, p.NextLine)
			if c.status == 409 {
				require.Contains(t, p.Detail, "999 jobs were stored before")
				require.NotContains(t, p.Detail, "send the body", "the group takes no more jobs")
				return
			}
			require.Contains(t, p.Detail, "999 jobs were stored before: send the body from line 1001 on")
		})
	}
}

// TestEndlessLineEndsWithAnError: a line of NDJSON or CSV that does not end gets 413 after 2 MiB,
// and the answer counts the jobs of the first batch, which was stored before.
func TestEndlessLineEndsWithAnError(t *testing.T) {
	line := &lineGenerator{left: 1 << 40, line: bytes.Repeat([]byte("x"), 1<<20)}
	for typ, head := range map[string]string{ndjson: numbered(httpapi.MaxBatchLines + 1), "text/csv": "a\n" + strings.Repeat("1\n", httpapi.MaxBatchLines+1) + "\""} {
		f := apitest.NewBackend().WithGroup("g")
		req := httptest.NewRequest("POST", "/v1/groups/g/jobs", io.MultiReader(strings.NewReader(head), line))
		req.Header.Set("Content-Type", typ)
		rec := httptest.NewRecorder()
		httpapi.New(options(f)).ServeHTTP(rec, req)
		requireDocumented(t, req, rec)
		p := decode[api.AppendProblem](t, rec)
		require.Equal(t, 413, p.Status)
		require.Contains(t, p.Detail, fmt.Sprintf("line %d is longer than 2097152 bytes", strings.Count(head, "\n")+1))
		require.EqualValues(t, httpapi.MaxBatchLines, p.Accepted)
	}
	rec := postJobs(t, httpapi.New(options(apitest.NewBackend().WithGroup("g"))), "text/csv", strings.Repeat("x", httpapi.MaxSkipped+1))
	requireProblem(t, rec, 413, "")
}

// TestProblemReachesAClientThatStillSends: if the store refuses the fourth batch of a body that
// does not end, the client gets the answer 409, not a broken connection.
func TestProblemReachesAClientThatStillSends(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g")
	f.OnAppend = func(call int) error {
		if call == 3 {
			return api.ErrSealed
		}
		return nil
	}
	srv := httptest.NewServer(httpapi.New(options(f)))
	defer srv.Close()
	in, out := io.Pipe()
	defer in.Close()
	go func() {
		line := []byte(`{"payload":{"n":1}}` + "\n")
		for {
			if _, err := out.Write(line); err != nil {
				return
			}
		}
	}()
	resp, err := srv.Client().Post(srv.URL+"/v1/groups/g/jobs", ndjson, in)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, 409, resp.StatusCode)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Contains(t, string(body), `"accepted":1500`)
}

// TestConnectionThatBreaksLeavesWholeBatches: a client sends 800 lines of NDJSON, and closes the
// connection before the announced end. The handler returns, and 500 jobs are stored.
func TestConnectionThatBreaksLeavesWholeBatches(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g")
	ended := make(chan struct{})
	h := httpapi.New(options(f))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(ended)
		h.ServeHTTP(w, r)
	}))
	defer srv.Close()
	conn, err := net.Dial("tcp", srv.Listener.Addr().String())
	require.NoError(t, err)
	body := numbered(800)
	_, err = fmt.Fprintf(conn, "POST /v1/groups/g/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", ndjson, 2*len(body), body)
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	<-ended
	require.Len(t, f.Payloads("g"), 500)
}

// lineGenerator is an io.Reader of a body with many equal lines. It does not hold the body in
// memory.
type lineGenerator struct {
	left int
	line []byte
	rest []byte
}

func (g *lineGenerator) Read(p []byte) (n int, err error) {
	for n < len(p) {
		if len(g.rest) == 0 {
			if g.left == 0 {
				return n, io.EOF
			}
			g.left--
			g.rest = g.line
		}
		c := copy(p[n:], g.rest)
		n, g.rest = n+c, g.rest[c:]
	}
	return n, nil
}

// memoryProbe is a fake backend that counts jobs without storing them. After each 100 batches it
// reads the size of the heap; peak is the largest one, in bytes.
type memoryProbe struct {
	*apitest.Backend
	jobs, batches int
	peak          uint64
}

func (s *memoryProbe) Append(_ context.Context, _ string, jobs []messages.Job, _ httpapi.AppendOptions) error {
	s.jobs += len(jobs)
	if s.batches++; s.batches%100 == 0 {
		s.peak = max(s.peak, heapInUse())
	}
	return nil
}

func heapInUse() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse
}

func TestAMillionLinesInBoundedMemory(t *testing.T) {
	const n = 1_000_000
	for _, c := range []struct{ typ, head, line string }{
		{ndjson, "", `{"payload":{"to":"somebody@example.com","n":12345}}` + "\n"},
		{"text/csv", "to,n\n", "somebody@example.com,12345\n"},
	} {
		t.Run(c.typ, func(t *testing.T) {
			runtime.GC()
			s := &memoryProbe{Backend: apitest.NewBackend().WithGroup("g")}
			srv := httptest.NewServer(httpapi.New(options(s)))
			defer srv.Close()
			before := heapInUse()
			body := io.MultiReader(strings.NewReader(c.head), &lineGenerator{left: n, line: []byte(c.line)})
			resp, err := srv.Client().Post(srv.URL+"/v1/groups/g/jobs", c.typ, body)
			require.NoError(t, err)
			defer resp.Body.Close()
			answer, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.JSONEq(t, `{"accepted":1000000,"rejected":[],"rejected_total":0}`, string(answer))
			require.Equal(t, n, s.jobs)
			require.Less(t, s.peak, before+48<<20)
		})
	}
}

func BenchmarkAppend(b *testing.B) {
	for _, c := range []struct{ typ, head, line string }{
		{ndjson, "", `{"payload":{"to":"somebody@example.com","n":12345}}` + "\n"},
		{"text/csv", "to,n\n", "somebody@example.com,12345\n"},
	} {
		b.Run(c.typ, func(b *testing.B) {
			const n = 10_000
			s := &memoryProbe{Backend: apitest.NewBackend().WithGroup("g")}
			h := httpapi.New(options(s))
			body := []byte(c.head + strings.Repeat(c.line, n))
			b.ReportAllocs()
			for b.Loop() {
				req := httptest.NewRequest("POST", "/v1/groups/g/jobs", bufio.NewReader(bytes.NewReader(body)))
				req.Header.Set("Content-Type", c.typ)
				h.ServeHTTP(httptest.NewRecorder(), req)
			}
			b.ReportMetric(float64(s.jobs)/b.Elapsed().Seconds(), "jobs/s")
		})
	}
}

func TestAppendCSVWithOptions(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g")
	h := httpapi.New(options(f))
	send := func(query, body string) (int, string) {
		rec := call(t, h, "POST", "/v1/groups/g/jobs?"+query, body, "Content-Type", "text/csv")
		return rec.Code, rec.Body.String()
	}
	code, answer := send(url.Values{"delimiter": {";"}, "types": {"age:number,vip:boolean"}}.Encode(),
		"to;age;vip\na@example.com;41;true\nb@example.com;old;false\n")
	require.Equal(t, 200, code, answer)
	require.JSONEq(t, `{"accepted":1,"rejected_total":1,"rejected":[{"line":3,"error":"column 2 (age) must be a number such as 12 or -0.5, or empty"}]}`, answer)
	require.Equal(t, []string{`{"to":"a@example.com","age":41,"vip":true}`}, f.Payloads("g"))

	for name, c := range map[string]struct{ query, body, field, problem string }{
		"no header":      {"", "\n", "header", "line 1: the header is missing"},
		"column":         {"", "a,b,a\n", "header[2]", `line 1, column 3 repeats the name "a" of column 1`},
		"semicolons":     {"", "a;b\n", "header", "send the query parameter delimiter=%3B"},
		"Excel":          {"", "\xef\xbb\xbfsep=;\r\na;b\r\n", "header", "remove it; send the query parameter delimiter=%3B"},
		"CR":             {"", "to,n\ra,1\rb,2\r", "header", "has a carriage return inside: end the lines with LF or CRLF"},
		"workbook":       {"", "PK\x03\x04", "body", "is a ZIP archive, such as a workbook"},
		"delimiter":      {"delimiter=x", "a\n", "delimiter", "must be a comma, a semicolon"},
		"types":          {"types=age", "a\n", "types", "write it as name:type"},
		"unknown column": {"types=age:number", "a\n", "types", `names the column "age"`},
		"too long":       {"", strings.Repeat("x", httpapi.MaxLine+1), "header", "is too long"},
	} {
		t.Run(name, func(t *testing.T) {
			code, answer := send(c.query, c.body)
			require.Equal(t, 422, code, answer)
			var p api.Problem
			require.NoError(t, json.Unmarshal([]byte(answer), &p))
			require.Equal(t, c.field, p.Fields[0].Field)
			require.Contains(t, p.Fields[0].Problem, c.problem)
		})
	}
	for body, problem := range map[string]string{
		"[\n{\"payload\":1},\n{\"payload\":2}\n]\n": "is a JSON array, not NDJSON",
		"\xff\xfe{\x00}\x00":                        "is in UTF-16",
	} {
		rec := postJobs(t, h, "application/x-ndjson", body)
		require.Equal(t, 422, rec.Code)
		require.Contains(t, rec.Body.String(), `"field":"body","problem":"`+problem)
	}
	require.Len(t, f.Payloads("g"), 1, "nothing more is stored")
	rec := postJobs(t, h, "application/x-ndjson", "{\"payload\":1}\r{\"payload\":2}\r\n[{\"payload\":3}]\n")
	require.Equal(t, 200, rec.Code)
	require.Contains(t, rec.Body.String(), "the line has a carriage return inside: end lines with LF or CRLF")
	require.Contains(t, rec.Body.String(), `"rejected_total":2`)
	require.Equal(t, 200, postJobs(t, h, "text/csv; charset=utf-8; header=present", "a\n1\n").Code)
	rec = call(t, h, "POST", "/v1/groups/g/jobs?delimiter=%3B", "{}", "Content-Type", "application/x-ndjson")
	require.Equal(t, 422, rec.Code)
	require.Contains(t, rec.Body.String(), "only for Content-Type text/csv")
}
