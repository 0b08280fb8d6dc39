package roomapi

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
)

var document = apitest.NewDocument(openapiDocument)

// requireDocumented checks an answer against the OpenAPI document. A request that the document does
// not describe must get a status from 300 on, unless its method is HEAD or it is for an asset.
func requireDocumented(t *testing.T, req *http.Request, rec *httptest.ResponseRecorder) {
	t.Helper()
	if !document.Describes(t, req, rec) && req.Method != http.MethodHead && !strings.HasPrefix(req.URL.Path, "/assets/") {
		require.GreaterOrEqual(t, rec.Code, 300, "%s %s is not documented", req.Method, req.URL.Path)
	}
}

func TestDocument(t *testing.T) {
	t.Parallel()
	require.NoError(t, document.Validate(t.Context()))
	rec := call(t, New(options(newFakeRoom())), "GET", "/openapi.yaml")
	require.Equal(t, openapiDocument, rec.Body.Bytes())

	var served []string
	for path, methods := range New(options(newFakeRoom())).routes() {
		for method := range methods {
			if method != http.MethodHead && !strings.HasPrefix(path, "/assets/") {
				served = append(served, method+" "+path)
			}
		}
	}
	documented := slices.DeleteFunc(document.Calls(t), func(call string) bool { return strings.Contains(call, " ?") })
	require.ElementsMatch(t, served, documented)

	for schema, value := range map[string]any{
		"EventStatus": api.EventStatus{}, "EventSlots": api.EventSlots{}, "Ticket": api.Ticket{}, "EntryToken": api.EntryToken{},
		"Problem": api.Problem{}, "FieldError": api.FieldError{},
	} {
		document.Agrees(t, schema, value, true)
	}
}
