package guard

import (
	"context"
	"fmt"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// The laws that the data of each guard in Redis obeys. The scripts never break them. A violation
// means that another program wrote the keys, or that Redis lost data.
const (
	LawState = "guard-state" // each member is in exactly one state
	LawHeld  = "guard-held"  // members' counts of leases and probes are right; each lease has an end and a member
	LawQueue = "guard-queue" // the queue and the waiters are the same calls
)

// Finding is a violation of a law by a guard.
type Finding struct {
	Guard  string // KIND/NAME
	Law    string
	Detail string
}

const (
	// mostAuditRuns is how many passes one call of Repair makes at most. Repairing one violation
	// may reveal another one.
	mostAuditRuns = 8
	// mostCounted bounds what one call of the audit script reads. In a guard with more leases, the
	// audit does not count members' leases and finds no leases without an end. In one with more
	// waiters, it finds none that are missing in the queue.
	mostCounted = 10_000
)

// Audit checks the data of one guard in Redis and returns each violation of a law. It changes
// nothing, and other calls may use the guard meanwhile. Each finding is certain: one script saw it
// at one instant. A guard that Redis does not know has none. With more than 10,000 leases, members'
// counters and leases without an end are not checked; with more than 10,000 waiters, those that are
// missing in the queue.
func (o operations) Audit(ctx context.Context, name string) ([]Finding, error) {
	g, err := o.named(name)
	if err != nil {
		return nil, err
	}
	return auditOnce(ctx, g, "check")
}

// Repair corrects the violations that Audit finds in a guard, and returns them. Other calls may use
// the guard meanwhile. It makes at most 8 passes; if they sufficed, a repeated call finds nothing.
func (o operations) Repair(ctx context.Context, name string) ([]Finding, error) {
	g, err := o.named(name)
	if err != nil {
		return nil, err
	}
	var all []Finding
	for range mostAuditRuns {
		some, err := auditOnce(ctx, g, "repair")
		all = append(all, some...)
		if err != nil || len(some) == 0 {
			return all, err
		}
	}
	return all, nil
}

// auditOnce makes one pass over the lists of a guard in Redis, page by page, and returns the
// findings. mode is check, or repair, which also corrects them. Leases come first, because members'
// counters are compared with them.
func auditOnce(ctx context.Context, g *shared, mode string) (all []Finding, err error) {
	for _, list := range []string{"leases", "members", "free", "cooling", "queue"} {
		for from, more := 0, true; more; from += rowsPerPage {
			reply, err := g.send(ctx, auditScript, []any{mode, list, from, rowsPerPage, mostCounted})
			if err != nil {
				return all, err
			}
			if reply == nil {
				return all, nil // it has expired
			}
			r := auditScript.Reply(reply)
			more = r.Flag()
			for r.More() {
				f := readFinding(list, r.List())
				f.Guard = g.kind + "/" + g.name
				all = append(all, f)
			}
			if err := r.Err(); err != nil {
				return all, fmt.Errorf("audit guard %s: %w", g.name, err)
			}
		}
	}
	return all, nil
}

// violations maps each finding of the audit script (law and kind) to its text for people. The text
// gets the id of the member or call, and for some kinds also the counter and its right value.
var violations = map[string]string{
	"state two":     "member %s is free and cooling at once",
	"state off":     "member %s is off, but free or cooling",
	"state busy":    "member %s has no lease left to lend, but is free or cooling",
	"state lost":    "member %s could be lent, but is neither free nor cooling, so it never is",
	"state retired": "member %s was removed and has no lease, but is still there",
	"state empty":   "member %s is on the list of members, but does not exist",
	"state ghost":   "%s is free or cooling, but is no member",
	"held held":     "member %s counts %d leases, but has %d",
	"held probes":   "member %s counts %d probes of its breaker, but has %d",
	"held endless":  "the lease of call %s has no end",
	"held bare":     "call %s has an end of its lease, but no lease",
	"held orphan":   "the lease of call %s is of a member that does not exist",
	"queue bare":    "call %s stands in the queue, but has no record of its client and deadline",
	"queue left":    "call %s waits, but does not stand in the queue",
}

// readFinding reads a finding from a row of the audit script's reply. It does not set Guard.
func readFinding(list string, row *call.Reply) Finding {
	law, what, id, have, want := row.Text(), row.Text(), row.Text(), row.Number(), row.Number()
	args := []any{id}
	if law == "held" && (what == "held" || what == "probes") {
		args = append(args, have, want)
	}
	text, ok := violations[law+" "+what]
	if !ok {
		text, args = "unknown finding %s of the list "+list, []any{what}
	}
	return Finding{Law: "guard-" + law, Detail: fmt.Sprintf(text, args...)}
}
