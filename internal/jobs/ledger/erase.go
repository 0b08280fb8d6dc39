package ledger

import (
	"bytes"
	"context"
	"crypto/sha1" //nolint:gosec // it recognizes a chunk, as Redis's sha1hex does
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var (
	deleteCallbacks = script("callbacks/delete_callbacks", "signals", "callbacks")
	eraseJob        = script("groups/erase_job")
	eraseResult     = script("groups/erase_result")
	releaseID       = script("groups/release_id")
)

// forgetPage is how many entries of a stream, which may have a payload each, are read at once.
const forgetPage = 100

// GroupEvents returns the ids of all events that a group may have, and the time of its creation; zero if
// it was reopened, since its hash then has the time of the present round.
func GroupEvents(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) (events []string, created time.Time, err error) {
	g, err := c.HMGet(ctx, p.Group(group), groupRound, groupAt+strings.ToLower(string(api.StatusCreated))).Result()
	if err != nil {
		return nil, created, fmt.Errorf("read group %s: %w", group, err)
	}
	for round := int64(1); round <= max(1, values(g).num(0)); round++ {
		for _, status := range api.Statuses {
			events = append(events, EventID(group, strconv.FormatInt(round, 10), status))
		}
	}
	if values(g).num(0) > 1 {
		return events, created, nil
	}
	return events, values(g).when(1), nil
}

// ForgetGroup deletes what the streams of all groups, and the callbacks, hold of a group that has
// ended: dead letters, results that are not reduced, and events, those of the outbox too. events and
// created are those of GroupEvents. Entries of ready streams are left to DeleteGroup. Twice: the second
// call finds nothing.
func ForgetGroup(
	ctx context.Context, c redis.Cmdable, space keyspace.Space, p keyspace.Partition, group string, events []string, created time.Time,
) error {
	failed := func(err error) error { return fmt.Errorf("forget group %s: %w", group, err) }
	for chunk := range slices.Chunk(events, 1000) {
		ids := make([]any, len(chunk))
		for i, id := range chunk {
			ids[i] = id
		}
		r := run(ctx, c, deleteCallbacks, p, ids...)
		if _, err := r.Number(), r.Err(); err != nil {
			return failed(err)
		}
	}
	if err := forgetLetters(ctx, c, p, group); err != nil {
		return failed(err)
	}
	if err := deleteEntries(ctx, c, p.ResultStream(), "-", keyspace.GroupAggregator,
		func(fields map[string]any) bool { return fields["g"] == group }); err != nil {
		return failed(err)
	}
	if err := deleteEntries(ctx, c, p.Outbox(), "-", "", func(fields map[string]any) bool { return fields["group"] == group }); err != nil {
		return failed(err)
	}
	from := "-"
	if !created.IsZero() { // a minute earlier, because Redis's clock may have been set back
		from = strconv.FormatInt(max(0, created.Add(-time.Minute).UnixMilli()), 10)
	}
	if err := deleteEntries(ctx, c, space.Events(), from, "", func(fields map[string]any) bool {
		id, _ := fields["id"].(string)
		return slices.Contains(events, id) || strings.HasPrefix(id, "audit.") && isOf(fields["data"], group)
	}); err != nil {
		return failed(err)
	}
	return nil
}

// isOf reports whether an event shows a group.
func isOf(payload any, group string) bool {
	text, _ := payload.(string)
	var e struct {
		Group *struct{ ID string } `json:"group"`
	}
	return json.Unmarshal([]byte(text), &e) == nil && e.Group != nil && e.Group.ID == group
}

// EventID returns the id of the event that a group has entered a status.
func EventID(group, round string, status api.Status) string {
	return group + "." + round + "." + strings.ToLower(string(status))
}

// forgetLetters deletes the dead letters of a group's failed jobs.
func forgetLetters(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) error {
	var letters []string
	flush := func() error {
		defer func() { letters = letters[:0] }()
		if len(letters) == 0 {
			return nil
		}
		return c.XDel(ctx, p.DeadLetters(), letters...).Err()
	}
	err := Failures(ctx, c, p, group, func(e JobError) error {
		if e.Letter != "" {
			letters = append(letters, e.Letter)
		}
		if len(letters) < 1000 {
			return nil
		}
		return flush()
	})
	return errors.Join(err, flush())
}

// deleteEntries deletes the entries of a stream that are the right ones, from an id on, also for its
// consumer group if it has one.
func deleteEntries(
	ctx context.Context, c redis.Cmdable, stream, from, consumers string, right func(fields map[string]any) bool,
) error {
	for {
		page, err := c.XRangeN(ctx, stream, from, "+", forgetPage).Result()
		if err != nil || len(page) == 0 {
			return err
		}
		var ids []string
		for _, e := range page {
			if right(e.Values) {
				ids = append(ids, e.ID)
			}
		}
		if len(ids) > 0 {
			if consumers != "" {
				if err := c.XAck(ctx, stream, consumers, ids...).Err(); err != nil {
					return err
				}
			}
			if err := c.XDel(ctx, stream, ids...).Err(); err != nil {
				return err
			}
		}
		if len(page) < forgetPage {
			return nil
		}
		from = "(" + page[len(page)-1].ID
	}
}

// DeleteGroup deletes a group that has ended, at once: as Expire, and its entries in ready streams, so
// that what a worker reports of its jobs is stale. Twice: the second call finds nothing.
func DeleteGroup(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) error {
	r := run(ctx, c, expire, p, group, "", "now")
	if r.Code("OK", "OPEN") == "OPEN" {
		return fmt.Errorf("group %s has been opened again meanwhile: %w", group, api.ErrConflict)
	}
	return r.Err()
}

// ReleaseID deletes the owner key of a group that was deleted, if it still is that of the tenant. If the
// tenant has created the group again in between, the owner key stays or is written again.
func ReleaseID(ctx context.Context, c redis.Cmdable, space keyspace.Space, p keyspace.Partition, group, tenant string) error {
	of := space.OfGroup(group)
	left, err := c.Exists(ctx, p.Group(group)).Result()
	if err == nil && left == 0 && tenant != "" {
		if r := run(ctx, c, releaseID, of, group, tenant); r.Code("OK", "OTHER") == "OK" {
			if left, err = c.Exists(ctx, p.Group(group)).Result(); left > 0 {
				err = c.SetNX(ctx, of.Owner(group), tenant, 0).Err()
			}
		} else {
			err = r.Err()
		}
	}
	if err != nil {
		return fmt.Errorf("release the id of group %s: %w", group, err)
	}
	return nil
}

// GroupKey is what a group knows of a job with a key.
type GroupKey struct {
	Group   string
	Unique  bool  // the group has an index of its keys
	Ordinal int64 // of the job; -1: there is none
	Open    bool  // some of its jobs have not ended, or their results are not reduced
}

// FindKeys looks for a key in about n groups of a tenant, from a cursor on. next is the cursor for the
// next call; 0: there are no more groups. A group may be returned more than once.
func FindKeys(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant, key string, cursor uint64, n int64,
) (found []GroupKey, next uint64, err error) {
	pairs, next, err := c.ZScan(ctx, p.GroupsOf(tenant), cursor, "", n).Result()
	if err != nil {
		return nil, 0, fmt.Errorf("list groups of tenant %s: %w", tenant, err)
	}
	var groups []string
	for pair := range slices.Chunk(pairs, 2) {
		groups = append(groups, pair[0])
	}
	type replies struct {
		group   *redis.SliceCmd
		ordinal *redis.SliceCmd
	}
	reads, err := pipelined(ctx, c, groups, func(pipe redis.Pipeliner, group string) replies {
		return replies{
			pipe.HMGet(ctx, p.Group(group), groupUniqueKeys, groupAccepted, groupReduced, groupFailed, groupCancelled),
			pipe.HMGet(ctx, p.KeyIndex(group), key),
		}
	})
	if err != nil {
		return nil, 0, fmt.Errorf("look for a key in groups of tenant %s: %w", tenant, err)
	}
	for i, r := range reads {
		k := GroupKey{Group: groups[i], Ordinal: -1}
		g := values(r.group.Val())
		k.Unique, k.Open = g.has(0), g.num(1) > g.num(2)+g.num(3)+g.num(4)
		if at := values(r.ordinal.Val()); at.has(0) {
			k.Ordinal = at.num(0)
		}
		found = append(found, k)
	}
	return found, next, nil
}

// EndedWithKey returns the ordinals of the failed and reduced jobs of a group that have a key, by their
// records.
func EndedWithKey(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group, key string) ([]int64, error) {
	var ended []int64
	if err := Failures(ctx, c, p, group, func(e JobError) error {
		if e.Key == key {
			ended = append(ended, e.Ordinal)
		}
		return nil
	}); err != nil {
		return nil, err
	}
	err := Results(ctx, c, p, group, func(line []byte) error {
		var r struct {
			Ordinal int64  `json:"ordinal"`
			Key     string `json:"key"`
		}
		if bytes.Contains(line, []byte(`"key":`)) && json.Unmarshal(line, &r) == nil && r.Key == key {
			ended = append(ended, r.Ordinal)
		}
		return nil
	})
	return ended, err
}

// EraseJob replaces what is kept of a job that has ended: the record of a failed one has no payload, key
// and error text any more, the result of a done one no data, and its dead letter and its key are
// deleted. key is "" if the group has no index of keys. Twice: the second call finds nothing to erase.
// Errors: ErrJobMoved if the job has not ended, or runs again.
func EraseJob(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64, key string) error {
	st, err := ReadJob(ctx, c, p, group, ordinal)
	if err != nil {
		return err
	}
	field := strconv.FormatInt(ordinal, 10)
	var record, erased, letter string
	switch st.State.Letter() {
	case Failed:
		if record, err = c.HGet(ctx, p.Failures(group), field).Result(); err != nil && !errors.Is(err, redis.Nil) {
			return fmt.Errorf("erase job %s.%d: %w", group, ordinal, err)
		}
		if erased, letter, err = withoutPerson(record); err != nil {
			return fmt.Errorf("erase job %s.%d: %w", group, ordinal, err)
		}
	case Reduced:
		if err := eraseResultOf(ctx, c, p, group, ordinal); err != nil {
			return err
		}
	case Cancelled:
		// Of a cancelled group, the entry stays in the ready stream until a worker has read it, or gives it back.
		if ready, err := inReadyStream(ctx, c, p, group, ordinal); err != nil {
			return err
		} else if ready {
			return fmt.Errorf("erase job %s.%d: its entry is in a ready stream: %w", group, ordinal, ErrJobMoved)
		}
	default:
		return fmt.Errorf("erase job %s.%d: %w", group, ordinal, ErrJobMoved)
	}
	r := run(ctx, c, eraseJob, p, group, ordinal, key, record, erased, letter)
	_ = r.Code("OK")
	return r.Err()
}

func inReadyStream(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64) (bool, error) {
	types, err := c.HGet(ctx, p.Group(group), groupTypes).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return false, fmt.Errorf("find job %s.%d: %w", group, ordinal, err)
	}
	_, found, err := FindReady(ctx, c, p, strings.Split(types, typesSeparator), group, ordinal)
	return found, err
}

