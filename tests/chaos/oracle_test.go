package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// oracle decides whether a phase was right: it compares the outcome of groups with the plan and
// with the files in which workers record what they ran.
type oracle struct {
	fleet *fleet
	conn  *redisx.Conn // without a proxy
	url   string       // Redis's URL, without a proxy
	space keyspace.Space
	api   *client.API

	deleted *deletions // by administrators' commands
}

func newOracle(ctx context.Context, f *fleet, url string, partitions int) (*oracle, error) {
	conn, err := redisx.Connect(ctx, redisx.Config{URL: url, PoolMaxActive: 10, CommandTimeout: 5 * time.Second})
	if err != nil {
		return nil, err
	}
	space, err := keyspace.New("bulk-action:", partitions)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &oracle{fleet: f, conn: conn, url: url, space: space, api: f.apis[0], deleted: newDeletions()}, nil
}

// awaitEnded waits until groups have ended, and returns those that still have not after the time
// patience. With missing, a group that does not exist counts as ended: Redis may have lost it.
func (o *oracle) awaitEnded(ctx context.Context, groups []*group, patience time.Duration, missing bool) (open []*group) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	open = slices.Clone(groups)
	for len(open) > 0 {
		open = slices.DeleteFunc(open, func(g *group) bool {
			got, err := o.api.Group(ctx, g.id)
			return err == nil && got.Status.Ended() || missing && isMissing(err)
		})
		if len(open) > 0 && redisx.Sleep(ctx, 50*time.Millisecond) != nil {
			break
		}
	}
	return open
}

func isMissing(err error) bool {
	e, ok := errors.AsType[*client.Error](err)
	return ok && e.Status == 404
}

// judge compares groups with the plan, adds their figures and violations to r, and moves the
// fleet's violations to r.
func (o *oracle) judge(ctx context.Context, r *phase, groups []*group) error {
	runs, err := readRuns(o.fleet.files)
	if err != nil {
		return err
	}
	for _, g := range groups {
		if err := o.judgeGroup(ctx, r, g, runs); err != nil {
			return fmt.Errorf("judge group %s: %w", g.id, err)
		}
	}
	o.fleet.mu.Lock()
	spans := slices.Clone(o.fleet.spans)
	r.Violations = append(r.Violations, o.fleet.violations...)
	o.fleet.violations = nil
	o.fleet.mu.Unlock()
	for _, executions := range runs {
		for _, e := range executions {
			if e.how == "crash" {
				r.Faults["worker_crash"]++
			}
		}
	}
	r.DeletedJobs = o.deleted.count()
	r.recoveries = recoveries(runs, spans)
	r.RecoveryP99 = percentile(r.recoveries, 0.99).Seconds()
	r.StaleRefused, err = o.stale(ctx)
	return err
}

func (o *oracle) judgeGroup(ctx context.Context, r *phase, g *group, runs map[string][]execution) error {
	r.Jobs += len(g.jobs)
	ends := newEnds(g, o.deleted.ofGroup(g.id))
	defer func() {
		for n, job := range g.jobs {
			o.judgeRuns(r, g, n, job, ends.lost[n], runs[fmt.Sprintf("%s.%d", g.id, n)])
		}
	}()
	got, err := o.api.Group(ctx, g.id)
	if isMissing(err) {
		r.Lost += len(g.jobs)
		return nil
	}
	if err != nil {
		return err
	}
	for result, err := range o.api.Results(ctx, g.id) {
		if err != nil {
			return err
		}
		var data struct {
			N     int
			Value int64
		}
		if err := json.Unmarshal(result.Data, &data); err != nil {
			return err
		}
		ends.add(r, result.Ordinal, data.N, func(want payload) bool { return want.done() && want.Value == data.Value }, string(result.Data))
	}
	var failures []api.Failure
	for failure, err := range o.api.Failures(ctx, g.id) {
		if err != nil {
			return err
		}
		failures = append(failures, failure)
	}
	ends.addFailures(r, failures)
	ends.judge(r)
	judgeCounts(r, g, ends.lost, got)
	return nil
}

// code returns the error code with which a job with this payload must fail; "" if it must not fail.
func (p payload) code() string {
	switch {
	case p.Crash:
		return "WORKER_LOST"
	case p.Permanent:
		return "CHAOS_PERMANENT"
	}
	return ""
}

