// Package read reads the data of the audit from Redis: a group as of one instant ([Group]), and the
// elements of each location of jobs ([Reader.Elements]). It hides paging, the form of records,
// repeated reads after a lost connection, the rate limit, and keys of the wrong Redis type. It uses
// no view of the ledger, because the audit recounts for itself.
package read

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

const (
	// PageSize is about the most elements or commands that are read in one round trip.
	PageSize = 500
	// PageBytes is about how many bytes are read at once.
	PageBytes = 1 << 20

	retryTimeout = 10 * time.Second // how long a read is repeated while Redis doesn't answer
)

// Reader has methods that read large structures of one Redis, a page at a time. To them a key that
// does not exist is empty. A key of the wrong Redis type is empty too and is recorded in
// WrongTypes, so that the audit can read everything else.
type Reader struct {
	Cmd   redis.UniversalClient
	Pacer *Pacer // limits the rate; nil: no limit
	// WrongTypes is filled by the reader with the keys of the wrong Redis type that it met. Each is
	// mapped to "", which callers replace by the key's group. nil: it doesn't record them.
	WrongTypes map[string]string
}

// Pacer is the rate limit of the audit's reads, so that a large audit doesn't disturb the roles. A
// nil Pacer doesn't wait. It is not safe for concurrent use.
type Pacer struct {
	rate int           // bytes per second; 0: no limit
	owed time.Duration // how long the next wait has to be for what was read since the last one
}

// NewPacer returns a pacer for a rate in bytes per second. 0: no limit.
func NewPacer(rate int) *Pacer { return &Pacer{rate: rate} }

// elementBytes is added to the length of each element for the rate limit, for the overhead of a
// reply.
const elementBytes = 32

// Wait sleeps as long as it takes, at the pacer's rate, to read this many elements with this many
// bytes. It adds up waits of less than 50 ms and sleeps later.
func (p *Pacer) Wait(ctx context.Context, elements, bytes int) error {
	if p == nil || p.rate <= 0 {
		return nil
	}
	p.owed += time.Duration(elements*elementBytes+bytes) * time.Second / time.Duration(p.rate)
	if p.owed < 50*time.Millisecond {
		return nil
	}
	owed := p.owed
	p.owed = 0
	return redisx.Sleep(ctx, owed)
}

// bytesOf returns the sum of the lengths of these elements.
func bytesOf(page []string) (bytes int) {
	for _, e := range page {
		bytes += len(e)
	}
	return bytes
}

// Transaction sends the commands that fill adds, all for one partition, as a transaction: their
// replies belong to one instant.
func (r Reader) Transaction(ctx context.Context, fill func(redis.Pipeliner)) error {
	return r.exec(ctx, r.Cmd.TxPipeline, fill)
}

// Pipeline sends the commands that fill adds in one round trip. Other commands may be executed
// between them.
func (r Reader) Pipeline(ctx context.Context, fill func(redis.Pipeliner)) error {
	return r.exec(ctx, r.Cmd.Pipeline, fill)
}

// exec sends the commands, and repeats them for up to retryTimeout while Redis doesn't answer. They
// only read, so repeating them is harmless.
func (r Reader) exec(ctx context.Context, create func() redis.Pipeliner, fill func(redis.Pipeliner)) error {
	return redisx.RetryWhile(ctx, retryTimeout, call.IsUnavailable, func(ctx context.Context) error {
		pipe := create()
		fill(pipe)
		if pipe.Len() == 0 {
			return nil
		}
		cmds, err := pipe.Exec(ctx)
		return r.firstError(cmds, err)
	})
}

// Ask adds commands for each item by calling ask, for up to n items in one call of send, and
// returns the replies in the order of the items. send is [Reader.Pipeline] or [Reader.Transaction].
func Ask[T, R any](
	ctx context.Context, send func(context.Context, func(redis.Pipeliner)) error, n int, items []T,
	ask func(redis.Pipeliner, T) R,
) ([]R, error) {
	replies := make([]R, 0, len(items))
	for page := range slices.Chunk(items, n) {
		before := replies
		err := send(ctx, func(p redis.Pipeliner) {
			replies = before // send may call this again
			for _, item := range page {
				replies = append(replies, ask(p, item))
			}
		})
		if err != nil {
			return nil, err
		}
	}
	return replies, nil
}

