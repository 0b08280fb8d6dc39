package apitest

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/legacy"
	"github.com/stretchr/testify/require"
)

func init() {
	for _, typ := range []string{"application/x-ndjson", "text/event-stream", "text/html"} {
		openapi3filter.RegisterBodyDecoder(typ, openapi3filter.PlainBodyDecoder)
	}
}

// Document is an OpenAPI document that answers of an API are checked against.
type Document struct {
	*openapi3.T
	router routers.Router
}

// NewDocument parses a document. It panics if the document is malformed.
func NewDocument(text []byte) Document {
	doc, err := openapi3.NewLoader().LoadFromData(text)
	if err != nil {
		panic(err)
	}
	router, err := legacy.NewRouter(doc)
	if err != nil {
		panic(err)
	}
	return Document{doc, router}
}

// Describes checks the status, headers, media type and body of an answer. It returns false if the
// document does not describe the request.
func (d Document) Describes(t testing.TB, req *http.Request, rec *httptest.ResponseRecorder) bool {
	t.Helper()
	escaped := req.Clone(req.Context()) // the router splits a name such as pool%2Fsmtp in two
	escaped.URL.Path, escaped.URL.RawPath = req.URL.EscapedPath(), ""
	route, params, err := d.router.FindRoute(escaped)
	if err != nil {
		return false
	}
	require.NoError(t, openapi3filter.ValidateResponse(req.Context(), &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{Request: req, PathParams: params, Route: route},
		Status:                 rec.Code,
		Header:                 rec.Header(),
		Body:                   io.NopCloser(bytes.NewReader(rec.Body.Bytes())),
		Options:                &openapi3filter.Options{IncludeResponseStatus: true},
	}))
	return true
}

// Calls returns the calls of the document, such as "GET /v1/groups", each followed by its query
// parameters, such as "GET /v1/groups ?limit". It requires that answers with which a client may try
// again have the header Retry-After.
func (d Document) Calls(t testing.TB) (all []string) {
	t.Helper()
	for path, item := range d.Paths.Map() {
		for method, op := range item.Operations() {
			call := method + " " + path
			all = append(all, call)
			for _, param := range slices.Concat(item.Parameters, op.Parameters) {
				if param.Value.In == "query" {
					all = append(all, call+" ?"+param.Value.Name)
				}
			}
			for _, status := range []int{429, 503} {
				if resp := op.Responses.Status(status); resp != nil {
					require.Contains(t, resp.Value.Headers, "Retry-After", "%s %d", call, status)
				}
			}
		}
	}
	return all
}

// Agrees requires that a schema has the JSON fields of the struct value, and no others. The schema
// of an answer requires the fields that are never omitted.
func (d Document) Agrees(t testing.TB, schema string, value any, answer bool) {
	t.Helper()
	s := d.Components.Schemas[schema].Value
	var all, properties []string
	for _, f := range reflect.VisibleFields(reflect.TypeOf(value)) {
		if f.Anonymous {
			continue
		}
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		all = append(all, name)
		if answer && !strings.Contains(options, "omitempty") {
			require.Contains(t, s.Required, name, schema)
		}
	}
	for name := range s.Properties {
		properties = append(properties, name)
	}
	require.ElementsMatch(t, all, properties, schema)
}
