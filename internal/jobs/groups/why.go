package groups

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
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
// none. The job may move meanwhile: the explanation is about the returned job, which has its state.
// For an unknown group or job it returns api.ErrNotFound.
func (s *Store) explainJob(
	ctx context.Context, p keyspace.Partition, group string, ordinal int64, lastErr *ledger.JobError,
) (waitingJob, api.Why, error) {
	for try := 1; ; try++ {
		read, err := ledger.Why(ctx, s.conn.Cmd, p, group, ordinal, mostRead)
		if err != nil {
			return waitingJob{}, api.Why{}, err
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
				return j, w, err
			}
		case !errors.Is(err, errMoved):
			return j, api.Why{}, fmt.Errorf("explain group %s: %w", group, err)
		case try == maxTries:
			return j, api.Why{
				Job: j.id(),
				Detail: "It is on its way from one place to the next: look again. If it stays so, bulkaction " +
					"audit says whether it vanished.",
			}, nil
		}
	}
}

type waitingJob struct {
	ledger.WaitingJob
	s       *Store
	p       keyspace.Partition
	group   string
	lastErr *ledger.JobError // nil: no attempt has failed, or it was not read yet

	due    time.Time     // of a non-ready job
	reason ledger.Reason // of a non-ready job
	before int64         // undelivered entries before a ready job
	blob   *ledger.Job   // of a non-ready or ready job that was looked for

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
			w := api.Why{Detail: detail}
			if j.Status == api.StatusAggregating {
				missing, err := j.missingReducers(ctx)
				if err != nil {
					return w, err
				}
				w.Detail = cmp.Or(missing, detail)
			}
			return w, j.missingRole(ctx, &w)
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
			w.Detail = "Its group was cancelled: it will not start."
		}
		return w, nil
	}
	for _, check := range []func(context.Context, *api.Why) error{
		j.paused, j.scheduled, j.unserved, j.missingRole, j.limitedByType, j.atBound, j.rateLimited, j.behindOthers,
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

// missingReducers returns a text that names the group's reducers that no live process has which
// should reduce with them; "" if there are none.
func (j *waitingJob) missingReducers(ctx context.Context) (string, error) {
	groups, err := ledger.ReadGroups(ctx, j.s.conn.Cmd, j.p, []string{j.group})
	if err != nil || len(groups) == 0 {
		return "", err
	}
	for _, role := range []string{"aggregator", "watcher"} {
		have, err := presence.Reducers(ctx, j.s.conn, j.s.space, role)
		if err != nil {
			return "", err
		}
		if missing := lacking(ledger.AggregateOps(groups[0].Aggregates), have); len(missing) > 0 && len(have) > 0 {
			return fmt.Sprintf("All of its jobs have ended, but no live %s has the reducer %s: start one that has it.",
				role, strings.Join(missing, ", ")), nil
		}
	}
	return "", nil
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
	j.Key, j.blob = n.Key, n.Job
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
	j.Key, j.blob = r.Key, r.Job
	return nil
}

const unownedDetail = "It was delivered to a worker, but no worker owns it now, as after XGROUP DELCONSUMER " +
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
	scopeType   = "type"
)