// Batches divides items into batches of at least one item. A batch of more items needs up to
// PageSize commands and reads up to PageBytes, by the cost that the caller gives for each item.
func Batches[T any](items []T, cost func(T) (commands int, bytes int64)) iter.Seq[[]T] {
	return func(yield func([]T) bool) {
		for len(items) > 0 {
			n, commands, bytes := 1, 0, int64(0)
			for commands, bytes = cost(items[0]); n < len(items); n++ {
				c, b := cost(items[n])
				if commands, bytes = commands+c, bytes+b; commands > PageSize || bytes > PageBytes {
					break
				}
			}
			if !yield(items[:n]) {
				return
			}
			items = items[n:]
		}
	}
}

// firstError returns the first error of the replies or of the connection. Missing keys and keys of
// the wrong Redis type are no errors.
func (r Reader) firstError(cmds []redis.Cmder, err error) error {
	for _, c := range cmds {
		e := c.Err()
		switch {
		case IsWrongType(e):
			r.noteWrongType(c)
		case e != nil && !errors.Is(e, redis.Nil):
			return fmt.Errorf("%s: %w", c.Name(), e)
		}
	}
	if errors.Is(err, redis.Nil) || IsWrongType(err) {
		return nil
	}
	return err
}

// IsWrongType reports whether err says that a command or script found a key of the wrong Redis
// type.
func IsWrongType(err error) bool { return err != nil && strings.Contains(err.Error(), "WRONGTYPE") }

// noteWrongType records the key of a command that failed because of the key's Redis type. It sets
// an HMGET's reply to empty fields, so that its caller need not check the length.
func (r Reader) noteWrongType(c redis.Cmder) {
	if fields, ok := c.(*redis.SliceCmd); ok {
		fields.SetVal(make([]any, len(c.Args())-2))
	}
	key := fmt.Sprint(c.Args()[1])
	if _, known := r.WrongTypes[key]; r.WrongTypes != nil && !known {
		r.WrongTypes[key] = ""
	}
}

// pageSizer adapts the number of elements per page, so that a page has about PageBytes bytes.
type pageSizer struct{ n int64 }

// adapt takes the bytes of the last page into account.
func (s *pageSizer) adapt(bytes int) {
	s.n = max(1, min(PageSize, 4*s.n, s.n*PageBytes/int64(max(1, bytes))))
}

// ReadByScore calls fn with the members of a sorted set, in pages and by ascending score. A member
// whose score doesn't change is yielded exactly once, even if other members come and go.
func (r Reader) ReadByScore(ctx context.Context, key string, fn func([]string) error) error {
	from, seen := "-inf", map[string]bool{} // the last score that was read, and its members so far
	for {
		var cmd *redis.ZSliceCmd
		count := int64(PageSize + len(seen))
		err := r.Pipeline(ctx, func(p redis.Pipeliner) {
			cmd = p.ZRangeByScoreWithScores(ctx, key, &redis.ZRangeBy{Min: from, Max: "+inf", Count: count})
		})
		if err != nil {
			return err
		}
		found := cmd.Val()
		var page []string
		for _, z := range found {
			member, score := z.Member.(string), strconv.FormatFloat(z.Score, 'f', -1, 64)
			if score != from {
				from = score
				clear(seen)
			} else if seen[member] {
				continue
			}
			seen[member] = true
			page = append(page, member)
		}
		if len(page) > 0 {
			if err := fn(page); err != nil {
				return err
			}
		}
		if int64(len(found)) < count {
			return nil
		}
	}
}

