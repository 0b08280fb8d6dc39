package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/guard"
)

func newGuard(r *Root) *cobra.Command {
	all := []*cobra.Command{newGuardLs(r), newGuardShow(r)}
	for _, action := range []struct {
		do                guard.Action
		done, short, note string
	}{
		{guard.Disable, "disabled", "Stop lending a member; leases that are out run on", ""},
		{guard.Enable, "enabled", "Enable a disabled member", ""},
		{guard.Open, "opened", "Open the circuit breaker of a member, for as long as its policy says", ""},
		{guard.CloseBreaker, "closed", "Close the circuit breaker of a member", ""},
		{guard.TakeBack, "taken back", "End the leases of a member, for example of a holder that hangs",
			"The holders learn it at their next renewal, up to a third of a lease later; until then they go on."},
	} {
		all = append(all, &cobra.Command{
			Use:   string(action.do) + " GUARD [MEMBER]",
			Short: action.short,
			Args: func(_ *cobra.Command, args []string) error {
				_, _, err := guardAndMember(string(action.do), args)
				return err
			},
			RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.GuardAction, error) {
				name, member, err := guardAndMember(string(action.do), args)
				if err != nil {
					return api.GuardAction{}, err
				}
				done, err := a.ControlGuard(ctx, name, member, string(action.do))
				if err == nil && action.note != "" {
					r.Notef("%s", action.note)
				}
				return done, hintGuard(ctx, a, name, err)
			}, func(t table, done api.GuardAction) { t.row(done.Guard, done.Member, action.done) }),
		})
	}
	cmd := parentCommand("guard", "List and show guards; disable, enable and take back their members", all...)
	cmd.Long = "List and show guards: the limits, circuit breakers, pools, locks and queues that processes share.\n" +
		"GUARD is KIND/NAME, for example lock/report; a NAME alone is that of a pool. KIND is pool, breaker,\n" +
		"lock, semaphore, limiter or key (key/NAME/KEY). A limiter has keys and no members; other guards that are\n" +
		"not pools have one member, 1."
	return cmd
}

func newGuardLs(r *Root) *cobra.Command {
	var kind string
	cmd := &cobra.Command{
		Use:   "ls [--kind KIND]",
		Short: "List the guards",
		Args: func(cmd *cobra.Command, args []string) error {
			if kind != "" && !slices.Contains(guard.Kinds, kind) {
				return usagef("--kind %q: must be one of %s", kind, strings.Join(guard.Kinds, ", "))
			}
			return cobra.NoArgs(cmd, args)
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			var all []api.GuardSummary
			for g, err := range a.Guards(ctx, kind) {
				if err != nil {
					return err
				}
				all = append(all, g)
			}
			slices.SortFunc(all, func(a, b api.GuardSummary) int { return cmp.Compare(a.Name, b.Name) })
			all = slices.CompactFunc(all, func(a, b api.GuardSummary) bool { return a.Name == b.Name })
			if !r.JSON {
				if h, err := a.GuardHealth(ctx); err == nil { // a server of an older version has no health
					r.Notef("%s", healthText(h))
				}
			}
			sorted := everyPage(func(string) ([]api.GuardSummary, string, error) { return all, "", nil })
			return printLines(r, sorted, &columns[api.GuardSummary]{
				none: "No guard yet. Guards of your own are listed if you create them with the API's " +
					`BULKACTION_KEY_PREFIX, such as guard.Prefix("bulk-action:").`,
				format: "%-32v %8v %8v %8v %8v %8v %12v %12v %8v",
				head:   []any{"GUARD", "MEMBERS", "FREE", "COOLING", "LEASES", "QUEUE", "GRANTED", "DENIED", "LOST"},
				cells: func(g api.GuardSummary) []any {
					if isLimiter(g.Name) { // it has none of these
						return []any{g.Name, "-", "-", "-", "-", "-", "-", "-", "-"}
					}
					return []any{
						g.Name, thousands(g.Members), thousands(g.Free), thousands(g.Cooling), thousands(g.Leases),
						thousands(g.Queue), thousands(g.Counters["granted"]), thousands(g.Counters["denied"]),
						thousands(g.Counters["lost"]),
					}
				},
			})
		}),
	}
	cmd.Flags().StringVar(&kind, "kind", "", "only guards of this kind; without it, those of all kinds but key, of\n"+
		"which there may be many")
	return cmd
}

func isLimiter(guard string) bool { return strings.HasPrefix(guard, "limiter/") }

// healthText says how the API's process reaches the guards.
func healthText(h api.GuardHealth) string {
	if !h.Redis.Reachable {
		return "Redis does not answer: guards follow their outage policies. " + h.Redis.Error
	}
	memory := "its memory has no limit"
	if h.Redis.MemoryRatio > 0 {
		memory = fmt.Sprintf("its memory is %.0f%% full", h.Redis.MemoryRatio*100)
	}
	if !h.Healthy {
		memory += ". It forgets keys when that is full, and with them limits and leases: set maxmemory-policy to noeviction"
	}
	role := cmp.Or(h.Redis.Role, "role unknown")
	return fmt.Sprintf("Redis (%s) answers in %.1f ms; %s.", role, h.Redis.PingMS, memory)
}

