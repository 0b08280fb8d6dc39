package client_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// endsWhenSealed is a backend whose groups are completed when they are sealed, and in which each job
// has its payload as its result. The tests use the handlers of the real HTTP API: they show that
// client and server understand each other, which tests with a fake server can't show.
type endsWhenSealed struct{ *apitest.Backend }

func newEndsWhenSealed() endsWhenSealed {
	b := endsWhenSealed{apitest.NewBackend()}
	b.OnResults = func(yield func([]byte) error) error {
		for i, payload := range b.Payloads("g") {
			if err := yield(fmt.Appendf(nil, `{"ordinal":%d,"attempts":1,"data":%s}`, i, payload)); err != nil {
				return err
			}
		}
		return nil
	}
	return b
}

func (b endsWhenSealed) Seal(ctx context.Context, id string, total *int64) (api.Accepted, error) {
	b.Mu.Lock()
	g := b.ByID[id]
	g.View.Status = api.StatusCompleted
	for _, s := range []string{"dispatched", "running", "aggregating", "completed"} {
		g.View.Timestamps[s] = time.Now()
	}
	b.Mu.Unlock()
	return b.Backend.Seal(ctx, id, total)
}

func TestClientAndServerAgree(t *testing.T) {
	for _, c := range []struct {
		name   string
		append func(*client.API, context.Context, string) (api.Appended, error)
		jobs   int
		bad    []int64
	}{
		{"jobs", func(a *client.API, ctx context.Context, g string) (api.Appended, error) {
			return a.Append(ctx, g, numbered(12_345))
		}, 12_345, nil},
		{"ndjson", func(a *client.API, ctx context.Context, g string) (api.Appended, error) {
			return a.AppendNDJSON(ctx, g, strings.NewReader(ndjson(12_345, 1, 5000, 5001, 12_345)))
		}, 12_341, []int64{1, 5000, 5001, 12_345}},
		{"csv", func(a *client.API, ctx context.Context, g string) (api.Appended, error) {
			row := "a@example.com,\"two\nlines\"\n"
			return a.AppendCSV(ctx, g, strings.NewReader("\xef\xbb\xbfto,\"bo\ndy\"\n"+strings.Repeat(row, 6000)+"too,many,columns\n"+row+"x\"y,z\n"))
		}, 6001, []int64{12_003, 12_006}},
		{"an endless row", func(a *client.API, ctx context.Context, g string) (api.Appended, error) {
			return a.AppendCSV(ctx, g, strings.NewReader("to\n\""+strings.Repeat("x\n", 1<<20)+"\"\na@example.com\na,b\n"))
		}, 1, []int64{2, 1<<20 + 4}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			m := newEndsWhenSealed()
			m.OnAppend = func(call int) error {
				if call == 13 {
					return &api.BackpressureError{RetryAfter: time.Second, Reason: "the backlog"}
				}
				return nil
			}
			a, _ := serve(t, httpapi.New(httpapi.Options{Backend: m}))
			accepted, err := a.Submit(t.Context(), client.Submission{ID: "g", Tenant: "acme", Type: "NOOP"})
			require.NoError(t, err)
			require.Equal(t, "/v1/groups/g/events", accepted.Links["events"])

			got, err := c.append(a, t.Context(), "g")
			require.NoError(t, err)
			require.EqualValues(t, c.jobs, got.Accepted)
			require.Len(t, m.Payloads("g"), c.jobs, "each job is stored once although the server was busy once")
			var bad []int64
			for _, l := range got.Rejected {
				bad = append(bad, l.Line)
			}
			require.Equal(t, c.bad, bad)

			waited := make(chan api.Group)
			go func() {
				g, _ := a.Wait(t.Context(), "g")
				waited <- g
			}()
			_, err = a.Seal(t.Context(), "g", nil)
			require.NoError(t, err)
			require.Equal(t, api.StatusCompleted, (<-waited).Status)

			var events []string
			for e, err := range a.Events(t.Context(), "g", "") {
				require.NoError(t, err)
				events = append(events, e.ID+" "+e.Type)
			}
			require.Equal(t, []string{"1.1 group.created", "1.2 group.dispatched", "1.3 group.running", "1.4 group.aggregating", "1.5 group.completed"}, events)
			events = slices.Delete(events, 0, 5)
			for e, err := range a.Events(t.Context(), "g", "1.4") {
				require.NoError(t, err)
				events = append(events, e.ID)
			}
			for e, err := range a.Events(t.Context(), "g", "1.5") {
				t.Error("unexpected event after the last one", e, err)
			}
			require.Equal(t, []string{"1.5"}, events)

			n := 0
			for _, err := range a.Results(t.Context(), "g") {
				require.NoError(t, err)
				n++
			}
			require.Equal(t, c.jobs, n)

			_, err = a.Append(t.Context(), "g", numbered(1))
			require.ErrorContains(t, err, "409 Conflict")
		})
	}
	t.Run("problems", func(t *testing.T) {
		a, _ := serve(t, httpapi.New(httpapi.Options{Backend: newEndsWhenSealed()}))
		_, err := a.Submit(t.Context(), client.Submission{Tenant: "a/b", Type: "x y"})
		require.EqualError(t, err, "submit group: 422 Unprocessable Entity: tenant: must match ^[A-Za-z0-9._-]{1,128}$ (except . and ..); type: must match ^[A-Za-z0-9._-]{1,128}$ (except . and ..)")
		_, err = a.AppendCSV(t.Context(), "g", strings.NewReader(""))
		var e *client.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, http.StatusUnprocessableEntity, e.Status)
		require.NotEmpty(t, e.RequestID)
	})
}

// TestLimitsOfClientAndServerAgree: what the client patches is what the server shows, also if not
// all partitions have answered.
func TestLimitsOfClientAndServerAgree(t *testing.T) {
	m := apitest.NewBackend()
	m.Pending = []int{1}
	a, _ := serve(t, httpapi.New(httpapi.Options{Backend: m}))
	l, err := a.PatchLimits(t.Context(), api.LimitsPatch{Global: api.GlobalPatch{RPS: api.SetTo[int64](5000), MaxBackoff: api.SetTo("2m")}})
	require.NoError(t, err)
	require.Equal(t, api.LimitSetting[int64]{Configured: 10_000, Effective: 5000, Source: api.SourceAPI}, l.Global.RPS)
	require.Equal(t, "2m", l.Global.MaxBackoff.Effective)
	require.Equal(t, []int{1}, l.PendingPartitions)
	rps := int64(7)
	l, err = a.PatchType(t.Context(), "T", api.TypePatch{RPS: api.SetTo(rps), InFlight: api.ToDefault[int64]()})
	require.NoError(t, err)
	require.Equal(t, map[string]api.TypeLimits{"T": {RPS: &rps}}, l.Types)
	again, err := a.Limits(t.Context())
	require.NoError(t, err)
	require.Equal(t, l, again)
	_, err = a.PatchLimits(t.Context(), api.LimitsPatch{})
	require.ErrorContains(t, err, "nothing to change")
	tenant, err := a.PatchTenant(t.Context(), "t", api.TenantPatch{InFlight: api.SetTo[int64](20)})
	require.NoError(t, err)
	require.EqualValues(t, 20, *tenant.InFlight)
}
