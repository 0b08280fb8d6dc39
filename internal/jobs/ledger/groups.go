package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// The scripts of the folder lua/groups, except for pause.
var (
	seal     = script("groups/seal", "signals")
	schedule = script("groups/schedule", "signals", "tenants", "priority", "fair_queue")
	cancel   = script("groups/cancel", "signals", "tenants", "priority", "fair_queue")
	sweep    = script("groups/sweep", "signals", "tenants", "non_ready", "blob")
	reopen   = script("groups/reopen", "signals")
	requeue  = script("groups/requeue", "signals", "blob", "tenants", "priority", "fair_queue")
	advance  = script("groups/advance", "signals", "tenants", "lifecycle")
	expire   = script("groups/expire", "signals", "tenants", "places", "ready", "tags")

	reduceFailures = script("groups/reduce_failures", "signals")
)

// ErrFenced says that the caller's fencing number is old: another watcher is the partition's leader
// now.
var ErrFenced = errors.New("another watcher leads the partition")

// ErrMoving is an api.ErrConflict that soon passes: Requeue moves other jobs of the group.
var ErrMoving = fmt.Errorf("%w: jobs are being moved", api.ErrConflict)

// GroupFields are the settings of a group that its submission chooses.
type GroupFields struct {
	Lane             string
	Name             string
	Tags             api.Tags
	BasePriority     float64
	MaxRetries       *int          // nil: the worker's default
	JobTimeout       time.Duration // 0: the worker's default
	RunAt            *time.Time    // nil: at once
	FailureThreshold *float64      // nil: 1
	Total            *int64        // nil: not announced
	Aggregate        string        // the aggregates that were asked for, as JSON; "": none
	ReduceFailures   bool          // some of them are of failed jobs
	UniqueKeys       bool          // no two jobs have the same key
	CallbackURL      string        // is told of the group's end; "": that of the tenant
	SubmittedBy      string        // id of the API key; "": not known
}

// Encode returns the fields as the group's hash stores them, for [CreateArgs].
func (g *GroupFields) Encode() map[string]string {
	f := map[string]string{groupLane: g.Lane}
	if g.Name != "" {
		f[groupName] = g.Name
	}
	if len(g.Tags) > 0 {
		f[groupTags] = strings.Join(g.Tags.Pairs(), tagsSeparator)
	}
	if g.BasePriority != 0 {
		f[groupBasePriority] = strconv.FormatFloat(g.BasePriority, 'f', -1, 64)
	}
	if g.MaxRetries != nil {
		f[groupMaxRetries] = strconv.Itoa(*g.MaxRetries)
	}
	if g.JobTimeout > 0 {
		f[groupJobTimeout] = strconv.FormatInt(g.JobTimeout.Milliseconds(), 10)
	}
	if g.RunAt != nil {
		f[groupRunAt] = strconv.FormatInt(g.RunAt.UnixMilli(), 10)
	}
	if g.FailureThreshold != nil {
		f[groupFailureThreshold] = strconv.FormatFloat(*g.FailureThreshold, 'f', -1, 64)
	}
	if g.Total != nil {
		f[groupTotal] = strconv.FormatInt(*g.Total, 10)
	}
	if g.Aggregate != "" {
		f[groupAggregate] = g.Aggregate
	}
	if g.ReduceFailures {
		f[groupReduceFailures] = "1"
	}
	if g.UniqueKeys {
		f[groupUniqueKeys] = "1"
	}
	if g.CallbackURL != "" {
		f[groupCallbackURL] = g.CallbackURL
	}
	if g.SubmittedBy != "" {
		f[groupSubmittedBy] = g.SubmittedBy
	}
	return f
}

// CreateArgs describe a group that does not exist yet.
type CreateArgs struct {
	Group, Tenant string
	Type          string            // of jobs that name none
	Hash          string            // digest of the submission, by which a repetition is recognized
	Fields        map[string]string // further fields of the group's hash
	// Own makes the tenant the owner of the id, too, as RegisterOwners does: only if the owner's key
	// is in the tenant's partition.
	Own bool
}

// Create creates a group without jobs and returns its status. Twice: the second call, with the same
// Hash, changes nothing and returns the status that the group has then. Errors: api.ErrConflict if
// a submission with another Hash has created a group with this id.
func Create(ctx context.Context, c redis.Cmdable, p keyspace.Partition, a CreateArgs) (api.Status, error) {
	results, err := Submit(ctx, c, p, []AppendArgs{{Group: a.Group, Create: &a}})
	if err != nil {
		return "", err
	}
	return results[0].Status, results[0].Err
}

// Seal seals a group: it gets no more jobs. With total it announces that the group gets exactly
// total jobs, and the group is sealed as soon as it has them. Seal reports whether the group is
// sealed now. Twice: the second call reports the same. Errors: api.ErrNotFound; api.ErrConflict if
// the group is cancelled, has more than total jobs, is sealed with fewer, has announced another
// total, or without total has fewer jobs than announced.
func Seal(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, total *int64) (bool, error) {
	arg := any("")
	if total != nil {
		arg = *total
	}
	r := run(ctx, c, seal, p, group, arg)
	sealed := r.Code("OK", "PENDING") == "OK"
	_ = r.Text()
	return call.Done(r, sealed)
}

