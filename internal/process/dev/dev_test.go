package dev_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/dev"
)

// TestWaitingRoom: dev runs a broker without being asked, at a free port if its own is taken, and
// without an event. An event that is created then has a waiting page. Only Rooms creates the demo.
func TestWaitingRoom(t *testing.T) {
	t.Parallel()
	for _, rooms := range []bool{false, true} {
		taken, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer taken.Close()
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		started, ended := make(chan dev.Addresses, 1), make(chan int, 1)
		var log bytes.Buffer
		go func() {
			ended <- dev.Run(ctx, dev.Options{
				Addr: "127.0.0.1:0", Log: &log, Rooms: rooms, Started: func(at dev.Addresses) { started <- at },
				Environ: []string{"BULKACTION_ADMIN_ADDR=127.0.0.1:0", "BULKACTION_BROKER_ADDR=" + taken.Addr().String()},
			})
		}()
		at := <-started
		require.NotContains(t, at.Room, taken.Addr().String())
		page := func(event string) int {
			q, err := http.NewRequestWithContext(ctx, http.MethodGet, at.Room+"/events/"+event+"/wait", nil)
			require.NoError(t, err)
			a, err := http.DefaultTransport.RoundTrip(q) // which follows no redirects
			require.NoError(t, err)
			require.NoError(t, a.Body.Close())
			return a.StatusCode
		}
		wantDemo := http.StatusNotFound
		if rooms {
			wantDemo = http.StatusSeeOther // a slot is free: to the shop
		}
		require.Equal(t, wantDemo, page(dev.DemoEvent))
		_, err = client.NewAPI("http://"+at.API).SetRoomEvent(ctx, "sale", api.EventSettings{Capacity: new(int64)}, 0)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, page("sale"))
		stop()
		require.Equal(t, app.ExitOK, <-ended, log.String())
	}
}

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
					Started: func(at dev.Addresses) { started <- at.API },
				})
			}()
			c := client.NewAPI("http://" + <-started)
			_, err := c.Submit(ctx, client.Submission{ID: "g", Tenant: "acme", Type: "HTTP", Seal: true,
				Jobs: []client.NewJob{{Payload: map[string]string{"url": handler.URL}}}})
			require.NoError(t, err)
			g, err := c.Wait(ctx, "g")
			require.NoError(t, err)
			var codes []string
			for f, err := range c.Failures(ctx, "g") {
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
