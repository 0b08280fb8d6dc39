package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
)

func newLimit(r *Root) *cobra.Command {
	return parentCommand("limit", "Show, set and reset the limits of all jobs together",
		newLimitShow(r), newLimitSet(r), newLimitReset(r), newLimitResetCounting(r))
}

func newLimitShow(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "show",
		Short: "Show the limits of all jobs together and of types: configured, in effect, and since when",
		Args:  cobra.NoArgs,
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			return r.showLimits(a.Limits(ctx))
		}),
	}
}

func newLimitSet(r *Root) *cobra.Command {
	var rps int64
	var share string
	var first, longest time.Duration
	cmd := &cobra.Command{
		Use:   "set [--rps N] [--share static|elastic] [--default-backoff D] [--max-backoff D]",
		Short: "Change the limits of all jobs together while processes run",
		Long: "Change the limits of all jobs together while processes run. Settings without a flag stay unchanged.\n" +
			"A value holds for all processes, also for those that start later, until `bulkaction limit reset`.",
		Example: "  bulkaction limit set --rps 5000\n  bulkaction limit set --default-backoff 2s --max-backoff 2m",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f := cmd.Flags()
			p := api.GlobalPatch{
				RPS:            changeOf(f, "rps", rps, false),
				Share:          changeOf(f, "share", share, false),
				DefaultBackoff: changeOf(f, "default-backoff", first.String(), false),
				MaxBackoff:     changeOf(f, "max-backoff", longest.String(), false),
			}
			if p == (api.GlobalPatch{}) {
				return usagef("nothing to set: give --rps, --share, --default-backoff or --max-backoff")
			}
			return r.patchLimits(cmd.Context(), p)
		},
	}
	f := cmd.Flags()
	f.Int64Var(&rps, "rps", 0, "permits a second of all jobs, 0 to 1e9; 0: no limit")
	f.StringVar(&share, "share", "", "static or elastic: whether tenants may borrow what others leave")
	f.DurationVar(&first, "default-backoff", 0, "wait before the first retry, 1ms to 24h")
	f.DurationVar(&longest, "max-backoff", 0, "longest wait before a retry, 1ms to 24h")
	return cmd
}

func newLimitReset(r *Root) *cobra.Command {
	var rps, share, first, longest bool
	cmd := &cobra.Command{
		Use:   "reset [--rps] [--share] [--default-backoff] [--max-backoff]",
		Short: "Let the values of the environment hold again",
		Long: "Let the values of the environment hold again: those of the settings whose flags are given, or\n" +
			"of all four without a flag. The limits of types stay: see `bulkaction type set`.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f := cmd.Flags()
			all := !f.Changed("rps") && !f.Changed("share") && !f.Changed("default-backoff") && !f.Changed("max-backoff")
			return r.patchLimits(cmd.Context(), api.GlobalPatch{
				RPS:            api.Change[int64]{Given: all || rps},
				Share:          api.Change[string]{Given: all || share},
				DefaultBackoff: api.Change[string]{Given: all || first},
				MaxBackoff:     api.Change[string]{Given: all || longest},
			})
		},
	}
	f := cmd.Flags()
	f.BoolVar(&rps, "rps", false, "reset the permits a second")
	f.BoolVar(&share, "share", false, "reset how tenants share them")
	f.BoolVar(&first, "default-backoff", false, "reset the wait before the first retry")
	f.BoolVar(&longest, "max-backoff", false, "reset the longest wait before a retry")
	return cmd
}

func newLimitResetCounting(r *Root) *cobra.Command {
	var redis redisFlags
	cmd := &cobra.Command{
		Use:   "reset-counting",
		Short: "Let the next process say by which limiter, and in windows of what length, permits are counted",
		Long: "Let the next process that starts say by which limiter, and in windows of what length, permits are\n" +
			"counted: BULKACTION_BACKPRESSURE_LIMITER and BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW. Processes\n" +
			"with other values than the installation's refuse to start. Stop all processes before: the command\n" +
			"refuses while one is alive.",
		Args: cobra.NoArgs,
	}
	redis.add(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := redis.check(); err != nil {
			return err
		}
		ctx := cmd.Context()
		conn, err := redis.connect(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }() // no command is running any more
		space, err := redis.installation(ctx, conn)
		if err != nil {
			return err
		}
		alive, err := presence.Configured(ctx, conn, space)
		if err != nil {
			return err
		}
		if len(alive) > 0 {
			return fmt.Errorf("%d processes are alive, such as the %s %s: stop all of them first", len(alive), alive[0].Role, alive[0].ID)
		}
		if err := ledger.ForgetMeter(ctx, conn.Cmd, space); err != nil {
			return err
		}
		r.Notef("The next process that starts says how permits are counted.")
		return nil
	}
	return cmd
}