// Schedule puts scheduled groups whose run_at has come into the fair queue, `most` at most; a
// paused group enters it when it is resumed. It returns the number of groups that it removed from
// the schedule, and the time until the next group is due, negative if none is scheduled. Twice: the
// second call takes the next groups.
func Schedule(ctx context.Context, c redis.Cmdable, p keyspace.Partition, most int) (int, time.Duration, error) {
	r := run(ctx, c, schedule, p, most)
	n, wait := int(r.Number()), r.Duration()
	return n, wait, r.Err()
}

// Cancel ends a group at once and seals it: no more of its jobs start, and the outcomes of
// jobs in flight are stale. It takes the group's queues out of the fair queue; Sweep empties them
// later, and moves the jobs that have not ended to cancelled. Twice: the second call changes
// nothing. Errors: api.ErrNotFound; api.ErrConflict if the group is completed or failed.
func Cancel(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) error {
	return done(run(ctx, c, cancel, p, group), "OK")
}

// SweepJobs is the most jobs that one call of Sweep moves. Such a call costs some milliseconds of
// Redis's time.
const SweepJobs = 5000

// Sweep moves a batch of a cancelled group's jobs to cancelled; more says that another call may be
// needed. ended are the sampled jobs that it has removed from their locations. The last calls
// remove the waiting, non-ready and suspended jobs, the large payloads and the errors, and put the
// group among the ended ones. It does nothing to a group that is not cancelled. Twice: the second
// call moves the next batch.
func Sweep(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string,
) (more bool, ended []JobStep, err error) {
	r := run(ctx, c, sweep, p, group, SweepJobs)
	more = r.Code("MORE", "DONE") == "MORE"
	_ = r.Number()
	ended = steps(r.List())
	return more, ended, r.Err()
}

// RetryChoice says which failed jobs a retry runs: those with one of the error codes, and those
// with one of the ordinals. The zero value stands for all failed jobs.
type RetryChoice struct {
	Codes []string `json:"codes,omitempty"`
	Jobs  []int64  `json:"jobs,omitempty"`
}

// Reopen opens the next round of an ended group and returns its number. Requeue then moves the
// chosen failed jobs; the others stay failed. Twice: with the same request id ("": none) the second
// call returns the same number, unless another call has opened a later round. Errors:
// api.ErrNotFound; api.ErrConflict if the group has not ended, was cancelled, has no failed jobs
// among the chosen ones, or Requeue still moves other jobs.
func Reopen(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group, request string, choice RetryChoice,
) (int, error) {
	return reopenFor(ctx, c, p, group, request, choice, "")
}

// reopenFor does the same as Reopen. If a request that begins with adds ("": none) has opened the
// group's round, and it has not ended, the chosen jobs are added to it. The error is ErrMoving while
// Requeue moves other jobs.
func reopenFor(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group, request string, choice RetryChoice, adds string,
) (int, error) {
	chosen := ""
	if len(choice.Codes)+len(choice.Jobs) > 0 {
		text, err := json.Marshal(choice)
		if err != nil {
			return 0, fmt.Errorf("encode the choice of a retry: %w", err)
		}
		chosen = string(text)
	}
	r := run(ctx, c, reopen, p, group, request, chosen, adds)
	_ = r.Code("OK")
	return call.Done(r, int(r.Number()))
}

// Requeue moves a batch of a reopened group's chosen failed jobs into the fair queue; more says
// that another call may be needed. The jobs of a paused group enter it when the group is resumed.
// Twice: the second call moves the next batch.
func Requeue(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) (more bool, err error) {
	r := run(ctx, c, requeue, p, group, 100)
	more = r.Code("MORE", "DONE") == "MORE"
	_ = r.Number()
	return call.Done(r, more)
}

// AdvanceReply says how far a group has advanced.
type AdvanceReply struct {
	Moved     int   // number of transitions
	Failures  int64 // failed jobs that must be reduced before the group can end (see ReduceFailures)
	Round     int64
	Unsettled bool  // Sweep or Requeue must complete its cancellation or reopening first
	Err       error // that the group can't be read
}

// MaxAdvance is the most groups of one call of Advance: it takes 1 or 2 ms of Redis's time.
const MaxAdvance = 50

// Advance moves groups through their states as far as their counts allow, and removes them from the
// dirty groups. It adds an event to the outbox for each transition. The replies are in the order of
// the groups. Twice: the second call makes no transition.
func Advance(ctx context.Context, c redis.Cmdable, p keyspace.Partition, groups ...string) ([]AdvanceReply, error) {
	args := make([]any, len(groups))
	for i, group := range groups {
		args[i] = group
	}
	r := run(ctx, c, advance, p, args...)
	replies := make([]AdvanceReply, len(groups))
	for i := range replies {
		switch one := r.List(); one.Code("OK", "UNSETTLED", "ERR") {
		case "OK":
			replies[i] = AdvanceReply{Moved: int(one.Number()), Failures: one.Number(), Round: one.Number()}
		case "UNSETTLED":
			replies[i].Unsettled = true
		case "ERR":
			replies[i].Err = fmt.Errorf("advance group %s: %s", groups[i], one.Text())
		}
	}
	return call.Done(r, replies)
}

