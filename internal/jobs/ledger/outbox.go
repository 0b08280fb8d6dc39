package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// OutboxEntry is an entry of the outbox: a group has entered one status, or several in turn.
type OutboxEntry struct {
	ID    string // of the entry
	Group string
	Round string
	Moves []Move
	Err   error // the entry can't be read, and the fields above mean nothing
	// Endpoint is the callback endpoint of the group's tenant. With EndpointErr it can't be read.
	Endpoint    Endpoint
	EndpointErr error

	values map[string]any
}

// Move says that a group has entered a status.
type Move struct {
	Status api.Status
	At     time.Time
	// After is the group as it was when it entered the status. But if several moves share an entry,
	// its counts are those of the last of them, and its error codes and partial aggregates are those
	// of now. They may be newer than the status, until the group has ended; then they no longer change
	// in this round.
	After Group
}

// Ended returns the move with which the group has ended; nil: it has not.
func (e *OutboxEntry) Ended() *Move {
	if n := len(e.Moves); n > 0 && e.Moves[n-1].Status.Ended() {
		return &e.Moves[n-1]
	}
	return nil
}

// Text returns the whole entry, for a person to read.
func (e *OutboxEntry) Text() string { return fmt.Sprint(e.values) }

// OutboxSize returns how many entries the outboxes of all partitions have.
func OutboxSize(ctx context.Context, c redis.Cmdable, space keyspace.Space) (size int64, err error) {
	sizes, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, p := range space.All() {
			pipe.XLen(ctx, p.Outbox())
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("read the size of the outbox: %w", err)
	}
	for _, n := range sizes {
		size += n.(*redis.IntCmd).Val()
	}
	return size, nil
}

// ReadOutbox reads the oldest entries of the outbox, at most n of them, in at most two round trips.
func ReadOutbox(ctx context.Context, c redis.Cmdable, p keyspace.Partition, n int) ([]OutboxEntry, error) {
	var read *redis.XMessageSliceCmd
	var endpoints *redis.IntCmd
	_, _ = c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		read, endpoints = pipe.XRangeN(ctx, p.Outbox(), "-", "+", int64(n)), pipe.HLen(ctx, p.Endpoints())
		return nil
	})
	entries, err := read.Result()
	if err == nil && (call.IsUnavailable(endpoints.Err()) || ctx.Err() != nil) {
		err = errors.Join(endpoints.Err(), ctx.Err()) // otherwise callbacks would be lost
	}
	if err != nil {
		return nil, fmt.Errorf("read outbox: %w", err)
	}
	all, hashes := make([]OutboxEntry, len(entries)), make([]map[string]string, len(entries))
	parts := map[string]groupParts{} // of the groups that may have some
	var having, tenants []string
	for i, e := range entries {
		id, _ := e.Values["group"].(string)
		all[i], hashes[i] = outboxEntry(e, id)
		tenants = append(tenants, hashes[i][groupTenant])
		if _, known := parts[id]; !known && (hashes[i][groupAggregate] != "" || integer(hashes[i][groupFailed]) > 0) {
			parts[id], having = groupParts{}, append(having, id)
		}
	}
	var configured *redis.SliceCmd
	reads := make([]groupParts, len(having))
	if ask := len(entries) > 0 && endpoints.Val() > 0; ask || len(having) > 0 {
		_, err = c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			for i, id := range having {
				reads[i] = readParts(ctx, pipe, p, id)
			}
			if ask {
				configured = pipe.HMGet(ctx, p.Endpoints(), tenants...)
			}
			return nil
		})
	}
	if err != nil && (call.IsUnavailable(err) || ctx.Err() != nil) {
		return nil, fmt.Errorf("read groups of the outbox: %w", err)
	} // any other error is of one group
	for i, id := range having {
		parts[id] = reads[i]
	}
	for i := range all {
		of, has := parts[all[i].Group]
		if !has {
			of = groupParts{&redis.MapStringStringCmd{}, &redis.MapStringStringCmd{}}
		}
		all[i].Err = errors.Join(all[i].Err, of.codes.Err(), of.aggregate.Err())
		all[i].setGroups(hashes[i], of)
		all[i].EndpointErr = endpoints.Err()
		if configured != nil {
			all[i].Endpoint, all[i].EndpointErr = parseEndpoint(values(configured.Val()).str(i))
		}
	}
	return all, nil
}

// outboxEntry parses an entry that a script has written, and returns the group's hash with it.
func outboxEntry(e redis.XMessage, id string) (OutboxEntry, map[string]string) {
	text := func(field string) string { v, _ := e.Values[field].(string); return v }
	out, hash := OutboxEntry{ID: e.ID, Group: id, Round: text("round"), values: e.Values}, map[string]string{}
	if err := readSnapshot(text("snapshot"), func(field, value string) { hash[field] = value }); err != nil {
		out.Err = fmt.Errorf("read snapshot: %w", err)
	}
	moves := strings.Fields(text("moves"))
	if len(moves) == 0 {
		moves = []string{text("status"), text("at")}
	}
	for pair := range slices.Chunk(moves, 2) {
		at, err := strconv.ParseInt(pair[len(pair)-1], 10, 64)
		if err != nil {
			out.Err = errors.Join(out.Err, fmt.Errorf("read time: %w", err))
		}
		out.Moves = append(out.Moves, Move{Status: api.Status(pair[0]), At: time.UnixMilli(at).UTC()})
	}
	return out, hash
}

// setGroups sets After of each move: what the last one has left, without what came later.
func (e *OutboxEntry) setGroups(hash map[string]string, parts groupParts) {
	last := newGroup(hash, parts)
	for i := len(e.Moves) - 1; i >= 0; i-- {
		m := &e.Moves[i]
		m.After = last
		m.After.Status, m.After.Entered = m.Status, maps.Clone(last.Entered)
		delete(last.Entered, strings.ToLower(string(m.Status)))
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
