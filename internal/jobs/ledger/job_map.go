package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// ReadJobMap counts the jobs of a group by state, in `buckets` ranges of consecutive ordinals, or
// one range a job if the group has fewer jobs. It reads the states in pieces of 64 KiB, so the map
// is not of one instant. The map of a group that does not exist is empty. Errors: api.ErrNotFound
// if the group is deleted meanwhile.
func ReadJobMap(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, buckets int64,
) (m api.JobMap, err error) {
	const (
		piece = 64 << 10 // bytes
		// piecesPerTrip is the number of pieces that one round trip reads: each round trip may have
		// to wait for the scripts of other clients.
		piecesPerTrip = 8
	)
	size, err := c.StrLen(ctx, p.States(group)).Result()
	if err != nil {
		return m, fmt.Errorf("read length of the states of group %s: %w", group, err)
	}
	m.Jobs = size / StateBytes
	m.Buckets = make([]api.MapBucket, min(buckets, m.Jobs))
	n := int64(len(m.Buckets))
	for i := range n {
		m.Buckets[i].From, m.Buckets[i].To = i*m.Jobs/n, (i+1)*m.Jobs/n-1
	}
	at, end := 0, m.Jobs*StateBytes
	for from := int64(0); from < end; {
		var pieces []*redis.StringCmd
		next := from
		_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			for ; next < end && len(pieces) < piecesPerTrip; next += piece {
				pieces = append(pieces, pipe.GetRange(ctx, p.States(group), next, min(next+piece, end)-1))
			}
			return nil
		})
		if err != nil {
			return m, fmt.Errorf("read states of group %s: %w", group, err)
		}
		for _, read := range pieces {
			states := read.Val()
			if int64(len(states)) < min(piece, end-from) {
				return m, UnknownGroup(group)
			}
			for i := int64(0); i < int64(len(states)); i += StateBytes {
				for (from+i)/StateBytes > m.Buckets[at].To {
					at++
				}
				countState(&m.Buckets[at], Letter(states[i]))
			}
			from += int64(len(states))
		}
	}
	return m, nil
}

// countState adds a job with a state to a range.
func countState(b *api.MapBucket, l Letter) {
	switch l {
	case Waiting:
		b.Waiting++
	case NonReady:
		b.NonReady++
	case Ready:
		b.Ready++
	case InFlight:
		b.InFlight++
	case Done, Reduced:
		b.Done++
	case Failed:
		b.Failed++
	case Cancelled:
		b.Cancelled++
	}
}
