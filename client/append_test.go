package client_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// appendServer is a fake server that treats appends as the real server does: it stores the jobs of
// each idempotency key once. It rejects lines that contain "bad".
type appendServer struct {
	mu          sync.Mutex
	failures    []func(http.ResponseWriter) // answers to the first requests; nil: accept
	requests    int
	contentType string
	query       string
	answers     map[string]api.Appended // by idempotency key
	accepted    []string                // bodies of the accepted requests
}

func (s *appendServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	body, err := io.ReadAll(r.Body)
	if err != nil || r.Method+" "+r.URL.Path != "POST /v1/groups/g/jobs" {
		refuse(w, http.StatusBadRequest, api.Problem{Detail: r.URL.Path})
		return
	}
	s.contentType, s.query = r.Header.Get("Content-Type"), r.URL.RawQuery
	n := s.requests
	s.requests++
	if n < len(s.failures) && s.failures[n] != nil {
		s.failures[n](w)
		return
	}
	key := r.Header.Get("Idempotency-Key")
	if _, known := s.answers[key]; !known {
		if s.answers == nil {
			s.answers = map[string]api.Appended{}
		}
		s.answers[key] = s.take(string(body))
	}
	answer(w, http.StatusOK, s.answers[key])
}

func (s *appendServer) take(body string) api.Appended {
	s.accepted = append(s.accepted, body)
	got := api.Appended{Rejected: []api.LineError{}}
	lines := bufio.NewScanner(strings.NewReader(body))
	lines.Buffer(nil, 16<<20)
	for n := int64(1); lines.Scan(); n++ {
		switch {
		case strings.Contains(lines.Text(), "bad"):
			got.RejectedTotal++
			got.Rejected = append(got.Rejected, api.LineError{Line: n, Error: "is bad"})
		case s.contentType == "text/csv" && n == 1, lines.Text() == "":
		default:
			got.Accepted++
		}
	}
	return got
}

func (s *appendServer) whole() string { return strings.Join(s.accepted, "") }

func numbered(n int) iter.Seq[client.NewJob] {
	return func(yield func(client.NewJob) bool) {
		for i := range n {
			if !yield(client.NewJob{Payload: map[string]int{"i": i}}) {
				return
			}
		}
	}
}

func ndjson(n int, bad ...int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "{\"payload\":%d}\n", i)
	}
	lines := strings.SplitAfter(b.String(), "\n")
	for _, i := range bad {
		lines[i-1] = "bad\n"
	}
	return strings.Join(lines, "")
}

func TestAppendJobs(t *testing.T) {
	s := &appendServer{}
	a, _ := serve(t, s)
	const n = 12_000 // three parts
	res, err := a.Append(t.Context(), "g", numbered(n))
	require.NoError(t, err)
	require.Equal(t, api.Appended{Accepted: n}, res)
	require.Equal(t, "application/x-ndjson", s.contentType)
	require.Len(t, s.accepted, 3)
	lines := strings.Split(s.whole(), "\n")
	require.Len(t, lines, n+1)
	require.Equal(t, `{"payload":{"i":0}}`, lines[0])
	require.Equal(t, fmt.Sprintf(`{"payload":{"i":%d}}`, n-1), lines[n-1])
	require.Len(t, s.answers, 3, "each part has a key of its own")

	s.accepted = nil
	res, err = a.Append(t.Context(), "g", numbered(0))
	require.NoError(t, err)
	require.Zero(t, res.Accepted)
	require.Equal(t, []string{""}, s.accepted, "an empty append is sent too, so that an unknown group is noticed")

	res, err = a.Append(t.Context(), "g", func(yield func(client.NewJob) bool) {
		for i := range 5001 {
			if !yield(client.NewJob{Payload: i}) {
				return
			}
		}
		yield(client.NewJob{Payload: make(chan int)})
	})
	require.EqualError(t, err, "append to group g: encode job 5001: json: unsupported type: chan int")
	require.EqualValues(t, 5000, res.Accepted)
}

