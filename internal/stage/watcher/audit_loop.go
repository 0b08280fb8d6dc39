package watcher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/stage"
)

// Audit says how often the data is held against the laws. 0 is never.
type Audit struct {
	Interval     time.Duration // between rounds, which are cheap
	FullInterval time.Duration // between looks at everything
	Lease        time.Duration // of a job: one that is missing may be in a worker's hands for so long
}

// fullAuditRate is how many bytes a second a look at everything reads.
const fullAuditRate = 4 << 20

// auditLoop is the audit of one partition while this process leads it: rounds that look at ledgers,
// and closer at groups that are suspicious, and now and then a look at everything. Missing jobs are
// ended as lost once it is certain.
type auditLoop struct {
	*partitionLoop
	check        *audit.IncrementalCheck
	leadSince    time.Time // the lead that the rest belongs to
	nextAt       time.Time // of the next round
	alarmed      bool      // the next round is to look at everything that is under way
	missingSince map[missingJob]time.Time
	missing      audit.Candidates // with jobs that are missing

	mu            sync.Mutex
	fromFullAudit audit.Candidates // from the look at everything

	fullAuditAt time.Time // the last look at everything
}

// missingJob is a job that was missing, in the state in which it was.
type missingJob struct {
	group string
	ledger.Missed
}

// auditRuns runs the audit of all partitions that this process leads: one after the other, so that
// its load has a bound.
func (w *Watcher) auditRuns(partitions []*partitionLoop) []func(context.Context) error {
	if w.cfg.Audit.Interval <= 0 {
		return nil
	}
	loops := make([]*auditLoop, len(partitions))
	for i, p := range partitions {
		loops[i] = &auditLoop{partitionLoop: p, check: audit.NewIncrementalCheck(w.conn, p.p)}
	}
	step := func(ctx context.Context) (time.Duration, error) {
		var errs error
		for _, l := range loops {
			if err := l.step(ctx); err != nil {
				errs = errors.Join(errs, fmt.Errorf("partition %d: %w", l.p.Index(), err))
			}
		}
		return min(redisx.MaxBlock, w.cfg.Audit.Interval), errs
	}
	full := func(ctx context.Context) (time.Duration, error) {
		var errs error
		for _, l := range loops {
			if err := l.fullAudit(ctx); err != nil {
				errs = errors.Join(errs, fmt.Errorf("partition %d: %w", l.p.Index(), err))
			}
		}
		return redisx.MaxBlock, errs
	}
	runs := []func(context.Context) error{func(ctx context.Context) error {
		return stage.Loop{Name: "audit", Log: w.tel.Log}.Run(ctx, step)
	}}
	if w.cfg.Audit.FullInterval > 0 {
		runs = append(runs, func(ctx context.Context) error {
			return stage.Loop{Name: "full audit", Log: w.tel.Log}.Run(ctx, full)
		})
	}
	return runs
}

// step makes a round when it is due, or when reclaim has met what nobody may have deleted.
func (l *auditLoop) step(ctx context.Context) error {
	since, leads := l.leadsSince()
	if !leads {
		l.open.removePartition(l.p.Index())
		l.leadSince = time.Time{}
		return nil
	}
	if since != l.leadSince { // what was before belongs to another lead
		l.leadSince, l.nextAt, l.alarmed, l.missingSince, l.missing = since, time.Time{}, false, nil, audit.Candidates{}
		l.check = audit.NewIncrementalCheck(l.conn, l.p)
	}
	removed, err := l.conn.Cmd.HDel(ctx, l.p.Watch(), "suspicious").Result()
	if err != nil {
		return fmt.Errorf("look for suspicions: %w", err)
	}
	l.alarmed = l.alarmed || removed > 0
	if !l.alarmed && time.Now().Before(l.nextAt) {
		return nil
	}
	switch err := l.checkGroups(ctx); {
	case call.IsOOM(err): // readings of one instant are refused then, too
		l.log.Warn("audit postponed: redis has no memory left", "error", err)
		l.nextAt = time.Now().Add(l.cfg.Audit.Interval)
		return nil
	case err != nil:
		return err
	}
	l.alarmed, l.nextAt = false, time.Now().Add(l.cfg.Audit.Interval)
	if len(l.missingSince) > 0 {
		if soon := time.Now().Add(l.cfg.Audit.Lease / 2); soon.Before(l.nextAt) {
			l.nextAt = soon
		}
	}
	return nil
}

