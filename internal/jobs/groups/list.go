package groups

import (
	"cmp"
	"context"
	"encoding/json"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func badCursor() error {
	return &messages.ValidationError{Fields: []messages.FieldError{{
		Field:   "cursor",
		Problem: "must be one that an earlier page gave",
	}}}
}

// withoutData returns a result line with null as its data. Of a damaged line nothing else is left.
func withoutData(result []byte) []byte {
	var r map[string]json.RawMessage
	_ = json.Unmarshal(result, &r) // of a damaged result, nothing is shown
	if r == nil {
		r = map[string]json.RawMessage{}
	}
	r["data"] = json.RawMessage("null")
	out, err := json.Marshal(r)
	if err != nil {
		return []byte("{}")
	}
	return out
}

// Results calls yield with the result of each reduced job of a group, in the order in which they
// were reduced. For a principal that may not see payloads, the results have null as their data. It
// stops at the first error of yield and returns it.
func (s *views) Results(ctx context.Context, id string, yield func(result []byte) error) error {
	if !auth.SeesPayloads(ctx) {
		all := yield
		yield = func(result []byte) error { return all(withoutData(result)) }
	}
	return eachOf(ctx, s.access, id, ledger.Results, yield)
}

// failedPayload returns the payload of a failed job; null if the payload is lost.
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

// eachOf calls yield with each item that read finds in a group. It converts errors of read to those
// of package api, and returns an error of yield unchanged.
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
