package guard

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

var counterNames = []string{"granted", "denied", "queued", "expired", "stale", "lost"}

var breakerNames = map[string]string{"C": "closed", "O": "open", "H": "half_open"}

// Inspect reads the pool and all of its members.
func (p *Pool) Inspect(ctx context.Context) (api.Guard, error) {
	if _, _, err := p.g.settings(); err != nil {
		return api.Guard{}, err
	}
	return p.g.inspect(ctx)
}

// Inspect returns what Redis stores of one guard. name is KIND/NAME, or the NAME of a pool. The
// error is ErrUnknownGuard when Redis knows no such guard.
func (o operations) Inspect(ctx context.Context, name string) (api.Guard, error) {
	g, err := o.named(name)
	if err != nil {
		return api.Guard{}, err
	}
	return g.inspect(ctx)
}

func (g *shared) inspect(ctx context.Context) (api.Guard, error) {
	view := api.Guard{Name: g.kind + "/" + g.name, Members: []api.GuardMember{}, Counters: map[string]int64{}}
	for from := 0; ; from += rowsPerPage {
		reply, err := g.send(ctx, inspectScript, []any{from, rowsPerPage})
		if err != nil {
			return api.Guard{}, err
		}
		if reply == nil {
			return api.Guard{}, fmt.Errorf("guard %s: %w", g.name, ErrUnknownGuard)
		}
		n, err := readPage(&view, reply, from == 0)
		if err != nil {
			return api.Guard{}, fmt.Errorf("guard %s: %w", g.name, err)
		}
		if n < rowsPerPage {
			return view, nil
		}
	}
}

// readPage adds one page, a reply of the script inspect, to v, and returns how many members it has.
// first says that it is the first page, from which the state of the queue is read.
func readPage(v *api.Guard, reply any, first bool) (int, error) {
	r := inspectScript.Reply(reply)
	head, sizes, members, leases, waiters := readHead(r.List()), r.List(), r.List(), r.List(), r.List()
	at := r.Number()
	v.Rev, v.Spec, v.Counters = head.rev, head.spec, head.counters
	wall := func(micros int64) *time.Time {
		if micros == 0 {
			return nil
		}
		t := time.UnixMicro(micros - head.offset)
		return &t
	}
	if first {
		for range 4 {
			_ = sizes.Number()
		}
		v.Queue.Length = sizes.Number()
		if waiters.More() {
			row := waiters.List()
			_, _ = row.Text(), row.Text()
			_, deadline, _ := strings.Cut(row.Text(), "|")
			ends, _ := strconv.ParseInt(deadline, 10, 64) // 0 for damaged text
			v.Queue.OldestMS = max(0, v.Spec.MaxWaitMS-max(0, ends-at/1000))
		}
	}
	n := 0
	for _, list := range []*call.Reply{sizes, leases, waiters} {
		list.Skip()
	}
	for members.More() {
		row := members.List()
		m := api.GuardMember{
			ID: row.Text(), State: row.Text(), Breaker: breakerNames[row.Text()], Failures: row.Number(),
		}
		switch openUntil := row.Number(); {
		case m.Breaker != "open":
		case openUntil > at:
			m.OpenUntil = wall(openUntil)
		default:
			m.Breaker = breakerNames["H"] // its time is over, so the next call is a probe
		}
		m.Held = row.Number()
		if left := row.Number(); left >= 0 {
			m.Left = &left
		}
		due := row.Number()
		if m.State == "cooling" && due <= at {
			m.State, due = "free", 0 // the next call lends it
		}
		m.NextAt, m.LastUsedAt, m.Uses = wall(due), wall(row.Number()), row.Number()
		row.Skip() // what the script needs of a breaker and a limit
		v.Members = append(v.Members, m)
		n++
	}
	return n, r.Err()
}

// guardHead has those fields of a guard's hash that Inspect and List use.
type guardHead struct {
	rev, offset int64
	spec        api.GuardSpec
	counters    map[string]int64
}

func readHead(fields *call.Reply) guardHead {
	head := guardHead{counters: map[string]int64{}}
	for _, name := range counterNames {
		head.counters[name] = 0
	}
	for fields.More() {
		name, value := fields.Text(), fields.Text()
		n, _ := strconv.ParseInt(value, 10, 64) // 0 for text
		switch {
		case name == "rev":
			head.rev = n
		case name == "spec":
			head.spec = readSpec(value)
		case name == "offset":
			head.offset = n
		case slices.Contains(counterNames, name):
			head.counters[name] = n
		}
	}
	return head
}

