package ledger

import (
	"context"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// NonReadyJob is a non-ready job, as its location describes it.
type NonReadyJob struct {
	Ordinal int64
	Type    string
	Due     time.Time // of a suspended job: when it was suspended, or the latest resumption
	Reason  Reason
}

// FindNonReady finds a job of a group among its tenant's non-ready and suspended jobs; with
// [NextJob], the one that is due first. It returns false when there is none. It scans all of them,
// 1,000 a command, because they are not ordered by group.
func FindNonReady(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant, group string, ordinal int64,
) (first NonReadyJob, found bool, err error) {
	pattern := group + "|*"
	if ordinal >= 0 {
		pattern = group + "|*|" + strconv.FormatInt(ordinal, 10) + "|*"
	}
	lowest := 0.0 // score of first
	for _, key := range []string{p.NonReadyOf(tenant), p.SuspendedOf(tenant)} {
		for cursor := uint64(0); ; {
			page, next, err := c.ZScan(ctx, key, cursor, pattern, 1000).Result()
			if err != nil {
				return first, false, err
			}
			for i := 0; i+1 < len(page); i += 2 {
				j, err := ParseJob(page[i])
				if err != nil || j.Group != group || (ordinal >= 0 && j.Ordinal != ordinal) {
					continue
				}
				score, err := strconv.ParseFloat(page[i+1], 64)
				if err != nil || found && score >= lowest {
					continue
				}
				lowest, found = score, true
				first = NonReadyJob{
					Ordinal: j.Ordinal, Type: j.Type, Due: time.UnixMilli(int64(score)), Reason: j.Reason,
				}
			}
			if cursor = next; cursor == 0 || (found && ordinal >= 0) {
				break
			}
		}
	}
	return first, found, nil
}

// DueBefore counts a tenant's non-ready jobs that are due before a time, without suspended ones.
func DueBefore(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, at time.Time,
) (int64, error) {
	return c.ZCount(ctx, p.NonReadyOf(tenant), "-inf", "("+strconv.FormatInt(at.UnixMilli(), 10)).Result()
}

// ReadyJob is a job in a ready stream. It may be in flight.
type ReadyJob struct {
	Ordinal int64
	Type    string
	Before  int64 // entries before it that no worker process has read; 0 if one has read it
}

// FindReady finds a job of a group in the ready streams of these types; with [NextJob], the group's
// first job that no slot has started. It returns false when there is none among the first 20,000
// entries of each stream.
func FindReady(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, types []string, group string, ordinal int64,
) (ReadyJob, bool, error) {
	const page, pages = 500, 40
	for _, typ := range types {
		before, from := int64(0), "-"
		for range pages {
			entries, err := c.XRangeN(ctx, p.Ready(typ), from, "+", page).Result()
			if err != nil {
				return ReadyJob{}, false, err
			}
			for _, e := range entries {
				j, err := ParseJob(MessageBlob(e.Values))
				mine := err == nil && j.Group == group && (ordinal < 0 || j.Ordinal == ordinal)
				if mine && ordinal < 0 { // jobs in flight are in the stream too
					letter, err := ReadLetter(ctx, c, p, group, j.Ordinal)
					if err != nil {
						return ReadyJob{}, false, err
					}
					mine = letter == Ready
				}
				if mine {
					read, err := delivered(ctx, c, p, typ)
					return ReadyJob{Ordinal: j.Ordinal, Type: typ, Before: max(0, before-read)}, err == nil, err
				}
				before++
			}
			if len(entries) < page {
				break
			}
			from = "(" + entries[len(entries)-1].ID
		}
	}
	return ReadyJob{}, false, nil
}

// delivered counts the entries of a ready stream that worker processes have read.
func delivered(ctx context.Context, c redis.Cmdable, p keyspace.Partition, typ string) (int64, error) {
	pending, err := c.XPending(ctx, p.Ready(typ), keyspace.GroupWorkers).Result()
	if call.IsNoGroup(err) { // no worker process has served the type yet
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return pending.Count, nil
}
