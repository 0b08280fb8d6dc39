package client_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/client"
)

func TestRejected(t *testing.T) {
	t.Parallel()
	var asked []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.URL.String())
		_, _ = w.Write([]byte(`{"rejected":[{"id":"2-0","reason":"no such type","bytes":2}],"cursor":"2-0"}`))
	}))
	defer srv.Close()
	a := client.NewAPI(srv.URL)
	page, err := a.Rejected(t.Context(), client.RejectedQuery{})
	require.NoError(t, err)
	require.Equal(t, "2-0", page.Cursor)
	require.Equal(t, "no such type", page.Rejected[0].Reason)
	_, err = a.Rejected(t.Context(), client.RejectedQuery{Cursor: page.Cursor, Limit: 7, Data: true})
	require.NoError(t, err)
	require.Equal(t, []string{"GET /v1/rejected", "GET /v1/rejected?cursor=2-0&data=true&limit=7"}, asked)
}