// ReduceFailures stores the partial aggregate of a group's failed jobs, which the caller has
// reduced. a has the number of these jobs and their round. If one of the two has changed, or the
// group is not AGGREGATING, it does nothing. Twice: the second call stores the same again.
func ReduceFailures(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, a AdvanceReply, state []byte,
) error {
	return done(run(ctx, c, reduceFailures, p, group, a.Round, a.Failures, state), "OK")
}

// Expire deletes an ended group, or with resultsOnly only its result lines. The group's owner key,
// dead letters and outbox entries stay. With the last group of a tenant that has no settings and no
// unfinished jobs and is not paused it deletes the tenant. It does nothing to a group that has not
// ended, or whose cancellation Sweep has not completed. Twice: the second call finds nothing.
// Errors: ErrFenced.
func Expire(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, fence int64, resultsOnly bool,
) error {
	scope := "all"
	if resultsOnly {
		scope = "results"
	}
	return done(run(ctx, c, expire, p, group, fence, scope), "OK", "OPEN")
}

// GroupOwner returns the tenant of a group. p is the partition of the group's id, which need not
// be the tenant's. Errors: api.ErrNotFound.
func GroupOwner(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) (string, error) {
	tenant, err := c.Get(ctx, p.Owner(group)).Result()
	if errors.Is(err, redis.Nil) {
		return "", UnknownGroup(group)
	}
	if err != nil {
		return "", fmt.Errorf("find group %s: %w", group, err)
	}
	return tenant, nil
}

// UnknownGroup returns the error for a group that does not exist.
func UnknownGroup(group string) error { return fmt.Errorf("group %s: %w", group, api.ErrNotFound) }

// OwnerClaim is a tenant that wants to be the owner of a group.
type OwnerClaim struct {
	Partition     keyspace.Partition // of the group's id, which need not be the tenant's
	Group, Tenant string
	Err           error // of RegisterOwners: api.ErrConflict if the group belongs to another tenant
}

// RegisterOwners makes each tenant the owner of its group unless the group has an owner, in one round
// trip, and sets the error of each claim. Two tenants can't own the same group. It returns the first
// error of Redis. Twice: the second call finds the owners.
func RegisterOwners(ctx context.Context, c redis.Cmdable, claims []OwnerClaim) error {
	type replies struct {
		set   *redis.BoolCmd
		owner *redis.StringCmd
	}
	reads, err := pipelined(ctx, c, claims, func(pipe redis.Pipeliner, o OwnerClaim) replies {
		key := o.Partition.Owner(o.Group)
		return replies{pipe.SetNX(ctx, key, o.Tenant, 0), pipe.Get(ctx, key)}
	})
	for i, r := range reads {
		o, owner := &claims[i], r.owner
		switch o.Err = owner.Err(); {
		case errors.Is(o.Err, redis.Nil) && r.set.Err() != nil:
			o.Err = r.set.Err()
		case errors.Is(o.Err, redis.Nil):
			o.Err = fmt.Errorf("group %s: its owner was deleted meanwhile: %w", o.Group, api.ErrUnavailable)
		case o.Err == nil && owner.Val() != o.Tenant:
			o.Err = fmt.Errorf("group %s: this id is taken: choose another: %w", o.Group, api.ErrConflict) // whose it is must not be said
		}
	}
	return err
}

// QueueOwner adds the read of a group's owner to a pipeline. After the pipeline has run, the
// returned function gives the tenant; "" if there is none, and also after an error.
func QueueOwner(ctx context.Context, pipe redis.Pipeliner, p keyspace.Partition, group string) func() string {
	return pipe.Get(ctx, p.Owner(group)).Val
}

// QueueRequests adds reads to a pipeline that find out whether a partition remembers all these
// request ids of appends. After the pipeline has run, the returned function gives the answer; false
// also after an error.
func QueueRequests(
	ctx context.Context, pipe redis.Pipeliner, p keyspace.Partition, requests ...string,
) (stored func() bool) {
	scores := make([]*redis.FloatCmd, len(requests))
	for i, request := range requests {
		scores[i] = pipe.ZScore(ctx, requestsKey(p, request), request)
	}
	return func() bool {
		return !slices.ContainsFunc(scores, func(score *redis.FloatCmd) bool { return score.Err() != nil })
	}
}

// requestsKey returns the key of the sorted set that remembers a request id. append.lua stores the
// ids that begin with an entry's id (EntryRequest) in a set of their own, ordered by the time in
// that id: they are needed only as long as the entry can be delivered again.
func requestsKey(p keyspace.Partition, request string) string {
	if entry, ok := strings.CutPrefix(request, EntryRequest("")); ok {
		if ms, _, ok := strings.Cut(entry, "-"); ok {
			if _, isNumber := number(ms); isNumber {
				return p.Entries()
			}
		}
	}
	return p.Messages()
}