// judgeCounts compares the group's counts and aggregate with the plan. The jobs in lost must have
// failed as LOST, because their entry was deleted.
func judgeCounts(r *phase, g *group, lost map[int]bool, got api.Group) {
	want, codes, sum := api.Counts{Accepted: int64(len(g.jobs))}, map[string]int64{}, int64(0)
	for n, j := range g.jobs {
		if lost[n] {
			want.Failed++
			codes[codeLost]++
			continue
		}
		if j.done() {
			want.Done++
			sum += j.Value
			continue
		}
		want.Failed++
		codes[j.code()]++
	}
	if got.Counts != want {
		r.violate("group %s is %s with the counts %+v, planned were %+v", g.id, got.Status, got.Counts, want)
		r.DuplicateEffects += int(max(0, got.Counts.Accepted-want.Accepted, got.Counts.Done-want.Done))
	}
	if !maps.Equal(got.FailuresByCode, codes) {
		r.violate("group %s has failures by code %v, planned were %v", g.id, got.FailuresByCode, codes)
	}
	for as, planned := range map[string]int64{"n": want.Done, "sum": sum} {
		var value int64
		if raw := got.Aggregate[as]; len(raw) > 0 && string(raw) != "null" {
			if err := json.Unmarshal(raw, &value); err != nil {
				r.violate("group %s: aggregate %s is %s", g.id, as, raw)
			}
		}
		if value == planned {
			continue
		}
		r.violate("group %s: aggregate %s is %d, planned was %d", g.id, as, value, planned)
		if as == "n" && value > planned {
			r.DuplicateEffects += int(value - planned)
		}
	}
}

// judgeRuns counts, by the workers' files, the runs of one job and those beyond the planned ones,
// and checks how the runs ended. If the job has ended as LOST, they may have ended in any way.
func (o *oracle) judgeRuns(r *phase, g *group, ordinal int, job payload, lost bool, runs []execution) {
	r.Executions += len(runs)
	ends, fails := 0, 0
	for _, e := range runs {
		switch e.how {
		case "end":
			ends++
		case "fail":
			fails++
		}
	}
	switch {
	case lost:
	case job.done() && ends == 0:
		r.violate("group %s: no worker has run job %d (%d ms) to its end: %s", g.id, ordinal, job.MS, describeRuns(runs))
	case job.Permanent && fails == 0:
		r.violate("group %s: no worker has let job %d fail", g.id, ordinal)
	case !job.done() && ends > 0:
		r.violate("group %s: job %d, which is to fail, was run to its end", g.id, ordinal)
	}
	if !job.Crash { // MAX_DELIVERIES bounds the runs of a job that crashes its worker
		r.DuplicateExecutions += max(0, len(runs)-1-min(fails, job.FailTimes))
	}
}

// describeRuns describes the runs of a job as text.
func describeRuns(runs []execution) string {
	var b strings.Builder
	for _, e := range runs {
		fmt.Fprintf(&b, "attempt %d in %s at %s", e.attempt, e.process, e.began.Format(clock))
		if e.how != "" {
			fmt.Fprintf(&b, ", %s at %s", e.how, e.ended.Format(clock))
		}
		b.WriteString("; ")
	}
	return b.String()
}

// stale returns how many outcomes Redis refused because their attempt was no longer the job's
// current one.
func (o *oracle) stale(ctx context.Context) (n int, err error) {
	for _, p := range o.space.All() {
		got, err := o.conn.Cmd.HGet(ctx, p.Load("CHAOS"), "stale").Int()
		if err != nil && !errors.Is(err, redis.Nil) {
			return 0, fmt.Errorf("read the number of stale outcomes: %w", err)
		}
		n += got
	}
	return n, nil
}

// audit runs the command `bulkaction audit` and returns its report. receipts is a file of receipts,
// with which the audit also reports accepted jobs that are missing.
func (o *oracle) audit(ctx context.Context, receipts string) (audit.Report, error) {
	cmd := exec.CommandContext(ctx, o.fleet.bins.bulkaction, "audit", "--json", "--redis-url", o.url, "--receipts", receipts)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	runErr := cmd.Run() // the exit code is 1 when the audit finds violations
	var report audit.Report
	if err := json.Unmarshal(stdout.Bytes(), &report); err != nil {
		return report, fmt.Errorf("audit: %w: %w\n%s", runErr, err, strings.TrimSpace(stderr.String()))
	}
	return report, nil
}

