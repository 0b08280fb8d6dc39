package ledger

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var why = script("jobs/why", "priority")

// NextJob stands for the ordinal of the group's next job that waits.
const NextJob = -1

// Look is what can be seen of a job that may be waiting.
type Look struct {
	Now          time.Time // by Redis
	State        Letter    // its letter; 0 when the next job was asked for and none waits in a queue
	Ordinal      int64     // NextJob when there is none
	Tenant, Type string
	Status       api.Status // of the group
	Types        []string   // that the group's jobs have

	GroupPaused, TenantPaused, TypePaused bool

	HeldUntil        time.Time // the group's run_at while it is held; zero: it is not
	RateLimitedUntil time.Time // when the tenant returns to the fair queue; zero: it is not rate-limited
	Place            int64     // jobs before it in its queue; -1: unknown
	ByPriority       bool      // groups are chosen by priority, whoever's they are; else a tenant's own stand in a line
	GroupsBefore     int64     // before its own in that order, for its type
	JobsBefore       int64     // jobs of these that wait
	Started          time.Time // the group; zero: it has not
	Ended            int64     // jobs of the group
	Accepted         int64
	NonReady         int64
	Ready            int64
	InFlight         int64
}

// Why looks at a job, or with NextJob at the one that its group would dequeue next. At most so
// many types of the group and groups before it are looked at. Errors: api.ErrNotFound.
func Why(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64, most int,
) (Look, error) {
	r, err := run(ctx, c, why, p, group, ordinal, most)
	if err != nil {
		return Look{}, err
	}
	switch r.str(0) {
	case "NOGROUP":
		return Look{}, fmt.Errorf("group %s: %w", group, api.ErrNotFound)
	case "NOJOB":
		return Look{}, fmt.Errorf("job %s.%d: %w", group, ordinal, api.ErrNotFound)
	}
	paused := map[rune]bool{}
	for _, what := range r.str(7) {
		paused[what] = true
	}
	l := Look{
		Now:              time.UnixMilli(r.num(1)),
		Ordinal:          r.num(3),
		Tenant:           r.str(4),
		Status:           api.Status(r.str(5)),
		Type:             r.str(6),
		GroupPaused:      paused['g'],
		TenantPaused:     paused['t'],
		TypePaused:       paused['y'],
		HeldUntil:        r.when(8),
		RateLimitedUntil: r.when(9),
		Place:            r.num(10),
		GroupsBefore:     r.num(11),
		JobsBefore:       r.num(12),
		ByPriority:       r.num(13) == 1,
		Started:          r.when(14),
		Ended:            r.num(15),
		Accepted:         r.num(16),
	}
	if state := r.str(2); state != "" {
		l.State = Letter(state[0])
	}
	counts := r.list(17)
	l.NonReady, l.Ready, l.InFlight = counts.num(0), counts.num(1), counts.num(2)
	for i, types := 0, r.list(18); i < len(types); i++ {
		l.Types = append(l.Types, types.str(i))
	}
	return l, nil
}

// when reads a time in ms that may be a sorted set's score, which Redis writes as
// it likes; zero is none.
func (r reply) when(i int) time.Time {
	ms, err := strconv.ParseFloat(r.str(i), 64)
	if err != nil || !(ms > 0 && ms < 1<<53) {
		return time.Time{}
	}
	return time.UnixMilli(int64(ms))
}
