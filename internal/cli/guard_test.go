package cli

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
)

func (f *fakeAPI) listGuards(w http.ResponseWriter, r *http.Request) {
	switch q := r.URL.Query(); {
	case q.Get("kind") == "key":
		reply(w, http.StatusOK, api.GuardList{Guards: []api.GuardSummary{{Name: "key/hosts/a"}}})
	case q.Get("cursor") == "":
		reply(w, http.StatusOK, api.GuardList{Cursor: "0.1.", Guards: []api.GuardSummary{{
			Name: "pool/smtp", Members: 40, Free: 3, Cooling: 30, Leases: 7, Queue: 1234,
			Counters: map[string]int64{"granted": 1234567, "denied": 5, "lost": 2},
		}}})
	default:
		reply(w, http.StatusOK, api.GuardList{Guards: []api.GuardSummary{{Name: "lock/a"}, {Name: "pool/smtp"}}})
	}
}

func fakeGuard(name string) api.Guard {
	left, at := int64(17), epoch
	return api.Guard{
		Name: name, Rev: 3,
		Spec: api.GuardSpec{
			Limiter: "sliding", Permits: 80, WindowMS: 600_000, Failures: 3, OpenForMS: 600_000, Successes: 3, Concurrency: 1,
			LeaseMS: 30_000, MaxWaitMS: 60_000, MaxQueue: 10_000,
		},
		Members: []api.GuardMember{
			{ID: "a", State: "busy", Breaker: "half_open", Failures: 1, Held: 1, Left: &left, LastUsedAt: &at, Uses: 1234},
			{ID: "b", State: "free", Breaker: "closed", NextAt: &at},
		},
		Queue:    api.GuardQueue{Length: 2, OldestMS: 1500},
		Counters: map[string]int64{"granted": 1234},
	}
}

func (f *fakeAPI) showGuard(w http.ResponseWriter, r *http.Request) {
	if r.PathValue("name") == "none" {
		problem(w, http.StatusNotFound, "guard none: no such guard")
		return
	}
	reply(w, http.StatusOK, fakeGuard(r.PathValue("name")))
}

func (f *fakeAPI) controlGuard(w http.ResponseWriter, r *http.Request) {
	name, member, do := r.PathValue("name"), r.PathValue("id"), r.PathValue("verb")
	switch {
	case name == "none" || member == "x":
		problem(w, http.StatusNotFound, "not found")
	case member == "b" && do == "open":
		problem(w, http.StatusConflict, "the member has no circuit breaker")
	default:
		reply(w, http.StatusAccepted, api.GuardAction{Guard: name, Member: member, Action: do})
	}
}

func TestGuardLs(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{outIsTerm: true}, "guard", "ls")
	require.Equal(t, exitOK, got.code, got.err)
	lines := strings.Split(strings.TrimSpace(got.out), "\n")
	require.Len(t, lines, 3, "sorted, and each guard once")
	require.Equal(t, "GUARD MEMBERS FREE COOLING LEASES QUEUE GRANTED DENIED LOST", strings.Join(strings.Fields(lines[0]), " "))
	require.Equal(t, "lock/a 0 0 0 0 0 0 0 0", strings.Join(strings.Fields(lines[1]), " "))
	require.Equal(t, "pool/smtp 40 3 30 7 1,234 1,234,567 5 2", strings.Join(strings.Fields(lines[2]), " "))
	got = f.exec(t.Context(), console{}, "guard", "ls", "--kind", "key", "--json")
	require.Equal(t, `{"name":"key/hosts/a","rev":0,"members":0,"free":0,"cooling":0,"leases":0,"queue":0,"counters":null}`+"\n", got.out)
	got = f.exec(t.Context(), console{}, "guard", "ls", "--kind", "keys")
	require.Equal(t, exitUsage, got.code)
	require.Contains(t, got.err, `--kind "keys": must be one of pool`)
	require.Equal(t, exitUsage, f.exec(t.Context(), console{}, "guard").code)
}

func TestGuardShow(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "guard", "show", "pool/smtp")
	require.Equal(t, exitOK, got.code, got.err)
	for _, line := range []string{
		"Limit 80 in any 10m0s", "Breaker opens after 3 failures in a row for 10m0s, closes after 3 successes",
		"Queue 2 of at most 10,000, for at most 1m0s, the first for 1.5s", "granted 1,234",
		"a busy half-open 1 1 17 1,234 2030-01-02 03:04:05Z",
		"b free closed 0 0 no limit 0 never 2030-01-02 03:04:05Z",
	} {
		require.Contains(t, strings.Join(strings.Fields(got.out), " "), line)
	}
	require.Contains(t, f.exec(t.Context(), console{}, "guard", "show", "lock/a", "--json").out, `{"name":"lock/a","rev":3,`)
	got = f.exec(t.Context(), console{}, "guard", "show", "none")
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.err, "`bulkaction guard ls` lists")
	for _, args := range [][]string{nil, {"a", "b"}, {"a b"}, {"pools/a"}} {
		require.Equal(t, exitUsage, f.exec(t.Context(), console{}, append([]string{"guard", "show"}, args...)...).code, args)
	}
}

func TestGuardActions(t *testing.T) {
	f := newFakeAPI(t)
	for do, done := range map[guard.Action]string{
		guard.Disable: "disabled", guard.Enable: "enabled", guard.Open: "opened", guard.CloseBreaker: "closed",
		guard.TakeBack: "taken back",
	} {
		got := f.exec(t.Context(), console{}, "guard", string(do), "smtp", "a")
		require.Equal(t, exitOK, got.code, got.err)
		require.Equal(t, fmt.Sprintf("smtp   a   %s\n", done), got.out)
		require.Equal(t, do == guard.TakeBack, strings.Contains(got.err, "a third of a lease later"))
		require.True(t, f.called("POST /v1/guards/smtp/members/a/"+string(do)))
		got = f.exec(t.Context(), console{}, "guard", string(do), "breaker/b", "--json")
		require.Equal(t, fmt.Sprintf(`{"guard":"breaker/b","member":"1","action":%q}`+"\n", do), got.out)
	}
	for args, hint := range map[string]string{
		"disable none a": "A guard is known once a process has used it",
		"disable smtp x": "Guard smtp exists; `bulkaction guard show smtp` lists its members, for example a.",
		"open smtp b":    "Its policy has no breaker.",
	} {
		got := f.exec(t.Context(), console{}, append([]string{"guard"}, strings.Fields(args)...)...)
		require.Equal(t, exitError, got.code, args)
		require.Contains(t, got.err, hint)
	}
	for args, problem := range map[string]string{
		"disable":         "needs a guard",
		"disable a b c":   "needs a guard",
		"disable smtp":    "`bulkaction guard show smtp` lists them",
		"disable smtp a/": "member id",
		"disable x/y a":   "must be NAME or KIND/NAME",
	} {
		got := f.exec(t.Context(), console{}, append([]string{"guard"}, strings.Fields(args)...)...)
		require.Equal(t, exitUsage, got.code, args)
		require.Contains(t, got.err, problem)
	}
}
