package cli

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/process/demo"
)

func newDemo(r *Root) *cobra.Command {
	var o demo.Options
	var stay bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Send e-mails of some tenants to a local sink, through all roles in this process",
		Long: "Run all roles in this process and send e-mails through them, one group for each tenant. The mail\n" +
			"server is a sink on this machine, so no e-mail leaves it. At the end the data is audited.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case o.Tenants < 1:
				return usagef("--tenants %d: must be at least 1", o.Tenants)
			case o.Jobs < 1:
				return usagef("--jobs %d: must be at least 1", o.Jobs)
			case o.Jobs < o.Tenants:
				return usagef("--jobs %d --tenants %d: each tenant needs at least one job; give --tenants %[1]d",
					o.Jobs, o.Tenants)
			}
			if err := checkDev(cmd.Context(), o.RedisURL, o.Addr); err != nil {
				return err
			}
			r.noteUnreachable(cmd.Context(), "demo", o.RedisURL)
			o.Environ, o.Log = append([]string{"BULKACTION_LOG_LEVEL=warn", "BULKACTION_LOG_FORMAT=text"},
				os.Environ()...), r.Err
			if !r.JSON {
				redis := "an embedded Redis, whose data is lost at the end"
				if o.RedisURL != "" {
					redis = "the given Redis"
				}
				r.Notef("Sending %s of %s by SMTP to a sink on this machine, on %s.",
					counted(int64(o.Jobs), "e-mail"), counted(int64(o.Tenants), "tenant"), redis)
				if !r.IsTerminal {
					r.Notef("Progress is shown only on a terminal; the result follows at the end.")
				}
			}
			bars := r.newProgress()
			o.Progress = func(groups []api.Group) {
				for _, g := range groups {
					bars.showGroup(g.Tenant, g)
				}
			}
			shown := false
			if stay {
				o.Stay = func(result demo.Result, address string) {
					bars.stop()
					shown = true
					_ = r.showDemo(result)
					r.Notef("The roles keep running at %s until interrupted. Try: bulkaction --api %s status %s",
						address, address, result.Groups[0].ID)
					if servesConsole() {
						r.Notef("Console at %s%s", address, consolePath)
					}
					<-cmd.Context().Done()
				}
			}
			result, err := demo.Run(cmd.Context(), o)
			bars.stop()
			if err != nil {
				return err
			}
			if !shown {
				if err := r.showDemo(result); err != nil {
					return err
				}
			}
			switch {
			case !result.Audit.OK:
				return fmt.Errorf("the audit found %d violations: run the demo with --redis-url and then "+
					"`bulkaction audit`",
					len(result.Audit.Violations))
			case result.Failed > 0:
				return &failedJobsError{failed: result.Failed}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Jobs, "jobs", 10_000, "number of e-mails")
	f.IntVar(&o.Tenants, "tenants", 3, "number of tenants, each with one group")
	f.StringVar(&o.RedisURL, "redis-url", "", "Redis to use instead of the embedded one")
	f.StringVar(&o.Addr, "addr", "127.0.0.1:0", "address of the API; port 0 is a free one")
	f.BoolVar(&stay, "stay", false, "keep the roles running afterwards until interrupted")
	return cmd
}

// showDemo prints the result.
func (r *Root) showDemo(d demo.Result) error {
	if r.JSON {
		return r.Print(d)
	}
	t := newTable(r.Out)
	t.row("TENANT", "GROUP", "STATUS", "DONE", "FAILED")
	for _, g := range d.Groups {
		t.row(g.Tenant, g.ID, g.Status, thousands(g.Done), thousands(g.Failed))
	}
	if err := t.flush(); err != nil {
		return err
	}
	audit := "clean"
	if !d.Audit.OK {
		audit = fmt.Sprintf("%d violations", len(d.Audit.Violations))
	}
	throttles := ""
	if d.ThrottlesPerJob > 0 {
		throttles = fmt.Sprintf(" %.2f throttles a job,", d.ThrottlesPerJob)
	}
	_, err := fmt.Fprintf(r.Out,
		"\n%s of %s e-mails done in %.1f s (%s a second), %s received by the sink,%s audit %s\n",
		thousands(d.Done), thousands(d.Jobs), d.ElapsedSeconds, thousands(int64(d.JobsPerSecond)),
		thousands(d.SinkReceived), throttles, audit)
	return err
}
