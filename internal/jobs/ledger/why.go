package ledger

import (
	"context"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var why = script("jobs/why", "priority")

// NextJob in the place of an ordinal asks for a group's next job: the next waiting one in Why,
// the next due one in FindNonReady, and the first ready one in FindReady.
const NextJob = -1

// WaitingJob is what the script why returns of a job that may be waiting, of its group and of the
// jobs before it.
type WaitingJob struct {
	Now          time.Time // Redis's clock
	State        Letter    // 0 when NextJob was asked for and no job of the group is in the fair queue
	Ordinal      int64     // NextJob when State is 0
	Tenant, Type string    // Type is "" when the group has several types and only the job's blob names its own
	Status       api.Status
	Types        []string // the types of the group's jobs, as many as Why looks at

	GroupPaused, TenantPaused, TypePaused bool

	HeldUntil        time.Time // the group's run_at while it is scheduled; zero: it is not
	RateLimitedUntil time.Time // when the tenant of a waiting job returns to the fair queue; zero: not rate-limited
	Place            int64     // jobs of its group before it in the same queue; -1: unknown
	ByPriority       bool      // a lane's groups are ordered by priority; otherwise each tenant's by age and size
	GroupsBefore     int64     // groups before its group in that order, for its type
	JobsBefore       int64     // waiting jobs of these groups
	Started          time.Time // when the first job of the group's round started; zero: none has

	// The next fields are counts of the group. Ended jobs are done, failed or cancelled.
	Accepted, NonReady, Ready, InFlight, Ended int64

	Key string // of a waiting job whose Place is known; "": it has none
}

// Why reads a job, or with NextJob the one with the lowest ordinal at the heads of the group's
// queues. It looks at no more than `most` types of the group and `most` groups before it: beyond
// that, JobsBefore is too low. Errors: api.ErrNotFound.
func Why(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64, most int,
) (WaitingJob, error) {
	r := run(ctx, c, why, p, group, ordinal, most)
	_ = r.Code("OK")
	w := WaitingJob{
		Now: r.Time(), State: letterOf(r.Text()), Ordinal: r.Number(), Tenant: r.Text(), Status: api.Status(r.Text()),
		Type: r.Text(),
	}
	paused := r.Text()
	w.GroupPaused, w.TenantPaused = strings.Contains(paused, "g"), strings.Contains(paused, "t")
	w.TypePaused = strings.Contains(paused, "y")
	w.HeldUntil, w.RateLimitedUntil = r.Time(), r.Time()
	w.Place, w.GroupsBefore, w.JobsBefore, w.ByPriority = r.Number(), r.Number(), r.Number(), r.Flag()
	w.Started, w.Ended = r.Time(), r.Number()
	w.Accepted, w.NonReady, w.Ready, w.InFlight = r.Number(), r.Number(), r.Number(), r.Number()
	w.Types, w.Key = r.List().Texts(), r.Text()
	return call.Done(r, w)
}
