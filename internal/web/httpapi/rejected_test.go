package httpapi

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRejected(t *testing.T) {
	t.Parallel()
	f := newFakeBackend()
	h := New(options(f))
	for path, want := range map[string]string{
		"/v1/rejected": "rejected  50 false",
		"/v1/rejected?cursor=5-0&limit=7&data=true": "rejected 5-0 7 true",
		"/v1/rejected?data=false":                   "rejected  50 false",
	} {
		rec := call(t, h, "GET", path, "")
		require.Equal(t, 200, rec.Code)
		require.JSONEq(t, `{"rejected":[]}`, rec.Body.String())
		require.Equal(t, want, f.calls[len(f.calls)-1])
	}
	requireProblem(t, call(t, h, "GET", "/v1/rejected?data=yes", ""), 422, "data")
	requireProblem(t, call(t, h, "GET", "/v1/rejected?limit=0", ""), 422, "limit")
}