func readSpec(text string) api.GuardSpec {
	parts := strings.Split(text, "|")
	n := func(i int) int64 {
		if i >= len(parts) {
			return 0
		}
		v, _ := strconv.ParseInt(parts[i], 10, 64) // 0 for an empty field
		return v
	}
	return api.GuardSpec{
		Limiter: parts[0], Permits: n(1), WindowMS: n(2), Burst: n(3), Failures: n(4), OpenForMS: n(5), Successes: n(6),
		Concurrency: n(7), LeaseMS: n(8), MaxWaitMS: n(9), MaxQueue: n(10),
	}
}

// Action is what an operator does with a member.
type Action string

// The actions of Control. There is one more, Open: it opens the member's breaker for as long as the
// breaker's policy says.
const (
	Disable      Action = "disable"   // no new lease; leases that are out run on
	Enable       Action = "enable"    // ends Disable
	CloseBreaker Action = "close"     // closes the breaker
	TakeBack     Action = "take-back" // ends the member's leases; the holders learn it up to a third of a lease later
)

// Actions are all actions.
var Actions = []Action{Disable, Enable, Open, CloseBreaker, TakeBack}

// operations holds the methods of Client by which operators read and change any guard by its name.
type operations struct{ c *Client }

// Control carries out an operator's action on one member of a guard. guard is KIND/NAME, for
// example pool/smtp; a NAME alone is that of a pool. Guards that are not pools have one member,
// "1". A repeated Open begins the breaker's time again, and a repeated TakeBack also ends leases
// that were granted since; other repeated actions change nothing. When Redis is away, Control
// returns ErrUnavailable, whatever the guard's outage policy.
//
// Further errors: ErrUnknownGuard, ErrUnknownMember, ErrNoBreaker when the member has no breaker to
// open or close, and ErrInvalid.
func (o operations) Control(ctx context.Context, guard, member string, do Action) error {
	g, err := o.named(guard)
	if err != nil {
		return err
	}
	if err := checkMember(member); err != nil {
		return fmt.Errorf("guard %s: %w", guard, err)
	}
	if g.kind == kindLimiter {
		return fmt.Errorf("guard %s: a limiter has no members: %w", guard, ErrUnknownMember)
	}
	if !slices.Contains(Actions, do) {
		return fmt.Errorf("guard %s: %w", guard,
			invalid("action %.40q: must be disable, enable, open, close or take-back", string(do)))
	}
	again := false // take-back goes on behind the leases that earlier calls have looked at
	for from := int64(0); ; {
		reply, err := g.send(ctx, controlScript, []any{member, string(do), from})
		if err != nil {
			return err
		}
		r := controlScript.Reply(reply)
		verdict, next := r.Code("OK", "UNKNOWN", "REFUSED"), r.Number()
		switch {
		case r.Err() != nil:
			return fmt.Errorf("guard %s: %w", guard, r.Err())
		case verdict == "UNKNOWN" && again:
			return nil // the member was retired, and its last lease has ended meanwhile
		case verdict == "UNKNOWN":
			if known, err := g.isDeclared(ctx); err == nil && !known {
				return fmt.Errorf("guard %s: %w", guard, ErrUnknownGuard)
			}
			return fmt.Errorf("guard %s: member %s: %w", guard, member, ErrUnknownMember)
		case verdict == "REFUSED":
			return fmt.Errorf("guard %s: member %s: %s: %w", guard, member, do, ErrNoBreaker)
		case next < 0:
			return nil
		}
		from, again = next, true
	}
}

// Kinds lists the kinds of guards: the first parts of the names KIND/NAME.
var Kinds = []string{kindPool, kindBreaker, kindLock, kindSemaphore, kindLimiter, kindKey}

// ParseName splits the name of a guard into its kind and the rest: KIND/NAME, key/NAME/KEY, or a
// NAME alone, which is that of a pool. ok is false for any other text.
func ParseName(name string) (kind, rest string, ok bool) {
	kind, rest, found := strings.Cut(name, "/")
	if !found {
		kind, rest = kindPool, name
	}
	parts := []string{rest}
	if kind == kindKey {
		parts = strings.SplitN(rest, "/", 2)
	}
	ok = slices.Contains(Kinds, kind) && (kind != kindKey || len(parts) == 2)
	for _, part := range parts {
		ok = ok && validID(part)
	}
	return kind, rest, ok
}

// named returns a guard by the name that operators use, as a new object, which no other call
// shares. It does not ask Redis whether the guard exists.
func (o operations) named(name string) (*shared, error) {
	kind, rest, ok := ParseName(name)
	if !ok {
		return nil, invalid("guard %.300q: must be NAME or KIND/NAME, where KIND is pool, breaker, lock, semaphore, "+
			"limiter or key (key/NAME/KEY)", name)
	}
	return newShared(o.c, kind, rest), nil
}