// scan calls fn with each element that a SCAN command on one key yields. texts is the number of
// strings per element, such as 2 for member and score. An element that is there the whole time is
// yielded at least once, perhaps more often.
func (r Reader) scan(
	ctx context.Context, key string, texts int,
	command func(redis.Pipeliner, context.Context, string, uint64, string, int64) *redis.ScanCmd,
	fn func(element []string) error,
) error {
	for cursor := uint64(0); ; {
		var cmd *redis.ScanCmd
		err := r.Pipeline(ctx, func(p redis.Pipeliner) { cmd = command(p, ctx, key, cursor, "", PageSize) })
		if err != nil {
			return err
		}
		page, next := cmd.Val()
		if err := r.Pacer.Wait(ctx, len(page), bytesOf(page)); err != nil {
			return err
		}
		for element := range slices.Chunk(page, texts) {
			if err := fn(element); err != nil {
				return err
			}
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

// ScanMembers scans the members of a sorted set, without their scores (see scan).
func (r Reader) ScanMembers(ctx context.Context, key string, fn func(member string) error) error {
	return r.scan(ctx, key, 2, redis.Pipeliner.ZScan, func(e []string) error { return fn(e[0]) })
}

// ScanSet scans the members of a set (see scan).
func (r Reader) ScanSet(ctx context.Context, key string, fn func(member string) error) error {
	return r.scan(ctx, key, 1, redis.Pipeliner.SScan, func(e []string) error { return fn(e[0]) })
}

// ScanHash scans the fields of a hash (see scan).
func (r Reader) ScanHash(ctx context.Context, key string, fn func(field, value string) error) error {
	return r.scan(ctx, key, 2, redis.Pipeliner.HScan, func(e []string) error { return fn(e[0], e[1]) })
}

// ReadStream calls fn once with each entry of a Redis stream. Entries that are added after the call
// began are left out.
func (r Reader) ReadStream(ctx context.Context, key string, fn func(redis.XMessage) error) error {
	var newest *redis.XMessageSliceCmd
	if err := r.Pipeline(ctx, func(p redis.Pipeliner) { newest = p.XRevRangeN(ctx, key, "+", "-", 1) }); err != nil {
		return err
	}
	if len(newest.Val()) == 0 {
		return nil
	}
	size := pageSizer{n: 50}
	for from, to := "-", newest.Val()[0].ID; ; {
		var cmd *redis.XMessageSliceCmd
		if err := r.Pipeline(ctx, func(p redis.Pipeliner) { cmd = p.XRangeN(ctx, key, from, to, size.n) }); err != nil {
			return err
		}
		page, bytes := cmd.Val(), 0
		if len(page) == 0 {
			return nil
		}
		for _, e := range page {
			for _, v := range e.Values {
				bytes += len(v.(string))
			}
		}
		size.adapt(bytes)
		if err := r.Pacer.Wait(ctx, len(page), bytes); err != nil {
			return err
		}
		from = "(" + page[len(page)-1].ID
		for _, e := range page {
			if err := fn(e); err != nil {
				return err
			}
		}
	}
}

// ReadList calls fn with the first n elements of a list that only grows at its end.
func (r Reader) ReadList(ctx context.Context, key string, n int64, fn func(string) error) error {
	size := pageSizer{n: 8}
	for at := int64(0); at < n; {
		page, err := r.listRange(ctx, key, at, min(size.n, n-at))
		if err != nil || len(page) == 0 {
			return err
		}
		bytes := 0
		for _, e := range page {
			bytes += len(e)
			if err := fn(e); err != nil {
				return err
			}
		}
		at += int64(len(page))
		size.adapt(bytes)
	}
	return nil
}

// ReadQueue calls fn with the first n elements of a list, and those behind them in the same page,
// each once. Other clients may take elements from its head and add some at its end; elements taken
// before they were read are left out. To find its position in a list that has moved, it looks for
// the last element that it has read. It assumes that no two elements are the same.
func (r Reader) ReadQueue(ctx context.Context, key string, n int64, fn func(string) error) error {
	last, at := "", int64(0) // the last element that was read, and where it was
	for first := true; n > 0; first = false {
		page, err := r.listRange(ctx, key, at, PageSize)
		if err != nil {
			return err
		}
		next := 0
		if !first {
			for next = slices.Index(page, last) + 1; next == 0 && at > 0; next = slices.Index(page, last) + 1 {
				at = max(0, at-PageSize)
				if page, err = r.listRange(ctx, key, at, PageSize); err != nil {
					return err
				}
			}
		}
		fresh := page[next:] // the whole page if the last element is not in the list any more
		if len(fresh) == 0 {
			return nil
		}
		for _, e := range fresh {
			if err := fn(e); err != nil {
				return err
			}
		}
		n -= int64(len(fresh))
		last, at = fresh[len(fresh)-1], at+int64(len(page))-1
	}
	return nil
}

// listRange reads up to n elements of a list from index at on.
func (r Reader) listRange(ctx context.Context, key string, at, n int64) ([]string, error) {
	var cmd *redis.StringSliceCmd
	err := r.Pipeline(ctx, func(p redis.Pipeliner) { cmd = p.LRange(ctx, key, at, at+n-1) })
	if err == nil {
		err = r.Pacer.Wait(ctx, len(cmd.Val()), bytesOf(cmd.Val()))
	}
	return cmd.Val(), err
}

// ScanKeys scans the keys of every shard and calls fn with those that match the pattern, a page at a
// time and never twice at once. A key that is there the whole time is passed at least once.
func ScanKeys(ctx context.Context, conn *redisx.Conn, pattern string, fn func(keys []string) error) error {
	var mu sync.Mutex
	return conn.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		for cursor := uint64(0); ; {
			keys, next, err := shard.Scan(ctx, cursor, pattern, PageSize).Result()
			if err != nil {
				return err
			}
			mu.Lock()
			err = fn(keys)
			mu.Unlock()
			if cursor = next; err != nil || cursor == 0 {
				return err
			}
		}
	})
}
