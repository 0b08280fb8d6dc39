package guard

import (
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/lua"
)

// The Lua scripts of guards. The header of each Lua file describes its arguments and its reply.
var (
	takeScript    = call.NewScript("take", lua.Source("parts/base", "parts/limiters", "guard/take"))
	acquireScript = call.NewScript("acquire",
		lua.Source("parts/base", "parts/quick", "guard/acquire_quick", "parts/limiters", "parts/quick_permit",
			"guard/acquire_limited", "parts/guard", "guard/acquire"))
	waitScript = call.NewScript("wait",
		lua.Source("parts/base", "parts/limiters", "parts/guard", "guard/wait"))
	releaseScript = call.NewScript("release",
		lua.Source("parts/base", "parts/quick", "guard/release_quick", "parts/limiters", "parts/quick_permit",
			"guard/release_limited", "parts/guard", "guard/release"))
	renewScript = call.NewScript("renew",
		lua.Source("parts/base", "parts/limiters", "parts/guard", "guard/renew"))
	declareScript = call.NewScript("declare",
		lua.Source("parts/base", "parts/limiters", "parts/guard", "guard/declare"))
	controlScript = call.NewScript("control",
		lua.Source("parts/base", "parts/limiters", "parts/guard", "guard/control"))
	inspectScript = call.NewScript("inspect",
		lua.Source("parts/base", "parts/limiters", "parts/guard", "guard/inspect"))
	auditScript = call.NewScript("audit",
		lua.Source("parts/base", "parts/limiters", "parts/guard", "guard/audit"))
)

// The most elements that one call of a script handles.
const (
	mostWaitsPerCall    = 1000
	mostRenewalsPerCall = 200
	mostMembersPerCall  = 200
	rowsPerPage         = 200
)

// answer is what Redis says about one call for a lease: the first part of a reply of the script
// acquire, or the call's part of a reply of the script wait.
type answer struct {
	verdict    string // GRANTED, QUEUED, DENIED, FULL, UNKNOWN, LATE, GONE
	fence      int64
	member     string
	generation int64
	probe      bool
	lease      time.Duration
	position   int64
	after      time.Duration // -1 = unknown
	reason     Reason
}

// hint is what a script's reply says about the whole guard. free is the number of members that can
// be lent now; -1 if the reply does not say it. next is the time until a member can be lent: 0 =
// ask again now, negative = unknown.
type hint struct {
	free int64
	next time.Duration
	at   int64 // guard time, µs; 0 = unknown
}

// readAnswer reads the part of a reply that concerns one call. It leaves the values behind that
// part to the caller.
func readAnswer(r *call.Reply) answer {
	a := answer{verdict: r.Text()}
	switch a.verdict {
	case "GRANTED":
		a.fence, a.member, a.generation, a.probe = r.Number(), r.Text(), r.Number(), r.Flag()
		a.lease = r.Duration()
	case "QUEUED":
		a.position = r.Number()
	case "DENIED":
		a.after, a.reason = r.Duration(), Reason(r.Text())
	}
	return a
}

// guardKeys returns the KEYS of all scripts but take.
func guardKeys(base string) []string { return []string{base, base + "-"} }

type acquireArgs struct {
	call, client, member, spec string
	lease, wait                time.Duration
	bound                      int
	validUntil                 int64 // 0 = never
}

func (a acquireArgs) args() []any {
	valid := ""
	if a.validUntil > 0 {
		valid = strconv.FormatInt(a.validUntil, 10)
	}
	return []any{a.call, a.client, a.member, a.spec, a.lease.Milliseconds(), a.wait.Milliseconds(), a.bound, valid}
}

func readAcquire(reply any) (answer, hint, error) {
	r := acquireScript.Reply(reply)
	a := readAnswer(r)
	h := hint{free: -1, next: -1}
	switch a.verdict {
	case "GRANTED", "DENIED":
		h.free, h.next = r.Number(), r.Duration()
	case "QUEUED", "FULL":
		h.next = r.Duration()
	}
	h.at = r.Number()
	return a, h, r.Err()
}

func waitArgs(client string, calls []string) []any {
	args := append(make([]any, 0, 1+len(calls)), client)
	for _, id := range calls {
		args = append(args, id)
	}
	return args
}

func readWait(reply any, n int) ([]answer, hint, error) {
	r := waitScript.Reply(reply)
	all := make([]answer, 0, n)
	for range n {
		all = append(all, readAnswer(r.List()))
	}
	h := hint{free: -1, next: r.Duration(), at: r.Number()}
	return all, h, r.Err()
}

// ending is one lease in a call of release.
type ending struct {
	call    string
	fence   string // empty = cancel the call
	outcome Outcome
}

func releaseArgs(e ending) []any {
	letter, delay := e.outcome.letter()
	return []any{1, e.call, e.fence, letter, delay.Milliseconds()}
}

// settled is the reply to one ending. changed: it has changed the state of the breaker.
type settled struct {
	verdict string // OK, GONE, LEFT, GIVEN
	breaker string // C, O or H; empty unless OK
	changed bool
}

func readRelease(reply any) (settled, hint, error) {
	r := releaseScript.Reply(reply)
	part := r.List()
	s := settled{verdict: part.Text()}
	if s.verdict == "OK" {
		s.breaker, s.changed = part.Text(), part.Flag()
	}
	h := hint{free: -1, next: r.Duration(), at: r.Number()}
	return s, h, r.Err()
}

func renewArgs(lease time.Duration, leases []*Lease) []any {
	args := append(make([]any, 0, 1+2*len(leases)), lease.Milliseconds())
	for _, l := range leases {
		args = append(args, l.call, l.fenceText())
	}
	return args
}

// readRenew returns for each lease of a renewal whether it still exists and was extended.
func readRenew(reply any, n int) ([]bool, hint, error) {
	r := renewScript.Reply(reply)
	held := make([]bool, 0, n)
	for range n {
		held = append(held, r.Text() == "OK")
	}
	h := hint{free: -1, next: -1, at: r.Number()}
	return held, h, r.Err()
}
