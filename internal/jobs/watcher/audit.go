package watcher

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/repair"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
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
	// Others is called in a full audit to check what is no job, such as the waiting room, by the laws
	// OtherLaws; nil: nothing else is checked.
	Others    func(context.Context, *redisx.Conn, keyspace.Space, keyspace.Partition, audit.Options, *audit.Report) error
	OtherLaws []string
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
	check *audit.Incremental
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
		loops[i] = &auditLoop{partition: p, check: audit.NewIncremental(w.Conn, p.Partition)}
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
		l.check = audit.NewIncremental(l.Conn, l.Partition)
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

// fullAudit audits the whole partition if that is due. The first one of a leadership comes after FullInterval, not at once. It publishes new violations, and
// hands missing jobs to the incremental checks, which end them.
func (l *auditLoop) fullAudit(ctx context.Context) error {
	since, leads := l.leadership()
	if !leads || time.Since(since) < l.cfg.Audit.FullInterval || time.Since(l.fullAuditAt) < l.cfg.Audit.FullInterval {
		return nil
	}
	began := time.Now()
	options := audit.Options{Rate: fullAuditRate}
	report, err := audit.Partition(ctx, l.Conn, l.Space, l.Partition, options)
	if err == nil && l.cfg.Audit.Others != nil {
		err = l.cfg.Audit.Others(ctx, l.Conn, l.Space, l.Partition, options, &report)
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

// openViolations holds the violations that were found and are still there. Each is logged and
// published once, by the audit that found it first; it is published again if it was gone in
// between, or if another process leads. The metric audit_violations counts them by law.
type openViolations struct {
	metrics *telemetry.WatcherMetrics
	laws    []string // of which the metric and GET /v1/audit count the violations
	mu      sync.Mutex
	// bySource holds what the last audit of each source has found, by violation id.
	bySource   map[source]map[string]api.Violation
	announced  map[string]bool // ids of the open violations that are published
	durability []api.Violation // losses that were found; they are past events and stay counted
}

func newOpenViolations(metrics *telemetry.WatcherMetrics, otherLaws []string) *openViolations {
	v := &openViolations{
		metrics: metrics, laws: slices.Concat(audit.Laws, otherLaws), bySource: map[source]map[string]api.Violation{}, announced: map[string]bool{},
	}
	v.updateMetrics()
	return v
}

// source is one kind of audit of one partition.
type source struct {
	partition int
	full      bool // a full audit; otherwise an incremental check
}

// replace replaces the violations that an audit found in a partition and publishes new ones. A
// violation that can't be published stays open, and the next audit that finds it publishes it.
// groups names the groups that the audit has read job by job: violations of them that an earlier
// full audit found and this audit did not are closed. Publishing happens without the lock, because
// the goroutine that renews the leader lease takes this lock too.
func (v *openViolations) replace(
	ctx context.Context, p *partition, full bool, groups []string, violations []api.Violation,
) error {
	found := make(map[string]api.Violation, len(violations))
	for _, one := range violations {
		found[violationID(one)] = one
	}
	v.mu.Lock()
	v.bySource[source{p.Index(), full}] = found
	maps.DeleteFunc(v.bySource[source{p.Index(), true}], func(id string, one api.Violation) bool {
		_, stays := found[id]
		return !stays && one.Group != "" && slices.Contains(groups, one.Group)
	})
	v.dropClosed()
	v.updateMetrics()
	fresh := slices.DeleteFunc(slices.Clone(violations),
		func(one api.Violation) bool { return v.announced[violationID(one)] })
	v.mu.Unlock()
	var errs error
	for _, one := range fresh {
		id := violationID(one)
		if err := p.publishViolation(ctx, id, one); err != nil {
			errs = errors.Join(errs, err)
			continue
		}
		v.mu.Lock()
		v.announced[id] = true
		v.mu.Unlock()
	}
	return errs
}

// dropClosed forgets the ids of violations that no audit finds any more, so that they are published
// if they come back. The caller holds mu.
func (v *openViolations) dropClosed() {
	maps.DeleteFunc(v.announced, func(id string, _ bool) bool {
		for _, found := range v.bySource {
			if _, stays := found[id]; stays {
				return false
			}
		}
		return true
	})
}

// removePartition forgets the violations of a partition that another process leads now, except
// those of the law durability.
func (v *openViolations) removePartition(partition int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	maps.DeleteFunc(v.bySource, func(s source, _ map[string]api.Violation) bool { return s.partition == partition })
	v.dropClosed()
	v.updateMetrics()
}

// restore adds the violations that the full audits of an earlier leader have found in a partition.
func (v *openViolations) restore(partition int, stored []ledger.AuditedViolation) {
	found := map[string]api.Violation{}
	for _, one := range stored {
		if one.Deep {
			found[violationID(one.Violation)] = one.Violation
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.bySource[source{partition, true}] = found
	v.updateMetrics()
}

// maxStored is how many open violations of a partition are stored in Redis at most, for GET
// /v1/audit.
const maxStored = 100

// state returns what is stored in Redis: up to maxStored open violations of a partition, ordered by
// group, and the number of all, by law.
func (v *openViolations) state(partition int) (some []ledger.AuditedViolation, byLaw map[string]int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	byLaw = map[string]int64{}
	for _, law := range v.laws {
		byLaw[law] = 0
	}
	seen := map[string]bool{}
	add := func(one api.Violation, deep bool) {
		byLaw[one.Law] += max(1, one.Count)
		some = append(some, ledger.AuditedViolation{Violation: one, Key: one.Key, Deep: deep})
	}
	for _, deep := range []bool{true, false} {
		for id, one := range v.bySource[source{partition, deep}] {
			if !seen[id] {
				add(one, deep)
			}
			seen[id] = true
		}
	}
	for _, one := range v.durability {
		if one.Partition == partition {
			add(one, false)
		}
	}
	slices.SortFunc(some, func(a, b ledger.AuditedViolation) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Law, b.Law), cmp.Compare(a.Detail, b.Detail))
	})
	return some[:min(len(some), maxStored)], byLaw
}

// addDurability adds a violation of the law durability: Redis has lost confirmed writes. That is a
// past event, so it stays among the open violations as long as this process runs.
func (v *openViolations) addDurability(one api.Violation) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.durability = append(v.durability, one)
	v.updateMetrics()
}

