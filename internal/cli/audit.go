package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/checkers"
	"github.com/bulkaction/bulkaction/internal/audit/repair"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// auditCommand has the flag values of `bulkaction audit`.
type auditCommand struct {
	root     *Root
	redis    redisFlags
	receipts string
	repair   bool
	last     bool
}

func newAudit(r *Root) *cobra.Command {
	a := &auditCommand{root: r}
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Prove from the data in Redis that no job is lost or counted twice",
		Long: "Prove from the data in Redis that no job is lost or counted twice. The audit compares the counts of\n" +
			"each group with the states of its jobs and with the locations of the jobs. It also checks the members,\n" +
			"leases and queues of guards, and the users, numbers and slots of the waiting room's events, whose\n" +
			"users it does not name. The roles may keep running. The exit code is 1 if a law is violated.\n\n" +
			"--repair sets wrong data right where the right value is certain: it sets counters to the counted\n" +
			"values, moves entries that are not jobs to the list {N}:quarantine, and ends a job that vanished as\n" +
			"failed with code LOST. Then it audits again; the exit code is 1 if violations remain.\n\n" +
			"--receipts also checks that Redis contains what producers were told: it reads a file with one line\n" +
			"{\"group\": \"…\", \"accepted\": n} for each group. It finds groups that Redis has lost or that have\n" +
			"fewer jobs, for example after a failover or with a truncated append-only file. Such a group can be\n" +
			"submitted again safely. A group that has expired (BULKACTION_RETENTION_GROUPS) looks like a lost\n" +
			"one, so keep receipts for a shorter time.\n\n" +
			"--last counts nothing: it asks the API what the watchers have found when they last audited their\n" +
			"partitions, and when that was. The exit code is 1 if a violation is open, or if a partition has no\n" +
			"leader or was not looked at.",
		Args: cobra.NoArgs,
	}
	a.redis.add(cmd.Flags())
	cmd.Flags().BoolVar(&a.repair, "repair", false, "set wrong data right where the right value is certain")
	cmd.Flags().StringVar(&a.receipts, "receipts", "", "file with the answers that producers got; - is standard input")
	cmd.Flags().BoolVar(&a.last, "last", false, "show what the watchers have found last, by the API")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if a.last {
			return a.showLast(cmd)
		}
		return a.run(cmd)
	}
	return cmd
}

// showLast shows what the watchers have found last.
func (a *auditCommand) showLast(cmd *cobra.Command) error {
	if a.repair || a.receipts != "" {
		return usagef("--last excludes --repair and --receipts")
	}
	c, err := a.root.API()
	if err != nil {
		return err
	}
	state, err := c.Audit(cmd.Context())
	if err != nil {
		return err
	}
	if err := a.root.show(state, func(t table) { auditStateRows(t, state) }); err != nil {
		return err
	}
	if !state.OK {
		return errors.New("a violation is open, or a partition has no leader or was not looked at")
	}
	return nil
}

func auditStateRows(t table, state api.AuditState) {
	at := func(at *time.Time) string {
		if at == nil {
			return "never"
		}
		return formatTime(*at)
	}
	t.row("PARTITION", "LEADER", "LOOKED AT", "FULL AUDIT AT")
	for _, p := range state.Partitions {
		t.row(p.Partition, cmp.Or(p.Leader, "none"), at(p.LookedAt), at(p.DeepAt))
	}
	if len(state.Violations) > 0 {
		t.section("LAW", "PARTITION", "GROUP", "JOB", "DETAIL")
		violationRows(t, state.Violations)
	}
}

func violationRows(t table, violations []api.Violation) {
	for _, v := range violations {
		job := ""
		if v.Ordinal != nil {
			job = strconv.FormatInt(*v.Ordinal, 10)
		}
		partition := strconv.Itoa(v.Partition)
		if v.Partition == audit.NoPartition {
			partition = ""
		}
		t.row(v.Law, partition, v.Group, job, v.Detail)
	}
}

