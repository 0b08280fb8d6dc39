// Package ledger owns the layout of jobs, groups, tenants and limits in Redis. Each transition is
// one Lua script in package lua and one typed function here. A script runs as one step: it reads,
// decides by Redis's clock, and writes.
//
// After an error a caller does not know whether the script ran, so it may repeat any call with the
// same arguments. The doc comment of a function that runs a script which writes says under "Twice"
// what the second call does.
// Errors that are not listed are those of Redis and of the network.
package ledger

import (
	"context"
	"fmt"
	"iter"
	"path"
	"slices"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

// script returns a script of package lua, such as jobs/start, with the files that it needs in front
// of it: the part base and the named parts. Name a part behind the parts that it needs.
func script(file string, parts ...string) *call.Script {
	files := []string{"parts/base"}
	for _, part := range parts {
		files = append(files, "parts/"+part)
	}
	return call.NewScript(path.Base(file), lua.Source(append(files, file)...))
}

// Permit is the number N of a tenant's jobs that a call has made ready. With a rate limit, each of
// them has spent one permit.
type Permit struct {
	Tenant string
	N      int64
}

// Denial names a tenant that a call refused a permit. Reason is "per_group" if the tenant has spent
// its own limit or share, or what is left of it is kept for the tenant's other jobs. It is "global"
// if all tenants of the partition together have spent its limit.
type Denial struct{ Tenant, Reason string }

// refusal is the Go error for a code with which a script refuses a call. In text, the verbs %[1]v
// and %[2]v stand for the values behind the code in the reply, %[3]v and the following ones for the
// script's arguments.
type refusal struct {
	text string
	is   error
}

// refusals holds the codes by which a script refuses a call, by script and code; script "" stands
// for every script without an entry of its own for the code. Codes that are not listed are no
// errors: they are values of the reply.
var refusals = map[[2]string]refusal{
	{"", "NOGROUP"}:        {"group %[3]v", api.ErrNotFound},
	{"pause", "NOGROUP"}:   {"group %[4]v", api.ErrNotFound},
	{"why", "NOJOB"}:       {"job %[3]v.%[4]v", api.ErrNotFound},
	{"advance", "FENCED"}:  {"advance group %[3]v", ErrFenced},
	{"expire", "FENCED"}:   {"expire group %[3]v", ErrFenced},
	{"create", "CONFLICT"}: {"group %[3]v: another group has this id: choose another id", api.ErrConflict},
	{"cancel", "ENDED"}:    {"group %[3]v is %[1]v and can't be cancelled any more", api.ErrConflict},
	{"pause", "ENDED"}:     {"group %[4]v is %[1]v and can't be paused or resumed any more", api.ErrConflict},
	{"seal", "CANCELLED"}:  {"group %[3]v is CANCELLED and can't be sealed any more", api.ErrConflict},
	{"seal", "TOTAL"}:      {"group %[3]v: has %[1]v jobs, which disagrees with the total of %[2]v", api.ErrConflict},
	{"reopen", "STATE"}:    {"group %[3]v is %[1]v: only a completed or failed group can be retried", api.ErrConflict},
	{"reopen", "NOTCHOSEN"}: {
		"group %[3]v: no failed job has one of these codes or ordinals: look at its failures", api.ErrConflict,
	},
	{"reopen", "MOVING"}: {
		"group %[3]v: a retry of other jobs has just begun: wait until the group has ended", api.ErrConflict,
	},
	{"reopen", "NONE"}: {"group %[3]v: no job has failed, so there is nothing to retry", api.ErrConflict},
	// The arguments of append (%[3]v to %[6]v) are the group, the limit, the request's number of
	// jobs and its piece.
	{"append", "GAP"}:    {"group %[3]v: piece %[6]v: %[1]v are there", ErrGap},
	{"append", "SEALED"}: {"group %[3]v is %[1]v and takes no more jobs: start another group", api.ErrSealed},
	{"append", "TOTAL"}: {
		"group %[3]v: %[1]v jobs were announced, %[2]v are there, %[5]v more are too many", api.ErrConflict,
	},
	{"append", "LIMIT"}: {
		"group %[3]v: a group holds at most %[4]v jobs, %[1]v are there: start another group", api.ErrConflict,
	},
}

// run executes a script on a partition and returns its reply, which is always an array. A reply
// that begins with a code of the table refusals is an error. After an error the reply is empty.
func run(ctx context.Context, c redis.Cmdable, s *call.Script, p keyspace.Partition, args ...any) (reply, error) {
	r, err := s.Run(ctx, c, p.Keys(), args)
	if err != nil {
		return nil, fmt.Errorf("partition %d: %w", p.Index(), err)
	}
	list, ok := r.([]any)
	if !ok {
		return nil, fmt.Errorf("partition %d: script %s: unexpected reply %T", p.Index(), s.Name(), r)
	}
	if err := reply(list).refused(s, args...); err != nil {
		return nil, err
	}
	return list, nil
}

// pipelined sends one pipeline; for each item it calls queue, which adds the item's commands to the
// pipeline. It returns queue's results in the order of the items, and the error of the first
// command that failed. Without items it sends nothing.
func pipelined[T, R any](
	ctx context.Context, c redis.Cmdable, items []T, queue func(pipe redis.Pipeliner, item T) R,
) ([]R, error) {
	if len(items) == 0 {
		return nil, nil
	}
	replies := make([]R, len(items))
	_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, item := range items {
			replies[i] = queue(pipe, item)
		}
		return nil
	})
	return replies, err
}

