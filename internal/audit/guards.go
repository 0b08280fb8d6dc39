package audit

import (
	"context"
	"fmt"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// NoPartition is what stands as the partition in a guard's violation: guards are in no partition.
const NoPartition = -1

// CheckGuards adds to the report a violation for each law that a guard breaks. It scans the names
// of all keys in Redis to find the guards.
func CheckGuards(ctx context.Context, conn *redisx.Conn, space keyspace.Space, report *Report) error {
	err := EachGuard(ctx, conn, space, func(c *guard.Client, name string) error {
		found, err := c.Audit(ctx, name)
		for _, f := range found {
			report.Violations = append(report.Violations, GuardViolation(f))
		}
		return err
	})
	report.finish()
	return err
}

// EachGuard calls do for each guard of the key space, also those of the kind key, until do returns
// an error. It scans the names of all keys in Redis.
func EachGuard(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, do func(c *guard.Client, name string) error,
) error {
	c := guard.New(conn.Cmd, guard.Prefix(space.Prefix()))
	names, err := c.Guards(ctx, true)
	for _, name := range names {
		if err == nil {
			err = do(c, name)
		}
	}
	if err != nil {
		return fmt.Errorf("audit guards: %w", err)
	}
	return nil
}

// GuardViolation converts a finding of package guard to a violation.
func GuardViolation(f guard.Finding) Violation {
	return Violation{Law: f.Law, Partition: NoPartition, Detail: "guard " + f.Guard + ": " + f.Detail}
}