func (a *auditCommand) run(cmd *cobra.Command) error {
	ctx := cmd.Context()
	if err := a.redis.check(); err != nil {
		return err
	}
	receipts, err := a.readReceipts(cmd)
	if err != nil {
		return err
	}
	conn, err := a.redis.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // no command is running any more
	space, err := a.redis.installation(ctx, conn)
	if err != nil {
		return err
	}
	var report audit.Report
	var repairs []repair.Result
	run := func(ctx context.Context) (err error) {
		report, repairs, err = a.audit(ctx, conn, space)
		return err
	}
	if a.repair {
		err = record(ctx, conn, space, api.Activity{Action: "audit.repair", Object: space.Prefix()}, run)
	} else {
		err = run(ctx)
	}
	if err != nil {
		return err
	}
	if err := receipts.Check(ctx, conn, space, &report); err != nil {
		return err
	}
	return a.show(report, repairs, receipts)
}

func (a *auditCommand) readReceipts(cmd *cobra.Command) (audit.Receipts, error) {
	if a.receipts == "" {
		return nil, nil
	}
	from := cmd.InOrStdin()
	if a.receipts != "-" {
		f, err := os.Open(a.receipts)
		if err != nil {
			return nil, usagef("--receipts: %v", err)
		}
		defer func() { _ = f.Close() }() // it was only read
		from = f
	}
	receipts, err := audit.ReadReceipts(from)
	if err != nil {
		return nil, usagef("--receipts: %v", err)
	}
	return receipts, nil
}

// audit runs a full audit, with --repair after repairs. Without --repair it changes nothing, and
// repairs is nil.
func (a *auditCommand) audit(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space,
) (report audit.Report, repairs []repair.Result, err error) {
	if a.repair {
		repairs = []repair.Result{}
		tell := func(r repair.Result) {
			repairs = append(repairs, r)
			what := "repaired"
			if !r.Done {
				what = "not repaired"
			}
			job := r.Group
			if r.Ordinal != nil {
				job = fmt.Sprintf("%s.%d", r.Group, *r.Ordinal)
			}
			if r.Partition == audit.NoPartition {
				a.root.Notef("%s: %s: %s", what, r.Law, r.Detail)
				return
			}
			a.root.Notef("%s: partition %d, %s %s: %s", what, r.Partition, r.Law, job, r.Detail)
		}
		if report, err = repair.Run(ctx, conn, space, audit.Options{}, tell); err == nil {
			err = repair.OwnerKeys(ctx, conn, space, tell)
		}
		if err == nil {
			err = checkers.RepairGuards(ctx, conn, space, tell)
		}
	} else {
		report, err = audit.Run(ctx, conn, space, audit.Options{})
	}
	if err == nil {
		err = audit.CheckOwnerKeys(ctx, conn, space, &report)
	}
	if err == nil {
		err = checkers.CheckGuards(ctx, conn, space, &report)
	}
	if err == nil {
		err = checkers.CheckRooms(ctx, conn, space, &report)
	}
	if call.IsOOM(err) {
		err = fmt.Errorf(
			"redis is out of memory and refuses the audit's scripts, so the audit has no result: "+
				"raise maxmemory and audit again: %w",
			err,
		)
	}
	return report, repairs, err
}

func (a *auditCommand) show(report audit.Report, repairs []repair.Result, receipts audit.Receipts) error {
	scope, compared := fmt.Sprintf("%s groups, %s jobs", thousands(report.Groups), thousands(report.Jobs)), (*int)(nil)
	if receipts != nil {
		n := len(receipts)
		compared = &n
		scope += fmt.Sprintf(", %s receipts", thousands(int64(n)))
	}
	shown := struct {
		audit.Report
		Receipts *int            `json:"receipts,omitempty"`
		Repairs  []repair.Result `json:"repairs,omitzero"`
	}{report, compared, repairs}
	err := a.root.show(shown, func(t table) {
		if report.OK {
			t.row("ok: " + scope)
			return
		}
		t.row("LAW", "PARTITION", "GROUP", "JOB", "DETAIL")
		violationRows(t, report.Violations)
	})
	if err != nil {
		return err
	}
	if !report.OK {
		return fmt.Errorf("the audit of %s found violations: %s", scope, thousands(report.Total()))
	}
	return nil
}
