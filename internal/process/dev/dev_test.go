package dev_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/dev"
)

// TestHTTPJobsMayCallThisMachine: under `bulkaction dev` an HTTP job may call a handler on this
// machine, unless the operator has said which addresses jobs may call.
func TestHTTPJobsMayCallThisMachine(t *testing.T) {
	t.Parallel()
	handler := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(handler.Close)
	for name, tt := range map[string]struct {
		environ []string
		code    string // of the failure
	}{
		"default":  {nil, ""},
		"private":  {[]string{"BULKACTION_HTTP_PROCESSOR_ALLOW_PRIVATE=false"}, "ADDRESS_REFUSED"},
		"networks": {[]string{"BULKACTION_HTTP_PROCESSOR_ALLOWED_CIDRS=10.0.0.0/8"}, "ADDRESS_REFUSED"},
		"none":     {[]string{"BULKACTION_HTTP_PROCESSOR_ALLOWED_CIDRS="}, "ADDRESS_REFUSED"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, stop := context.WithTimeout(t.Context(), time.Minute)
			defer stop()
			started, ended := make(chan string, 1), make(chan int, 1)
			var log bytes.Buffer
			go func() {
				ended <- dev.Run(ctx, dev.Options{
					Addr: "127.0.0.1:0", Environ: append(tt.environ, "BULKACTION_ADMIN_ADDR=127.0.0.1:0"), Log: &log,
					Started: func(api, _ string) { started <- api },
				})
			}()
			api := client.NewAPI("http://" + <-started)
			_, err := api.Submit(ctx, client.Submission{ID: "g", Tenant: "acme", Type: "HTTP", Seal: true,
				Jobs: []client.NewJob{{Payload: map[string]string{"url": handler.URL}}}})
			require.NoError(t, err)
			g, err := api.Wait(ctx, "g")
			require.NoError(t, err)
			var codes []string
			for f, err := range api.Failures(ctx, "g") {
				require.NoError(t, err)
				text, _ := json.Marshal(f)
				require.Contains(t, string(text), tt.code)
				codes = append(codes, tt.code)
			}
			require.Equal(t, tt.code != "", len(codes) == 1, g)
			stop()
			require.Equal(t, app.ExitOK, <-ended, log.String())
		})
	}
}
