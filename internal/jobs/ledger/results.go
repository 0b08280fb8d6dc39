package ledger

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

// resultChunks is how many chunks of results one read returns; a chunk can have several MB.
const resultChunks = 10

// maxJobs bounds the ordinals of jobs: the states of a group are one string, which in Redis has at
// most 512 MB.
const maxJobs = 512 << 20 / StateBytes

// Results calls yield with the result line of each reduced job of a group, in the order of
// reduction. It stops at the first error of yield and returns it.
func Results(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, yield func(line []byte) error,
) error {
	for from := int64(0); ; from += resultChunks {
		chunks, err := c.LRange(ctx, p.Results(group), from, from+resultChunks-1).Result()
		if err != nil {
			return fmt.Errorf("read results of group %s: %w", group, err)
		}
		for _, chunk := range chunks {
			for line := range strings.SplitSeq(chunk, "\n") {
				if err := yield([]byte(line)); err != nil {
					return err
				}
			}
		}
		if len(chunks) < resultChunks {
			return nil
		}
	}
}

// Failures calls yield once with the error record of each failed job of a group, in no order. It
// stops at the first error of yield and returns it, and fails at a record that it can't read.
func Failures(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, yield func(JobError) error,
) error {
	var seen bitset // HSCAN may return a field more than once
	for record, err := range scan(func(cursor uint64) *redis.ScanCmd {
		return c.HScan(ctx, p.Failures(group), cursor, "", 100)
	}) {
		if err != nil {
			return fmt.Errorf("read failures of group %s: %w", group, err)
		}
		e, err := parseFailure(record[1])
		if err != nil {
			return fmt.Errorf("failures of group %s: %w", group, err)
		}
		if e.Ordinal < 0 || e.Ordinal >= maxJobs {
			return fmt.Errorf("failures of group %s: no job has the ordinal %d", group, e.Ordinal)
		}
		if !seen.add(e.Ordinal) {
			continue
		}
		if err := yield(e); err != nil {
			return err
		}
	}
	return nil
}

// SomeFailures returns the error records, without payloads, of up to `most` failed jobs of a group,
// in no order. Which jobs these are does not depend on their errors.
func SomeFailures(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, most int,
) ([]JobError, error) {
	var some []JobError
	err := Failures(ctx, c, p, group, func(e JobError) error {
		if len(some) == most {
			return errEnough
		}
		e.Payload = "" // it may have 4 KiB
		some = append(some, e)
		return nil
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	return some, err
}

var errEnough = errors.New("enough records were read")

// FailureCodes returns how many jobs of a group have failed, by code.
func FailureCodes(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string,
) (map[string]int64, error) {
	codes, err := c.HGetAll(ctx, p.Codes(group)).Result()
	if err != nil {
		return nil, fmt.Errorf("read failures by code of group %s: %w", group, err)
	}
	return countsByCode(codes), nil
}

// countsByCode parses the hash codes:GROUP. It leaves out codes whose count is 0: their jobs were
// requeued.
func countsByCode(codes map[string]string) map[string]int64 {
	counts := map[string]int64{}
	for code, value := range codes {
		if n := integer(value); n > 0 {
			counts[code] = n
		}
	}
	return counts
}

// bitset is a set of ordinals, one bit for each: a group may have millions of jobs.
type bitset []uint64

// add adds an ordinal and returns false if the set had it.
func (b *bitset) add(ordinal int64) bool {
	word, bit := int(ordinal/64), uint64(1)<<(ordinal%64)
	if word >= len(*b) {
		*b = append(*b, make([]uint64, word+1-len(*b))...)
	}
	fresh := (*b)[word]&bit == 0
	(*b)[word] |= bit
	return fresh
}

// DeadLetters reads a partition's n newest dead letters that are older than the entry before and
// not older than the entry oldest; "" sets no bound.
func DeadLetters(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, before, oldest string, n int,
) ([]api.DeadLetter, error) {
	top := "+"
	if before != "" {
		top = "(" + before
	}
	entries, err := c.XRevRangeN(ctx, p.DeadLetters(), top, cmp.Or(oldest, "-"), int64(n)).Result()
	if err != nil {
		return nil, fmt.Errorf("read dead letters of partition %d: %w", p.Index(), err)
	}
	all := make([]api.DeadLetter, len(entries))
	for i, e := range entries {
		all[i] = deadLetter(e)
	}
	return all, nil
}

// deadLetter parses an entry of the stream dead-letters, as fail_job in lua/parts/endings.lua
// writes it. Other programs may write to the stream as well: a missing or invalid field is empty,
// but At is then the time in the entry's id. The result can always be encoded as JSON.
func deadLetter(e redis.XMessage) api.DeadLetter {
	text := func(field string) string { v, _ := e.Values[field].(string); return v }
	const year9999 = 253402300799999 // the last time that JSON can express
	at, err := strconv.ParseInt(text("at"), 10, 64)
	if err != nil || at < 0 || at > year9999 {
		id, _ := stream.ParseID(e.ID)
		at = int64(min(id.MS, year9999))
	}
	d := api.DeadLetter{
		EntryID:  e.ID,
		Job:      text("job"),
		Tenant:   text("tenant"),
		Group:    text("group"),
		Ordinal:  integer(text("ordinal")),
		Key:      text("key"),
		Type:     text("type"),
		Code:     text("code"),
		Error:    text("error"),
		Attempts: int(integer(text("attempts"))),
		At:       time.UnixMilli(at).UTC(),
	}
	if payload := text("payload"); json.Valid([]byte(payload)) {
		d.Payload = []byte(payload)
	}
	return d
}
