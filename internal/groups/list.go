package groups

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// place is a group's place in the order of creation, newest first; equal times are ordered by id.
type place struct {
	created float64
	id      string
	p       keyspace.Partition
}

func (a place) String() string { return strconv.FormatFloat(a.created, 'f', 0, 64) + "." + a.id }

// after says whether a comes after b: is older.
func (a place) after(b place) bool {
	return a.created < b.created || (a.created == b.created && a.id < b.id)
}

func parseCursor(cursor string) (place, error) {
	if cursor == "" {
		return place{created: math.Inf(1)}, nil
	}
	ms, id, ok := strings.Cut(cursor, ".")
	created, err := strconv.ParseInt(ms, 10, 64)
	if !ok || err != nil || !messages.ValidID(id) {
		return place{}, badCursor()
	}
	return place{created: float64(created), id: id}, nil
}

func badCursor() error {
	return &messages.ValidationError{Fields: []messages.FieldError{{
		Field:   "cursor",
		Problem: "must be one that an earlier page gave",
	}}}
}

// newest merges the partitions' next groups after a place.
func (s *Store) newest(
	ctx context.Context, parts []keyspace.Partition, tenant string, before place, limit int,
) ([]place, error) {
	var page []place
	for _, p := range parts {
		key := p.Groups()
		if tenant != "" {
			key = p.GroupsOf(tenant)
		}
		for offset, got := int64(0), 0; ; offset += int64(limit) {
			found, err := s.conn.Cmd.ZRevRangeByScoreWithScores(ctx, key, &redis.ZRangeBy{
				Min: "-inf", Max: strconv.FormatFloat(before.created, 'f', 0, 64), Offset: offset, Count: int64(limit),
			}).Result()
			if err != nil {
				return nil, fmt.Errorf("list groups: %w", err)
			}
			for _, z := range found {
				at := place{created: z.Score, id: z.Member.(string), p: p}
				if at.after(before) {
					page = append(page, at)
					got++
				}
			}
			// Those created in the cursor's very millisecond may fill pages before it. Each
			// partition must give as many as it has, or the next one's would be taken for
			// what follows.
			if got >= limit || len(found) < limit {
				break
			}
		}
	}
	slices.SortFunc(page, func(a, b place) int {
		return cmp.Or(cmp.Compare(b.created, a.created), cmp.Compare(b.id, a.id))
	})
	return page[:min(len(page), limit)], nil
}

// How much of a long list is read at once: chunks of results, of up to some MB each, and failures.
const (
	chunkPage = 10
	pageSize  = 100
)

// Results calls yield with each result of a done job, as they were reduced.
func (s *Store) Results(ctx context.Context, id string, yield func(line []byte) error) error {
	p, _, err := s.locateGroup(ctx, id)
	if err != nil {
		return err
	}
	for from := int64(0); ; from += chunkPage {
		chunks, err := s.conn.Cmd.LRange(ctx, p.Results(id), from, from+chunkPage-1).Result()
		if err != nil {
			return apiError(fmt.Errorf("read results of group %s: %w", id, err))
		}
		for _, chunk := range chunks {
			for line := range strings.SplitSeq(chunk, "\n") {
				if err := yield([]byte(line)); err != nil {
					return err
				}
			}
		}
		if len(chunks) < chunkPage {
			return nil
		}
	}
}

// Failures calls yield with each failed job, once.
func (s *Store) Failures(ctx context.Context, id string, yield func(api.Failure) error) error {
	p, _, err := s.locateGroup(ctx, id)
	if err != nil {
		return err
	}
	var seen bitset // HSCAN may repeat itself while the hash grows
	for cursor := uint64(0); ; {
		page, next, err := s.conn.Cmd.HScan(ctx, p.Failures(id), cursor, "", pageSize).Result()
		if err != nil {
			return apiError(fmt.Errorf("read failures of group %s: %w", id, err))
		}
		for i := 1; i < len(page); i += 2 {
			text, _, _ := strings.Cut(page[i], "\n")
			e, err := parseError(text)
			if err != nil {
				return fmt.Errorf("failures of group %s: %w", id, err)
			}
			if !seen.add(e.Ordinal) {
				continue
			}
			if err := yield(api.Failure{
				Ordinal:  e.Ordinal,
				Code:     e.Code,
				Error:    e.Error,
				Attempts: e.Attempts,
				At:       time.UnixMilli(e.At).UTC(),
			}); err != nil {
				return err
			}
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

// bitset is a set of ordinals: a group may have millions of them.
type bitset []uint64

// add returns false for one that is in the set.
func (b *bitset) add(ordinal int64) bool {
	word, bit := int(ordinal/64), uint64(1)<<(ordinal%64)
	if word >= len(*b) {
		*b = append(*b, make([]uint64, word+1-len(*b))...)
	}
	fresh := (*b)[word]&bit == 0
	(*b)[word] |= bit
	return fresh
}

// DeadLetters lists dead letters of all partitions, newest first. The cursor holds the
// place in each.
func (s *Store) DeadLetters(ctx context.Context, cursor string, limit int) (api.DeadLetterList, error) {
	list := api.DeadLetterList{DeadLetters: []api.DeadLetter{}}
	parts := s.space.All()
	before := make([]string, len(parts))
	if cursor != "" {
		before = strings.Split(cursor, ",")
	}
	if len(before) != len(parts) {
		return list, badCursor()
	}
	type letter struct {
		part int
		api.DeadLetter
	}
	var all []letter
	more := false
	for i, p := range parts {
		top := "+"
		if before[i] != "" {
			if !messages.ValidID(before[i]) {
				return list, badCursor()
			}
			top = "(" + before[i]
		}
		entries, err := s.conn.Cmd.XRevRangeN(ctx, p.DeadLetters(), top, "-", int64(limit)).Result()
		if err != nil {
			return list, apiError(fmt.Errorf("read dead letters: %w", err))
		}
		for _, e := range entries {
			all = append(all, letter{i, deadLetter(e)})
		}
		more = more || len(entries) == limit
	}
	slices.SortStableFunc(all, func(a, b letter) int { return b.At.Compare(a.At) })
	more = more || len(all) > limit
	for _, l := range all[:min(limit, len(all))] {
		list.DeadLetters = append(list.DeadLetters, l.DeadLetter)
		before[l.part] = l.EntryID
	}
	if more {
		list.Cursor = strings.Join(before, ",")
	}
	return list, nil
}

// deadLetter shows an entry; what it lacks, because others wrote it, is empty.
func deadLetter(e redis.XMessage) api.DeadLetter {
	text := func(field string) string { v, _ := e.Values[field].(string); return v }
	const year9999 = 253402300799999 // what JSON can tell of time ends there
	at, err := strconv.ParseInt(text("at"), 10, 64)
	if err != nil || at < 0 || at > year9999 {
		ms, _, _ := strings.Cut(e.ID, "-")
		at = min(number(ms), year9999)
	}
	d := api.DeadLetter{
		EntryID:  e.ID,
		Job:      text("job"),
		Tenant:   text("tenant"),
		Group:    text("group"),
		Ordinal:  number(text("ordinal")),
		Type:     text("type"),
		Code:     text("code"),
		Error:    text("error"),
		Attempts: int(number(text("attempts"))),
		At:       time.UnixMilli(at).UTC(),
	}
	if payload := text("payload"); json.Valid([]byte(payload)) {
		d.Payload = []byte(payload)
	}
	return d
}