// judgeAudit adds the audit's violations to r.
func (o *oracle) judgeAudit(ctx context.Context, r *phase, receipts string) error {
	report, err := o.audit(ctx, receipts)
	if err != nil {
		return err
	}
	for _, v := range report.Violations {
		r.violate("audit: law %s, group %q: %s", v.Law, v.Group, v.Detail)
	}
	return nil
}

// codeLost is the error code of a job whose data vanished from Redis.
const codeLost = "LOST"

// ends counts how often each job of a group has ended, once by the job's ordinal and once by its
// index in the plan: each must have ended exactly once.
type ends struct {
	g                 *group
	deleted           map[int64]deletion // by ordinal: only these jobs may end as LOST
	ordinals, planned map[int64]int
	crashes           []int
	lost              map[int]bool // the jobs that have ended as LOST, by index
}

func newEnds(g *group, deleted map[int64]deletion) *ends {
	e := &ends{g: g, deleted: deleted, ordinals: map[int64]int{}, planned: map[int64]int{}, lost: map[int]bool{}}
	for n, job := range g.jobs {
		if job.Crash {
			e.crashes = append(e.crashes, n)
		}
	}
	return e
}

// nextCrash returns the index of the next job of the plan that kills its workers, and removes it
// from crashes; -1: no more. The failures of these jobs do not say which job it was, so they are
// matched in order.
func (e *ends) nextCrash() int {
	if len(e.crashes) == 0 {
		return -1
	}
	n := e.crashes[0]
	e.crashes = e.crashes[1:]
	return n
}

// addFailures counts the failed jobs of the group as ended. LOST jobs come first: their deletion
// tells their index, and jobs that kill their workers may be among them.
func (e *ends) addFailures(r *phase, failures []api.Failure) {
	for _, f := range failures {
		if f.Code == codeLost {
			e.addLost(r, f)
		}
	}
	for _, f := range failures {
		if f.Code == codeLost {
			continue
		}
		n, err := strconv.Atoi(f.Error) // the processor's error contains the job's number
		if err != nil {
			n = e.nextCrash()
		}
		e.add(r, f.Ordinal, n, func(want payload) bool { return want.code() == f.Code }, fmt.Sprintf("%s (%s)", f.Code, f.Error))
	}
}

// addLost counts a job that has ended as LOST. If nobody deleted the job's entry, that is a
// violation, and the job counts as missing. It is also a violation if the job ended later than
// endWithin after the deletion.
func (e *ends) addLost(r *phase, f api.Failure) {
	e.ordinals[f.Ordinal]++
	d, ok := e.deleted[f.Ordinal]
	if !ok || d.n < 0 || d.n >= len(e.g.jobs) {
		r.violate("group %s: ordinal %d ended as LOST (%s), and nobody has deleted its entry", e.g.id, f.Ordinal, f.Error)
		return
	}
	e.planned[int64(d.n)]++
	e.lost[d.n] = true
	e.crashes = slices.DeleteFunc(e.crashes, func(n int) bool { return n == d.n })
	r.EndedAsLost++
	after := f.At.Sub(d.at)
	r.LostWithin = max(r.LostWithin, after.Seconds())
	if after > endWithin {
		r.violate("group %s: ordinal %d ended as LOST %s after its entry was deleted", e.g.id, f.Ordinal, after)
	}
}

func (e *ends) add(r *phase, ordinal int64, n int, asPlanned func(payload) bool, what string) {
	e.ordinals[ordinal]++
	e.planned[int64(n)]++
	if n < 0 || n >= len(e.g.jobs) {
		r.violate("group %s: ordinal %d ended with %s, and no such job was planned", e.g.id, ordinal, what)
	} else if want := e.g.jobs[n]; !asPlanned(want) {
		r.violate("group %s: ordinal %d ended with %s, planned was %+v", e.g.id, ordinal, what, want)
	}
}

func (e *ends) judge(r *phase) {
	lost, twice := 0, 0
	for n := range e.g.jobs {
		if e.planned[int64(n)] == 0 {
			lost++
			r.violate("group %s: job %d has neither a result nor a failure", e.g.id, n)
		}
	}
	for _, counted := range []map[int64]int{e.ordinals, e.planned} {
		n := 0
		for _, times := range counted {
			n += times - 1
		}
		twice = max(twice, n)
	}
	if twice > 0 {
		r.violate("group %s: %d results and failures too many", e.g.id, twice)
	}
	r.Lost += lost
	r.DuplicateEffects += twice
}
