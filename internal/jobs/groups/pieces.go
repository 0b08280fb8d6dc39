package groups

import (
	"context"
	"strconv"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// pieces stores the jobs of a group in pieces. A piece has at most as many jobs as one call of the
// script append can store.
type pieces struct {
	*access
	groupLocks keyedMutex
}

// split divides jobs into pieces, each with its own request id: the prefix request and the piece's
// number from 0. It also starts the jobs' traces, and so records spans.
func (s *pieces) split(
	ctx context.Context, tenant, group string, jobs []messages.Job, request string, o Origin,
) []ledger.AppendArgs {
	if len(jobs) == 0 {
		return nil
	}
	var pieces []ledger.AppendArgs
	for fresh := s.newJobs(ctx, tenant, group, jobs, o); len(fresh) > 0; {
		n, bytes := 0, 0
		for n < len(fresh) && n < ledger.MaxAppend && (n == 0 || bytes+len(fresh[n].Payload) <= ledger.MaxAppendBytes) {
			bytes += len(fresh[n].Payload)
			n++
		}
		pieces = append(pieces, ledger.AppendArgs{
			Group:   group,
			Limit:   messages.MaxTotal,
			Jobs:    fresh[:n],
			Request: request + strconv.Itoa(len(pieces)),
		})
		fresh = fresh[n:]
	}
	return pieces
}

// store appends the pieces in order. skipped are the jobs that were left out because their keys are
// taken, by their index among all jobs of the pieces.
func (s *pieces) store(
	ctx context.Context, p keyspace.Partition, pieces []ledger.AppendArgs,
) (skipped []int, err error) {
	first := 0 // index of the piece's first job among all jobs
	for _, a := range pieces {
		left, err := s.storeOne(ctx, p, a)
		if err != nil {
			return nil, err
		}
		for _, n := range left {
			skipped = append(skipped, first+n)
		}
		first += len(a.Jobs)
	}
	return skipped, nil
}

func (s *pieces) storeOne(ctx context.Context, p keyspace.Partition, a ledger.AppendArgs) (skipped []int, err error) {
	lock, err := s.groupLocks.lock(ctx, a.Group)
	if err != nil {
		return nil, err
	}
	defer s.groupLocks.unlock(lock)
	err = retryUnavailable(ctx, func(ctx context.Context) error {
		a.Next = lock.nextOrdinal
		r, err := ledger.Append(ctx, s.appender, p, a)
		if err == nil && !r.Duplicate {
			lock.nextOrdinal = r.First + r.N
		}
		skipped = r.Skipped
		return err
	})
	return skipped, err
}
