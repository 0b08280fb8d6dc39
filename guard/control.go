package guard

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

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
var Kinds = []string{kindPool, kindBreaker, kindLock, kindSemaphore, kindKey}

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
		return nil, invalid("guard %.300q: must be NAME or KIND/NAME, where KIND is pool, breaker, lock, semaphore "+
			"or key (key/NAME/KEY)", name)
	}
	return newShared(o.c, kind, rest), nil
}
