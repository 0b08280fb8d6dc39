package groups

import (
	"context"
	"strconv"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// pieces stores the jobs of a group piece by piece. A piece is what one call of the script takes.
type pieces struct {
	*access
	groupLocks keyedMutex
}

// split divides jobs into pieces that the script can take. Each piece has its own request id.
// It also starts the jobs' traces, and so records spans.
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

func (s *pieces) store(ctx context.Context, p keyspace.Partition, pieces []ledger.AppendArgs) error {
	for _, a := range pieces {
		if err := s.storeOne(ctx, p, a); err != nil {
			return err
		}
	}
	return nil
}

func (s *pieces) storeOne(ctx context.Context, p keyspace.Partition, a ledger.AppendArgs) error {
	lock, err := s.groupLocks.lock(ctx, a.Group)
	if err != nil {
		return err
	}
	defer s.groupLocks.unlock(lock)
	return retryUnavailable(ctx, func(ctx context.Context) error {
		a.Next = lock.nextOrdinal
		r, err := ledger.Append(ctx, s.appender, p, a)
		if err == nil && !r.Duplicate {
			lock.nextOrdinal = r.First + r.N
		}
		return err
	})
}