func TestAppendNDJSON(t *testing.T) {
	for _, c := range []struct {
		name  string
		body  string
		parts []int // bytes
		lines []int64
	}{
		{"small", "{\"payload\":1}\n{\"payload\":2}", []int{28}, nil},
		{"bad lines of many parts", ndjson(12_000, 1, 5000, 5001, 12_000), nil, []int64{1, 5000, 5001, 12_000}},
		{"empty lines count", "\n\n" + ndjson(10, 3), nil, []int64{5}},
		{"large lines", strings.Repeat("{\"payload\":\""+strings.Repeat("x", 1<<19)+"\"}\n", 9), []int{7 * (1<<19 + 15), 2 * (1<<19 + 15)}, nil},
		{"an endless line", "{\"payload\":\"" + strings.Repeat("x", 3<<20) + "\n" + ndjson(3, 2), []int{1<<20 + 1, 32}, []int64{3}},
		{"nothing", "", []int{0}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := &appendServer{}
			a, _ := serve(t, s)
			res, err := a.AppendNDJSON(t.Context(), "g", strings.NewReader(c.body))
			require.NoError(t, err)
			require.EqualValues(t, len(c.lines), res.RejectedTotal)
			for i, l := range res.Rejected {
				require.Equal(t, c.lines[i], l.Line)
			}
			if c.parts != nil {
				var sizes []int
				for _, b := range s.accepted {
					sizes = append(sizes, len(b))
				}
				require.Equal(t, c.parts, sizes)
			}
			if len(c.body) < 1<<20 {
				require.Equal(t, strings.TrimSuffix(c.body, "\n"), strings.TrimSuffix(s.whole(), "\n"))
			}
		})
	}
}

func TestAppendListsTheFirstThousandRejects(t *testing.T) {
	a, _ := serve(t, &appendServer{})
	res, err := a.AppendNDJSON(t.Context(), "g", strings.NewReader(strings.Repeat("bad\n", 6000)))
	require.NoError(t, err)
	require.EqualValues(t, 6000, res.RejectedTotal)
	require.Len(t, res.Rejected, 1000)
}

func TestAppendCSV(t *testing.T) {
	header := "\xef\xbb\xbfto,\"a \"\"b\"\"\nc\"\r\n" // two lines
	row := "x@example.com,\"one\ntwo, \"\"three\"\"\"\r\n"
	s := &appendServer{}
	a, _ := serve(t, s)
	const n = 6000 // rows of two lines: three parts
	body := "\n" + header + strings.Repeat(row, n) + "bad,row"
	res, err := a.AppendCSV(t.Context(), "g", strings.NewReader(body))
	require.NoError(t, err)
	require.Equal(t, "text/csv", s.contentType)
	require.Len(t, s.accepted, 3)
	whole := ""
	for _, b := range s.accepted {
		rest, ok := strings.CutPrefix(b, header)
		require.True(t, ok, "each part must begin with the header")
		require.Zero(t, len(rest)%len(row)%8, "each part must end with a whole row")
		whole += rest
	}
	require.Equal(t, strings.Repeat(row, n)+"bad,row\n", whole)
	require.Equal(t, []api.LineError{{Line: 1 + 2 + 2*n + 1, Error: "is bad"}}, res.Rejected, "lines are numbered as in the file")
}

func TestAppendCSVWithDelimiterAndTypes(t *testing.T) {
	s := &appendServer{}
	a, _ := serve(t, s)
	header, row := "to;age\n", "\"x;\ny\";41\n" // a line break in quotes behind a semicolon
	body := header + row + "z;" + row + row
	opts := []client.CallOption{client.WithIdempotencyKey("k"), client.WithDelimiter(';'), client.WithColumnTypes("age:number")}
	_, err := a.AppendCSV(t.Context(), "g", strings.NewReader(body), opts...)
	require.NoError(t, err)
	require.Equal(t, "delimiter=%3B&types=age%3Anumber", s.query)
	require.Equal(t, body, s.whole())

	_, err = a.AppendCSV(t.Context(), "g", strings.NewReader(body), opts...)
	require.NoError(t, err)
	require.Len(t, s.answers, 1, "the same request")
	_, err = a.AppendCSV(t.Context(), "g", strings.NewReader(body), client.WithIdempotencyKey("k"), client.WithDelimiter(';'))
	require.NoError(t, err)
	require.Len(t, s.answers, 2, "with other types, the same rows are other jobs")

	_, err = a.AppendNDJSON(t.Context(), "g", strings.NewReader("{}\n"), opts...)
	require.NoError(t, err)
	require.Empty(t, s.query)
}

