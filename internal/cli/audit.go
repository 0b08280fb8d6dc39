package cli

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func newAudit(r *Root) *cobra.Command {
	url, prefix := os.Getenv("BULKACTION_REDIS_URL"), os.Getenv("BULKACTION_KEY_PREFIX")
	if url == "" {
		url = "redis://127.0.0.1:6379/0"
	}
	if prefix == "" {
		prefix = "bulk-action:"
	}
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Prove from the data in Redis that no job is lost or counted twice",
		Long: "Prove from the data in Redis that no job is lost or counted twice: the ledger of each group against its jobs' states and\n" +
			"against the places where they lie. It may run beside the roles. Exit code 1 when a law is broken.",
		Args: cobra.NoArgs,
	}
	cmd.Flags().StringVar(&url, "redis-url", url, "Redis of the roles; BULKACTION_REDIS_URL sets the default")
	cmd.Flags().StringVar(&prefix, "key-prefix", prefix, "what their keys begin with; BULKACTION_KEY_PREFIX sets the default")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx := cmd.Context()
		if _, err := redisx.ParseURL(url); err != nil {
			return usagef("--redis-url: %v", err)
		}
		conn, err := redisx.Connect(ctx, redisx.Config{URL: url, DialTimeout: 5 * time.Second, CommandTimeout: 10 * time.Second})
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }() // only read from
		if err := conn.Ping(ctx); err != nil {
			return withHint(err, "Say where Redis is with --redis-url or BULKACTION_REDIS_URL.")
		}
		one, err := keyspace.New(prefix, 1)
		if err != nil {
			return usagef("--key-prefix: %v", err)
		}
		count, err := conn.Cmd.Get(ctx, one.PartitionCount()).Result()
		if errors.Is(err, redis.Nil) {
			r.Notef("No role has used this Redis under the prefix %s yet: there is nothing to audit.", prefix)
			count, err = "1", nil
		}
		if err != nil {
			return fmt.Errorf("read number of partitions: %w", err)
		}
		partitions, err := strconv.Atoi(count)
		if err != nil {
			return fmt.Errorf("read number of partitions: %q is no number", count)
		}
		space, err := keyspace.New(prefix, partitions)
		if err != nil {
			return err
		}
		report, err := audit.Run(ctx, conn, space, audit.Options{})
		if err != nil {
			return err
		}
		return r.showAudit(report)
	}
	return cmd
}

func (r *Root) showAudit(report audit.Report) error {
	broken := fmt.Errorf("the audit of %s groups, %s jobs found violations: %d", thousands(report.Groups), thousands(report.Jobs), len(report.Violations))
	if r.JSON {
		if err := r.Print(report); err != nil {
			return err
		}
	} else if report.OK {
		_, err := fmt.Fprintf(r.Out, "ok: %s groups, %s jobs\n", thousands(report.Groups), thousands(report.Jobs))
		return err
	} else {
		t := newTable(r.Out)
		t.row("LAW", "PARTITION", "GROUP", "JOB", "DETAIL")
		for _, v := range report.Violations {
			job := ""
			if v.Ordinal != nil {
				job = strconv.FormatInt(*v.Ordinal, 10)
			}
			t.row(v.Law, v.Partition, v.Group, job, v.Detail)
		}
		if err := t.flush(); err != nil {
			return err
		}
	}
	if !report.OK {
		return broken
	}
	return nil
}
