package ledger

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Fields of an entry of the dead letters, as the scripts write them.
const (
	deadJob      = "job"
	deadTenant   = "tenant"
	deadGroup    = "group"
	deadOrdinal  = "ordinal"
	deadType     = "type"
	deadCode     = "code"
	deadError    = "error"
	deadAttempts = "attempts"
	deadAt       = "at" // ms
	deadPayload  = "payload"
)

// DeadLetters reads a partition's n newest dead letters that are older than the entry before; ""
// means the newest of all.
func DeadLetters(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, before string, n int,
) ([]api.DeadLetter, error) {
	top := "+"
	if before != "" {
		top = "(" + before
	}
	entries, err := c.XRevRangeN(ctx, p.DeadLetters(), top, "-", int64(n)).Result()
	if err != nil {
		return nil, fmt.Errorf("read dead letters of partition %d: %w", p.Index(), err)
	}
	all := make([]api.DeadLetter, len(entries))
	for i, e := range entries {
		all[i] = deadLetter(e)
	}
	return all, nil
}

// deadLetter reads an entry. Other programs may write to the stream as well: a missing or invalid
// field is empty, and the result can always be written as JSON.
func deadLetter(e redis.XMessage) api.DeadLetter {
	text := func(field string) string { v, _ := e.Values[field].(string); return v }
	const year9999 = 253402300799999 // the last time that JSON can express
	at, err := strconv.ParseInt(text(deadAt), 10, 64)
	if err != nil || at < 0 || at > year9999 {
		ms, _, _ := strings.Cut(e.ID, "-")
		at = min(integer(ms), year9999)
	}
	d := api.DeadLetter{
		EntryID:  e.ID,
		Job:      text(deadJob),
		Tenant:   text(deadTenant),
		Group:    text(deadGroup),
		Ordinal:  integer(text(deadOrdinal)),
		Type:     text(deadType),
		Code:     text(deadCode),
		Error:    text(deadError),
		Attempts: int(integer(text(deadAttempts))),
		At:       time.UnixMilli(at).UTC(),
	}
	if payload := text(deadPayload); json.Valid([]byte(payload)) {
		d.Payload = []byte(payload)
	}
	return d
}
