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
	"github.com/bulkaction/bulkaction/internal/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// CreatedGroup is a group in the order of creation. Groups of the same time are ordered by id.
type CreatedGroup struct {
	Created float64 // ms
	ID      string
}

// Newest is a place before all groups.
func Newest() CreatedGroup { return CreatedGroup{Created: math.Inf(1)} }

// OlderThan reports whether a comes after b in a list that begins with the newest group.
func (a CreatedGroup) OlderThan(b CreatedGroup) bool {
	return a.Created < b.Created || (a.Created == b.Created && a.ID < b.ID)
}

// ListGroups returns a partition's groups that are older than before, the newest first: limit of
// them, or fewer if there are no more. tenant "" means all tenants.
func ListGroups(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, before CreatedGroup, limit int,
) ([]CreatedGroup, error) {
	key := p.Groups()
	if tenant != "" {
		key = p.GroupsOf(tenant)
	}
	var groups []CreatedGroup
	// The groups that were created in the same ms as before, and that are not older, may fill whole
	// pages.
	for offset := int64(0); ; offset += int64(limit) {
		page, err := c.ZRevRangeByScoreWithScores(ctx, key, &redis.ZRangeBy{
			Min: "-inf", Max: strconv.FormatFloat(before.Created, 'f', 0, 64), Offset: offset, Count: int64(limit),
		}).Result()
		if err != nil {
			return nil, fmt.Errorf("list groups of partition %d: %w", p.Index(), err)
		}
		for _, z := range page {
			id, _ := z.Member.(string)
			if g := (CreatedGroup{z.Score, id}); g.OlderThan(before) {
				groups = append(groups, g)
			}
		}
		if len(groups) >= limit || len(page) < limit {
			return groups[:min(len(groups), limit)], nil
		}
	}
}

// GroupStatus reads a group's status. Errors: api.ErrNotFound.
func GroupStatus(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) (api.Status, error) {
	status, err := c.HGet(ctx, p.Group(group), layout.GroupStatus).Result()
	if errors.Is(err, redis.Nil) {
		err = api.ErrNotFound
	}
	if err != nil {
		return "", fmt.Errorf("read status of group %s: %w", group, err)
	}
	return api.Status(status), nil
}

// GroupState holds what submissions and commands change in a group.
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
	read := pipe.HMGet(ctx, p.Group(group), layout.GroupStatus, layout.GroupRound, layout.GroupSealed,
		layout.GroupTotal, layout.GroupPaused, layout.GroupSubmitted)
	return func() (GroupState, bool) {
		v := read.Val()
		if read.Err() != nil || v[0] == nil {
			return GroupState{}, false
		}
		status, _ := v[0].(string)
		return GroupState{
			Status:    api.Status(status),
			Round:     int(count(v[1])),
			Sealed:    v[2] != nil,
			Announced: v[3] != nil,
			Paused:    v[4] != nil,
			Submitted: v[5] != nil,
		}, true
	}
}

// GroupFields are the fields of a group that a submission chooses.
type GroupFields struct {
	Lane             string
	Name             string
	BasePriority     float64
	MaxRetries       *int          // nil: the worker's default
	JobTimeout       time.Duration // 0: the worker's default
	RunAt            *time.Time    // nil: at once
	FailureThreshold *float64      // nil: 1
	Total            *int64        // nil: not announced
	Aggregate        string        // the aggregates that were asked for, as JSON; "": none
}

// Encode returns the fields as the group's hash stores them, for [CreateArgs].
func (g *GroupFields) Encode() map[string]string {
	f := map[string]string{
		layout.GroupLane:         g.Lane,
		layout.GroupName:         g.Name,
		layout.GroupBasePriority: strconv.FormatFloat(g.BasePriority, 'f', -1, 64),
	}
	if g.MaxRetries != nil {
		f[layout.GroupMaxRetries] = strconv.Itoa(*g.MaxRetries)
	}
	if g.JobTimeout > 0 {
		f[layout.GroupJobTimeout] = strconv.FormatInt(g.JobTimeout.Milliseconds(), 10)
	}
	if g.RunAt != nil {
		f[layout.GroupRunAt] = strconv.FormatInt(g.RunAt.UnixMilli(), 10)
	}
	if g.FailureThreshold != nil {
		f[layout.GroupFailureThreshold] = strconv.FormatFloat(*g.FailureThreshold, 'f', -1, 64)
	}
	if g.Total != nil {
		f[layout.GroupTotal] = strconv.FormatInt(*g.Total, 10)
	}
	if g.Aggregate != "" {
		f[layout.GroupAggregate] = g.Aggregate
	}
	return f
}

