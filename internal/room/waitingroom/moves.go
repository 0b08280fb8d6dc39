package waitingroom

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Move is an entry of the Redis stream moves: a change of one event's queue, with the numbers that
// have left it.
type Move struct {
	ID     string
	Event  string
	Change int64 // the change number of the event with this move
	Gone   []Range
}

// Range is Count numbers from First on.
type Range struct{ First, Count int64 }

const (
	mostMoves   = 1000
	mostNumbers = 1000
)

// Moves returns the entries of the stream moves after the entry with the id `after`, at most 1,000.
// If there are none, it waits for up to block, at most redisx.MaxBlock; 0: not at all. An
// unreadable entry is returned with an empty Event.
func (r *Rooms) Moves(ctx context.Context, p keyspace.Partition, after string, block time.Duration) ([]Move, error) {
	args := &redis.XReadArgs{Streams: []string{p.Moves(), after}, Count: mostMoves, Block: -1}
	rdb := r.rdb
	if block > 0 {
		args.Block = min(block, redisx.MaxBlock)
		rdb = r.blocking
	}
	streams, err := rdb.XRead(ctx, args).Result()
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("partition %d: read moves: %w", p.Index(), err)
	}
	var all []Move
	for _, s := range streams {
		for _, m := range s.Messages {
			all = append(all, parseMove(m))
		}
	}
	return all, nil
}

func parseMove(m redis.XMessage) Move {
	text := func(field string) string {
		s, _ := m.Values[field].(string)
		return s
	}
	move := Move{ID: m.ID}
	change, err := strconv.ParseInt(text("change"), 10, 64)
	if err != nil {
		return move
	}
	fields := strings.Fields(text("gone"))
	gone := make([]Range, 0, len(fields)/2)
	for i := 0; i+1 < len(fields); i += 2 {
		first, err1 := strconv.ParseInt(fields[i], 10, 64)
		count, err2 := strconv.ParseInt(fields[i+1], 10, 64)
		if err1 != nil || err2 != nil {
			return move
		}
		gone = append(gone, Range{First: first, Count: count})
	}
	move.Event, move.Change, move.Gone = text("event"), change, gone
	return move
}

// Numbers calls yield with the numbers of all users who are waiting or away, in no order, about
// 1,000 at a time. A number may be yielded twice. It finds every user who is in the queue during
// the whole call, even if other users change state meanwhile.
func (r *Rooms) Numbers(ctx context.Context, event string, yield func(numbers []int64)) error {
	p := r.space.OfEvent(event)
	for cursor := uint64(0); ; {
		pairs, next, err := r.rdb.HScan(ctx, p.RoomUsers(event), cursor, "", mostNumbers).Result()
		if err != nil {
			return fmt.Errorf("partition %d: read the numbers of event %s: %w", p.Index(), event, err)
		}
		numbers := make([]int64, 0, len(pairs)/2)
		for i := 1; i < len(pairs); i += 2 {
			if rec, ok := parseRecord(pairs[i]); ok && (rec.letter == 'W' || rec.letter == 'A') {
				numbers = append(numbers, rec.number)
			}
		}
		yield(numbers)
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

// InPartition returns the events of a partition. If an event changes its place in the list
// meanwhile, an event may be returned twice or not at all.
func (r *Rooms) InPartition(ctx context.Context, p keyspace.Partition) ([]string, error) {
	const page = 1000
	var all []string
	for {
		some, err := r.rdb.ZRange(ctx, p.Rooms(), int64(len(all)), int64(len(all)+page-1)).Result()
		if err != nil {
			return nil, fmt.Errorf("partition %d: list events: %w", p.Index(), err)
		}
		if all = append(all, some...); len(some) < page {
			return all, nil
		}
	}
}
