package stagetest

// The functions of this file change data of the ledger directly, without its scripts, as damage in
// Redis would, and read fields that only tests read. One that fails ends the test.

import (
	"context"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// AddToCount changes a group's count of jobs in a state.
func AddToCount(
	t testing.TB, c redis.Cmdable, p keyspace.Partition, group string, state ledger.Letter, by int64,
) {
	t.Helper()
	require.NoError(t, c.HIncrBy(context.WithoutCancel(t.Context()), p.Group(group), state.Word(), by).Err())
}

// SetEntered sets the time at which a group entered a status. The zero time removes it.
func SetEntered(
	t testing.TB, c redis.Cmdable, p keyspace.Partition, group string, status api.Status, at time.Time,
) {
	t.Helper()
	ctx, field := context.WithoutCancel(t.Context()), "at:"+strings.ToLower(string(status))
	if at.IsZero() {
		require.NoError(t, c.HDel(ctx, p.Group(group), field).Err())
		return
	}
	require.NoError(t, c.HSet(ctx, p.Group(group), field, at.UnixMilli()).Err())
}

// LosePayload deletes the payload of a job whose payload is stored apart from the job.
func LosePayload(t testing.TB, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64) {
	t.Helper()
	field := strconv.FormatInt(ordinal, 10)
	removed, err := c.HDel(context.WithoutCancel(t.Context()), p.Payloads(group), field).Result()
	require.NoError(t, err)
	require.EqualValues(t, 1, removed)
}

// SetWaiting sets the counter of a type's waiting jobs.
func SetWaiting(t testing.TB, c redis.Cmdable, p keyspace.Partition, typ string, jobs int64) {
	t.Helper()
	require.NoError(t, c.HSet(context.WithoutCancel(t.Context()), p.Load(typ), "waiting", jobs).Err())
}

// MakeActive makes a tenant active. It sets both its count of unfinished jobs, and of those that
// want a permit, to jobs. c may be a pipeline.
func MakeActive(t testing.TB, c redis.Cmdable, p keyspace.Partition, tenant string, jobs int64) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	require.NoError(t, c.SAdd(ctx, p.Active(), tenant).Err())
	require.NoError(t, c.HSet(ctx, p.Tenant(tenant), "unfinished", jobs, "active", jobs).Err())
}

// SetRenewals sets the partition's counter of how often the leader lease was renewed.
func SetRenewals(t testing.TB, c redis.Cmdable, p keyspace.Partition, n int64) {
	t.Helper()
	require.NoError(t, c.HSet(context.WithoutCancel(t.Context()), p.Watch(), "renewals", n).Err())
}

// Renewals returns how often the leader lease was renewed.
func Renewals(t testing.TB, c redis.Cmdable, p keyspace.Partition) int64 {
	t.Helper()
	n, err := c.HGet(context.WithoutCancel(t.Context()), p.Watch(), "renewals").Int64()
	if err != nil {
		require.ErrorIs(t, err, redis.Nil)
	}
	return n
}

// Leader returns the process that leads a partition.
func Leader(t testing.TB, c redis.Cmdable, p keyspace.Partition) string {
	t.Helper()
	leader, err := c.HGet(context.WithoutCancel(t.Context()), p.Watch(), "owner").Result()
	require.NoError(t, err)
	return leader
}

// Unseal removes the mark that a group gets no more jobs.
func Unseal(t testing.TB, c redis.Cmdable, p keyspace.Partition, group string) {
	t.Helper()
	require.NoError(t, c.HDel(context.WithoutCancel(t.Context()), p.Group(group), "sealed").Err())
}

// Unpause removes the mark that a group is paused.
func Unpause(t testing.TB, c redis.Cmdable, p keyspace.Partition, group string) {
	t.Helper()
	require.NoError(t, c.HDel(context.WithoutCancel(t.Context()), p.Group(group), "paused").Err())
}

// SetLastError overwrites the stored last errors of a job that is non-ready for a retry. text
// should be a JSON error.
func SetLastError(
	t testing.TB, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64, text string,
) {
	t.Helper()
	field := strconv.FormatInt(ordinal, 10)
	require.NoError(t, c.HSet(context.WithoutCancel(t.Context()), p.Errors(group), field, text).Err())
}