func (r *Root) patchLimits(ctx context.Context, p api.GlobalPatch) error {
	a, err := r.API()
	if err != nil {
		return err
	}
	return r.showLimits(a.PatchLimits(ctx, api.LimitsPatch{Global: p}))
}

// changeOf returns the change that a flag makes: to its value if it was given, otherwise to the
// default if clearAll is set, and otherwise none.
func changeOf[T any](f *pflag.FlagSet, flag string, value T, clearAll bool) (c api.Change[T]) {
	switch {
	case f.Changed(flag):
		return api.SetTo(value)
	case clearAll:
		return api.ToDefault[T]()
	}
	return c
}

func (r *Root) showLimits(l api.Limits, err error) error {
	if err != nil {
		return err
	}
	r.notePending(l)
	if len(l.ProcessesThatDiffer) > 0 {
		r.Notef("Warning: the environments of the processes differ. Where the source is the environment, rps and share of " +
			"the leader among the fetchers are in effect, and each worker uses its own backoffs. Give all the same values.")
	}
	return r.show(l, func(t table) { limitsRows(t, l) })
}

// notePending says which partitions have not taken over the last change, and what to do.
func (r *Root) notePending(l api.Limits) {
	if len(l.PendingPartitions) == 0 {
		return
	}
	noun := "partition"
	if len(l.PendingPartitions) > 1 {
		noun += "s"
	}
	list := strings.ReplaceAll(strings.Trim(fmt.Sprint(l.PendingPartitions), "[]"), " ", ", ")
	r.Notef("The last change is stored, but not in effect yet in %s %s. It takes effect when a fetcher reaches them: if "+
		"`bulkaction stats` shows none, start one (`bulkaction fetcher`). `bulkaction limit show` says when it did.", noun, list)
}

func limitsRows(t table, l api.Limits) {
	t.row("Limiter", fmt.Sprintf("%s, window of %d ms", l.Limiter, l.WindowMS))
	if l.AppliedAt != nil {
		t.row("Last change in effect since", formatTime(*l.AppliedAt))
	}
	t.section("SETTING", "CONFIGURED", "EFFECTIVE", "SOURCE")
	g := l.Global
	t.row("rps", orNone(g.RPS.Configured), orNone(g.RPS.Effective), g.RPS.Source)
	t.row("share", g.Share.Configured, g.Share.Effective, g.Share.Source)
	t.row("default-backoff", g.DefaultBackoff.Configured, g.DefaultBackoff.Effective, g.DefaultBackoff.Source)
	t.row("max-backoff", g.MaxBackoff.Configured, g.MaxBackoff.Effective, g.MaxBackoff.Source)
	if len(l.Types) > 0 {
		t.section("TYPE", "RPS", "IN FLIGHT", "OF AT MOST")
		for _, name := range slices.Sorted(maps.Keys(l.Types)) {
			y := l.Types[name]
			t.row(name, orNoLimit(y.RPS), thousands(y.InFlightNow), orNoLimit(y.InFlight))
		}
	}
	if len(l.ProcessesThatDiffer) > 0 {
		t.section("PROCESS", "ROLE", "RPS", "SHARE", "DEFAULT-BACKOFF", "MAX-BACKOFF")
		for _, p := range l.ProcessesThatDiffer {
			t.row(p.ID, p.Role, orNone(p.RPS), p.Share, p.DefaultBackoff, p.MaxBackoff)
		}
	}
}

func orNoLimit(limit *int64) string {
	if limit == nil {
		return "no limit"
	}
	return thousands(*limit)
}

func newTypeShow(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "show TYPE",
		Short: "Show the limits of a type",
		Args:  requireID("type"),
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			l, err := a.Limits(ctx)
			return r.showType(args[0], l, err)
		}),
	}
}

