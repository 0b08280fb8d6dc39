package guard

import (
	"fmt"
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

// scanner reads the reply of a script value by value. A missing value, or a text in the place of a
// number, sets failed, which the caller checks after the last value.
type scanner struct {
	values []any
	failed error
}

func scan(reply any) *scanner {
	values, ok := reply.([]any)
	s := &scanner{values: values}
	if !ok {
		s.failed = fmt.Errorf("reply %T instead of a list", reply)
	}
	return s
}

func (s *scanner) next() any {
	if len(s.values) == 0 {
		if s.failed == nil {
			s.failed = fmt.Errorf("reply is too short")
		}
		return nil
	}
	v := s.values[0]
	s.values = s.values[1:]
	return v
}

func (s *scanner) text() string {
	switch v := s.next().(type) {
	case string:
		return v
	case int64:
		return strconv.FormatInt(v, 10)
	}
	return ""
}

func (s *scanner) number() int64 {
	switch v := s.next().(type) {
	case int64:
		return v
	case string:
		n, err := strconv.ParseInt(v, 10, 64)
		if err == nil {
			return n
		}
		f, err := strconv.ParseFloat(v, 64) // the score of a sorted set
		if err != nil && s.failed == nil {
			s.failed = fmt.Errorf("reply has %q instead of a number", v)
		}
		return int64(f)
	}
	return 0
}

func (s *scanner) ms() time.Duration { return time.Duration(s.number()) * time.Millisecond }

func (s *scanner) list() *scanner { return scan(s.next()) }

func (s *scanner) more() bool { return len(s.values) > 0 }

// readAnswer reads the part of a reply that concerns one call. It leaves the values behind that
// part to the caller.
func readAnswer(s *scanner) answer {
	a := answer{verdict: s.text()}
	switch a.verdict {
	case "GRANTED":
		a.fence, a.member, a.generation, a.probe = s.number(), s.text(), s.number(), s.number() == 1
		a.lease = s.ms()
	case "QUEUED":
		a.position = s.number()
	case "DENIED":
		a.after = s.ms()
		a.reason = Reason(s.text())
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
	s := scan(reply)
	a := readAnswer(s)
	h := hint{free: -1, next: -1}
	switch a.verdict {
	case "GRANTED", "DENIED":
		h.free = s.number()
		h.next = s.ms()
	case "QUEUED", "FULL":
		h.next = s.ms()
	}
	h.at = s.number()
	return a, h, s.failed
}

func waitArgs(client string, calls []string) []any {
	args := append(make([]any, 0, 1+len(calls)), client)
	for _, id := range calls {
		args = append(args, id)
	}
	return args
}

func readWait(reply any, n int) ([]answer, hint, error) {
	s := scan(reply)
	all := make([]answer, 0, n)
	for range n {
		part := s.list()
		all = append(all, readAnswer(part))
		if part.failed != nil && s.failed == nil {
			s.failed = part.failed
		}
	}
	h := hint{free: -1, next: s.ms(), at: s.number()}
	return all, h, s.failed
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
	s := scan(reply)
	part := s.list()
	r := settled{verdict: part.text()}
	if r.verdict == "OK" {
		r.breaker, r.changed = part.text(), part.number() == 1
	}
	h := hint{free: -1, next: s.ms(), at: s.number()}
	if s.failed == nil {
		s.failed = part.failed
	}
	return r, h, s.failed
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
	s := scan(reply)
	held := make([]bool, 0, n)
	for range n {
		held = append(held, s.text() == "OK")
	}
	h := hint{free: -1, next: -1, at: s.number()}
	return held, h, s.failed
}
