// Package why explains why a job is not running: what holds it up, until when, and how many jobs
// are before it. It reads only. It hides the order in which the reasons are checked, and that jobs
// move while they are read.
package why

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
)

const (
	mostRead = 200 // most types of the group, groups before it, or unowned entries read
	maxTries = 3   // for a job that moves while it is read
)

// errMoved says that a job was not at the location of the state that was read: the caller reads
// again.
var errMoved = errors.New("the job moved while it was read")

// Explainer explains why jobs wait.
type Explainer struct {
	conn  *redisx.Conn
	space keyspace.Space
	rate  ledger.Rate // the global rate limit
}

// New returns an Explainer for an installation with this global rate limit.
func New(conn *redisx.Conn, space keyspace.Space, rate ledger.Rate) *Explainer {
	return &Explainer{conn: conn, space: space, rate: rate}
}

// Group says why the next job of a group is not running. For an unknown group it returns
// api.ErrNotFound.
func (e *Explainer) Group(ctx context.Context, p keyspace.Partition, group string) (api.Why, error) {
	_, w, err := e.Job(ctx, p, group, ledger.NextJob, nil)
	return w, err
}

// Job says why a job is not running. lastErr is the record of its latest failed attempt, nil for
// none. The job may move meanwhile: the returned letter is the state that the explanation is about.
// For an unknown group or job it returns api.ErrNotFound.
func (e *Explainer) Job(
	ctx context.Context, p keyspace.Partition, group string, ordinal int64, lastErr *ledger.JobError,
) (ledger.Letter, api.Why, error) {
	for try := 1; ; try++ {
		read, err := ledger.Why(ctx, e.conn.Cmd, p, group, ordinal, mostRead)
		if err != nil {
			return 0, api.Why{}, err
		}
		j := job{WaitingJob: read, e: e, p: p, group: group, lastErr: lastErr}
		w, err := j.explain(ctx)
		switch {
		case err == nil:
			now := j.State
			if j.Ordinal >= 0 {
				now, err = ledger.ReadLetter(ctx, e.conn.Cmd, p, group, j.Ordinal)
			}
			if err != nil || now == j.State || try == maxTries {
				return j.State, w, err
			}
		case !errors.Is(err, errMoved):
			return 0, api.Why{}, fmt.Errorf("explain group %s: %w", group, err)
		case try == maxTries:
			return j.State, api.Why{
				Job: j.id(),
				Detail: "It is on its way from one place to the next: look again. If it stays so, bulkaction " +
					"audit says whether it vanished.",
			}, nil
		}
	}
}

// job is the job that is explained.
type job struct {
	ledger.WaitingJob
	e       *Explainer
	p       keyspace.Partition
	group   string
	lastErr *ledger.JobError // nil: no attempt has failed, or it was not read yet

	due    time.Time     // of a non-ready job
	reason ledger.Reason // of a non-ready job
	before int64         // undelivered entries before a ready job

	workers []presence.WorkerReport // live ones that serve the type, once unserved has read them

	// tenantState is the state of the job's tenant, once readTenant has read it.
	tenantState *ledger.TenantState
}

// id returns the job's id; "" when the group has no next job.
func (j *job) id() string {
	if j.Ordinal < 0 {
		return ""
	}
	return j.group + "." + strconv.FormatInt(j.Ordinal, 10)
}

// explain returns the explanation with the first reason that applies. It returns errMoved when the
// job was not at its location.
func (j *job) explain(ctx context.Context) (api.Why, error) {
	if j.Ordinal < 0 {
		if detail := j.noneToStart(); detail != "" {
			return api.Why{Detail: detail}, nil
		}
	}
	if err := j.find(ctx); err != nil {
		return api.Why{}, err
	}
	w := api.Why{Job: j.id(), Key: j.Key}
	if j.State != ledger.Waiting && j.State != ledger.NonReady && j.State != ledger.Ready ||
		j.Status == api.StatusCancelled {
		w.Detail = notWaiting[j.State]
		if j.State == ledger.InFlight {
			if unowned, err := isUnowned(ctx, j); err != nil || unowned {
				w.Detail = unownedDetail
				return w, err
			}
		}
		if j.Status == api.StatusCancelled {
			w.Detail = "Its group was cancelled: it does not start any more."
		}
		return w, nil
	}
	for _, check := range []func(context.Context, *api.Why) error{
		j.paused, j.scheduled, j.unserved, j.nonReady, j.rateLimited, j.behindOthers,
	} {
		if err := check(ctx, &w); err != nil || w.Reason != "" {
			return w, err
		}
	}
	return w, nil
}

var notWaiting = map[ledger.Letter]string{
	ledger.InFlight:  "It is running.",
	ledger.Done:      "It is done; its result is being reduced.",
	ledger.Reduced:   "It is done.",
	ledger.Failed:    "It has failed for good.",
	ledger.Cancelled: "It was cancelled.",
}

