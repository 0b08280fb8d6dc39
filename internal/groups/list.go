package groups

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/auth"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// listedGroup is a group in the order of creation, and its partition.
type listedGroup struct {
	ledger.CreatedGroup
	p keyspace.Partition
}

// formatCursor returns the cursor of a page that ends with g.
func formatCursor(g ledger.CreatedGroup) string {
	return strconv.FormatFloat(g.Created, 'f', 0, 64) + "." + g.ID
}

// parseCursor returns the group with which the page before ended.
func parseCursor(cursor string) (ledger.CreatedGroup, error) {
	if cursor == "" {
		return ledger.Newest(), nil
	}
	ms, id, ok := strings.Cut(cursor, ".")
	created, err := strconv.ParseInt(ms, 10, 64)
	if !ok || err != nil || !api.ValidID(id) {
		return ledger.CreatedGroup{}, badCursor()
	}
	return ledger.CreatedGroup{Created: float64(created), ID: id}, nil
}

func badCursor() error {
	return &messages.ValidationError{Fields: []messages.FieldError{{
		Field:   "cursor",
		Problem: "must be one that an earlier page gave",
	}}}
}

// newest returns the limit newest groups of these partitions that are older than before, newest
// first; only those of tenant, unless it is "".
func (s *views) newest(
	ctx context.Context, parts []keyspace.Partition, tenant string, before ledger.CreatedGroup, limit int,
) ([]listedGroup, error) {
	var page []listedGroup
	for _, p := range parts {
		found, err := ledger.ListGroups(ctx, s.conn.Cmd, p, tenant, before, limit)
		if err != nil {
			return nil, err
		}
		for _, g := range found {
			page = append(page, listedGroup{g, p})
		}
	}
	slices.SortFunc(page, func(a, b listedGroup) int {
		return cmp.Or(cmp.Compare(b.Created, a.Created), cmp.Compare(b.ID, a.ID))
	})
	return page[:min(len(page), limit)], nil
}

// withStatus returns the first limit groups of a page that are in this state; an empty status
// matches every group. scanned is how many groups of the page it has looked at. It leaves out
// groups that were deleted meanwhile, or that changed their state after it was read.
func withStatus(
	ctx context.Context, s *views, page []listedGroup, status api.Status, limit int,
) (found []api.Group, scanned int, err error) {
	matching := page
	scanned = len(page)
	if status != "" {
		statuses, err := statusesOf(ctx, s.access, page)
		if err != nil {
			return nil, 0, err
		}
		matching = nil
		for i, at := range page {
			if statuses[at.ID] != status {
				continue
			}
			if matching = append(matching, at); len(matching) == limit {
				scanned = i + 1
				break
			}
		}
	} else if len(page) > limit {
		matching, scanned = page[:limit], limit
	}
	views, err := s.viewPage(ctx, matching)
	if err != nil {
		return nil, 0, err
	}
	for _, at := range matching {
		if v, ok := views[at.ID]; ok && (status == "" || v.Status == status) {
			found = append(found, v)
		}
	}
	return found, scanned, nil
}

// statusesOf returns the states of groups by id.
func statusesOf(ctx context.Context, s *access, page []listedGroup) (map[string]api.Status, error) {
	all := make(map[string]api.Status, len(page))
	for p, ids := range byPartition(page) {
		statuses, err := ledger.GroupStatuses(ctx, s.conn.Cmd, p, ids)
		if err != nil {
			return nil, err
		}
		for i, id := range ids {
			all[id] = statuses[i]
		}
	}
	return all, nil
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
	return eachOf(ctx, s, id, ledger.Results, yield)
}

// Failures calls yield once with each failed job, in no order; with its payload only if asked. It
// stops at an error of yield and returns it.
func (s *views) Failures(ctx context.Context, id string, payloads bool, yield func(api.Failure) error) error {
	return eachOf(ctx, s, id, ledger.Failures, func(e ledger.JobError) error {
		f := api.Failure{
			Ordinal: e.Ordinal, Key: e.Key, Code: e.Code, Error: e.Error, Attempts: e.Attempts, At: e.Time(),
		}
		if !auth.SeesPayloads(ctx) {
			f.Error = ""
		} else if payloads {
			payload, err := failedPayload(ctx, s.access, id, e)
			if err != nil {
				return err
			}
			f.Payload = json.RawMessage(payload)
		}
		return yield(f)
	})
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
	ctx context.Context, s *views, id string,
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