// GroupOwner returns the tenant of a group. p is the partition of the group's id, which need not
// be the tenant's. Errors: api.ErrNotFound.
func GroupOwner(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) (string, error) {
	tenant, err := c.Get(ctx, p.Owner(group)).Result()
	if errors.Is(err, redis.Nil) {
		return "", fmt.Errorf("group %s: %w", group, api.ErrNotFound)
	}
	if err != nil {
		return "", fmt.Errorf("find group %s: %w", group, err)
	}
	return tenant, nil
}

// RegisterOwner makes tenant the owner of a group that has none, and returns the owner. p is the
// partition of the group's id. Two tenants can't own the same group.
func RegisterOwner(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group, tenant string,
) (owner string, err error) {
	key := p.Owner(group)
	ok, err := c.SetNX(ctx, key, tenant, 0).Result()
	if err != nil || ok {
		return tenant, err
	}
	owner, err = c.Get(ctx, key).Result()
	if errors.Is(err, redis.Nil) { // it was deleted in between
		err = nil
	}
	return owner, err
}

// QueueOwner adds the read of a group's owner to a pipeline. After the pipeline has run, the
// returned function gives the tenant, "" if there is none.
func QueueOwner(ctx context.Context, pipe redis.Pipeliner, p keyspace.Partition, group string) func() string {
	return pipe.Get(ctx, p.Owner(group)).Val
}

// QueueRequests adds to a pipeline the question whether a partition remembers all these request ids
// of appends. After the pipeline has run, the returned function gives the answer.
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

// requestsKey returns the key of the sorted set that remembers a request id: append.lua keeps those
// of stream entries apart, because their ids contain a time.
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

// TenantQueue names the waiting groups of one tenant, for one type and lane.
type TenantQueue struct{ Type, Lane, Tenant string }

// QueuedGroups are the first groups of a [TenantQueue], in the order in which they are served.
type QueuedGroups struct {
	Groups     []QueuedGroup
	TypePaused bool
}

// QueuedGroup is a group of a [TenantQueue] and the number of its waiting jobs.
type QueuedGroup struct {
	ID      string
	Waiting int64
}

// ReadQueues reads the first most groups of each queue, in two round trips.
func ReadQueues(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, queues []TenantQueue, most int64,
) (map[TenantQueue]QueuedGroups, error) {
	orders := make(map[TenantQueue]*redis.StringSliceCmd, len(queues))
	paused := map[string]*redis.BoolCmd{}
	_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, q := range queues {
			orders[q] = pipe.ZRange(ctx, p.FairTenant(q.Type, q.Lane, q.Tenant), 0, most-1)
			if paused[q.Type] == nil {
				paused[q.Type] = pipe.HExists(ctx, p.Pauses(), layout.PauseOfType+q.Type)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read queues of partition %d: %w", p.Index(), err)
	}
	waiting := map[string]*redis.SliceCmd{}
	_, err = c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, order := range orders {
			for _, id := range order.Val() {
				if waiting[id] == nil {
					waiting[id] = pipe.HMGet(ctx, p.Group(id), layout.GroupWaiting)
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read queues of partition %d: %w", p.Index(), err)
	}
	read := make(map[TenantQueue]QueuedGroups, len(queues))
	for q, order := range orders {
		ids := order.Val()
		groups := make([]QueuedGroup, len(ids))
		for i, id := range ids {
			groups[i] = QueuedGroup{id, max(0, count(waiting[id].Val()[0]))}
		}
		read[q] = QueuedGroups{groups, paused[q.Type].Val()}
	}
	return read, nil
}