func newTypeScale(r *Root) *cobra.Command {
	drain := api.DefaultDrain
	cmd := &cobra.Command{
		Use:   "scale TYPE[,TYPE...] [--drain 1m]",
		Short: "Show how many slots of workers the jobs of a type, or of several together, could use",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return requireID("type")(cmd, args)
			}
			for _, typ := range strings.Split(args[0], ",") {
				if err := checkID("type", typ); err != nil {
					return err
				}
			}
			return nil
		},
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.Scale, error) {
			if drain < api.MinDrain || drain > api.MaxDrain {
				return api.Scale{}, usagef("drain: must be a time from %s to %s, such as 60s", api.MinDrain, api.MaxDrain)
			}
			s, err := a.Scale(ctx, drain, args...)
			if err == nil && s.Backlog == 0 && s.Runnable == 0 && s.SlotsNow == 0 {
				r.Notef("No job waits and no worker serves this type.")
			}
			return s, err
		}, func(t table, s api.Scale) {
			t.row("Type", s.Type)
			t.row("Backlog", thousands(s.Backlog))
			t.row("Runnable", thousands(s.Runnable))
			t.row("Mean run time", time.Duration(s.MeanRunMS*float64(time.Millisecond)).Round(time.Microsecond))
			t.row("Bound by limits", yesNo(s.RateBound))
			t.row("Slots now", thousands(s.SlotsNow))
			t.row("Slots wanted", thousands(s.SlotsWanted))
			if sample := s.Sample; sample != nil {
				t.row("Error", fmt.Sprintf("±%.0f%%: %s of %s tenants were looked at", 100*sample.Error, thousands(sample.LookedAt), thousands(sample.Tenants)))
			}
		}),
	}
	cmd.Flags().DurationVar(&drain, "drain", drain, "time within which the jobs that wait should end")
	return cmd
}

func newTypeSet(r *Root) *cobra.Command {
	var rps, inFlight int64
	var clearAll bool
	cmd := &cobra.Command{
		Use:   "set TYPE [--rps N] [--in-flight N] [--clear]",
		Short: "Limit a type over all processes while they run",
		Long: "Limit a type over all processes while they run: how many of its jobs start a second, and how many may\n" +
			"be ready or running at once. Limits without a flag stay unchanged; with --clear they end.",
		Example: "  bulkaction type set HTTP --rps 50 --in-flight 20\n  bulkaction type set HTTP --clear",
		Args:    requireID("type"),
		RunE: func(cmd *cobra.Command, args []string) error {
			f := cmd.Flags()
			p := api.TypePatch{
				RPS: changeOf(f, "rps", rps, clearAll), InFlight: changeOf(f, "in-flight", inFlight, clearAll),
			}
			if p == (api.TypePatch{}) {
				return usagef("nothing to set: give --rps, --in-flight or --clear")
			}
			a, err := r.API()
			if err != nil {
				return err
			}
			l, err := a.PatchType(cmd.Context(), args[0], p)
			return r.showType(args[0], l, err)
		},
	}
	f := cmd.Flags()
	f.Int64Var(&rps, "rps", 0, "permits a second of its jobs, 1 to 1e9")
	f.Int64Var(&inFlight, "in-flight", 0, "how many of its jobs may be ready or running at once, 1 to 1e6")
	f.BoolVar(&clearAll, "clear", false, "end the limits without a flag")
	return cmd
}

// typeLimits is what `type show` and `type set` print of an answer with all limits.
type typeLimits struct {
	Type string `json:"type"`
	api.TypeLimits
	AppliedAt         *time.Time `json:"applied_at,omitempty"`
	PendingPartitions []int      `json:"pending_partitions,omitempty"`
}

func (r *Root) showType(name string, l api.Limits, err error) error {
	if err != nil {
		return err
	}
	r.notePending(l)
	y := typeLimits{name, l.Types[name], l.AppliedAt, l.PendingPartitions}
	return r.show(y, func(t table) {
		t.row("Type", name)
		t.row("Limit a second", orNoLimit(y.RPS))
		t.row("In flight", inFlightText(y.InFlight, y.InFlightNow))
	})
}

// inFlightText returns a bound on jobs in flight, such as "17 of at most 20".
func inFlightText(bound *int64, now int64) string {
	if bound == nil {
		return "no limit"
	}
	return thousands(now) + " of at most " + thousands(*bound)
}