// noneToStart returns a text about what a group waits for that has no job left to start; "" if it
// has such a job.
func (j *job) noneToStart() string {
	switch {
	case j.Status.Ended():
		return "The group has ended: it is " + string(j.Status) + "."
	case j.Status == api.StatusAggregating:
		return "All of its jobs have ended; their results are being reduced."
	case j.Ready+j.NonReady > 0:
		return ""
	case j.InFlight == 1:
		return "No job of it waits: the last one is running."
	case j.InFlight > 0:
		return fmt.Sprintf("No job of it waits: the last %d are running.", j.InFlight)
	case j.Ended >= j.Accepted:
		return fmt.Sprintf("All jobs that it was given have ended. If it is not sealed, it waits for more: seal it "+
			"with POST /v1/groups/%[1]s/seal or `bulkaction seal %[1]s`. Otherwise it is about to end.", j.group)
	}
	return "Its jobs are on their way from one place to the next: look again."
}

// find reads what ledger.Why does not tell: the ordinal and type of a group's next job, the due
// time and reason of a non-ready job, the number of jobs before a waiting or ready one, and whether
// the type is paused. It returns errMoved if the job is not at its location.
func (j *job) find(ctx context.Context) error {
	var err error
	switch {
	case j.State == ledger.Waiting && j.Place < 0:
		j.Place, err = ledger.CountWaiting(ctx, j.e.conn.Cmd, j.p, j.group, j.Ordinal)
		return err
	case j.State == ledger.Ready, j.State == 0 && j.Ready > 0:
		err = j.findReady(ctx)
	case j.State == ledger.NonReady && len(j.Types) == 1 &&
		j.lastErr != nil && j.lastErr.Until > j.Now.UnixMilli() && j.lastErr.Reason != "":
		// The error record has the due time and the reason, so no search among all of the tenant's
		// non-ready jobs is needed.
		j.due, j.reason, j.Type = time.UnixMilli(j.lastErr.Until), ledger.Reason(j.lastErr.Reason[0]), j.Types[0]
	case j.State == ledger.NonReady, j.State == 0 && j.NonReady > 0:
		err = j.findNonReady(ctx)
	}
	if err != nil || j.TypePaused || j.Type == "" {
		return err
	}
	j.TypePaused, err = ledger.TypePaused(ctx, j.e.conn.Cmd, j.p, j.Type)
	return err
}

func (j *job) findNonReady(ctx context.Context) error {
	n, found, err := ledger.FindNonReady(ctx, j.e.conn.Cmd, j.p, j.Tenant, j.group, j.Ordinal)
	if err != nil {
		return err
	}
	if !found {
		return errMoved
	}
	j.State, j.Ordinal, j.Type, j.due, j.reason = ledger.NonReady, n.Ordinal, n.Type, n.Due, n.Reason
	j.Key = n.Key
	return nil
}

func (j *job) findReady(ctx context.Context) error {
	types := j.Types
	if j.Type != "" {
		types = []string{j.Type}
	}
	r, found, err := ledger.FindReady(ctx, j.e.conn.Cmd, j.p, types, j.group, j.Ordinal)
	if err != nil {
		return err
	}
	if !found {
		return errMoved
	}
	j.State, j.Ordinal, j.Type, j.before = ledger.Ready, r.Ordinal, r.Type, r.Before
	j.Key = r.Key
	return nil
}

const unownedDetail = "It was delivered to a worker, but no worker owns it any more, as after XGROUP DELCONSUMER " +
	"or SETID. The dispatcher takes it back within two leases."

// isUnowned says whether no consumer owns a job's entry of a ready stream, although it was
// delivered. It looks at the first mostRead unowned entries of each type of the group.
func isUnowned(ctx context.Context, j *job) (bool, error) {
	for _, typ := range j.Types {
		key := j.p.Ready(typ)
		ids, err := stream.Unowned(ctx, j.e.conn.Cmd, key, keyspace.GroupWorkers)
		if err != nil {
			return false, err
		}
		for _, id := range ids[:min(len(ids), mostRead)] {
			entries, err := j.e.conn.Cmd.XRange(ctx, key, id, id).Result()
			if err != nil {
				return false, err
			}
			for _, e := range entries {
				at, err := ledger.ParseJob(ledger.MessageBlob(e.Values))
				if err == nil && at.Group == j.group && at.Ordinal == j.Ordinal {
					return true, nil
				}
			}
		}
	}
	return false, nil
}

// readTenant reads the state of the job's tenant, once.
func (j *job) readTenant(ctx context.Context) error {
	if j.tenantState != nil {
		return nil
	}
	limit := j.e.rate.Of(j.p.Index(), j.e.space.Partitions())
	st, err := ledger.Tenant(ctx, j.e.conn.Cmd, j.p, j.Tenant, limit)
	if err != nil {
		return fmt.Errorf("read tenant %s: %w", j.Tenant, err)
	}
	j.tenantState = &st
	return nil
}