// checkGroups looks at all ledgers, and closer where that gives a reason, where jobs were missing,
// and where a look at everything has seen something.
func (l *auditLoop) checkGroups(ctx context.Context) error {
	candidates, err := l.check.Run(ctx, l.alarmed)
	if err != nil {
		return err
	}
	l.mu.Lock()
	for _, more := range []audit.Candidates{l.missing, l.fromFullAudit} {
		candidates.Groups = append(candidates.Groups, more.Groups...)
		candidates.Tenants = append(candidates.Tenants, more.Tenants...)
	}
	l.fromFullAudit = audit.Candidates{}
	l.mu.Unlock()
	candidates.Groups = unique(append(candidates.Groups, l.open.groups(l.p.Index())...))
	candidates.Tenants = unique(candidates.Tenants)
	report := audit.Report{}
	if len(candidates.Groups) > 0 {
		report, err = audit.RunGroups(ctx, l.conn, l.space, l.p, candidates, audit.Options{Rate: 10 * fullAuditRate})
		if err != nil {
			return err
		}
	}
	err = l.endMissing(ctx, report.Missing)
	return errors.Join(err, l.open.replace(ctx, l.partitionLoop, "incremental", candidates.Groups, report.Violations))
}

// endMissing ends jobs that are missing for two leases: until then who holds one whose entry is
// gone may still end it.
func (l *auditLoop) endMissing(ctx context.Context, missing []audit.Missing) error {
	now, stillMissing := time.Now(), map[missingJob]time.Time{}
	l.missing = audit.Candidates{}
	var errs error
	for _, m := range missing {
		l.missing.Groups = append(l.missing.Groups, m.Group)
		l.missing.Tenants = append(l.missing.Tenants, m.Tenant)
		overdue := m
		overdue.Jobs = nil
		for _, j := range m.Jobs {
			key := missingJob{m.Group, j}
			first, ok := l.missingSince[key]
			if !ok {
				first = now
			}
			stillMissing[key] = first
			if ok && now.Sub(first) >= 2*l.cfg.Audit.Lease {
				overdue.Jobs = append(overdue.Jobs, j)
			}
		}
		if len(overdue.Jobs) == 0 {
			continue
		}
		lost, err := audit.Lose(ctx, l.conn, l.p, overdue)
		l.metrics.DeadLettered("LOST", len(lost))
		if n := len(lost); n > 0 {
			l.log.Error("jobs vanished from redis and were ended as failed",
				"group", m.Group, "jobs", n, "code", "LOST", "ordinals", lost[:min(n, 100)])
		}
		errs = errors.Join(errs, err)
	}
	l.missingSince = stillMissing
	return errs
}

func unique(s []string) []string {
	slices.Sort(s)
	return slices.Compact(s)
}

// fullAudit audits the whole partition when that is due, at a rate that disturbs nobody.
func (l *auditLoop) fullAudit(ctx context.Context) error {
	since, leads := l.leadsSince()
	if !leads || time.Since(since) < l.cfg.Audit.FullInterval || time.Since(l.fullAuditAt) < l.cfg.Audit.FullInterval {
		return nil
	}
	began := time.Now()
	report, err := audit.Partition(ctx, l.conn, l.space, l.p, audit.Options{Rate: fullAuditRate})
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
	return l.open.replace(ctx, l.partitionLoop, "full", nil, report.Violations)
}
