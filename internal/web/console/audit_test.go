package console

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
)

// Audit returns a state with three violations and with 120 partitions, of which one has no leader
// and one was never looked at. If f.sound is set or there are no groups, the state has one
// partition and no violation.
func (f *fakeBackend) Audit(context.Context) (api.AuditState, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, "audit")
	looked, deep := created.Add(time.Hour), created
	if len(f.groups) == 0 || f.sound {
		return api.AuditState{OK: true, Partitions: []api.AuditedPartition{{Partition: 0, Leader: "w", LookedAt: &looked, DeepAt: &deep}}}, f.err
	}
	ordinal := int64(0)
	s := api.AuditState{
		ByLaw: map[string]int64{"counters": 3, "location": 1200, "states": 0},
		Violations: []api.Violation{
			{Law: "location", Partition: 3, Group: "failed-1", Ordinal: &ordinal, Detail: "detail " + hostile},
			{Law: "location", Partition: 4, Group: "running-1", Detail: "and more", Count: 1100}, {Law: "guard-state", Partition: -1, Detail: "of a guard"},
		},
	}
	for i := range 120 {
		s.Partitions = append(s.Partitions, api.AuditedPartition{Partition: i, Leader: fmt.Sprint("leader-", i), LookedAt: &looked, DeepAt: &deep})
	}
	s.Partitions[110].Leader = ""
	s.Partitions[111].LookedAt, s.Partitions[111].DeepAt = nil, nil
	return s, f.err
}

func TestAudit(t *testing.T) {
	t.Parallel()
	w := as(t, reader)
	d := w.page("/ui/audit")
	for _, want := range []string{
		"1,203 violations are open.", "Open violations 1,203", "Partitions without a leader 1", "Partitions never looked at 1", "Oldest look –",
		"location 1200 1,200", "counters 3 3", "location failed-1.0 3 detail " + hostile + " 1", "running-1 4 and more 1,100", "guard-state – – of a guard",
		"and 101 other violations", "110 none", "111 leader-111 never –", "and 20 other partitions", "bulkaction audit --repair --redis-url URL",
		"failed-1.7",
	} {
		require.Contains(t, d.text, want)
	}
	require.NotContains(t, d.text, "states")
	require.NotContains(t, d.text, "leader-119")
	require.Less(t, strings.Index(d.text, "110 none"), strings.Index(d.text, "leader-0"), "what needs a look comes first")
	var links []string
	for _, a := range d.all("a") {
		links = append(links, attribute(a, "href"))
	}
	require.Subset(t, links, []string{"/ui/groups/failed-1/jobs/0", "/ui/groups/running-1", "/ui/dead-letters?code=LOST", "/ui/groups/failed-1/jobs/7"})
	require.Empty(t, w.log.entries)
	require.Equal(t, []string{"/ui/logout", "/ui/theme"}, d.actions(), "the page changes nothing")
	for _, who := range []auth.Principal{acme, metrics} {
		require.Equal(t, http.StatusForbidden, as(t, who).get("/ui/audit").Code)
	}

	w.backend.set(func() { w.backend.groups = nil })
	good := w.page("/ui/audit").text
	for _, want := range []string{"No law is violated.", "Oldest look 2026-01-02 04:04:05 UTC", "Oldest deep look 2026-01-02 03:04:05 UTC", "no job has vanished"} {
		require.Contains(t, good, want)
	}
	w.backend.set(func() { w.backend.err = api.ErrUnavailable })
	require.Contains(t, w.get("/ui/audit").Body.String(), "Redis does not answer")

	var unaudited auditData
	unaudited.summarize()
	require.Nil(t, unaudited.LookedAt)
}

// TestAuditLooksForLostJobsRarely: three reads of the audit page's data read the audit three times,
// and search the dead letters for the code LOST once.
func TestAuditLooksForLostJobsRarely(t *testing.T) {
	t.Parallel()
	w := newTestConsole(t)
	read := auditPage{w.backend}.reader()
	for range 3 {
		_, err := read(auth.With(t.Context(), admin))
		require.NoError(t, err)
	}
	require.Equal(t, []string{"audit", "dead letters  10 code=LOST", "audit", "audit"}, w.backend.calls)
}
