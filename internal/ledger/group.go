package ledger

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Group is a group as Redis describes it.
type Group struct {
	ID, Tenant, Name, Type, Lane string

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
	Partials   []string // the partial aggregates, encoded by their reducers, in no order
}

// groupRead holds the commands of a pipeline that read a group.
type groupRead struct{ group, codes, aggregate *redis.MapStringStringCmd }

// ReadGroups reads groups of one partition in one round trip, in the order of ids. It leaves out
// those that do not exist.
func ReadGroups(ctx context.Context, c redis.Cmdable, p keyspace.Partition, ids []string) ([]Group, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	reads := make([]groupRead, len(ids))
	_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, id := range ids {
			reads[i] = readParts(ctx, pipe, p, id)
			reads[i].group = pipe.HGetAll(ctx, p.Group(id))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read groups: %w", err)
	}
	groups := make([]Group, 0, len(ids))
	for _, r := range reads {
		g := r.parts()
		for field, value := range r.group.Val() {
			g.set(field, value)
		}
		if g.Status != "" {
			groups = append(groups, g)
		}
	}
	return groups, nil
}

// readParts adds to a pipeline the reads of a group's error codes and partial aggregates, which
// have hashes of their own. The command group stays nil.
func readParts(ctx context.Context, pipe redis.Pipeliner, p keyspace.Partition, id string) groupRead {
	return groupRead{codes: pipe.HGetAll(ctx, p.Codes(id)), aggregate: pipe.HGetAll(ctx, p.Aggregate(id))}
}

// parts returns a group with its error codes and partial aggregates only.
func (r groupRead) parts() Group {
	g := Group{FailuresByCode: map[string]int64{}, Entered: map[string]time.Time{}}
	for code, value := range r.codes.Val() {
		if n := integer(value); n > 0 {
			g.FailuresByCode[code] = n
		}
	}
	for field, value := range r.aggregate.Val() {
		if strings.HasPrefix(field, layout.AggregatePartial) {
			g.Partials = append(g.Partials, value)
		}
	}
	return g
}

// set stores the value of a field of the group's hash. It ignores fields that Group does not have.
func (g *Group) set(field, value string) {
	switch field {
	case layout.GroupID:
		g.ID = value
	case layout.GroupTenant:
		g.Tenant = value
	case layout.GroupName:
		g.Name = value
	case layout.GroupType:
		g.Type = value
	case layout.GroupLane:
		g.Lane = value
	case layout.GroupStatus:
		g.Status = api.Status(value)
	case layout.GroupRound:
		g.Round = int(integer(value))
	case layout.GroupSealed:
		g.Sealed = value != ""
	case layout.GroupPaused:
		g.Paused = value != ""
	case layout.GroupStarted:
		g.Started = instant(value)
	case layout.GroupTotal:
		if value != "" {
			total := integer(value)
			g.Total = &total
		}
	case layout.GroupAccepted:
		g.Counts.Accepted = integer(value)
	case layout.GroupWaiting:
		g.Counts.Waiting = integer(value)
	case layout.GroupNonReady:
		g.Counts.NonReady = integer(value)
	case layout.GroupReady:
		g.Counts.Ready = integer(value)
	case layout.GroupInFlight:
		g.Counts.InFlight = integer(value)
	case layout.GroupDone:
		g.Counts.Done = integer(value)
	case layout.GroupFailed:
		g.Counts.Failed = integer(value)
	case layout.GroupCancelled:
		g.Counts.Cancelled = integer(value)
	case layout.GroupThrottles:
		g.Throttles = integer(value)
	case layout.GroupRetries:
		g.Retries = integer(value)
	case layout.GroupAggregate:
		g.Aggregates = value
	default:
		if status, ok := strings.CutPrefix(field, layout.GroupAt); ok {
			g.Entered[status] = time.UnixMilli(integer(value)).UTC()
		}
	}
}

// integer parses the number of a field; it returns 0 for other text.
func integer(value string) int64 {
	n, _ := strconv.ParseInt(value, 10, 64)
	return n
}

// instant parses a time in ms; it returns the zero time for 0 and for other text.
func instant(value string) time.Time {
	ms := integer(value)
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}
