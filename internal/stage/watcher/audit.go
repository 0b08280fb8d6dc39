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
	Interval time.Duration // between rounds, which are cheap
	Deep     time.Duration // between looks at everything
	Lease    time.Duration // of a job: one that is missing may be in a worker's hands for so long
}

// deepRate is how many bytes a second a look at everything reads.
const deepRate = 4 << 20

// patrol is the audit of one partition while this process leads it: rounds that look at ledgers,
// and closer at groups that are suspicious, and now and then a look at everything. Missing jobs are
// ended as lost once it is certain.
type patrol struct {
	*partition
	sentry *audit.IncrementalCheck
	led    time.Time // the lead that the rest belongs to
	at     time.Time // of the next round
	alarm  bool      // the next round is to look at everything that is under way
	missed map[missedJob]time.Time
	again  audit.Candidates // with jobs that are missing

	mu   sync.Mutex
	tips audit.Candidates // from the look at everything

	deepAt time.Time // the last look at everything
}

// missedJob is a job that was missing, in the state in which it was.
type missedJob struct {
	group string
	ledger.Missed
}

// patrols runs the audit of all partitions that this process leads: one after the other, so that
// its load has a bound.
func (w *Watcher) patrols(parts []*partition) []func(context.Context) error {
	if w.cfg.Audit.Interval <= 0 {
		return nil
	}
	all := make([]*patrol, len(parts))
	for i, p := range parts {
		all[i] = &patrol{partition: p, sentry: audit.NewIncrementalCheck(w.conn, p.p)}
	}
	rounds := func(ctx context.Context) (time.Duration, error) {
		var errs error
		for _, t := range all {
			if err := t.step(ctx); err != nil {
				errs = errors.Join(errs, fmt.Errorf("partition %d: %w", t.p.Index(), err))
			}
		}
		return min(redisx.MaxBlock, w.cfg.Audit.Interval), errs
	}
	deep := func(ctx context.Context) (time.Duration, error) {
		var errs error
		for _, t := range all {
			if err := t.lookAtEverything(ctx); err != nil {
				errs = errors.Join(errs, fmt.Errorf("partition %d: %w", t.p.Index(), err))
			}
		}
		return redisx.MaxBlock, errs
	}
	runs := []func(context.Context) error{func(ctx context.Context) error {
		return stage.Loop{Name: "audit", Log: w.tel.Log}.Run(ctx, rounds)
	}}
	if w.cfg.Audit.Deep > 0 {
		runs = append(runs, func(ctx context.Context) error {
			return stage.Loop{Name: "audit of everything", Log: w.tel.Log}.Run(ctx, deep)
		})
	}
	return runs
}

// step makes a round when it is due, or when reclaim has met what nobody may have deleted.
func (t *patrol) step(ctx context.Context) error {
	since, leads := t.leads()
	if !leads {
		t.posted.leave(t.p.Index())
		t.led = time.Time{}
		return nil
	}
	if since != t.led { // what was before belongs to another lead
		t.led, t.at, t.alarm, t.missed, t.again = since, time.Time{}, false, nil, audit.Candidates{}
		t.sentry = audit.NewIncrementalCheck(t.conn, t.p)
	}
	alarmed, err := t.conn.Cmd.HDel(ctx, t.p.Watch(), "suspicious").Result()
	if err != nil {
		return fmt.Errorf("look for suspicions: %w", err)
	}
	t.alarm = t.alarm || alarmed > 0
	if !t.alarm && time.Now().Before(t.at) {
		return nil
	}
	switch err := t.round(ctx); {
	case call.IsOOM(err): // readings of one instant are refused then, too
		t.log.Warn("audit put off, since redis has no memory left", "error", err)
		t.at = time.Now().Add(t.cfg.Audit.Interval)
		return nil
	case err != nil:
		return err
	}
	t.alarm, t.at = false, time.Now().Add(t.cfg.Audit.Interval)
	if len(t.missed) > 0 {
		if soon := time.Now().Add(t.cfg.Audit.Lease / 2); soon.Before(t.at) {
			t.at = soon
		}
	}
	return nil
}

