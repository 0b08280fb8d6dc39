package watcher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/incremental"
	"github.com/bulkaction/bulkaction/internal/audit/repair"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Audit says how often the leader of a partition checks its data against the laws of package audit.
type Audit struct {
	// Interval is the time between incremental checks, which are cheap. 0: no audit at all.
	Interval time.Duration
	// FullInterval is the time between full audits. 0: none.
	FullInterval time.Duration
	// Lease is the length of a job lease. A missing job is ended as LOST only after it was missing
	// for that long, because until then a worker may run it and report its outcome.
	Lease time.Duration
}

// fullAuditRate is how many bytes per second a full audit reads, so that it doesn't disturb the
// roles.
const fullAuditRate = 4 << 20

// auditLoop audits one partition while this process leads it. An incremental check finds candidates
// among the open groups, which are then read job by job; from time to time a full audit reads
// everything. A job that stays missing for a job lease is ended as failed with code LOST.
//
// Two goroutines use it: one runs step, the other runs fullAudit. They share only the fields behind
// mu, and leadership() and openViolations, which are safe for concurrent use.
type auditLoop struct {
	*partition
	check *incremental.Check
	// leadershipBegan identifies this process's leadership, by its start, to which the fields up to
	// mu belong. In a new leadership they are reset.
	leadershipBegan time.Time
	nextAt          time.Time // when the next incremental check is due
	// missingSince holds the missing jobs of the last check, and when each was first found missing.
	missingSince map[missingJob]time.Time

	mu            sync.Mutex       // guards the next three fields
	fromFullAudit audit.Candidates // groups and tenants of jobs that the full audit found missing
	// lookedAt and deepAt are the times of the last incremental check and the last full audit, by
	// any process; nil: none is known.
	lookedAt, deepAt *time.Time

	fullAuditAt time.Time // when the last full audit ended; only fullAudit uses it
}

// missingJob identifies a job that is missing in a certain state and attempt. If the job changes
// its state or attempt, it counts as another missingJob, whose time begins anew.
type missingJob struct {
	group, tenant string
	ledger.Missed
}

// addAudits adds the loops that audit the partitions to r: one for incremental checks and one for
// full audits, as far as the configuration asks for them. Each loop goes through the partitions one
// after the other, which bounds its load.
func (w *Watcher) addAudits(r *stage.Runner, partitions []*partition) {
	if w.cfg.Audit.Interval <= 0 {
		return
	}
	loops := make([]*auditLoop, len(partitions))
	for i, p := range partitions {
		loops[i] = &auditLoop{partition: p, check: incremental.New(w.Conn, p.Partition)}
	}
	each := func(idle time.Duration, audit func(*auditLoop, context.Context) error) stage.Step {
		return func(ctx context.Context) (time.Duration, error) {
			var errs error
			for _, l := range loops {
				if err := audit(l, ctx); err != nil {
					errs = errors.Join(errs, fmt.Errorf("partition %d: %w", l.Index(), err))
				}
			}
			return idle, errs
		}
	}
	r.Loop("audit", "", each(w.cfg.Audit.Interval, (*auditLoop).step))
	if w.cfg.Audit.FullInterval > 0 {
		r.Loop("full audit", "", each(-1, (*auditLoop).fullAudit))
	}
}

// groupCost and candidateCost estimate Redis's time for an incremental check: for each open group,
// and for each group that it reads job by job. The pause after a check is at least checkPause times
// the estimate, so that checks take about 1% of Redis's time at most.
const (
	groupCost     = 15 * time.Microsecond
	candidateCost = 50 * time.Microsecond
	checkPause    = 100
)

