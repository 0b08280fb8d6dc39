package cli

import (
	"context"
	"fmt"
	"iter"
	"math"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func newTenant(r *Root) *cobra.Command {
	known := func(ctx context.Context, a *client.API, tenant string) bool {
		_, err := a.Tenant(ctx, tenant)
		return !isNotFound(err)
	}
	return parentCommand("tenant", "List, show, configure, pause and resume tenants",
		newTenantLs(r), newTenantShow(r), newTenantSet(r), newTenantErase(r),
		newPause(r, "tenant", (*client.API).PauseTenant, known,
			"Tenant %s is unknown: it has neither groups nor settings."),
		newResume(r, "tenant", (*client.API).ResumeTenant))
}

func newTenantLs(r *Root) *cobra.Command {
	var filter client.TenantFilter
	var sort string
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the tenants that have groups or settings, or are paused",
		Long: "List the tenants that have groups or settings, or are paused. A group without a tenant is its own\n" +
			"tenant: without --all, such a tenant is listed only if it has settings or is paused.\n\n" +
			"--sort backlog lists the active tenants with the most unfinished jobs, at most 100. Their figures are\n" +
			"at most about 30 s old.",
		Args: func(cmd *cobra.Command, args []string) error {
			if sort != "" && sort != "backlog" {
				return usagef("--sort %s: must be backlog", sort)
			}
			if sort != "" && filter.Groups {
				return usagef("--sort and --all exclude each other")
			}
			return cobra.NoArgs(cmd, args)
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			tenants, none := a.Tenants(ctx, filter), "No tenants found."
			if sort != "" {
				tenants, none = busiestTenants(ctx, r, a), "" // it says what there is
			}
			return printLines(r, tenants, &columns[api.Tenant]{
				none:   none,
				format: "%-24v %-8v %10v %8v %12v %12v %8v",
				head:   []any{"TENANT", "STATE", "RPS", "WEIGHT", "UNFINISHED", "NON-READY", "PER SEC"},
				cells: func(t api.Tenant) []any {
					return []any{
						t.ID, tenantState(t), orShare(t.RPS), t.Weight, thousands(t.Unfinished), thousands(t.NonReady),
						t.JobsPerSecond,
					}
				},
			})
		}),
	}
	cmd.Flags().BoolVar(&filter.Groups, "all", false, "list the tenants of groups without a tenant, too")
	cmd.Flags().StringVar(&sort, "sort", "",
		"backlog: the active tenants with the most unfinished jobs (default: all, by id)")
	return cmd
}

// busiestTenants iterates over the busiest tenants. It first prints the time at which the watchers
// found them, or that none has looked yet.
func busiestTenants(ctx context.Context, r *Root, a *client.API) iter.Seq2[api.Tenant, error] {
	return everyPage(func(string) ([]api.Tenant, string, error) {
		list, err := a.BusiestTenants(ctx)
		switch {
		case err != nil:
		case list.AsOf == nil:
			r.Notef("No watcher has looked at the tenants yet.")
		default:
			r.Notef("As of %s.", formatTime(*list.AsOf))
		}
		return list.Tenants, "", err
	})
}

func newTenantShow(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "show TENANT",
		Short: "Show a tenant: settings, current window, waiting jobs, congestion",
		Args:  requireID("tenant"),
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			t, err := a.Tenant(ctx, args[0])
			if isNotFound(err) {
				return withHint(err,
					"A tenant is known once it has a group or settings (`bulkaction tenant set %s --rps N`). "+
						"`bulkaction tenant ls` lists all.", args[0])
			}
			if err != nil {
				return err
			}
			return r.showTenant(ctx, a, t)
		}),
	}
}

type tenantFlags struct {
	rps, weight  float64
	basePriority int64
	inFlight     int64
	clear        bool
}

func newTenantSet(r *Root) *cobra.Command {
	var s tenantFlags
	cmd := &cobra.Command{
		Use:   "set TENANT [--rps N] [--in-flight N] [--weight W] [--base-priority B] [--clear]",
		Short: "Change a tenant's limits, weight or base priority, effective at once",
		Long: "Change a tenant's limits, weight or base priority, effective at once. Settings without a flag stay\n" +
			"unchanged; with --clear they get their defaults. The tenant need not have a group yet.",
		Example: "  bulkaction tenant set acme --rps 50 --weight 2\n  bulkaction tenant set acme --in-flight 20\n  bulkaction tenant set acme --clear",
		Args:    requireID("tenant"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := s.check(cmd); err != nil {
				return err
			}
			a, err := r.API()
			if err != nil {
				return err
			}
			t, err := a.PatchTenant(cmd.Context(), args[0], s.patch(cmd))
			if err != nil {
				return err
			}
			if cmd.Flags().Changed("rps") {
				r.noteWholePermits(s.rps, t.Window.WindowMS)
			}
			return r.showTenant(cmd.Context(), a, t)
		},
	}
	f := cmd.Flags()
	f.Float64Var(&s.rps, "rps", 0, "its own limit, jobs a second (default: a share of the global limit); a window\n"+
		"of BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW has whole permits, at least 1")
	f.Float64Var(&s.weight, "weight", 1, "weight of its share, 0.001 to 1000")
	f.Int64Var(&s.basePriority, "base-priority", 0,
		"added to the base priority of its groups, with BULKACTION_FAIR_QUEUE_POLICY=priority")
	f.Int64Var(&s.inFlight, "in-flight", 0, "how many of its jobs may be ready or running at once (default: no limit)")
	f.BoolVar(&s.clear, "clear", false, "reset the settings without a flag to their defaults")
	return cmd
}

