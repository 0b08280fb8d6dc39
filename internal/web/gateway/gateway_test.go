package gateway

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func newGateway(w *stagetest.World, addr string) (*Gateway, error) {
	w.T.Helper()
	return New(context.WithoutCancel(w.T.Context()), stagetest.Process(w, "gateway"),
		Config{Addr: addr, Grace: stagetest.Patience, Store: w.Store})
}

func TestServesTheAPI(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		g, err := newGateway(w, "127.0.0.1:0")
		require.NoError(w.T, err)
		w.Run(g)
		req, err := http.NewRequestWithContext(context.WithoutCancel(w.T.Context()), http.MethodPost, "http://"+g.Addr()+"/v1/groups",
			strings.NewReader(`{"id":"g","type":"T","seal":true,"jobs":[{"payload":1},{"payload":2}]}`))
		require.NoError(w.T, err)
		req.Header.Set("Content-Type", "application/json")
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Do(req)
		require.NoError(w.T, err)
		require.NoError(w.T, resp.Body.Close())
		require.Equal(w.T, http.StatusAccepted, resp.StatusCode)
		require.Equal(w.T, api.Counts{Accepted: 2, Waiting: 2}, w.Counts("g"))
	})
}

func TestAddressInUseIsAnError(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	g, err := newGateway(w, "127.0.0.1:0")
	require.NoError(t, err)
	w.Run(g)
	_, err = newGateway(w, g.Addr())
	require.ErrorContains(t, err, "set BULKACTION_API_ADDR to another address")
}

func TestUnknownGuardIsSaidOnce(t *testing.T) {
	err := guardError(fmt.Errorf("guard nope: %w", guard.ErrUnknownGuard))
	require.ErrorIs(t, err, api.ErrNotFound)
	require.EqualError(t, err, "guard nope: no such guard")
}
