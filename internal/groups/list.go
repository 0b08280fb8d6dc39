package groups

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/auth"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func badCursor() error {
	return &messages.ValidationError{Fields: []messages.FieldError{{
		Field:   "cursor",
		Problem: "must be one that an earlier page gave",
	}}}
}

// withoutData returns a result with null as its data.
func withoutData(result []byte) []byte {
	r := map[string]json.RawMessage{}
	_ = json.Unmarshal(result, &r) // of a damaged result, nothing is shown
	r["data"] = json.RawMessage("null")
	out, err := json.Marshal(r)
	if err != nil {
		return []byte("{}")
	}
	return out
}

// Results calls yield with the result of each reduced job, in the order in which they were reduced.
// It stops at an error of yield and returns it.
func (s *views) Results(ctx context.Context, id string, yield func(result []byte) error) error {
	if !auth.SeesPayloads(ctx) {
		all := yield
		yield = func(result []byte) error { return all(withoutData(result)) }
	}
	return eachOf(ctx, s.access, id, ledger.Results, yield)
}

// failedPayload returns the payload of a failed job. One that is lost is null.
func failedPayload(ctx context.Context, s *access, group string, e ledger.JobError) (string, error) {
	if e.Payload != "" {
		return e.Payload, nil
	}
	p, _, err := s.locateGroup(ctx, group)
	if err != nil {
		return "", err
	}
	large, err := ledger.Payloads(ctx, s.conn.Cmd, p, []ledger.JobRef{{Group: group, Ordinal: e.Ordinal}})
	if err != nil {
		return "", apiError(err)
	}
	return cmp.Or(large[0], "null"), nil
}

// eachOf calls yield with each item that read finds in a group. An error of yield stays as it is.
func eachOf[T any](
	ctx context.Context, s *access, id string,
	read func(context.Context, redis.Cmdable, keyspace.Partition, string, func(T) error) error,
	yield func(T) error,
) error {
	p, _, err := s.locateGroup(ctx, id)
	if err != nil {
		return err
	}
	var refused error
	err = read(ctx, s.conn.Cmd, p, id, func(item T) error {
		refused = yield(item)
		return refused
	})
	if refused != nil {
		return refused
	}
	return apiError(err)
}

// DeadLetters returns dead letters of all partitions, the newest first. The cursor holds the last
// entry of each partition. A principal of one tenant gets those of this tenant, and maybe a short
// page with a cursor.
func (s *views) DeadLetters(ctx context.Context, cursor string, limit int) (list api.DeadLetterList, err error) {
	own, err := ownTenant(ctx)
	switch {
	case err != nil:
		return list, err
	case own != "":
		list, err = deadLettersOf(ctx, s.access, own, cursor, limit)
	default:
		list, err = allDeadLetters(ctx, s.access, cursor, limit)
	}
	if !auth.SeesPayloads(ctx) {
		for i := range list.DeadLetters {
			list.DeadLetters[i].Error, list.DeadLetters[i].Payload = "", nil
		}
	}
	return list, err
}

const (
	deadLetterChunk   = 500    // dead letters that one command reads
	maxScannedLetters = 10_000 // dead letters that one call for one tenant looks at
)

// deadLettersOf returns a page of the dead letters of a tenant. They lie among those of the other
// tenants of its partition. The cursor is the id of the last entry that was looked at.
func deadLettersOf(
	ctx context.Context, s *access, tenant, cursor string, limit int,
) (api.DeadLetterList, error) {
	list := api.DeadLetterList{DeadLetters: []api.DeadLetter{}}
	if cursor != "" && !messages.ValidEntryID(cursor) {
		return list, badCursor()
	}
	for scanned := 0; scanned < maxScannedLetters; {
		found, err := ledger.DeadLetters(ctx, s.conn.Cmd, s.space.OfTenant(tenant), cursor, deadLetterChunk)
		if err != nil {
			return list, apiError(err)
		}
		for _, d := range found {
			scanned++
			cursor = d.EntryID
			if d.Tenant != tenant {
				continue
			}
			if list.DeadLetters = append(list.DeadLetters, d); len(list.DeadLetters) == limit {
				list.Cursor = cursor
				return list, nil
			}
		}
		if len(found) < deadLetterChunk {
			return list, nil
		}
	}
	list.Cursor = cursor
	return list, nil
}

// allDeadLetters returns a page of the dead letters of all tenants.
func allDeadLetters(ctx context.Context, s *access, cursor string, limit int) (api.DeadLetterList, error) {
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
		if before[i] != "" && !api.ValidID(before[i]) {
			return list, badCursor()
		}
		found, err := ledger.DeadLetters(ctx, s.conn.Cmd, p, before[i], limit)
		if err != nil {
			return list, apiError(err)
		}
		for _, d := range found {
			all = append(all, letter{i, d})
		}
		more = more || len(found) == limit
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
