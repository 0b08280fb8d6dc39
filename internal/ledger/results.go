package ledger

import (
	"context"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// resultChunks is how many chunks of results one read returns; a chunk can have several MB.
const resultChunks = 10

// maxJobs bounds the ordinals of jobs: their states are in one string, of at most 512 MB.
const maxJobs = 512 << 20 / StateBytes

// Results calls yield with the result line of each reduced job, in the order of reduction. It
// returns the first error of yield.
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

// Failures calls yield once with the record of each failed job, in no order. It returns the first
// error of yield.
func Failures(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, yield func(JobError) error,
) error {
	var seen bitset // HSCAN may return a field more than once
	for cursor := uint64(0); ; {
		page, next, err := c.HScan(ctx, p.Failures(group), cursor, "", 100).Result()
		if err != nil {
			return fmt.Errorf("read failures of group %s: %w", group, err)
		}
		for i := 1; i < len(page); i += 2 {
			text, _, _ := strings.Cut(page[i], layout.RecordSeparator)
			e, err := parseJobError(text)
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
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

// bitset is a set of ordinals. A group may have millions of jobs.
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