// step runs an incremental check if one is due, or if the script reclaim has reported an entry that
// was deleted while a worker held its job. The next check is due after Interval; while jobs are
// missing, already after half a job lease; after a costly check, later (see checkPause). If this
// process does not lead, step drops the partition's open violations.
func (l *auditLoop) step(ctx context.Context) error {
	since, leads := l.leadership()
	if !leads {
		l.open.removePartition(l.Index())
		l.leadershipBegan = time.Time{}
		return nil
	}
	if since != l.leadershipBegan { // these fields are of an earlier leadership
		if err := l.restore(ctx); err != nil {
			return err
		}
		l.leadershipBegan, l.nextAt = since, time.Time{}
		l.missingSince = nil
		l.check = incremental.New(l.Conn, l.Partition)
	}
	suspicious, err := ledger.TakeDeletedFound(ctx, l.Conn.Cmd, l.Partition)
	if err != nil {
		return err
	}
	if suspicious {
		l.nextAt = time.Time{}
	}
	if time.Now().Before(l.nextAt) {
		return nil
	}
	cost, err := l.checkGroups(ctx)
	switch {
	case call.IsOOM(err): // without memory Redis refuses transactions, even if they only read
		l.log.Warn("audit postponed: redis has no memory left", "error", err)
		l.nextAt = time.Now().Add(l.cfg.Audit.Interval)
		return nil
	case err != nil:
		return err
	}
	pause := l.cfg.Audit.Interval
	if len(l.missingSince) > 0 {
		pause = min(pause, l.cfg.Audit.Lease/2)
	}
	l.nextAt = time.Now().Add(max(pause, checkPause*cost))
	now := time.Now().UTC()
	return l.storeState(ctx, &now, nil)
}

// restore takes over what an earlier leader has stored: the times of the last audits, and those of
// its open violations that its last full audit found (see maxStored). These stay open until an
// audit does not find them any more.
func (l *auditLoop) restore(ctx context.Context) error {
	stored, err := ledger.ReadAudit(ctx, l.Conn.Cmd, l.Partition)
	if endsStep(ctx, err) {
		return err
	}
	if err != nil { // the next check replaces it
		l.log.Warn("the state of an earlier audit could not be read", "error", err)
	}
	l.mu.Lock()
	l.lookedAt, l.deepAt = stored.LookedAt, stored.DeepAt
	l.mu.Unlock()
	l.open.restore(l.Index(), stored.Violations)
	return nil
}

// storeState stores what is known of the audits of this partition, for GET /v1/audit: the times, of
// which a nil one stays as it is, and the open violations. If Redis has no memory left, the earlier
// state stays.
func (l *auditLoop) storeState(ctx context.Context, looked, deep *time.Time) error {
	l.mu.Lock()
	l.lookedAt, l.deepAt = cmp.Or(looked, l.lookedAt), cmp.Or(deep, l.deepAt)
	state := ledger.AuditState{LookedAt: l.lookedAt, DeepAt: l.deepAt}
	l.mu.Unlock()
	state.Violations, state.ByLaw = l.open.state(l.Index())
	err := ledger.StoreAudit(ctx, l.Conn.Cmd, l.Partition, state)
	if call.IsOOM(err) {
		return nil
	}
	return err
}

// checkGroups runs an incremental check, and then reads job by job: the candidates of that check,
// the groups with missing jobs, found by the last check or by a full audit, and those with open
// violations. It ends jobs that are missing for too long and publishes new violations. It returns
// about how much of Redis's time that takes.
func (l *auditLoop) checkGroups(ctx context.Context) (cost time.Duration, err error) {
	candidates, open, err := l.check.Run(ctx)
	if err != nil {
		return 0, err
	}
	for job := range l.missingSince {
		candidates.Groups = append(candidates.Groups, job.group)
		candidates.Tenants = append(candidates.Tenants, job.tenant)
	}
	l.mu.Lock()
	candidates.Groups = append(candidates.Groups, l.fromFullAudit.Groups...)
	candidates.Tenants = append(candidates.Tenants, l.fromFullAudit.Tenants...)
	l.fromFullAudit = audit.Candidates{}
	l.mu.Unlock()
	candidates.Groups = unique(append(candidates.Groups, l.open.groups(l.Index())...))
	candidates.Tenants = unique(candidates.Tenants)
	report := audit.Report{}
	if len(candidates.Groups) > 0 {
		options := audit.Options{Rate: 10 * fullAuditRate}
		if report, err = audit.RunGroups(ctx, l.Conn, l.Space, l.Partition, candidates, options); err != nil {
			return 0, err
		}
	}
	err = l.endMissing(ctx, report.Missing)
	cost = time.Duration(open)*groupCost + time.Duration(len(candidates.Groups))*candidateCost
	return cost, errors.Join(err, l.open.replace(ctx, l.partition, false, candidates.Groups, report.Violations))
}