func newGuardShow(r *Root) *cobra.Command {
	keys := false
	cmd := &cobra.Command{
		Use:   "show GUARD [--keys]",
		Short: "Show a guard: its limits, members, queue and counters",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("show needs the name of one guard, got %s", argumentsText(args))
			}
			return checkGuard(args[0])
		},
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.Guard, error) {
			read := a.Guard
			if keys {
				read = a.LimiterKeys
			}
			v, err := read(ctx, args[0])
			return v, hintGuard(ctx, a, args[0], err)
		}, guardRows),
	}
	cmd.Flags().BoolVar(&keys, "keys", false, "of a limiter: also show keys in use, at most 100")
	return cmd
}

func checkGuard(name string) error {
	if _, _, ok := guard.ParseName(name); !ok {
		return usagef("guard %q: must be NAME or KIND/NAME, where KIND is pool, breaker, lock, semaphore, "+
			"limiter or key (key/NAME/KEY)", name)
	}
	return nil
}

// guardAndMember checks and returns the arguments of an action on a guard. Only pools need a
// member: other guards have only member 1, which is the default.
func guardAndMember(action string, args []string) (name, member string, err error) {
	if len(args) < 1 || len(args) > 2 {
		return "", "", usagef("%s needs a guard, and a member if the guard is a pool, got %s",
			action, argumentsText(args))
	}
	if err := checkGuard(args[0]); err != nil {
		return "", "", err
	}
	if len(args) == 2 {
		return args[0], args[1], checkID("member", args[1])
	}
	if kind, _, _ := guard.ParseName(args[0]); kind == "pool" {
		return "", "", usagef("%s needs a member of pool %s; `bulkaction guard show %[2]s` lists them", action, args[0])
	}
	return args[0], "1", nil
}

// hintGuard adds to an error about a guard what to do next.
func hintGuard(ctx context.Context, a *client.API, name string, err error) error {
	refused, ok := errors.AsType[*client.Error](err)
	switch {
	case ok && refused.Status == http.StatusConflict:
		return withHint(err, "Its policy has no breaker. `bulkaction guard show %s` shows the policy; to stop a "+
			"member, use `bulkaction guard disable`.", name)
	case !isNotFound(err):
		return err
	}
	v, lost := a.Guard(ctx, name)
	switch {
	case isNotFound(lost):
		return withHint(err, "A guard is known once a process has used it; all but pools are forgotten some time "+
			"after their last use. Its Prefix must be the API's BULKACTION_KEY_PREFIX. `bulkaction guard ls` lists "+
			"those of all kinds but key, and with --kind key those.")
	case lost != nil || len(v.Members) == 0:
		return err
	}
	return withHint(err, "Guard %s exists; `bulkaction guard show %[1]s` lists its members, for example %s.",
		name, v.Members[0].ID)
}

// guardRows adds all data of a guard to the table.
func guardRows(t table, v api.Guard) {
	t.row("Guard", v.Name)
	if isLimiter(v.Name) {
		t.row("Limit", guardLimitText(v.Spec)+", for each key")
		if len(v.Keys) > 0 {
			t.section("KEY")
		}
		for _, key := range v.Keys {
			t.row(key)
		}
		if v.MoreKeys {
			t.row("…")
		}
		return
	}
	t.row("Declaration", v.Rev)
	t.row("Limit", guardLimitText(v.Spec))
	t.row("Breaker", breakerText(v.Spec))
	t.row("Leases at once", orUnbounded(v.Spec.Concurrency))
	t.row("Lease", formatMS(v.Spec.LeaseMS))
	queue := fmt.Sprintf("%s of at most %s, for at most %s", thousands(v.Queue.Length), thousands(v.Spec.MaxQueue),
		formatMS(v.Spec.MaxWaitMS))
	if v.Queue.Length > 0 {
		queue += ", the first for " + formatMS(v.Queue.OldestMS)
	}
	t.row("Queue", queue)

	t.section("CALLS", "COUNT")
	for _, name := range []string{"granted", "denied", "queued", "expired", "lost", "stale"} {
		t.row(name, thousands(v.Counters[name]))
	}

	t.section("MEMBER", "STATE", "BREAKER", "FAILURES", "LEASES", "PERMITS LEFT", "USES", "LAST USED", "NEXT")
	for _, m := range v.Members {
		left, used, next := "no limit", "never", ""
		if m.Left != nil {
			left = thousands(*m.Left)
		}
		if m.LastUsedAt != nil {
			used = formatTime(*m.LastUsedAt)
		}
		if m.NextAt != nil {
			next = formatTime(*m.NextAt)
		}
		t.row(m.ID, m.State, strings.ReplaceAll(m.Breaker, "_", "-"), m.Failures, m.Held, left, thousands(m.Uses),
			used, next)
	}
}

func guardLimitText(s api.GuardSpec) string {
	switch s.Limiter {
	case "sliding":
		return fmt.Sprintf("%s in any %s", thousands(s.Permits), formatMS(s.WindowMS))
	case "token":
		return fmt.Sprintf("%s per %s, bursts of %s", thousands(s.Permits), formatMS(s.WindowMS), thousands(s.Burst))
	}
	return "none"
}

func breakerText(s api.GuardSpec) string {
	if s.Failures == 0 {
		return "none"
	}
	return fmt.Sprintf("opens after %s failures in a row for %s, closes after %s successes", thousands(s.Failures),
		formatMS(s.OpenForMS), thousands(s.Successes))
}

func orUnbounded(n int64) string {
	if n == 0 {
		return "unbounded"
	}
	return thousands(n)
}

func formatMS(ms int64) string { return (time.Duration(ms) * time.Millisecond).String() }
