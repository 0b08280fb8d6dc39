package ledger

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Group is a group as Redis describes it.
type Group struct {
	ID, Tenant, Name, Type, Lane string
	Tags                         api.Tags
	CallbackURL                  string
	SubmittedBy                  string // id of the API key; "": not known

	RunAt            time.Time     // zero: none
	MaxRetries       *int          // nil: the workers' default
	JobTimeout       time.Duration // 0: the workers' default
	FailureThreshold *float64      // nil: 1
	UniqueKeys       bool

	Status         api.Status
	Round          int
	Sealed, Paused bool
	Entered        map[string]time.Time // status of the round, in lower case → when it was entered
	Started        time.Time            // when the round's first job started; zero: none has

	Total              *int64 // announced number of jobs; nil: none was announced
	Counts             api.Counts
	FailuresByCode     map[string]int64
	Throttles, Retries int64 // times that its jobs became markers for want of a permit, and were retried

	Aggregates string   // the aggregates that were asked for, as JSON; "": none
	Partials   []string // the partial aggregates, that of failed jobs too, as encoded by reducers, in no order
}

// groupParts are the pending reads, in a pipeline, of two hashes of a group beside group:GROUP: the
// numbers of its failed jobs by code, and its partial aggregates.
type groupParts struct{ codes, aggregate *redis.MapStringStringCmd }

func readParts(ctx context.Context, pipe redis.Pipeliner, p keyspace.Partition, id string) groupParts {
	return groupParts{codes: pipe.HGetAll(ctx, p.Codes(id)), aggregate: pipe.HGetAll(ctx, p.Aggregate(id))}
}

// ReadGroups reads groups of one partition in one round trip, in the order of ids. It leaves out
// those that do not exist.
func ReadGroups(ctx context.Context, c redis.Cmdable, p keyspace.Partition, ids []string) ([]Group, error) {
	type replies struct {
		groupParts
		fields *redis.MapStringStringCmd
	}
	reads, err := pipelined(ctx, c, ids, func(pipe redis.Pipeliner, id string) replies {
		return replies{readParts(ctx, pipe, p, id), pipe.HGetAll(ctx, p.Group(id))}
	})
	if err != nil {
		return nil, fmt.Errorf("read groups: %w", err)
	}
	groups := make([]Group, 0, len(ids))
	for _, r := range reads {
		if g := newGroup(r.fields.Val(), r.groupParts); g.Status != "" {
			groups = append(groups, g)
		}
	}
	return groups, nil
}

// ReadGroupSummary reads a group for a view that is read often. If the partial aggregates have more
// than maxAggregate bytes, it does not read them, and complete is false. The status of a group that
// does not exist is "".
func ReadGroupSummary(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, id string, maxAggregate int64,
) (g Group, complete bool, err error) {
	var fields *redis.MapStringStringCmd
	var sizes [partials + 1]*redis.IntCmd
	parts := groupParts{aggregate: &redis.MapStringStringCmd{}}
	_, err = c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		fields, parts.codes = pipe.HGetAll(ctx, p.Group(id)), pipe.HGetAll(ctx, p.Codes(id))
		for i := range partials {
			sizes[i] = pipe.HStrLen(ctx, p.Aggregate(id), aggregatePartial+strconv.Itoa(i))
		}
		sizes[partials] = pipe.HStrLen(ctx, p.Aggregate(id), aggregateFailed)
		return nil
	})
	bytes := int64(0)
	for _, size := range sizes {
		bytes += size.Val()
	}
	if err == nil && bytes > 0 && bytes <= maxAggregate {
		parts.aggregate = c.HGetAll(ctx, p.Aggregate(id))
		err = parts.aggregate.Err()
	}
	if err != nil {
		return Group{}, false, fmt.Errorf("read summary of group %s: %w", id, err)
	}
	return newGroup(fields.Val(), parts), bytes <= maxAggregate, nil
}

