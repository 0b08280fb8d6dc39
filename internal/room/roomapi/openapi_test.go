package roomapi

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/legacy"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

var document = sync.OnceValues(func() (*openapi3.T, error) { return openapi3.NewLoader().LoadFromData(openapiDocument) })

var documentRouter = sync.OnceValues(func() (routers.Router, error) {
	doc, err := document()
	if err != nil {
		return nil, err
	}
	return legacy.NewRouter(doc)
})

func init() {
	for _, typ := range []string{"text/event-stream", "text/html"} {
		openapi3filter.RegisterBodyDecoder(typ, openapi3filter.PlainBodyDecoder)
	}
}

// requireDocumented checks an answer against the OpenAPI document: its status, headers, media type
// and body. A request that the document does not describe must get a status from 300 on, unless its
// method is HEAD or it is for an asset.
func requireDocumented(t *testing.T, req *http.Request, rec *httptest.ResponseRecorder) {
	t.Helper()
	router, err := documentRouter()
	require.NoError(t, err)
	route, params, err := router.FindRoute(req)
	if err != nil {
		if req.Method != http.MethodHead && !strings.HasPrefix(req.URL.Path, "/assets/") {
			require.GreaterOrEqual(t, rec.Code, 300, "%s %s is not documented", req.Method, req.URL.Path)
		}
		return
	}
	err = openapi3filter.ValidateResponse(req.Context(), &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{Request: req, PathParams: params, Route: route},
		Status:                 rec.Code,
		Header:                 rec.Header(),
		Body:                   io.NopCloser(bytes.NewReader(rec.Body.Bytes())),
		Options:                &openapi3filter.Options{IncludeResponseStatus: true},
	})
	require.NoError(t, err)
}

func TestDocumentIsValidAndServed(t *testing.T) {
	t.Parallel()
	doc, err := document()
	require.NoError(t, err)
	require.NoError(t, doc.Validate(t.Context()))
	rec := call(t, New(options(newFakeRoom())), "GET", "/openapi.yaml")
	require.Equal(t, openapiDocument, rec.Body.Bytes())
}

func TestDocumentAndRoutesAgree(t *testing.T) {
	t.Parallel()
	doc, err := document()
	require.NoError(t, err)
	var documented, served []string
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			documented = append(documented, method+" "+path)
			for _, status := range []int{429, 503} {
				if resp := op.Responses.Status(status); resp != nil {
					require.Contains(t, resp.Value.Headers, "Retry-After", "%s %s %d", method, path, status)
				}
			}
		}
	}
	for _, rt := range New(options(newFakeRoom())).calls() {
		if !strings.HasPrefix(rt.path, "/assets/") {
			served = append(served, rt.method+" "+rt.path)
		}
	}
	require.ElementsMatch(t, served, documented)
}

func TestDocumentAndTypesAgree(t *testing.T) {
	t.Parallel()
	doc, err := document()
	require.NoError(t, err)
	for schema, value := range map[string]any{
		"EventStatus": api.EventStatus{}, "EventSlots": api.EventSlots{}, "Ticket": api.Ticket{}, "EntryToken": api.EntryToken{},
		"Problem": api.Problem{}, "FieldError": api.FieldError{},
	} {
		s := doc.Components.Schemas[schema].Value
		var all, properties []string
		for _, f := range reflect.VisibleFields(reflect.TypeOf(value)) {
			tag := strings.Split(f.Tag.Get("json"), ",")
			all = append(all, tag[0])
			require.Equal(t, !slices.Contains(tag, "omitempty"), slices.Contains(s.Required, tag[0]), "%s.%s", schema, tag[0])
		}
		for name := range s.Properties {
			properties = append(properties, name)
		}
		require.ElementsMatch(t, all, properties, schema)
	}
}