// scan iterates over the pairs of a hash (field and value) or sorted set (member and score). page
// reads one page of them at a cursor. A pair may be returned more than once. An error ends the
// iteration.
func scan(page func(cursor uint64) *redis.ScanCmd) iter.Seq2[[]string, error] {
	return func(yield func([]string, error) bool) {
		for cursor := uint64(0); ; {
			pairs, next, err := page(cursor).Result()
			if err != nil {
				yield(nil, err)
				return
			}
			for pair := range slices.Chunk(pairs, 2) {
				if !yield(pair, nil) {
					return
				}
			}
			if cursor = next; cursor == 0 {
				return
			}
		}
	}
}

// reply is the array that a script replied, or the values of some fields of a hash. Its methods
// return zero for a value that is missing.
type reply []any

// refused returns the error of a reply that begins with a code of the table refusals, otherwise
// nil.
func (r reply) refused(s *call.Script, args ...any) error {
	if len(r) == 0 {
		return nil
	}
	code, _ := r[0].(string)
	refused, ok := refusals[[2]string{s.Name(), code}]
	if !ok {
		refused, ok = refusals[[2]string{"", code}]
	}
	if !ok {
		return nil
	}
	values := append([]any{r.str(1), r.str(2)}, args...)
	return fmt.Errorf("%s: %w", fmt.Sprintf(refused.text, values...), refused.is)
}

func (r reply) str(i int) string {
	if i >= len(r) {
		return ""
	}
	switch v := r[i].(type) {
	case string:
		return v
	case int64:
		return strconv.FormatInt(v, 10)
	}
	return ""
}

func (r reply) num(i int) int64 {
	if i >= len(r) {
		return 0
	}
	switch v := r[i].(type) {
	case int64:
		return v
	case string:
		return integer(v)
	}
	return 0
}

// has reports whether a field exists.
func (r reply) has(i int) bool { return i < len(r) && r[i] != nil }

// when parses a value that is a time in ms. It may be the score of a sorted set, which Redis may
// write with an exponent. It returns the zero time for 0 and for an invalid value.
func (r reply) when(i int) time.Time {
	ms, err := strconv.ParseFloat(r.str(i), 64)
	if err != nil || !(ms > 0 && ms < 1<<53) {
		return time.Time{}
	}
	return time.UnixMilli(int64(ms))
}

// span reads a duration in ms.
func (r reply) span(i int) time.Duration { return time.Duration(r.num(i)) * time.Millisecond }

func (r reply) list(i int) reply {
	if i >= len(r) {
		return nil
	}
	l, _ := r[i].([]any)
	return l
}

// all returns the values as value reads each of them.
func all[T any](r reply, value func(r reply, i int) T) []T {
	out := make([]T, len(r))
	for i := range r {
		out[i] = value(r, i)
	}
	return out
}

func (r reply) permits() []Permit {
	out := make([]Permit, 0, len(r)/2)
	for pair := range slices.Chunk(r, 2) {
		out = append(out, Permit{Tenant: pair.str(0), N: pair.num(1)})
	}
	return out
}

func (r reply) denials() []Denial {
	out := make([]Denial, 0, len(r)/2)
	for pair := range slices.Chunk(r, 2) {
		out = append(out, Denial{Tenant: pair.str(0), Reason: pair.str(1)})
	}
	return out
}

// integer parses the number of a field; it returns 0 for other text.
func integer(value string) int64 {
	n, _ := strconv.ParseInt(value, 10, 64)
	return n
}