// limitedByType sets the reason WhyRate or WhyInFlight for a job that is not ready, if its partition
// has no permit of its type's rate or no place of its type's bound left.
func (j *waitingJob) limitedByType(ctx context.Context, w *api.Why) error {
	if j.State == ledger.Ready || j.Type == "" || j.due.After(j.Now) {
		return nil
	}
	st, err := ledger.ReadLimits(ctx, j.s.conn.Cmd, j.p, j.s.cfg.Meter, j.Type)
	if err != nil || st.Permits < 0 && st.Places < 0 {
		return err
	}
	set, err := ledger.ReadLimitSettings(ctx, j.s.conn.Cmd, j.s.space)
	if err != nil {
		return err
	}
	switch {
	case st.Permits >= 0 && st.NextPermit.After(st.Now):
		rps := j.s.cfg.Meter.PerSecond(st.Permits)
		if n := set.Types[j.Type].RPS; n != nil {
			rps = float64(*n)
		}
		l := &api.WhyLimit{Scope: scopeType, RPS: rps, PerWindow: st.Permits, Used: st.Spent, WindowMS: j.s.cfg.Meter.Window.Milliseconds(), NextPermitAt: &st.NextPermit}
		w.Reason, w.Limit, w.Until = api.WhyRate, l, &st.NextPermit
		w.Detail = fmt.Sprintf("Type %s: %d of %d permits of a window are used", j.Type, st.Spent, st.Permits)
		if j.s.space.Partitions() > 1 {
			w.Detail += " in its partition"
		}
		w.Detail += ": the next permit comes at " + formatTime(st.NextPermit) + "."
	case st.Places >= 0 && st.Entries >= st.Places:
		entries, err := j.s.entries(ctx, j.Type)
		if err != nil {
			return err
		}
		bound := st.Places
		if n := set.Types[j.Type].InFlight; n != nil {
			bound = *n
		}
		w.Reason = api.WhyInFlight
		w.Detail = fmt.Sprintf("Type %s: %d of %d jobs in flight", j.Type, entries, bound)
		if j.s.space.Partitions() > 1 {
			w.Detail += fmt.Sprintf(", %d of %d in its partition", st.Entries, st.Places)
		}
		w.Detail += "."
	}
	return nil
}

// atBound sets the reason WhyInFlight for a job that is not ready, if its tenant has as many jobs in
// flight as it may.
func (j *waitingJob) atBound(ctx context.Context, w *api.Why) error {
	if j.State == ledger.Ready || j.due.After(j.Now) {
		return nil
	}
	if err := j.readTenant(ctx); err != nil {
		return err
	}
	if bound := j.tenantState.Settings.InFlight; bound != nil && j.tenantState.Places >= *bound {
		w.Reason = api.WhyInFlight
		w.Detail = fmt.Sprintf("Tenant %s: %d of %d jobs in flight.", j.Tenant, j.tenantState.Places, *bound)
	}
	return nil
}

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
	next := latestOf(st.OwnPermit(), j.RateLimitedUntil)
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
		RPS:          j.s.cfg.Meter.PerSecond(st.Limit),
		PerWindow:    st.Limit,
		Used:         st.Used,
		WindowMS:     j.s.cfg.Meter.Window.Milliseconds(),
		NextPermitAt: timeIfAfter(j.nextPermit(), now),
	}
	usedUp := st.Limit > 0 && st.Used >= st.Limit
	switch {
	case st.GlobalPermit.After(now) && (!usedUp || st.Settings.RPS == nil && st.ActiveTenants <= 1):
		l.Scope, l.PerWindow, l.Used = scopeGlobal, st.GlobalLimit, st.GlobalUsed
		l.NextPermitAt = timeIfAfter(st.GlobalPermit, now)
		l.RPS = j.s.cfg.Meter.PerSecond(st.Total)
	case st.Settings.RPS != nil:
		l.Scope, l.RPS = scopeTenant, *st.Settings.RPS
	}
	return l
}

