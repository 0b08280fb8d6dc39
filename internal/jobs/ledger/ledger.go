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
	"strings"
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
// if all tenants of the partition together have spent its limit, "type" (of no tenant) if the type's
// rate is used up, and "in_flight" if as many jobs of the tenant, or of the type, are ready or running
// as may be.
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
	{"", "NOGROUP"}:           {"group %[3]v", api.ErrNotFound},
	{"pause", "NOGROUP"}:      {"group %[4]v", api.ErrNotFound},
	{"why", "NOJOB"}:          {"job %[3]v.%[4]v", api.ErrNotFound},
	{"expire", "FENCED"}:      {"expire group %[3]v", ErrFenced},
	{"append", "CONFLICT"}:    {"group %[3]v: another group has this id: choose another id", api.ErrConflict},
	{"append", "TAKEN"}:       {"group %[3]v: this id is taken: choose another", api.ErrConflict}, // whose it is must not be said
	{"cancel_job", "NOJOB"}:   {"job %[3]v.%[4]v", api.ErrNotFound},
	{"cancel_job", "GROUP"}:   {"job %[3]v.%[4]v: its group is cancelled, and the job with it", api.ErrConflict},
	{"cancel_job", "STARTED"}: {"job %[3]v.%[4]v is in flight: let it finish, or cancel its group", api.ErrConflict},
	{"cancel_job", "ENDED"}:   {"job %[3]v.%[4]v has ended", api.ErrConflict},
	{"cancel_job", "MOVED"}:   {"job %[3]v.%[4]v was not found, because it moves or many jobs are before it: try again, or cancel its group", ErrJobMoved},
	{"cancel", "ENDED"}:       {"group %[3]v is %[1]v and can no longer be cancelled", api.ErrConflict},
	{"pause", "ENDED"}:        {"group %[4]v is %[1]v and can no longer be paused or resumed", api.ErrConflict},
	{"seal", "CANCELLED"}:     {"group %[3]v is CANCELLED and can no longer be sealed", api.ErrConflict},
	{"seal", "TOTAL"}:         {"group %[3]v: has %[1]v jobs, which disagrees with the total of %[2]v", api.ErrConflict},
	{"reopen", "STATE"}:       {"group %[3]v is %[1]v: only a completed or failed group can be retried", api.ErrConflict},
	{"reopen", "NOTCHOSEN"}: {
		"group %[3]v: no failed job has one of these codes or ordinals: look at its failures", api.ErrConflict,
	},
	{"reopen", "MOVING"}: {
		"group %[3]v: a retry of other jobs has just begun: wait until the group has ended", ErrMoving,
	},
	{"reopen", "NONE"}:        {"group %[3]v: no job has failed, so there is nothing to retry", api.ErrConflict},
	{"plan", "FENCED"}:        {"plan operation %[3]v", ErrFenced},
	{"count", "FENCED"}:       {"count operation %[3]v", ErrFenced},
	{"direct", "NOOPERATION"}: {"operation %[3]v", api.ErrNotFound},
	{"direct", "OVER"}:        {"operation %[3]v is %[1]v: there is nothing to %[4]v", api.ErrConflict},
	{"enlist", "MANY"}:        {"%[1]v operations have not ended: cancel one, or wait for the end of one", api.ErrConflict},
	{"enlist", "OWN"}:         {"%[1]v operations of your tenant have not ended: cancel one, or wait for the end of one", api.ErrConflict},
	// The arguments of append (%[3]v to %[6]v) are the group, the limit, the request's number of
	// jobs and its piece.
	{"append", "GAP"}:    {"group %[3]v: piece %[6]v: %[1]v are there", ErrGap},
	{"append", "SEALED"}: {"group %[3]v is %[1]v and takes no more jobs: start another group", api.ErrSealed},
	{"append", "TOTAL"}: {
		"group %[3]v: %[1]v jobs were announced, %[2]v are there, %[5]v more are too many", api.ErrConflict,
	},
	{"append", "TAGS"}: {
		"group %[3]v: tags: the groups of a tenant may have at most %[2]v different tags, and %[1]v are there: use one " +
			"that is there, or wait until groups with others have expired", api.ErrConflict,
	},
	{"append", "LIMIT"}: {
		"group %[3]v: a group holds at most %[4]v jobs, %[1]v are there: start another group", api.ErrConflict,
	},
}

// run executes a script on a partition. A reply that begins with a code of the table refusals has
// failed.
func run(ctx context.Context, c redis.Cmdable, s *call.Script, p keyspace.Partition, args ...any) *call.Reply {
	reply, err := s.Run(ctx, c, p.Keys(), args)
	if err != nil {
		return call.Failed(fmt.Errorf("partition %d: %w", p.Index(), err))
	}
	r := s.Reply(reply)
	if refusal := refused(r, s, args...); refusal != nil && r.Err() == nil {
		return call.Failed(refusal)
	}
	return r
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

// values are the values of some fields of a hash, nil for a field that is missing. The methods return
// zero for it, and for a value of another type: another program may have written the hash.
type values []any

func (v values) str(i int) string {
	if i >= len(v) {
		return ""
	}
	text, _ := v[i].(string)
	return text
}

func (v values) num(i int) int64 { return integer(v.str(i)) }

// decimal returns 0 for a field that is absent or no number.
func (v values) decimal(i int) float64 {
	n, err := strconv.ParseFloat(v.str(i), 64)
	if err != nil {
		return 0
	}
	return n
}

// has reports whether a field exists.
func (v values) has(i int) bool { return i < len(v) && v[i] != nil }

func (v values) when(i int) time.Time { return instant(v.str(i)) }

// instant parses a time in ms. It returns the zero time for 0 and for text that is no time.
func instant(value string) time.Time {
	ms, err := strconv.ParseFloat(value, 64)
	if err != nil || !(ms > 0 && ms < 1<<53) {
		return time.Time{}
	}
	return time.UnixMilli(int64(ms))
}

// refused returns the error of a reply, or of a list inside one, that begins with a code of the table
// refusals, otherwise nil.
func refused(r *call.Reply, s *call.Script, args ...any) error {
	code, ok := r.Peek().(string)
	if !ok || code == "OK" { // nearly always
		return nil
	}
	if code == "ERR" { // the script has met a key of a wrong type, which concerns only this list
		_ = r.Text()
		return call.Answer(r.Text())
	}
	refusal, ok := refusals[[2]string{s.Name(), code}]
	if !ok {
		refusal, ok = refusals[[2]string{"", code}]
	}
	if !ok {
		return nil
	}
	_ = r.Text()
	values := []any{"", ""}
	for i := range values {
		if r.More() || strings.Contains(refusal.text, fmt.Sprintf("%%[%d]v", i+1)) {
			values[i] = r.Text()
		}
	}
	return fmt.Errorf("%s: %w", fmt.Sprintf(refusal.text, append(values, args...)...), refusal.is)
}

// done returns the error of a reply that is only one of these codes.
func done(r *call.Reply, codes ...string) error {
	_ = r.Code(codes...)
	return r.Err()
}

func permits(r *call.Reply) []Permit {
	all := make([]Permit, 0, r.Len()/2)
	for r.More() {
		all = append(all, Permit{Tenant: r.Text(), N: r.Number()})
	}
	return all
}

func denials(r *call.Reply) []Denial {
	all := make([]Denial, 0, r.Len()/2)
	for r.More() {
		all = append(all, Denial{Tenant: r.Text(), Reason: r.Text()})
	}
	return all
}

// integer parses the number of a field; it returns 0 for other text.
func integer(value string) int64 {
	n, _ := strconv.ParseInt(value, 10, 64)
	return n
}