func TestAppendCSVWithAnEndlessRow(t *testing.T) {
	s := &appendServer{}
	a, _ := serve(t, s)
	body := "to\na@example.com\n\"" + strings.Repeat("never closed\n", 200_000) + "\"\nbad\n"
	res, err := a.AppendCSV(t.Context(), "g", strings.NewReader(body))
	require.NoError(t, err)
	require.Len(t, s.accepted, 2)
	require.Less(t, len(s.whole()), 2<<20, "the end of a row that is too long is not sent")
	require.EqualValues(t, 200_000+4, res.Rejected[len(res.Rejected)-1].Line)

	s.accepted = nil
	_, err = a.AppendCSV(t.Context(), "g", strings.NewReader(""))
	require.NoError(t, err)
	require.Equal(t, []string{""}, s.accepted)
}

func TestAppendRetriesAPartUnderItsKey(t *testing.T) {
	// The connection of the second part breaks once, before the server stores the part. The server
	// is busy twice when the third part comes.
	s := &appendServer{failures: []func(http.ResponseWriter){nil, dropConnection, nil, status(429, "3"), status(503, "")}}
	a, w := serve(t, s)
	res, err := a.AppendNDJSON(t.Context(), "g", strings.NewReader(ndjson(12_000)))
	require.NoError(t, err)
	require.EqualValues(t, 12_000, res.Accepted)
	require.Equal(t, 6, s.requests)
	require.Equal(t, ndjson(12_000), s.whole(), "each job is accepted once, in order")
	require.Contains(t, w.all(), 3*time.Second)
}

func TestAppendCanBeRepeatedUnderOneKey(t *testing.T) {
	s := &appendServer{failures: []func(http.ResponseWriter){nil, status(409, "")}}
	a, _ := serve(t, s)
	key := client.WithIdempotencyKey(strings.Repeat("k", 255))
	res, err := a.AppendNDJSON(t.Context(), "g", strings.NewReader(ndjson(6000)), key)
	require.EqualError(t, err, "append to group g: 409 Conflict: not now")
	require.EqualValues(t, 5000, res.Accepted, "jobs accepted before the error are counted")

	res, err = a.AppendNDJSON(t.Context(), "g", strings.NewReader(ndjson(6000)), key)
	require.NoError(t, err)
	require.EqualValues(t, 6000, res.Accepted)
	require.Equal(t, ndjson(6000), s.whole())

	_, err = a.AppendNDJSON(t.Context(), "g", strings.NewReader(ndjson(6001)), key)
	require.NoError(t, err)
	require.Equal(t, ndjson(6000)+ndjson(6001)[len(ndjson(5000)):], s.whole(), "other content under the same key is not mistaken for a repetition")
}

func TestAppendReportsWhatAPartHadStored(t *testing.T) {
	a, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusConflict)
		_ = json.NewEncoder(w).Encode(api.AppendProblem{
			Problem:  api.Problem{Title: "Conflict", Status: 409, Detail: "is sealed"},
			Appended: api.Appended{Accepted: 500, Rejected: []api.LineError{{Line: 7, Error: "is bad"}}, RejectedTotal: 1},
			NextLine: 502,
		})
	}))
	res, err := a.AppendNDJSON(t.Context(), "g", strings.NewReader(ndjson(600)))
	require.EqualError(t, err, "append to group g: 409 Conflict: is sealed")
	require.Equal(t, api.Appended{Accepted: 500, Rejected: []api.LineError{{Line: 7, Error: "is bad"}}, RejectedTotal: 1}, res)
}