// describeLimit returns the beginning of a sentence that says which limit is used up. With several
// partitions, a tenant shares the partition's quota with the tenants of its partition.
func (j *waitingJob) describeLimit(l *api.WhyLimit) string {
	all, partitioned := j.tenantState.Total, j.s.space.Partitions() > 1
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

// This file has the checks that explain makes one after the other: each checks whether a reason
// applies, and if so sets w.Reason and the details.

// paused sets the reason WhyPaused for a job whose group, tenant or type is paused. This reason is
// checked first: until the pause ends, no other one matters.
func (j *waitingJob) paused(_ context.Context, w *api.Why) error {
	var named []string
	for _, what := range []struct {
		paused   bool
		kind, id string
	}{
		{j.GroupPaused, "group", j.group},
		{j.TenantPaused, "tenant", j.Tenant},
		{j.TypePaused, "type", j.Type},
	} {
		if what.paused {
			w.PausedBy = append(w.PausedBy, what.kind)
			named = append(named, what.kind+" "+what.id)
		}
	}
	if len(named) == 0 {
		return nil
	}
	w.Reason = api.WhyPaused
	that := "that is"
	if len(named) > 1 {
		that = "all of them are"
	}
	w.Detail = "Paused: " + strings.Join(named, " and ") + ". It goes on when " + that + " resumed."
	return nil
}

// scheduled sets the reason WhyScheduled before the start time that was requested for the group or
// for the job alone.
func (j *waitingJob) scheduled(_ context.Context, w *api.Why) error {
	start := j.HeldUntil
	if j.State == ledger.NonReady && j.reason == ledger.ReasonScheduled {
		start = j.due
	}
	if !start.After(j.Now) {
		return nil
	}
	w.Reason = api.WhyScheduled
	setStart(w, j.Now, start)
	w.Detail = "It was submitted to start at " + formatTime(start) + "."
	return nil
}

// unserved sets the reason WhyNoProcessor when no live worker process serves the job's type;
// otherwise it calls unpermitted.
func (j *waitingJob) unserved(ctx context.Context, w *api.Why) error {
	if j.Type == "" {
		return nil
	}
	workers, err := presence.Workers(ctx, j.s.conn, j.s.space)
	if err != nil {
		return err
	}
	upper := strings.ToUpper(j.Type)
	similar := slices.ContainsFunc(workers, func(r presence.WorkerReport) bool {
		return slices.Contains(r.Types, upper)
	})
	j.workers = slices.DeleteFunc(workers, func(r presence.WorkerReport) bool {
		return !slices.Contains(r.Types, j.Type)
	})
	if len(j.workers) > 0 {
		unpermitted(j, w)
		return nil
	}
	w.Reason = api.WhyNoProcessor
	w.Detail = "No live worker serves the type " + j.Type + ": start one. "
	if j.Type == "NOOP" { // workers serve it only if their settings name it
		w.Detail = "No live worker serves the type NOOP: start one with NOOP in BULKACTION_WORKER_TYPES. "
	}
	if similar {
		w.Detail += "Did you mean " + upper + "? "
	}
	w.Detail += "It waits until one does, or fails with NO_PROCESSOR after the watcher's " +
		"BULKACTION_NO_PROCESSOR_TIMEOUT if that is set."
	if j.State == ledger.NonReady {
		w.Until = timeIfAfter(j.due, j.Now)
	}
	return nil
}

// missingRole sets the reason WhyMissingRole when no process is alive of the role that moves the job
// next, or without a job the group. A ready job needs only a worker. It calls nonReady: the reason of
// a job that is not due yet stays, with the missing role in the details.
func (j *waitingJob) missingRole(ctx context.Context, w *api.Why) error {
	var needs []string
	switch {
	case w.Job == "" && (j.Status.Ended() || j.InFlight > 0 && j.Status != api.StatusAggregating):
	case w.Job == "":
		needs = []string{"aggregator", "watcher"}
	case j.State == ledger.NonReady:
		if err := j.nonReady(ctx, w); err != nil {
			return err
		}
		needs = []string{"dispatcher"}
	case !j.HeldUntil.IsZero(): // its group is due
		needs = []string{"dispatcher"}
	case j.State == ledger.Waiting:
		needs = []string{"fetcher"}
	}
	if len(needs) == 0 {
		return nil
	}
	absent, away, err := presence.Absent(ctx, j.s.conn, j.s.space, needs...)
	if err != nil || len(absent) == 0 {
		return err
	}
	if w.Until == nil {
		w.Reason = api.WhyMissingRole
	}
	missing := make([]string, len(absent))
	for i, role := range absent {
		missing[i] = "No " + role + " is alive: start one."
		if away[i] > 0 {
			missing[i] = "No " + role + " has been alive for " + formatSpan(away[i]) + ": start one."
		}
	}
	w.Detail = strings.TrimSuffix(strings.ReplaceAll(w.Detail, "Otherwise it is about to end.", ""), " ")
	w.Detail = strings.TrimSpace(w.Detail + " " + strings.Join(missing, " "))
	return nil
}

// formatSpan writes a time span for a person, such as 9 s or 2h5m0s.
func formatSpan(d time.Duration) string {
	if d < 100*time.Second {
		return strconv.FormatFloat(round(d.Seconds(), 1), 'f', -1, 64) + " s"
	}
	return d.Round(time.Second).String()
}

// atCapacity sets the reason WhyCapacity for a job that would start now if one of the slots of the
// workers that serve its type were free. before says how many jobs come before it.
func (j *waitingJob) atCapacity(w *api.Why, before string) {
	slots, active, runTime, weight := 0, 0, 0.0, 0.0
	for _, r := range j.workers {
		slots, active = slots+r.WorkerStatus.Workers, active+min(r.Active, r.WorkerStatus.Workers)
		if ms := r.RunMS[j.Type]; ms > 0 {
			runTime, weight = runTime+ms*float64(r.WorkerStatus.Workers), weight+float64(r.WorkerStatus.Workers)
		}
	}
	if slots == 0 || active < slots {
		return
	}
	if w.Position != nil && w.EstimateSeconds == nil && weight > 0 {
		seconds := round(float64(*w.Position+1)*runTime/weight/1000/float64(slots), 10)
		w.EstimateSeconds = &seconds
	}
	w.Reason = api.WhyCapacity
	w.Detail = fmt.Sprintf("%d of %d slots of %s are busy%s", active, slots, j.Type, before)
	if w.EstimateSeconds != nil {
		w.Detail += "; about " + formatSpan(time.Duration(*w.EstimateSeconds*float64(time.Second)))
	}
	w.Detail += "."
}

// unpermitted sets the reason WhyResource if j is a ready job of a gated type and no worker process
// can get a permission now. It sets w.Until to the time at which the first process may get one.
func unpermitted(j *waitingJob, w *api.Why) {
	if j.State != ledger.Ready || len(j.workers) == 0 {
		return
	}
	first := time.Time{}
	for _, r := range j.workers {
		until := r.NoPermissionUntil[j.Type]
		if !until.After(j.Now) {
			return
		}
		if first.IsZero() || until.Before(first) {
			first = until
		}
	}
	w.Reason = api.WhyResource
	setStart(w, j.Now, first)
	w.Detail = "It is ready, but what its type needs is busy until " + formatTime(first) + ", such as all accounts."
}

// nonReady sets the reason of a non-ready job: WhyCongestion if it was throttled, WhyResource if it
// was deferred, WhyRate if it is a tenant's marker, and WhyRetry if it was retried, released or
// reclaimed. It sets none for a scheduled job, or one that was paused.
func (j *waitingJob) nonReady(ctx context.Context, w *api.Why) error {
	if j.State != ledger.NonReady || j.reason == ledger.ReasonScheduled || j.reason == ledger.ReasonPaused {
		return nil
	}
	if err := j.readTenant(ctx); err != nil {
		return err
	}
	if j.lastErr == nil && j.reason != ledger.ReasonRate { // it is a group's next job
		status, err := ledger.ReadJob(ctx, j.s.conn.Cmd, j.p, j.group, j.Ordinal)
		if err != nil {
			return err
		}
		j.lastErr = status.LastError()
	}
	when, start := "its next attempt is at "+formatTime(j.due), "its reserved start is at "+formatTime(j.due)
	if j.due.After(j.Now) {
		setStart(w, j.Now, j.due)
	} else {
		late, err := j.overdue(ctx, w)
		if err != nil {
			return err
		}
		when, start = late, late
	}
	switch j.reason {
	case ledger.ReasonRate:
		w.Reason, w.Limit = api.WhyRate, j.usedUpLimit()
		w.Detail = j.describeLimit(w.Limit) + ": " + start + "."
	case ledger.ReasonThrottled:
		w.Reason = api.WhyCongestion
		w.Detail = "A downstream API asked to wait" + codeOf(j.lastErr) + ": " + when + "."
	case ledger.ReasonResource:
		w.Reason = api.WhyResource
		w.Detail = "Something that it needs is busy" + textOf(ctx, j.lastErr) + ": " + when + "."
	default:
		w.Reason = api.WhyRetry
		w.Detail = "Its last attempt did not succeed" + codeOf(j.lastErr) + ": " + when + "."
	}
	return nil
}

// overdue returns the text about a non-ready job whose due time has passed, and sets w.Position and
// w.EstimateSeconds. The tenant's jobs that were due earlier come before it.
func (j *waitingJob) overdue(ctx context.Context, w *api.Why) (string, error) {
	before, err := ledger.DueBefore(ctx, j.s.conn.Cmd, j.p, j.Tenant, j.due)
	if err != nil {
		return "", err
	}
	w.Position = &before
	j.setEstimate(w, j.tenantState.PerSecond)
	detail := "it is due and waits for a permit and for free capacity in the ready stream"
	if before > 0 {
		detail += ", behind " + plural(before, "due job") + " of its tenant"
	}
	return detail, nil
}

// behindOthers sets the reason WhyCapacity or WhyFairness when no other reason applies: the job
// waits for its turn, or no worker owns the entry of the ready job.
func (j *waitingJob) behindOthers(ctx context.Context, w *api.Why) error {
	w.Reason = api.WhyFairness
	switch j.State {
	case ledger.Ready:
		if unowned, err := isUnowned(ctx, j); err != nil || unowned {
			w.Detail = unownedDetail
			return err
		}
		w.Position = &j.before
		before := ""
		if j.before > 0 {
			before = ", behind " + plural(j.before, "other")
		}
		w.Detail = "It is ready and waits for a free worker" + before + "."
		j.atCapacity(w, before)
	case ledger.NonReady:
		w.Detail = "Its time has come: it becomes ready with the next permits."
		if j.reason == ledger.ReasonPaused {
			w.Detail = "It was paused and has been resumed: it becomes ready with the next permits."
		}
	default:
		if err := j.readTenant(ctx); err != nil {
			return err
		}
		place := j.describePlace(w)
		w.Detail = "It waits for its turn among the tenants" + place + "."
		j.atCapacity(w, place)
	}
	return nil
}

// describePlace returns the text about the jobs that are dequeued before a waiting job, of its
// tenant or with ByPriority of all tenants, and sets w.Position and w.EstimateSeconds. For a job
// that is not waiting it returns "".
func (j *waitingJob) describePlace(w *api.Why) string {
	if j.State != ledger.Waiting {
		return ""
	}
	place := max(0, j.Place) + j.JobsBefore
	w.Position = &place
	detail, verb := "; "+plural(place, "job"), "come"
	if place == 1 {
		verb = "comes"
	}
	if j.ByPriority {
		detail += " of a higher priority " + verb + " before it"
	} else {
		detail += " of its tenant " + verb + " before it"
	}
	if j.GroupsBefore > 0 {
		detail += ", of " + plural(j.GroupsBefore, "group") + " beside its own"
	}
	speed := j.tenantState.PerSecond
	if running := j.Now.Sub(j.Started).Seconds(); speed <= 0 && !j.Started.IsZero() && running > 0 {
		speed = float64(j.Ended) / running
	}
	j.setEstimate(w, speed)
	return detail
}

// setStart sets Until and EstimateSeconds for a start at a known time.
func setStart(w *api.Why, now, start time.Time) {
	w.Until = timeIfAfter(start, time.Time{})
	seconds := round(max(0, start.Sub(now).Seconds()), 10)
	w.EstimateSeconds = &seconds
}

// setEstimate sets w.EstimateSeconds, the time until the job has ended: the time that it and the
// w.Position jobs before it take at a speed in jobs per second, which the rate limits bound. It
// sets nothing if the speed is unknown.
func (j *waitingJob) setEstimate(w *api.Why, speed float64) {
	if speed = j.s.cfg.Meter.Bound(j.tenantState, speed); speed > 0 {
		seconds := round(float64(*w.Position+1)/speed, 10)
		w.EstimateSeconds = &seconds
	}
}

// codeOf returns a failed attempt's error code in parentheses; "" if there was no such attempt or
// its error has no code.
func codeOf(e *ledger.JobError) string {
	if e == nil || e.Code == "" {
		return ""
	}
	return " (" + e.Code + ")"
}

// textOf returns the text of a job's last error in parentheses; "" if the principal of ctx may not
// see error texts.
func textOf(ctx context.Context, e *ledger.JobError) string {
	if e == nil || e.Error == "" || !auth.SeesPayloads(ctx) {
		return ""
	}
	return " (" + e.Error + ")"
}

// formatTime writes a time for a person, in UTC and without fractions of a second.
func formatTime(at time.Time) string { return at.UTC().Format("2006-01-02 15:04:05Z") }

// plural writes "1 job" or "2 jobs".
func plural(n int64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.FormatInt(n, 10) + " " + what + "s"
}