// withoutPerson returns a record of failures:GROUP without the payload, key and error text, and the
// job's entry in the dead letters.
func withoutPerson(record string) (erased, letter string, err error) {
	if record == "" {
		return "", "", nil
	}
	text, blob, _ := strings.Cut(record, recordSeparator)
	var fields map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text), &fields); err != nil {
		return "", "", fmt.Errorf("read error record: %w", err)
	}
	_ = json.Unmarshal(fields["letter"], &letter)
	delete(fields, "letter")
	fields["error"] = json.RawMessage(`"erased"`)
	head, err := json.Marshal(fields)
	if err != nil {
		return "", "", err
	}
	j, err := ParseJob(blob)
	if err != nil {
		return "", "", err
	}
	j.Queued = j.Queued[:len(j.Queued)-len(j.end())]
	return string(head) + recordSeparator + j.Blob(), letter, nil
}

// eraseResultOf replaces the data in the result line of a job by null.
func eraseResultOf(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64) error {
	prefix := fmt.Sprintf(`{"ordinal":%d,`, ordinal)
	var chunks []string
	for at := int64(0); ; at++ {
		if len(chunks) == 0 {
			var err error
			if chunks, err = c.LRange(ctx, p.Results(group), at, at+resultChunks-1).Result(); err != nil {
				return fmt.Errorf("erase result %s.%d: %w", group, ordinal, err)
			}
		}
		if len(chunks) == 0 {
			return nil // there is none: it was deleted
		}
		chunk := chunks[0]
		chunks = chunks[1:]
		lines := strings.Split(chunk, "\n")
		i := slices.IndexFunc(lines, func(line string) bool { return strings.HasPrefix(line, prefix) })
		if i < 0 {
			continue
		}
		var fields map[string]json.RawMessage
		if err := json.Unmarshal([]byte(lines[i]), &fields); err != nil {
			return fmt.Errorf("erase result %s.%d: %w", group, ordinal, err)
		}
		delete(fields, "ordinal")
		delete(fields, "key")
		delete(fields, "last_error")
		fields["data"] = json.RawMessage("null")
		rest, err := json.Marshal(fields)
		if err != nil {
			return err
		}
		lines[i] = prefix + string(rest[1:])
		sum := sha1.Sum([]byte(chunk)) //nolint:gosec // see the import
		r := run(ctx, c, eraseResult, p, group, at, hex.EncodeToString(sum[:]), strings.Join(lines, "\n"))
		if r.Code("OK", "MOVED") == "MOVED" {
			at, chunks = at-1, nil // somebody has erased another line of the chunk
			continue
		}
		return r.Err()
	}
}
