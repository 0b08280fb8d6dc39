package groups

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
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

// explainJob says why a job is not running: what holds it up, until when, and how many jobs are
// before it. It reads only. lastErr is the record of its latest failed attempt, nil for
// none. The job may move meanwhile: the returned letter is the state that the explanation is about.
// For an unknown group or job it returns api.ErrNotFound.
func (s *Store) explainJob(
	ctx context.Context, p keyspace.Partition, group string, ordinal int64, lastErr *ledger.JobError,
) (ledger.Letter, api.Why, error) {
	for try := 1; ; try++ {
		read, err := ledger.Why(ctx, s.conn.Cmd, p, group, ordinal, mostRead)
		if err != nil {
			return 0, api.Why{}, err
		}
		j := waitingJob{WaitingJob: read, s: s, p: p, group: group, lastErr: lastErr}
		w, err := j.explain(ctx)
		switch {
		case err == nil:
			now := j.State
			if j.Ordinal >= 0 {
				now, err = ledger.ReadLetter(ctx, s.conn.Cmd, p, group, j.Ordinal)
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

// waitingJob is the job that is explained.
type waitingJob struct {
	ledger.WaitingJob
	s       *Store
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
func (j *waitingJob) id() string {
	if j.Ordinal < 0 {
		return ""
	}
	return j.group + "." + strconv.FormatInt(j.Ordinal, 10)
}

// explain returns the explanation with the first reason that applies. It returns errMoved when the
// job was not at its location.
func (j *waitingJob) explain(ctx context.Context) (api.Why, error) {
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
func (j *waitingJob) noneToStart() string {
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
func (j *waitingJob) find(ctx context.Context) error {
	var err error
	switch {
	case j.State == ledger.Waiting && j.Place < 0:
		j.Place, err = ledger.CountWaiting(ctx, j.s.conn.Cmd, j.p, j.group, j.Ordinal)
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
	j.TypePaused, err = ledger.TypePaused(ctx, j.s.conn.Cmd, j.p, j.Type)
	return err
}

func (j *waitingJob) findNonReady(ctx context.Context) error {
	n, found, err := ledger.FindNonReady(ctx, j.s.conn.Cmd, j.p, j.Tenant, j.group, j.Ordinal)
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

func (j *waitingJob) findReady(ctx context.Context) error {
	types := j.Types
	if j.Type != "" {
		types = []string{j.Type}
	}
	r, found, err := ledger.FindReady(ctx, j.s.conn.Cmd, j.p, types, j.group, j.Ordinal)
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
func isUnowned(ctx context.Context, j *waitingJob) (bool, error) {
	for _, typ := range j.Types {
		key := j.p.Ready(typ)
		ids, err := stream.Unowned(ctx, j.s.conn.Cmd, key, keyspace.GroupWorkers)
		if err != nil {
			return false, err
		}
		for _, id := range ids[:min(len(ids), mostRead)] {
			entries, err := j.s.conn.Cmd.XRange(ctx, key, id, id).Result()
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
func (j *waitingJob) readTenant(ctx context.Context) error {
	if j.tenantState != nil {
		return nil
	}
	st, err := j.s.tenantState(ctx, j.p, j.Tenant)
	if err != nil {
		return err
	}
	j.tenantState = &st
	return nil
}

// Values of api.WhyLimit.Scope.
const (
	scopeTenant = "tenant" // the tenant's own limit
	scopeShare  = "share"  // the tenant's share of the global limit
	scopeGlobal = "global"
)

// rateLimited sets the reason WhyRate for a job that is not ready, if its tenant or the partition
// has no permit left.
func (j *waitingJob) rateLimited(ctx context.Context, w *api.Why) error {
	if j.State == ledger.Ready { // it has spent its permit
		return nil
	}
	if err := j.readTenant(ctx); err != nil {
		return err
	}
	w.Until = timeIfAfter(latestOf(j.nextPermit(), j.tenantState.GlobalPermit), j.now())
	if w.Until == nil {
		return nil
	}
	w.Reason, w.Limit = api.WhyRate, j.usedUpLimit()
	w.Detail = j.describeLimit(w.Limit) + ": the next permit comes at " + formatTime(*w.Until) +
		j.describePlace(w) + "."
	if least := round(w.Until.Sub(j.Now).Seconds(), 10); w.EstimateSeconds != nil {
		*w.EstimateSeconds = max(*w.EstimateSeconds, least)
	}
	return nil
}

// now returns the time, by Redis, of the later of the two reads: of the job and of its tenant.
func (j *waitingJob) now() time.Time { return latestOf(j.Now, j.tenantState.Now) }

// nextPermit returns when the tenant may get a permit for the job, by its own limit or share; not
// before the time until which the tenant is rate-limited. A tenant whose share is used up may
// borrow, but the rest of the limit can be reserved for others: so its next own permit counts.
func (j *waitingJob) nextPermit() time.Time {
	st := j.tenantState
	next := latestOf(j.s.cfg.Rate.OwnPermit(*st), j.RateLimitedUntil)
	if st.Settings.RPS == nil && st.Limit > 0 && st.Used >= st.Limit {
		next = latestOf(next, st.NextPermit)
	}
	return next
}

// usedUpLimit returns the limit that the tenant waits for: its own limit or its share; the global
// limit if only that is used up, or if the tenant is the only active one and so has all of it.
func (j *waitingJob) usedUpLimit() *api.WhyLimit {
	st, now := j.tenantState, j.now()
	l := &api.WhyLimit{
		Scope:        scopeShare,
		RPS:          j.s.cfg.Rate.PerSecond(st.Limit),
		PerWindow:    st.Limit,
		Used:         st.Used,
		WindowMS:     j.s.cfg.Rate.Window.Milliseconds(),
		NextPermitAt: timeIfAfter(j.nextPermit(), now),
	}
	usedUp := st.Limit > 0 && st.Used >= st.Limit
	switch {
	case st.GlobalPermit.After(now) && (!usedUp || st.Settings.RPS == nil && st.ActiveTenants <= 1):
		l.Scope, l.PerWindow, l.Used = scopeGlobal, st.GlobalLimit, st.GlobalUsed
		l.NextPermitAt = timeIfAfter(st.GlobalPermit, now)
		l.RPS = j.s.cfg.Rate.PerSecond(j.s.cfg.Rate.PerWindow())
	case st.Settings.RPS != nil:
		l.Scope, l.RPS = scopeTenant, *st.Settings.RPS
	}
	return l
}

// describeLimit returns the beginning of a sentence that says which limit is used up. With several
// partitions, a tenant shares the partition's quota with the tenants of its partition.
func (j *waitingJob) describeLimit(l *api.WhyLimit) string {
	all, partitioned := j.s.cfg.Rate.PerWindow(), j.s.space.Partitions() > 1
	rps := strconv.FormatFloat(l.RPS, 'f', -1, 64)
	switch {
	case l.Used < l.PerWindow: // there were none when the job became non-ready
		return "Its tenant " + j.Tenant + " had no permit left"
	case l.Scope == scopeGlobal && partitioned:
		return fmt.Sprintf("The limit is %s a second for all tenants; its partition has %d of a window's %d, all used",
			rps, l.PerWindow, all)
	case l.Scope == scopeGlobal:
		return "All tenants together have used up the limit of " + rps + " a second"
	case l.Scope == scopeTenant:
		return "Its tenant " + j.Tenant + " has used up its own limit of " + rps + " a second"
	}
	detail := fmt.Sprintf("Its tenant %s has used up its share of %s a second among %s",
		j.Tenant, rps, plural(j.tenantState.ActiveTenants, "active tenant"))
	if partitioned {
		detail += fmt.Sprintf(" of its partition, which has %d of a window's %d", j.tenantState.GlobalLimit, all)
	}
	return detail
}
