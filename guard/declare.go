package guard

import (
	"context"
	"fmt"
)

// declare stores the spec and the members of a pool in Redis, piece by piece. If Redis has a
// declaration with a higher Rev, or with the same Rev and another spec, declare logs a warning and
// returns nil.
func (g *shared) declare(ctx context.Context) error {
	spec, _, err := g.settings()
	if err != nil {
		return err
	}
	packed, rev, members := spec.pack(0), spec.Rev, spec.Members
	for {
		n := min(len(members), mostMembersPerCall)
		piece, rest := members[:n], members[n:]
		last := 0
		if len(rest) == 0 {
			last = 1
		}
		args := append(make([]any, 0, 4+2*n), rev, packed, last, n)
		for _, m := range piece {
			args = append(args, m.ID, m.pack())
		}
		reply, err := g.send(ctx, declareScript, args)
		if err != nil {
			return fmt.Errorf("declare pool: %w", err)
		}
		r := declareScript.Reply(reply)
		stored, result, more := r.Number(), r.Code("SAME", "CHANGED", "OLDER"), r.Flag()
		if err := r.Err(); err != nil {
			return fmt.Errorf("declare pool %s: %w", g.name, err)
		}
		rev = stored
		if result == "OLDER" {
			g.c.cfg.logger.Warn("guard: a newer declaration of the pool is in use", "guard", g.name, "rev", stored)
			return nil
		}
		if more {
			members = nil // the same declaration again, without members, retires the others
			continue
		}
		if last == 1 {
			return nil
		}
		members = rest
	}
}

// isDeclared says whether Redis knows the guard, of any kind.
func (g *shared) isDeclared(ctx context.Context) (bool, error) {
	reply, err := g.send(ctx, inspectScript, []any{0, 0})
	return reply != nil, err
}