// groups returns the ids of groups with open violations in a partition, some of them repeatedly.
// The audit reads them in each check until nothing is wrong with them.
func (v *openViolations) groups(partition int) []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	var ids []string
	for s, found := range v.bySource {
		for _, one := range found {
			if s.partition == partition && one.Group != "" {
				ids = append(ids, one.Group)
			}
		}
	}
	return ids
}

// updateMetrics sets the gauge of violations, by law. The caller holds mu, or has just created v.
func (v *openViolations) updateMetrics() {
	byLaw, seen := map[string]int{}, map[string]bool{}
	for _, law := range v.laws {
		byLaw[law] = 0
	}
	for _, found := range v.bySource {
		for id, one := range found {
			if !seen[id] {
				byLaw[one.Law] += max(1, int(one.Count))
			}
			seen[id] = true
		}
	}
	byLaw[audit.LawDurability] += len(v.durability)
	v.metrics.SetViolations(byLaw)
}

// violationID returns an id that stays the same while the violation exists, also when its group
// moves. Of a violation with a Key, the detail may change, too: its counts do.
func violationID(v api.Violation) string {
	ordinal := int64(-1)
	if v.Ordinal != nil {
		ordinal = *v.Ordinal
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\n%d\n%s\n%d\n%s", v.Law, v.Partition, v.Group,
		ordinal, cmp.Or(v.Key, v.Detail)))
	return "audit." + hex.EncodeToString(sum[:12])
}
