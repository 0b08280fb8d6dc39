package audit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

const (
	pageSize     = 500              // elements or commands at once
	pageBytes    = 1 << 20          // that a page is aimed at
	retryTimeout = 10 * time.Second // while Redis does not answer
)

// reader reads from one Redis, a page at a time. What is not there is no error. Nor is a key of
// another type: one must not keep the rest from being looked at. It reads as what is not there,
// and its key is noted.
type reader struct {
	cmd   redis.UniversalClient
	pacer *pacer
	// keys of another type than they must be, with their group where it is known; nil: they
	// are not noted
	wrongTypes map[string]string
}

// pacer spreads what is read over time, so that a large look disturbs nobody.
type pacer struct {
	rate int // bytes a second; 0: no bound
	owed time.Duration
}

// elementBytes is what an element costs beside its bytes.
const elementBytes = 32

// wait waits for as long as so much takes at the rate, in pieces that are worth it.
func (p *pacer) wait(ctx context.Context, elements, bytes int) error {
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

func bytesOf(page []string) (bytes int) {
	for _, e := range page {
		bytes += len(e)
	}
	return bytes
}

// transaction sends commands on one partition as a transaction: their replies belong to the
// same instant.
func (r reader) transaction(ctx context.Context, fill func(redis.Pipeliner)) error {
	return r.exec(ctx, r.cmd.TxPipeline, fill)
}

// pipeline sends commands together; others may come between them.
func (r reader) pipeline(ctx context.Context, fill func(redis.Pipeliner)) error {
	return r.exec(ctx, r.cmd.Pipeline, fill)
}

// exec repeats what Redis did not answer: reading twice harms nothing.
func (r reader) exec(ctx context.Context, create func() redis.Pipeliner, fill func(redis.Pipeliner)) error {
	backoff := redisx.Backoff{Min: 20 * time.Millisecond, Max: time.Second}
	for deadline := time.Now().Add(retryTimeout); ; {
		pipe := create()
		fill(pipe)
		if pipe.Len() == 0 {
			return nil
		}
		cmds, err := pipe.Exec(ctx)
		if err = r.firstError(cmds, err); !call.IsUnavailable(err) || time.Now().After(deadline) ||
			redisx.Sleep(ctx, backoff.Next()) != nil {
			return err
		}
	}
}

func (r reader) firstError(cmds []redis.Cmder, err error) error {
	for _, c := range cmds {
		e := c.Err()
		switch {
		case isWrongType(e):
			r.noteWrongType(c)
		case e != nil && !errors.Is(e, redis.Nil):
			return fmt.Errorf("%s: %w", c.Name(), e)
		}
	}
	if errors.Is(err, redis.Nil) || isWrongType(err) {
		return nil
	}
	return err
}

// isWrongType says whether a command, or a script, met a key of another type than it must be.
func isWrongType(err error) bool { return err != nil && strings.Contains(err.Error(), "WRONGTYPE") }

func (r reader) noteWrongType(c redis.Cmder) {
	if fields, ok := c.(*redis.SliceCmd); ok {
		fields.SetVal(make([]any, len(c.Args())-2))
	}
	key := fmt.Sprint(c.Args()[1])
	if _, known := r.wrongTypes[key]; r.wrongTypes != nil && !known {
		r.wrongTypes[key] = ""
	}
}

// pageSizer adapts the number of elements of a page to their size.
type pageSizer struct{ n int64 }

func (s *pageSizer) adapt(bytes int) {
	s.n = max(1, min(pageSize, 4*s.n, s.n*pageBytes/int64(max(1, bytes))))
}

// readByScore calls fn with a sorted set's members by ascending score. One that keeps its score
// comes exactly once.
func (r reader) readByScore(ctx context.Context, key string, fn func([]string) error) error {
	from, seen := "-inf", map[string]bool{} // members at that very score
	for {
		var cmd *redis.ZSliceCmd
		count := int64(pageSize + len(seen))
		err := r.pipeline(ctx, func(p redis.Pipeliner) {
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

// scan calls fn with what a SCAN command of one key yields. An element that stays comes
// at least once.
func (r reader) scan(
	ctx context.Context, command func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd, fn func([]string) error,
) error {
	for cursor := uint64(0); ; {
		var cmd *redis.ScanCmd
		if err := r.pipeline(ctx, func(p redis.Pipeliner) { cmd = command(p, cursor) }); err != nil {
			return err
		}
		page, next := cmd.Val()
		if err := r.pacer.wait(ctx, len(page), bytesOf(page)); err != nil {
			return err
		}
		if err := fn(page); err != nil {
			return err
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

// scanMembers is a scan of a sorted set, without scores.
func (r reader) scanMembers(ctx context.Context, key string, fn func([]string) error) error {
	command := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd { return p.ZScan(ctx, key, cursor, "", pageSize) }
	return r.scan(ctx, command, func(page []string) error {
		members := page[:0]
		for i := 0; i < len(page); i += 2 {
			members = append(members, page[i])
		}
		return fn(members)
	})
}

// readStream calls fn with the entries that a stream has now, each once.
func (r reader) readStream(ctx context.Context, key string, fn func([]redis.XMessage) error) error {
	var newest *redis.XMessageSliceCmd
	if err := r.pipeline(ctx, func(p redis.Pipeliner) { newest = p.XRevRangeN(ctx, key, "+", "-", 1) }); err != nil {
		return err
	}
	if len(newest.Val()) == 0 {
		return nil
	}
	size := pageSizer{n: 50}
	for from, to := "-", newest.Val()[0].ID; ; {
		var cmd *redis.XMessageSliceCmd
		if err := r.pipeline(ctx, func(p redis.Pipeliner) { cmd = p.XRangeN(ctx, key, from, to, size.n) }); err != nil {
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
		if err := r.pacer.wait(ctx, len(page), bytes); err != nil {
			return err
		}
		from = "(" + page[len(page)-1].ID
		if err := fn(page); err != nil {
			return err
		}
	}
}

// readList calls fn with the first n elements of a list that only grows, at its end.
func (r reader) readList(ctx context.Context, key string, n int64, fn func(string)) error {
	size := pageSizer{n: 8}
	for at := int64(0); at < n; {
		page, err := r.listRange(ctx, key, at, min(size.n, n-at))
		if err != nil || len(page) == 0 {
			return err
		}
		bytes := 0
		for _, e := range page {
			bytes += len(e)
			fn(e)
		}
		at += int64(len(page))
		size.adapt(bytes)
	}
	return nil
}

// readQueue calls fn with the first n elements of a list, or what is left of them: it may lose
// elements at its head and gain some at its end meanwhile. Each comes once, since a page begins
// with the last element of the one before, wherever it is by then.
func (r reader) readQueue(ctx context.Context, key string, n int64, fn func(string)) error {
	last, at := "", int64(0) // the last element that was read, and where it was
	for first := true; n > 0; first = false {
		page, err := r.listRange(ctx, key, at, pageSize)
		if err != nil {
			return err
		}
		next := 0
		if !first {
			for next = slices.Index(page, last) + 1; next == 0 && at > 0; next = slices.Index(page, last) + 1 {
				at = max(0, at-pageSize)
				if page, err = r.listRange(ctx, key, at, pageSize); err != nil {
					return err
				}
			}
		}
		fresh := page[next:] // all, when the last element has left the list
		if len(fresh) == 0 {
			return nil
		}
		for _, e := range fresh {
			fn(e)
		}
		n -= int64(len(fresh))
		last, at = fresh[len(fresh)-1], at+int64(len(page))-1
	}
	return nil
}

func (r reader) listRange(ctx context.Context, key string, at, n int64) ([]string, error) {
	var cmd *redis.StringSliceCmd
	err := r.pipeline(ctx, func(p redis.Pipeliner) { cmd = p.LRange(ctx, key, at, at+n-1) })
	if err == nil {
		err = r.pacer.wait(ctx, len(cmd.Val()), bytesOf(cmd.Val()))
	}
	return cmd.Val(), err
}
