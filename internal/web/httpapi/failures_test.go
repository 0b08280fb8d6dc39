package httpapi

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

func TestFailurePages(t *testing.T) {
	f := newFakeBackend().withGroup("g")
	h := New(options(f))
	first := call(t, h, "GET", "/v1/groups/g/failures?limit=1&code=A%26B&payload=true", "")
	require.Equal(t, 200, first.Code)
	require.Equal(t, 1, strings.Count(first.Body.String(), "\n"))
	require.Equal(t, "application/x-ndjson", first.Header().Get("Content-Type"))
	link := first.Header().Get("Link")
	require.Equal(t, `</v1/groups/g/failures?code=A%26B&cursor=1&limit=1&payload=true>; rel="next"`, link)
	next, _, _ := strings.Cut(strings.TrimPrefix(link, "<"), ">")
	last := call(t, h, "GET", next, "")
	require.Contains(t, last.Body.String(), `"ordinal":1`)
	require.Empty(t, last.Header().Get("Link"))
	require.Empty(t, call(t, h, "GET", "/v1/groups/g/failures", "").Header().Get("Link"))
	require.Equal(t, []string{
		"failures {Code:A&B Payloads:true Cursor: Limit:1}", "failures {Code:A&B Payloads:true Cursor:1 Limit:1}",
		"failures {Code: Payloads:false Cursor: Limit:0}",
	}, f.calls)
	for field, value := range map[string]string{"code": strings.Repeat("x", 129), "limit": "0", "cursor": strings.Repeat("1", 513), "payload": "x"} {
		rec := call(t, h, "GET", "/v1/groups/g/failures?"+field+"="+value, "")
		require.Equal(t, 422, rec.Code, field)
		require.Contains(t, rec.Body.String(), `"field":"`+field+`"`)
	}
	require.Equal(t, 404, call(t, h, "GET", "/v1/groups/none/failures?limit=1", "").Code)
}

func TestSummaryAndMap(t *testing.T) {
	f := newFakeBackend().withGroup("g")
	h := New(options(f))
	sum := decode[api.FailureSummary](t, call(t, h, "GET", "/v1/groups/g/failures/summary", ""))
	require.Equal(t, "no mailbox <n>", sum.Codes[0].Fingerprints[0].Text)
	m := decode[api.JobMap](t, call(t, h, "GET", "/v1/groups/g/map", ""))
	require.EqualValues(t, 2, m.Jobs)
	call(t, h, "GET", "/v1/groups/g/map?buckets=1000", "")
	require.Equal(t, []string{"map 500", "map 1000"}, f.calls)
	for _, buckets := range []string{"0", "1001", "x", "-1"} {
		rec := call(t, h, "GET", "/v1/groups/g/map?buckets="+buckets, "")
		require.Equal(t, 422, rec.Code, buckets)
		require.Contains(t, rec.Body.String(), `"field":"buckets"`)
	}
}