// check refuses values that the server would refuse.
func (s *tenantFlags) check(cmd *cobra.Command) error {
	const most = 1_000_000_000_000_000
	set := cmd.Flags().Changed
	switch {
	case !set("rps") && !set("weight") && !set("base-priority") && !set("in-flight") && !s.clear:
		return usagef("nothing to set: give --rps, --in-flight, --weight, --base-priority or --clear")
	case set("rps") && !(s.rps > 0 && s.rps <= 1e9):
		return usagef("--rps %s: must be above 0 and at most 1,000,000,000; to stop a tenant, use `tenant pause`",
			plainNumber(s.rps))
	case !(s.weight >= 0.001 && s.weight <= 1000):
		return usagef("--weight %s: must be 0.001 to 1000", plainNumber(s.weight))
	case s.basePriority < -most || s.basePriority > most:
		return usagef("--base-priority %d: must be -1e15 to 1e15", s.basePriority)
	case set("in-flight") && (s.inFlight < 1 || s.inFlight > 1e6):
		return usagef("--in-flight %d: must be 1 to 1,000,000", s.inFlight)
	}
	return nil
}

// patch returns the change of the settings.
func (s *tenantFlags) patch(cmd *cobra.Command) api.TenantPatch {
	f := cmd.Flags()
	return api.TenantPatch{
		RPS:          changeOf(f, "rps", s.rps, s.clear),
		Weight:       changeOf(f, "weight", s.weight, s.clear),
		BasePriority: changeOf(f, "base-priority", s.basePriority, s.clear),
		InFlight:     changeOf(f, "in-flight", s.inFlight, s.clear),
	}
}

// noteWholePermits prints the tenant's real limit if --rps is not a whole number of permits in a
// window: a window has whole permits, rounded down, and at least 1.
func (r *Root) noteWholePermits(rps float64, windowMS int64) {
	permits := perWindow(rps, windowMS)
	if exact := rps * float64(windowMS) / 1000; windowMS == 0 || math.Abs(exact-float64(permits)) < 1e-6 {
		return
	}
	r.Notef("A window has whole permits, at least 1: --rps %s allows %s in each window of %d ms, "+
		"which is %.4g a second. A longer BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW is more exact.",
		plainNumber(rps), thousands(permits), windowMS, float64(permits)*1000/float64(windowMS))
}

func (r *Root) showTenant(ctx context.Context, a *client.API, tenant api.Tenant) error {
	return r.show(tenant, func(t table) {
		globalLimit := tenant.Window.GlobalLimit
		// if this call fails, only the partition's part is shown
		if stats, err := a.Stats(ctx); err == nil && globalLimit > 0 && stats.Partitions > 1 {
			globalLimit = perWindow(float64(stats.RateLimit.RPS), tenant.Window.WindowMS)
		}
		tenantRows(t, tenant, globalLimit)
	})
}

// perWindow returns the whole permits of a window, at least 1, for a limit in permits a second.
func perWindow(rps float64, windowMS int64) int64 {
	return max(1, int64(rps*float64(windowMS)/1000+1e-6))
}

// tenantRows adds all data of a tenant to the table. globalLimit is the global limit in permits a
// window, of all partitions; of the tenant's partition alone if that is not known.
func tenantRows(t table, n api.Tenant, globalLimit int64) {
	t.row("Tenant", n.ID)
	t.row("State", tenantState(n))
	t.row("Limit a second", orShare(n.RPS))
	t.row("In flight", inFlightText(n.InFlight, n.InFlightNow))
	t.row("Weight", n.Weight)
	base := "0"
	if n.BasePriority != nil {
		base = thousands(*n.BasePriority)
	}
	t.row("Base priority", base)
	t.row("Unfinished jobs", thousands(n.Unfinished))
	t.row("Non-ready", thousands(n.NonReady))
	t.row("Ended a second", n.JobsPerSecond)
	t.row("Active tenants", thousands(n.ActiveTenants))

	w := n.Window
	t.section(fmt.Sprintf("WINDOW OF %d MS", w.WindowMS), "USED", "OF")
	t.row("tenant", thousands(w.Used), orNone(w.Limit))
	if globalLimit > w.GlobalLimit {
		t.row("its partition", thousands(w.GlobalUsed),
			fmt.Sprintf("%s, its part of %s for all tenants", thousands(w.GlobalLimit), thousands(globalLimit)))
	} else {
		t.row("all tenants", thousands(w.GlobalUsed), orNone(w.GlobalLimit))
	}
	if w.NextPermitAt != nil {
		t.row("next permit", formatTime(*w.NextPermitAt))
	}

	c := n.Congestion
	t.section("CONGESTION", "VALUE")
	t.row("throttles", thousands(c.Throttles))
	t.row("returns", thousands(c.Returns))
	t.row("mean wait", formatSeconds(c.MeanWaitMS/1000))
	t.row("longest wait", formatSeconds(float64(c.LongestWaitMS)/1000))
	if c.LastAt != nil {
		t.row("last", formatTime(*c.LastAt))
	}
}

func tenantState(t api.Tenant) string {
	switch {
	case t.Paused:
		return "paused"
	case t.Active:
		return "active"
	}
	return "idle"
}

func orShare(rps *float64) string {
	if rps == nil {
		return "share"
	}
	return plainNumber(*rps)
}

func orNone(limit int64) string {
	if limit == 0 {
		return "no limit"
	}
	return thousands(limit)
}

// formatSeconds formats a duration for a table.
func formatSeconds(s float64) string {
	if s < 60 {
		return plainNumber(math.Round(s*10)/10) + " s"
	}
	return formatDuration(s)
}