// newGroup builds a Group from the fields of its hash and from its parts. It ignores unknown
// fields.
func newGroup(fields map[string]string, parts groupParts) Group {
	num := func(field string) int64 { return integer(fields[field]) }
	g := Group{
		ID:          fields[groupID],
		Tenant:      fields[groupTenant],
		Name:        fields[groupName],
		Type:        fields[groupType],
		Lane:        fields[groupLane],
		Tags:        tagsOf(fields[groupTags]),
		CallbackURL: fields[groupCallbackURL],
		SubmittedBy: fields[groupSubmittedBy],
		RunAt:       instant(fields[groupRunAt]),
		JobTimeout:  time.Duration(num(groupJobTimeout)) * time.Millisecond,
		UniqueKeys:  fields[groupUniqueKeys] != "",
		Status:      api.Status(fields[groupStatus]),
		Round:       int(num(groupRound)),
		Sealed:      fields[groupSealed] != "",
		Paused:      fields[groupPaused] != "",
		Started:     instant(fields[groupStarted]),
		Aggregates:  fields[groupAggregate],
		Throttles:   num(groupThrottles),
		Retries:     num(groupRetries),
		Counts: api.Counts{
			Accepted: num(groupAccepted), Waiting: num(groupWaiting), NonReady: num(groupNonReady),
			Ready: num(groupReady), InFlight: num(groupInFlight),
			Done: num(groupDone), Failed: num(groupFailed), Cancelled: num(groupCancelled),
		},
		Entered:        map[string]time.Time{},
		FailuresByCode: countsByCode(parts.codes.Val()),
	}
	if n, err := strconv.Atoi(fields[groupMaxRetries]); err == nil {
		g.MaxRetries = &n
	}
	if part, err := strconv.ParseFloat(fields[groupFailureThreshold], 64); err == nil {
		g.FailureThreshold = &part
	}
	if fields[groupTotal] != "" {
		total := num(groupTotal)
		g.Total = &total
	}
	for field, value := range fields {
		if status, ok := strings.CutPrefix(field, groupAt); ok {
			g.Entered[status] = time.UnixMilli(integer(value)).UTC()
		}
	}
	for field, value := range parts.aggregate.Val() {
		if strings.HasPrefix(field, aggregatePartial) {
			g.Partials = append(g.Partials, value)
		}
	}
	return g
}

// tagsOf parses the tags of a group as its hash stores them.
func tagsOf(text string) api.Tags {
	if text == "" {
		return nil
	}
	tags := api.Tags{}
	for pair := range strings.SplitSeq(text, tagsSeparator) {
		key, value, _ := strings.Cut(pair, "=")
		tags[key] = value
	}
	return tags
}

// GroupState is the part of a group that submissions and commands change.
type GroupState struct {
	Status    api.Status
	Round     int
	Sealed    bool
	Announced bool // the total number of jobs is known
	Paused    bool
	Submitted bool // the last piece of the submission is stored
}

// QueueGroupState adds the read of a group's state to a pipeline. After the pipeline has run, the
// returned function gives the state; it returns false if the group does not exist or was not read.
func QueueGroupState(
	ctx context.Context, pipe redis.Pipeliner, p keyspace.Partition, group string,
) func() (GroupState, bool) {
	read := pipe.HMGet(ctx, p.Group(group), groupStatus, groupRound, groupSealed,
		groupTotal, groupPaused, groupSubmitted)
	return func() (GroupState, bool) {
		v := values(read.Val())
		if !v.has(0) {
			return GroupState{}, false
		}
		return GroupState{
			Status:    api.Status(v.str(0)),
			Round:     int(v.num(1)),
			Sealed:    v.has(2),
			Announced: v.has(3),
			Paused:    v.has(4),
			Submitted: v.has(5),
		}, true
	}
}

// Statuses reads the statuses of groups of one partition, in their order and in one round trip. The
// status of a group that does not exist is "".
func Statuses(ctx context.Context, c redis.Cmdable, p keyspace.Partition, groups []string) ([]api.Status, error) {
	reads, err := pipelined(ctx, c, groups, func(pipe redis.Pipeliner, id string) *redis.SliceCmd {
		return pipe.HMGet(ctx, p.Group(id), groupStatus)
	})
	if err != nil {
		return nil, fmt.Errorf("read statuses of groups: %w", err)
	}
	out := make([]api.Status, len(groups))
	for i, read := range reads {
		out[i] = api.Status(values(read.Val()).str(0))
	}
	return out, nil
}

