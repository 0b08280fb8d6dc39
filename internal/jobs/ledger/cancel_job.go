package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var cancelJob = script("jobs/cancel_job", "signals", "states", "blob", "tenants", "priority", "fair_queue", "ready",
	"non_ready", "endings", "places")

// ErrJobMoved is an api.ErrConflict: a job was not where it was found before.
var ErrJobMoved = fmt.Errorf("%w: the job moves", api.ErrConflict)

// CancelJob ends a job that no worker has taken, as cancelled. It returns the job as a step if it is
// sampled. Twice: the second call changes nothing. Errors: api.ErrNotFound; ErrJobMoved;
// api.ErrConflict if the job is in flight, has ended, or its group is cancelled.
func CancelJob(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64,
) ([]JobStep, error) {
	typ, place, from, err := findPlace(ctx, c, p, group, ordinal)
	if err != nil {
		return nil, err
	}
	r := run(ctx, c, cancelJob, p, group, ordinal, typ, place, from)
	_ = r.Code("OK")
	return call.Done(r, steps(r.List()))
}

// findPlace returns the type of a job that has not started, and what the script cancel_job needs to
// find it: the blob in its queue and from which end to look for it, its moving blob, or the id of its
// entry. place is "" if it is not found.
func findPlace(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64,
) (typ, place string, from int, err error) {
	const mostTypes = 200
	w, err := Why(ctx, c, p, group, ordinal, mostTypes)
	if err != nil {
		return "", "", 0, err
	}
	switch w.State {
	case Waiting:
		return findQueued(ctx, c, p, group, ordinal, w)
	case NonReady:
		j, found, err := FindNonReady(ctx, c, p, w.Tenant, group, ordinal)
		if err != nil || !found {
			return "", "", 1, err
		}
		return j.Type, j.Job.Blob(), 1, nil
	case Ready:
		j, _, err := FindReady(ctx, c, p, w.Types, group, ordinal)
		return j.Type, j.ID, 1, err
	}
	return "", "", 1, nil
}

// findQueued does what findPlace does for a waiting job. Where bisection has not found the job,
// because a later round has put it behind jobs of higher ordinals, it reads up to 100,000 elements of
// each queue.
func findQueued(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64, w WaitingJob,
) (typ, place string, from int, err error) {
	const page, most = 500, 100_000
	if w.Place >= 0 {
		key := p.Queue(group, w.Type)
		n, err := c.LLen(ctx, key).Result()
		if err != nil {
			return "", "", 0, fmt.Errorf("find job %s.%d: %w", group, ordinal, err)
		}
		blobs, err := c.LRange(ctx, key, w.Place, w.Place).Result()
		if err != nil || len(blobs) == 0 {
			return "", "", 1, err
		}
		if from = 1; w.Place > n/2 {
			from = -1
		}
		return w.Type, blobs[0], from, nil
	}
	for _, typ := range w.Types {
		for at := int64(0); at < most; at += page {
			blobs, err := c.LRange(ctx, p.Queue(group, typ), at, at+page-1).Result()
			if err != nil {
				return "", "", 0, fmt.Errorf("find job %s.%d: %w", group, ordinal, err)
			}
			for _, blob := range blobs {
				if n, ok := QueuedOrdinal(blob); ok && n == ordinal {
					n, err := c.LLen(ctx, p.Queue(group, typ)).Result()
					if from = 1; at > n/2 {
						from = -1
					}
					return typ, blob, from, err
				}
			}
			if len(blobs) < page {
				break
			}
		}
	}
	return "", "", 1, nil
}
