package ledger

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

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

// keyOf returns the key of a list.
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
	Before ListedGroup // only groups that are older than this one; Newest(): all
	Since  time.Time   // only groups of this time or later; zero: all
}

// ListGroups returns the groups of a range in a partition, the newest first: limit of them, or
// fewer if there are no more.
func ListGroups(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, r GroupRange, limit int,
) ([]ListedGroup, error) {
	key, since := r.List.keyOf(p), "-inf"
	if r.Tenant != "" {
		key = p.GroupsOf(r.Tenant)
	}
	if !r.Since.IsZero() {
		since = strconv.FormatInt(r.Since.UnixMilli(), 10)
	}
	var groups []ListedGroup
	// Groups with the same ms as Before that come before it in the list may fill whole pages: they
	// are skipped.
	for offset := int64(0); ; offset += int64(limit) {
		page, err := c.ZRevRangeByScoreWithScores(ctx, key, &redis.ZRangeBy{
			Min: since, Max: strconv.FormatFloat(r.Before.At, 'f', 0, 64), Offset: offset, Count: int64(limit),
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
		if len(groups) >= limit || len(page) < limit {
			return groups[:min(len(groups), limit)], nil
		}
	}
}

// GroupFacts has what lists of groups are filtered by: the state, whether the group is paused,
// whether a job has failed, the time of creation, and the types. The Status of a group that does
// not exist is "".
type GroupFacts struct {
	Status api.Status
	Paused bool
	// FailedJobs says whether at least one job of the group has failed.
	FailedJobs bool
	Created    time.Time // when the group was created; a retry does not change it
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
			pipe.HMGet(ctx, p.Group(id), layout.GroupStatus, layout.GroupPaused, layout.GroupType, layout.GroupTypes,
				layout.GroupFailed),
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
			Created: time.UnixMilli(int64(read.created.Val())),
			types:   append(strings.Split(v.str(3), layout.TypesSeparator), v.str(2)),
		}
	}
	return facts, nil
}
