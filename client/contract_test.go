package client_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// memoryBackend is a fake backend behind the handlers of the real HTTP API. So its tests show that
// client and server understand each other, which tests with a fake server can't show.
type memoryBackend struct {
	httpapi.Backend // nil: methods that are not defined here are not called

	mu          sync.Mutex
	group       api.Group
	jobs        []messages.Job
	requests    map[string]bool
	busyAtBatch int // number of the batch before which the backend is busy, once
}

func (m *memoryBackend) Submit(_ context.Context, g *messages.SubmitGroup, _ httpapi.SubmitOptions) (api.Accepted, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.group = api.Group{ID: g.ID, Tenant: g.Tenant, Type: g.Type, Status: api.StatusCreated, Round: 1, Timestamps: map[string]time.Time{"created": time.Now()}}
	return api.Accepted{ID: g.ID, Status: m.group.Status}, nil
}

func (m *memoryBackend) Append(_ context.Context, _ string, jobs []messages.Job, opt httpapi.AppendOptions) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.requests[opt.RequestID] {
		return nil
	}
	if m.busyAtBatch > 0 && len(m.requests) == m.busyAtBatch {
		m.busyAtBatch = 0
		return &api.BackpressureError{RetryAfter: time.Second, Reason: "the backlog"}
	}
	if m.group.Sealed {
		return fmt.Errorf("append: %w", api.ErrSealed)
	}
	m.requests[opt.RequestID] = true
	m.jobs = append(m.jobs, jobs...)
	m.group.Counts.Accepted += int64(len(jobs))
	return nil
}

func (m *memoryBackend) Seal(context.Context, string, *int64) (api.Accepted, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.group.Sealed, m.group.Status, m.group.Counts.Done = true, api.StatusCompleted, m.group.Counts.Accepted
	stamps := map[string]time.Time{}
	for _, s := range []string{"created", "dispatched", "running", "aggregating", "completed"} {
		stamps[s] = time.Now()
	}
	m.group.Timestamps = stamps
	return api.Accepted{ID: m.group.ID, Status: m.group.Status}, nil
}

func (m *memoryBackend) Group(context.Context, string) (api.Group, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.group, nil
}

func (m *memoryBackend) GroupSummary(ctx context.Context, id string, _ int64) (api.Group, bool, error) {
	g, err := m.Group(ctx, id)
	return g, true, err
}

func (m *memoryBackend) Results(_ context.Context, _ string, yield func([]byte) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, j := range m.jobs {
		line, err := json.Marshal(api.Result{Ordinal: int64(i), Attempts: 1, Data: j.Payload})
		if err != nil {
			return err
		}
		if err := yield(line); err != nil {
			return err
		}
	}
	return nil
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
			m := &memoryBackend{requests: map[string]bool{}, busyAtBatch: 13}
			a, _ := serve(t, httpapi.New(httpapi.Options{Backend: m}))
			accepted, err := a.Submit(t.Context(), client.Submission{ID: "g", Tenant: "acme", Type: "NOOP"})
			require.NoError(t, err)
			require.Equal(t, "/v1/groups/g/events", accepted.Links["events"])

			got, err := c.append(a, t.Context(), "g")
			require.NoError(t, err)
			require.EqualValues(t, c.jobs, got.Accepted)
			require.Len(t, m.jobs, c.jobs, "each job is stored once although the server was busy once")
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
		a, _ := serve(t, httpapi.New(httpapi.Options{Backend: &memoryBackend{}}))
		_, err := a.Submit(t.Context(), client.Submission{Tenant: "a/b", Type: "x y"})
		require.EqualError(t, err, "submit group: 422 Unprocessable Entity: tenant: must match ^[A-Za-z0-9._-]{1,128}$ (except . and ..); type: must match ^[A-Za-z0-9._-]{1,128}$ (except . and ..)")
		_, err = a.AppendCSV(t.Context(), "g", strings.NewReader(""))
		var e *client.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, http.StatusUnprocessableEntity, e.Status)
		require.NotEmpty(t, e.RequestID)
	})
}
