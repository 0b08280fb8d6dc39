package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// OutboxEntry is an entry of the outbox: a group has entered a status.
type OutboxEntry struct {
	ID     string // of the entry
	Group  string
	Round  string
	Status api.Status
	At     time.Time
	// After is the group as it was when it entered the status. But its error codes and partial
	// aggregates are those of now. Both may be newer than the status, until the group has ended;
	// then they no longer change in this round.
	After  Group
	Err    error // the entry can't be read, and the fields above mean nothing
	values map[string]any
}

// Text returns the whole entry, for a person to read.
func (e *OutboxEntry) Text() string { return fmt.Sprint(e.values) }

// ReadOutbox reads the oldest entries of the outbox, at most n of them, in two round trips.
func ReadOutbox(ctx context.Context, c redis.Cmdable, p keyspace.Partition, n int) ([]OutboxEntry, error) {
	entries, err := c.XRangeN(ctx, p.Outbox(), "-", "+", int64(n)).Result()
	if err != nil {
		return nil, fmt.Errorf("read outbox: %w", err)
	}
	parts := map[string]groupParts{}
	_, err = pipelined(ctx, c, entries, func(pipe redis.Pipeliner, e redis.XMessage) any {
		id, _ := e.Values["group"].(string)
		if _, ok := parts[id]; !ok {
			parts[id] = readParts(ctx, pipe, p, id)
		}
		return nil
	})
	if err != nil && (call.IsUnavailable(err) || ctx.Err() != nil) {
		return nil, fmt.Errorf("read groups of the outbox: %w", err)
	} // any other error is of one group: outboxEntry reports it
	all, fields := make([]OutboxEntry, len(entries)), map[string]string{}
	for i, e := range entries {
		id, _ := e.Values["group"].(string)
		all[i] = outboxEntry(e, id, parts[id], fields)
	}
	return all, nil
}

// outboxEntry parses an entry that a script has written. fields is a map that it overwrites, so
// that callers need not allocate one for each entry.
func outboxEntry(e redis.XMessage, id string, parts groupParts, fields map[string]string) OutboxEntry {
	text := func(field string) string { v, _ := e.Values[field].(string); return v }
	at, err := strconv.ParseInt(text("at"), 10, 64)
	if err != nil {
		err = fmt.Errorf("read time: %w", err)
	}
	err = errors.Join(err, parts.codes.Err(), parts.aggregate.Err())
	clear(fields)
	set := func(field, value string) { fields[field] = value }
	if unreadable := readSnapshot(text("snapshot"), set); unreadable != nil {
		err = fmt.Errorf("read snapshot: %w", unreadable)
	}
	return OutboxEntry{
		ID: e.ID, Group: id, Round: text("round"), Status: api.Status(text("status")),
		At: time.UnixMilli(at).UTC(), After: newGroup(fields, parts), Err: err, values: e.Values,
	}
}

var errSnapshot = errors.New("want an array of strings")

// readSnapshot parses a group's hash in the form in which the outbox holds it: a JSON array of
// field names and values in turn, written by Redis's cjson. It calls set with each field until it
// meets an error. Reflection would cost most of the watcher's time, so the array is parsed by hand;
// only strings with escapes go through encoding/json.
func readSnapshot(text string, set func(field, value string)) error {
	rest, ok := strings.CutPrefix(text, "[")
	if !ok {
		return errSnapshot
	}
	for more := true; more; {
		var pair [2]string
		for i := range pair {
			if !more {
				return errSnapshot
			}
			var err error
			if pair[i], rest, err = cutString(rest); err != nil {
				return err
			}
			rest, more = strings.CutPrefix(rest, ",")
		}
		set(pair[0], pair[1])
	}
	if rest != "]" {
		return errSnapshot
	}
	return nil
}

// cutString parses the JSON string at the start of text. It returns the decoded string and the rest
// of text.
func cutString(text string) (s, rest string, err error) {
	if !strings.HasPrefix(text, `"`) {
		return "", "", errSnapshot
	}
	end, escaped := 1, false
	for ; end < len(text) && text[end] != '"'; end++ {
		if text[end] == '\\' {
			escaped = true
			end++
		}
	}
	if end >= len(text) {
		return "", "", errSnapshot
	}
	s, rest = text[1:end], text[end+1:]
	if escaped {
		if err := json.Unmarshal([]byte(text[:end+1]), &s); err != nil {
			return "", "", fmt.Errorf("%w: %w", errSnapshot, err)
		}
	}
	return s, rest, nil
}
