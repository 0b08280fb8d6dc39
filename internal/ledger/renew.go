package ledger

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var renew = script("jobs/renew", "states")

// Held is a job that a worker holds.
type Held struct {
	Entry, Group string
	Ordinal      int64
	Attempt      int
	Known        bool // the worker knows that it may be lost: it is not counted as a lost lease
}

// Renew extends the leases of a worker's jobs of one type. It returns the positions in jobs, from
// 0, of those that the worker has lost: they were taken back, cancelled, or have ended. Twice: the
// second call extends them again.
func Renew(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, typ, consumer string, jobs []Held,
) ([]int, error) {
	args := make([]any, 0, 3+5*len(jobs))
	args = append(args, typ, consumer, len(jobs))
	for _, j := range jobs {
		flag := ""
		if j.Known {
			flag = "k"
		}
		args = append(args, j.Entry, j.Group, j.Ordinal, j.Attempt, flag)
	}
	r, err := run(ctx, c, renew, p, args...)
	if err != nil {
		return nil, err
	}
	lost := make([]int, len(r))
	for i := range r {
		lost[i] = int(r.num(i)) - 1
	}
	return lost, nil
}
