package httpapi

import (
	_ "embed"
	"net/http"
)

//go:embed openapi.yaml
var openapiDocument []byte

func getOpenAPI(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "application/yaml")
	_, err := w.Write(openapiDocument)
	return err
}