// round looks at all ledgers, and closer where that gives a reason, where jobs were missing, and
// where a look at everything has seen something.
func (t *patrol) round(ctx context.Context) error {
	s, err := t.sentry.Run(ctx, t.alarm)
	if err != nil {
		return err
	}
	t.mu.Lock()
	for _, more := range []audit.Candidates{t.again, t.tips} {
		s.Groups, s.Tenants = append(s.Groups, more.Groups...), append(s.Tenants, more.Tenants...)
	}
	t.tips = audit.Candidates{}
	t.mu.Unlock()
	s.Groups = unique(append(s.Groups, t.posted.groups(t.p.Index())...))
	s.Tenants = unique(s.Tenants)
	report := audit.Report{}
	if len(s.Groups) > 0 {
		if report, err = audit.RunGroups(ctx, t.conn, t.space, t.p, s, audit.Options{Rate: 10 * deepRate}); err != nil {
			return err
		}
	}
	err = t.lose(ctx, report.Missing)
	return errors.Join(err, t.posted.post(ctx, t.partition, "round", s.Groups, report.Violations))
}

// lose ends jobs that are missing for two leases: until then who holds one whose entry is gone may
// still end it.
func (t *patrol) lose(ctx context.Context, missing []audit.Missing) error {
	now, seen := time.Now(), map[missedJob]time.Time{}
	t.again = audit.Candidates{}
	var errs error
	for _, m := range missing {
		t.again.Groups, t.again.Tenants = append(t.again.Groups, m.Group), append(t.again.Tenants, m.Tenant)
		gone := m
		gone.Jobs = nil
		for _, j := range m.Jobs {
			key := missedJob{m.Group, j}
			first, ok := t.missed[key]
			if !ok {
				first = now
			}
			seen[key] = first
			if ok && now.Sub(first) >= 2*t.cfg.Audit.Lease {
				gone.Jobs = append(gone.Jobs, j)
			}
		}
		if len(gone.Jobs) == 0 {
			continue
		}
		lost, err := audit.Lose(ctx, t.conn, t.p, gone)
		t.metrics.DeadLettered("LOST", len(lost))
		if n := len(lost); n > 0 {
			t.log.Error("jobs vanished from redis and were ended as failed",
				"group", m.Group, "jobs", n, "code", "LOST", "ordinals", lost[:min(n, 100)])
		}
		errs = errors.Join(errs, err)
	}
	t.missed = seen
	return errs
}

func unique(s []string) []string {
	slices.Sort(s)
	return slices.Compact(s)
}

// lookAtEverything audits the whole partition when that is due, at a rate that disturbs nobody.
func (t *patrol) lookAtEverything(ctx context.Context) error {
	since, leads := t.leads()
	if !leads || time.Since(since) < t.cfg.Audit.Deep || time.Since(t.deepAt) < t.cfg.Audit.Deep {
		return nil
	}
	began := time.Now()
	report, err := audit.Partition(ctx, t.conn, t.space, t.p, audit.Options{Rate: deepRate})
	if err != nil && !call.IsOOM(err) {
		return err
	}
	t.deepAt = time.Now()
	if err != nil {
		t.log.Warn("audit of everything put off, since redis has no memory left", "error", err)
		return nil
	}
	t.log.Info("audited everything", "groups", report.Groups, "jobs", report.Jobs, "violations",
		len(report.Violations), "took", time.Since(began))
	t.mu.Lock()
	for _, m := range report.Missing {
		t.tips.Groups, t.tips.Tenants = append(t.tips.Groups, m.Group), append(t.tips.Tenants, m.Tenant)
	}
	t.mu.Unlock()
	return t.posted.post(ctx, t.partition, "everything", nil, report.Violations)
}