// ReadTerms returns the terms of groups, in their order, without those that Start reads at last:
// MaxRetries is 0.
func ReadTerms(ctx context.Context, c redis.Cmdable, p keyspace.Partition, groups []string) ([]GroupTerms, error) {
	reads, err := pipelined(ctx, c, groups, func(pipe redis.Pipeliner, id string) *redis.SliceCmd {
		return pipe.HMGet(ctx, p.Group(id), groupTenant, groupJobTimeout)
	})
	if err != nil {
		return nil, fmt.Errorf("read terms of groups: %w", err)
	}
	out := make([]GroupTerms, len(groups))
	for i, read := range reads {
		v := values(read.Val())
		out[i] = GroupTerms{Tenant: v.str(0), JobTimeout: time.Duration(v.num(1)) * time.Millisecond}
	}
	return out, nil
}

// TenantOf returns the tenant of a group; "" when the group does not exist.
func TenantOf(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) (string, error) {
	tenant, err := c.HGet(ctx, p.Group(group), groupTenant).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return "", fmt.Errorf("read tenant of group %s: %w", group, err)
	}
	return tenant, nil
}

// GroupRef names a group and the partition that holds it.
type GroupRef struct {
	Partition keyspace.Partition
	ID        string
}

// Progress is how far the present round of a group is. Times are by Redis's clock; the time of a
// step that the round has not reached is zero. The zero Progress is that of a group that does not
// exist.
type Progress struct {
	Status             api.Status
	Counts             api.Counts
	Reduced            int64 // the part of Counts.Done whose results are reduced
	Throttles, Retries int64 // of all rounds

	Created   time.Time // the round began: the group was created or reopened
	Started   time.Time // the first job started
	JobsEnded time.Time // all jobs had ended
	Completed time.Time // the group became COMPLETED: all results were reduced
}

var progressFields = []string{
	groupStatus, groupAccepted, groupWaiting, groupNonReady, groupReady,
	groupInFlight, groupDone, groupFailed, groupCancelled,
	groupReduced, groupThrottles, groupRetries,
	groupAt + "created", groupStarted, groupAt + "aggregating", groupAt + "completed",
}

// ReadProgress reads the progress of groups, in their order. It costs one HMGET a group, all in one
// pipeline; that is much less than [ReadGroups].
func ReadProgress(ctx context.Context, c redis.Cmdable, groups []GroupRef) ([]Progress, error) {
	reads, err := pipelined(ctx, c, groups, func(pipe redis.Pipeliner, g GroupRef) *redis.SliceCmd {
		return pipe.HMGet(ctx, g.Partition.Group(g.ID), progressFields...)
	})
	if err != nil {
		return nil, fmt.Errorf("read progress of groups: %w", err)
	}
	out := make([]Progress, len(groups))
	for i, read := range reads {
		v := values(read.Val())
		out[i] = Progress{
			Status: api.Status(v.str(0)),
			Counts: api.Counts{
				Accepted: v.num(1), Waiting: v.num(2), NonReady: v.num(3), Ready: v.num(4),
				InFlight: v.num(5), Done: v.num(6), Failed: v.num(7), Cancelled: v.num(8),
			},
			Reduced: v.num(9), Throttles: v.num(10), Retries: v.num(11),
			Created: v.when(12), Started: v.when(13),
			JobsEnded: v.when(14), Completed: v.when(15),
		}
	}
	return out, nil
}

// TenantQueue is an argument of ReadQueues. It stands for the groups of one tenant that have
// waiting jobs of one type and lane.
type TenantQueue struct{ Type, Lane, Tenant string }

// QueuedGroups are the first groups of a [TenantQueue], in the order of the fair queue; with
// FAIR_QUEUE_POLICY=priority they are served in another order.
type QueuedGroups struct {
	Groups     []QueuedGroup
	TypePaused bool
}

// QueuedGroup is a group of a [TenantQueue] and the number of its waiting jobs, of all types.
type QueuedGroup struct {
	ID      string
	Waiting int64
}