type brokenReader struct{ io.Reader }

func (b brokenReader) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if err != nil {
		err = errors.New("disk on fire")
	}
	return n, err
}

func TestAppendFromABrokenReader(t *testing.T) {
	s := &appendServer{}
	a, _ := serve(t, s)
	_, err := a.AppendNDJSON(t.Context(), "g", brokenReader{strings.NewReader(ndjson(3))})
	require.EqualError(t, err, "append to group g: read line 4: disk on fire")
	require.Empty(t, s.accepted, "the last line may be incomplete, so it is not sent")
	_, err = a.AppendCSV(t.Context(), "g", brokenReader{strings.NewReader("to")})
	require.EqualError(t, err, "append to group g: read: disk on fire")
}

// blockedReader is a reader whose Read blocks until release is closed.
type blockedReader struct{ reading, release chan struct{} }

func (s blockedReader) Read([]byte) (int, error) {
	close(s.reading)
	<-s.release
	return 0, io.EOF
}

func TestAppendEndsWithContextWhileItsReaderBlocks(t *testing.T) {
	s := &appendServer{}
	a, _ := serve(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	r := blockedReader{make(chan struct{}), make(chan struct{})}
	defer close(r.release)
	go func() {
		<-r.reading
		cancel()
	}()
	_, err := a.AppendNDJSON(ctx, "g", r)
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, s.requests)
}

// TestGroupViews compares the paths and queries of five calls about groups, failures and job maps.
// FailurePage reads the next page's cursor from the header Link.
func TestGroupViews(t *testing.T) {
	var asked []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.String())
		switch r.URL.Path {
		case "/v1/groups":
			_, _ = io.WriteString(w, `{"groups":[],"scanned":0}`)
		case "/v1/groups/g/failures":
			if r.URL.Query().Get("cursor") == "" {
				w.Header().Set("Link", `</v1/groups/g/failures?cursor=7&limit=2>; rel="next"`)
			}
			_, _ = io.WriteString(w, "{\"ordinal\":3}\n{\"ordinal\":6}\n")
		case "/v1/groups/g/failures/summary":
			_, _ = io.WriteString(w, `{"total":3,"seen":3,"codes":[]}`)
		default:
			_, _ = io.WriteString(w, `{"jobs":9,"buckets":[]}`)
		}
	}))
	defer srv.Close()
	a := client.NewAPI(srv.URL)
	no := false
	for _, err := range a.Groups(t.Context(), client.GroupFilter{
		Type: "T", Paused: &no, FailedJobs: &no, Prefix: "p-", Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	}) {
		require.NoError(t, err)
	}
	first, err := a.FailurePage(t.Context(), "g", client.FailureQuery{Code: "A&B", Limit: 2, Payloads: true})
	require.NoError(t, err)
	require.Len(t, first.Failures, 2)
	require.Equal(t, "7", first.Cursor)
	last, err := a.FailurePage(t.Context(), "g", client.FailureQuery{Cursor: first.Cursor})
	require.NoError(t, err)
	require.Empty(t, last.Cursor)
	sum, err := a.FailureSummary(t.Context(), "g")
	require.NoError(t, err)
	require.EqualValues(t, 3, sum.Total)
	m, err := a.JobMap(t.Context(), "g", 10)
	require.NoError(t, err)
	require.EqualValues(t, 9, m.Jobs)
	require.Equal(t, []string{
		"/v1/groups?failed_jobs=false&paused=false&prefix=p-&since=2026-01-02T03%3A04%3A05Z&type=T",
		"/v1/groups/g/failures?code=A%26B&cursor=&limit=2&payload=true", "/v1/groups/g/failures?cursor=7",
		"/v1/groups/g/failures/summary", "/v1/groups/g/map?buckets=10",
	}, asked)
}
