package httpapi

import (
	"bytes"
	_ "embed"
	"net/http"

	"github.com/bulkaction/bulkaction/internal/access/auth"
)

//go:embed openapi.yaml
var openapiDocument []byte

// OpenAPI returns the OpenAPI document of the API.
func OpenAPI() []byte { return bytes.Clone(openapiDocument) }

// Scopes returns the scope of each call of the API that needs a key, by its method and path, as in
// "GET /v1/groups/{id}".
func Scopes() map[string]auth.Scope {
	// These nil stores are never called. With them, newServer registers the routes of all options.
	o := Options{Backend: struct{ Backend }{}, Rooms: struct{ Rooms }{}, Activity: struct{ Activity }{}}
	scopes := map[string]auth.Scope{}
	for _, rt := range newServer(o).routes() {
		if rt.scope != open {
			scopes[rt.method+" "+rt.path] = rt.scope
		}
	}
	return scopes
}

func getOpenAPI(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "application/yaml")
	_, err := w.Write(openapiDocument)
	return err
}