// ReadQueues reads the first groups of each queue, at most `most` of one queue, in two round trips.
func ReadQueues(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, queues []TenantQueue, most int64,
) (map[TenantQueue]QueuedGroups, error) {
	paused := map[string]*redis.BoolCmd{}
	orders, err := pipelined(ctx, c, queues, func(pipe redis.Pipeliner, q TenantQueue) *redis.StringSliceCmd {
		if paused[q.Type] == nil {
			paused[q.Type] = pipe.HExists(ctx, p.Pauses(), pauseOfType+q.Type)
		}
		return pipe.ZRange(ctx, p.FairTenant(q.Type, q.Lane, q.Tenant), 0, most-1)
	})
	if err != nil {
		return nil, fmt.Errorf("read queues of partition %d: %w", p.Index(), err)
	}
	var ids []string
	for _, order := range orders {
		ids = append(ids, order.Val()...)
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	counts, err := pipelined(ctx, c, ids, func(pipe redis.Pipeliner, id string) *redis.SliceCmd {
		return pipe.HMGet(ctx, p.Group(id), groupWaiting)
	})
	if err != nil {
		return nil, fmt.Errorf("read queues of partition %d: %w", p.Index(), err)
	}
	waiting := map[string]int64{}
	for i, count := range counts {
		waiting[ids[i]] = max(0, values(count.Val()).num(0))
	}
	read := make(map[TenantQueue]QueuedGroups, len(queues))
	for i, q := range queues {
		groups := make([]QueuedGroup, len(orders[i].Val()))
		for j, id := range orders[i].Val() {
			groups[j] = QueuedGroup{id, waiting[id]}
		}
		read[q] = QueuedGroups{groups, paused[q.Type].Val()}
	}
	return read, nil
}

// GroupList names a list of a partition's groups. The lists are sorted sets; the comment of each
// constant says which groups its list has, and by which time they are ordered.
type GroupList string

// The lists of groups. Until [Sweep] has completed, a cancelled group counts as one that has not
// ended.
const (
	AllGroups    GroupList = ""  // every group, by its creation
	OpenGroups   GroupList = "o" // groups that have not ended, by their creation or reopening
	EndedGroups  GroupList = "e" // groups that have ended, by their end
	FailedGroups GroupList = "f" // groups whose status is FAILED, by their end
)

// ListWith returns the shortest list that has all groups with a status; "" stands for any. A
// cancelled group is among the open ones until [Sweep] has completed, so only AllGroups has all of
// them.
func ListWith(status api.Status) GroupList {
	switch status {
	case "", api.StatusCancelled:
		return AllGroups
	case api.StatusCompleted:
		return EndedGroups
	case api.StatusFailed:
		return FailedGroups
	}
	return OpenGroups
}

func (l GroupList) keyOf(p keyspace.Partition) string {
	switch l {
	case OpenGroups:
		return p.Open()
	case EndedGroups:
		return p.Ended()
	case FailedGroups:
		return p.Failed()
	}
	return p.Groups()
}

// ListedGroup is a group at its place in a list. Groups of the same time are ordered by id.
type ListedGroup struct {
	At float64 // the time by which the list is ordered, ms
	ID string
}

// Newest returns a place in a list that is before all groups.
func Newest() ListedGroup { return ListedGroup{At: math.Inf(1)} }

// OlderThan reports whether a comes after b in a list that begins with the newest group.
func (a ListedGroup) OlderThan(b ListedGroup) bool {
	return a.At < b.At || (a.At == b.At && a.ID < b.ID)
}

// GroupRange is a part of a list of groups.
type GroupRange struct {
	List   GroupList
	Tenant string      // of AllGroups: only the groups of this tenant; "": those of all
	Tag    string      // KEY=VALUE, with Tenant: only the groups with this tag; "": all
	Before ListedGroup // only groups that are older than this one; Newest(): all
	Since  time.Time   // only groups of this time or later; zero: all
}

// ListGroups returns the groups of a range in a partition, the newest first: limit of them, or
// fewer if there are no more.
func ListGroups(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, r GroupRange, limit int,
) ([]ListedGroup, error) {
	key, since := r.List.keyOf(p), "-inf"
	switch {
	case r.Tenant != "" && r.Tag != "":
		key = p.Tagged(r.Tenant, r.Tag)
	case r.Tenant != "":
		key = p.GroupsOf(r.Tenant)
	}
	if !r.Since.IsZero() {
		since = strconv.FormatInt(r.Since.UnixMilli(), 10)
	}
	var groups []ListedGroup
	// Groups with the same ms as Before that come before it in the list may fill whole pages: they
	// are skipped.
	count := int64(limit) + 1 // with Before itself
	for offset := int64(0); ; offset += count {
		page, err := c.ZRevRangeByScoreWithScores(ctx, key, &redis.ZRangeBy{
			Min: since, Max: strconv.FormatFloat(r.Before.At, 'f', 0, 64), Offset: offset, Count: count,
		}).Result()
		if err != nil {
			return nil, fmt.Errorf("list groups of partition %d: %w", p.Index(), err)
		}
		for _, z := range page {
			id, _ := z.Member.(string)
			if g := (ListedGroup{z.Score, id}); g.OlderThan(r.Before) {
				groups = append(groups, g)
			}
		}
		if len(groups) >= limit || int64(len(page)) < count {
			return groups[:min(len(groups), limit)], nil
		}
	}
}

// RarestTag returns that of some tags which the fewest groups of a tenant have, as KEY=VALUE.
func RarestTag(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, tags api.Tags,
) (string, error) {
	pairs := tags.Pairs()
	if len(pairs) == 1 {
		return pairs[0], nil
	}
	counts, err := pipelined(ctx, c, pairs, func(pipe redis.Pipeliner, pair string) *redis.IntCmd {
		return pipe.ZCard(ctx, p.Tagged(tenant, pair))
	})
	if err != nil {
		return "", fmt.Errorf("count groups by tags: %w", err)
	}
	least := 0
	for i := range counts {
		if counts[i].Val() < counts[least].Val() {
			least = i
		}
	}
	return pairs[least], nil
}

// GroupFacts has what lists of groups and operations are filtered by: the state, whether the group is paused,
// whether a job has failed, the time of creation, the types and the tags. The Status of a group that
// does not exist is "".
type GroupFacts struct {
	Status api.Status
	Paused bool
	// FailedJobs says whether at least one job of the group has failed.
	FailedJobs bool
	Created    time.Time // when the group was created; a retry does not change it
	Tenant     string
	Reopened   string // the id of the request that has opened its round
	Tags       api.Tags
	Name       string
	types      []string
}

// HasType reports whether typ is the group's type or the type of one of its jobs.
func (f *GroupFacts) HasType(typ string) bool { return slices.Contains(f.types, typ) }

// ReadGroupFacts reads the facts of groups of one partition, in their order, in one round trip.
func ReadGroupFacts(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, ids []string,
) ([]GroupFacts, error) {
	type replies struct {
		fields  *redis.SliceCmd
		created *redis.FloatCmd
	}
	// Each reply has the error of the pipeline or its own.
	reads, _ := pipelined(ctx, c, ids, func(pipe redis.Pipeliner, id string) replies {
		return replies{
			pipe.HMGet(ctx, p.Group(id), groupStatus, groupPaused, groupType, groupTypes,
				groupFailed, groupTags, groupTenant, groupReopened, groupName),
			pipe.ZScore(ctx, p.Groups(), id),
		}
	})
	facts := make([]GroupFacts, len(ids))
	for i, read := range reads {
		if err := read.fields.Err(); err != nil {
			return nil, fmt.Errorf("read what group %s is listed by: %w", ids[i], err)
		}
		v := values(read.fields.Val())
		facts[i] = GroupFacts{
			Status: api.Status(v.str(0)), Paused: v.has(1), FailedJobs: v.num(4) > 0,
			Created: time.UnixMilli(int64(read.created.Val())), Tags: tagsOf(v.str(5)), Tenant: v.str(6), Reopened: v.str(7),
			Name:  v.str(8),
			types: append(strings.Split(v.str(3), typesSeparator), v.str(2)),
		}
	}
	return facts, nil
}