// endMissing ends jobs as failed with code LOST when they have been missing for a job lease, and
// remembers for the next check since when each job was missing. Until then a worker that runs such
// a job can still report its outcome, although the job's entry in the ready stream is gone.
func (l *auditLoop) endMissing(ctx context.Context, missing []audit.Missing) error {
	now, stillMissing := time.Now(), map[missingJob]time.Time{}
	var errs error
	for _, m := range missing {
		overdue := m
		overdue.Jobs = nil
		for _, j := range m.Jobs {
			key := missingJob{m.Group, m.Tenant, j}
			first, ok := l.missingSince[key]
			if !ok {
				first = now
			}
			stillMissing[key] = first
			if ok && now.Sub(first) >= l.cfg.Audit.Lease {
				overdue.Jobs = append(overdue.Jobs, j)
			}
		}
		if len(overdue.Jobs) == 0 {
			continue
		}
		lost, err := repair.Lose(ctx, l.Conn, l.Partition, overdue)
		l.metrics.DeadLettered("LOST", len(lost))
		for _, ordinal := range lost { // the jobs' traces are lost with them
			l.Tel.RecordStep(ctx, l.DeadLetters(), telemetry.JobStep{
				Name: "fail", Tenant: m.Tenant, Group: m.Group, Ordinal: ordinal, Code: "LOST",
			})
		}
		if n := len(lost); n > 0 {
			l.log.Error("jobs vanished from redis and were ended as failed",
				"group", m.Group, "jobs", n, "code", "LOST", "ordinals", lost[:min(n, 100)])
		}
		errs = errors.Join(errs, err)
	}
	l.missingSince = stillMissing
	return errs
}

// unique sorts s and removes repeated elements. It changes s.
func unique(s []string) []string {
	slices.Sort(s)
	return slices.Compact(s)
}

// fullAudit audits the whole partition if that is due, with its events of the waiting room. The
// first one of a leadership comes after FullInterval, not at once. It publishes new violations, and
// hands missing jobs to the incremental checks, which end them.
func (l *auditLoop) fullAudit(ctx context.Context) error {
	since, leads := l.leadership()
	if !leads || time.Since(since) < l.cfg.Audit.FullInterval || time.Since(l.fullAuditAt) < l.cfg.Audit.FullInterval {
		return nil
	}
	began := time.Now()
	options := audit.Options{Rate: fullAuditRate}
	report, err := audit.Partition(ctx, l.Conn, l.Space, l.Partition, options)
	if err == nil {
		err = audit.CheckRoomsOf(ctx, l.Conn, l.Space, l.Partition, options, &report)
	}
	if err != nil && !call.IsOOM(err) {
		return err
	}
	l.fullAuditAt = time.Now()
	if err != nil {
		l.log.Warn("full audit postponed: redis has no memory left", "error", err)
		return nil
	}
	l.log.Info("full audit finished", "groups", report.Groups, "jobs", report.Jobs, "violations",
		len(report.Violations), "took", time.Since(began))
	l.mu.Lock()
	for _, m := range report.Missing {
		l.fromFullAudit.Groups = append(l.fromFullAudit.Groups, m.Group)
		l.fromFullAudit.Tenants = append(l.fromFullAudit.Tenants, m.Tenant)
	}
	l.mu.Unlock()
	err = l.open.replace(ctx, l.partition, true, nil, report.Violations)
	now := time.Now().UTC()
	return errors.Join(err, l.storeState(ctx, nil, &now))
}
