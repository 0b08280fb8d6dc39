// Package operations carries out operations on many groups or dead letters. The leader of partition 0
// does it, in steps that each survive the death of their process. A step either plans a page: it
// reads the next candidates, decides what to do with those that match, and stores this; or it does what
// the page says and counts it. What it does may be repeated, and is: after a death the next leader
// does the same page again. The fence of the leader and the number of the page let each page count once
// (docs/adr/0055-operations-plan-act-count.md).
package operations

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

const (
	groupPage  = 200 // groups that a step compares with the filter
	letterPage = 50  // dead letters; each may have 256 KiB
	// maxUnsettled is how many groups of a partition may wait for the watcher, which moves their jobs,
	// when an operation gives it more of them.
	maxUnsettled = 100
	settlePause  = 50 * time.Millisecond
	// burst is how many groups are changed at once: their jobs come before those of others that come a
	// moment later.
	burst = 10
	// rest is how many times as long as its work took an operation does nothing then: it uses a part of
	// Redis's time, however many groups it changes.
	rest = 3
)

// Rest returns how long an operation does nothing after work that began at a time.
func Rest(began time.Time) time.Duration { return rest * time.Since(began) }

// Runner carries out the operations of an installation, one step at a time. It is not safe for
// concurrent use.
type Runner struct {
	conn  *redisx.Conn
	space keyspace.Space
	log   *slog.Logger
	acts  *activity.Log
	last  string // the operation of the last step: the others come first
}

// New returns a runner, which records the ends of operations in the activity log.
func New(conn *redisx.Conn, space keyspace.Space, log *slog.Logger, acts *activity.Log) *Runner {
	return &Runner{conn: conn, space: space, log: log, acts: acts}
}

// Lead returns the fencing number by which this process leads partition 0 at present, 0 if it does
// not.
type Lead func() int64

// Step does one step of one operation. It returns whether there was one to do. Errors: those of Redis,
// and ledger.ErrFenced if this process no longer leads.
func (r *Runner) Step(ctx context.Context, lead Lead) (worked bool, err error) {
	ids, err := ledger.OpenOperations(ctx, r.conn.Cmd, r.space)
	if err != nil || len(ids) == 0 {
		return false, err
	}
	at := slices.Index(ids, r.last) + 1
	var failed error
	for _, id := range slices.Concat(ids[at:], ids[:at]) {
		worked, err := r.stepOf(ctx, lead, id)
		if errors.Is(err, ledger.ErrStale) { // somebody paused or cancelled it
			worked, err = true, nil
		}
		if err != nil && (call.IsUnavailable(err) || errors.Is(err, ledger.ErrFenced) || ctx.Err() != nil) {
			return false, err
		}
		if worked && err == nil {
			r.last = id
			return true, nil
		}
		failed = cmp.Or(failed, err) // such as a full memory: others may only delete
	}
	return false, failed
}

func (r *Runner) stepOf(ctx context.Context, lead Lead, id string) (worked bool, err error) {
	found, err := ledger.ReadOperations(ctx, r.conn.Cmd, r.space, id)
	if err != nil {
		return false, err
	}
	if len(found) == 0 {
		found = []ledger.Operation{{Err: errors.New("it has no data"), Operation: api.Operation{ID: id}}}
	}
	o := &found[0]
	switch {
	case o.Err == nil && o.Page == nil && o.State == api.OperationPaused:
		return false, nil
	case o.Err == nil && o.Page == nil && o.State == api.OperationRunning:
		return true, r.plan(ctx, lead, o)
	case o.Err == nil && o.Page != nil && o.Page.Partition >= 0 && o.Page.Partition < r.space.Partitions() && !o.State.Ended():
		return r.act(ctx, lead, o)
	}
	if o.Err == nil && o.State.Ended() { // since it was listed; or the list is wrong
		return false, ledger.FailOperation(ctx, r.conn.Cmd, r.space, id, "")
	}
	err = cmp.Or(o.Err, errors.New("its state and its page disagree"))
	r.log.Error("an operation can't be read and was set aside", "operation", id, "error", err)
	return true, ledger.FailOperation(ctx, r.conn.Cmd, r.space, id, err.Error())
}

// place is where an operation continues: in which of its partitions, and behind which group or dead
// letter there.
type place struct {
	at     int
	behind string // "": at the beginning
}

func parsePlace(cursor string) (p place, ok bool) {
	if cursor == "" {
		return p, true
	}
	at, behind, ok := strings.Cut(cursor, "|")
	n, err := strconv.Atoi(at)
	return place{n, behind}, ok && err == nil && n >= 0
}

func (p place) String() string { return strconv.Itoa(p.at) + "|" + p.behind }

// plan stores the next page of an operation.
func (r *Runner) plan(ctx context.Context, lead Lead, o *ledger.Operation) error {
	tenant := cmp.Or(o.Tenant, o.Filter.Tenant)
	parts := ledger.PartitionsOf(r.space, tenant)
	from, ok := parsePlace(o.Cursor)
	if !ok || from.at >= len(parts) {
		return ledger.FailOperation(ctx, r.conn.Cmd, r.space, o.ID, "its cursor can't be read")
	}
	s := scan{r.conn, parts[from.at], tenant, o, &ledger.Page{Partition: parts[from.at].Index(), Skips: ledger.Skips{}}}
	read := s.groups
	if api.OnDeadLetters(o.Do) {
		read = s.letters
	}
	behind, examined, more, err := read(ctx, from.behind)
	if err != nil {
		return err
	}
	to, page := place{from.at, behind}, s.page
	if !more {
		to = place{at: from.at + 1}
	}
	if page.Sum() == 0 {
		page = nil
	}
	last := to.at == len(parts)
	store := func(ctx context.Context) error {
		return ledger.PlanOperation(ctx, r.conn.Cmd, r.space, lead(), o, page, to.String(), examined, last)
	}
	if page == nil && last {
		return r.end(ctx, o, api.OperationCompleted, 0, nil, store)
	}
	return store(ctx)
}

// end records in the activity log that an operation ends, and then ends it by do.
func (r *Runner) end(
	ctx context.Context, o *ledger.Operation, state api.OperationState, changed int64, skips ledger.Skips,
	do func(context.Context) error,
) error {
	after := api.Operation{Do: o.Do, State: state, DryRun: o.DryRun, Changed: o.Changed + changed, Skipped: o.Skipped + skips.Sum()}
	ctx = activity.WithActor(ctx, api.Activity{Actor: o.CreatedBy, Tenant: o.Tenant})
	return r.acts.Do(ctx, api.Activity{Action: "operation.end", Object: o.ID, After: activity.JSON(map[string]any{
		"do": after.Do, "state": state, "dry_run": after.DryRun, "matched": after.Changed + after.Skipped,
		"changed": after.Changed, "skipped": after.Skipped,
	})}, do)
}

// scan reads candidates of one partition, and puts those that match on a page.
type scan struct {
	conn   *redisx.Conn
	p      keyspace.Partition
	tenant string // "": all
	o      *ledger.Operation
	page   *ledger.Page
}

// groups reads groups that are behind this one, the newest first: new ones do not move the others.
func (s scan) groups(ctx context.Context, behind string) (last string, n int, more bool, err error) {
	f := &s.o.Filter
	read := ledger.GroupRange{Tenant: s.tenant, Before: ledger.ListedGroup{At: float64(s.end())}}
	if f.Since != nil {
		read.Since = *f.Since
	}
	if ms, id, ok := strings.Cut(behind, "."); ok {
		at, _ := strconv.ParseInt(ms, 10, 64)
		read.Before = ledger.ListedGroup{At: float64(at), ID: id}
	}
	if s.tenant != "" && len(f.Tags) > 0 {
		if read.Tag, err = ledger.RarestTag(ctx, s.conn.Cmd, s.p, s.tenant, f.Tags); err != nil {
			return "", 0, false, err
		}
	}
	listed, err := ledger.ListGroups(ctx, s.conn.Cmd, s.p, read, groupPage)
	if err != nil || len(listed) == 0 {
		return "", 0, false, err
	}
	var ids []string
	for _, g := range listed {
		if strings.HasPrefix(g.ID, f.Prefix) {
			ids = append(ids, g.ID)
		}
	}
	q := messages.ListQuery{Status: f.Status, Type: f.Type, Paused: f.Paused, FailedJobs: f.FailedJobs, Since: read.Since, Tags: f.Tags}
	facts, err := s.facts(ctx, ids)
	if err != nil {
		return "", 0, false, err
	}
	withCode := make([]bool, len(ids))
	if f.Code != "" {
		if withCode, err = ledger.HaveFailedWith(ctx, s.conn.Cmd, s.p, ids, f.Code); err != nil {
			return "", 0, false, err
		}
	}
	for i, id := range ids {
		g := facts[i]
		switch {
		case g == nil:
			s.page.Skips.Add(api.SkipUnreadable, id, 1)
		case g.Status == "" || s.tenant != "" && g.Tenant != s.tenant || f.Code != "" && !withCode[i] || !groups.Selects(&q, g):
		default:
			if reason := skipReason(s.o.Do, g); reason != "" {
				s.page.Skips.Add(reason, id, 1)
			} else {
				s.page.Items = append(s.page.Items, ledger.Item{ID: id})
			}
		}
	}
	end := listed[len(listed)-1]
	return strconv.FormatFloat(end.At, 'f', 0, 64) + "." + end.ID, len(listed), len(listed) == groupPage, nil
}

// end returns the time (ms) from which on groups and dead letters are too new.
func (s scan) end() int64 {
	end := s.o.CreatedAt.UnixMilli() + 1
	if s.o.Filter.Until != nil {
		end = min(end, s.o.Filter.Until.UnixMilli())
	}
	return end
}

// facts reads the facts of groups, nil of one that is damaged.
func (s scan) facts(ctx context.Context, ids []string) ([]*ledger.GroupFacts, error) {
	all := make([]*ledger.GroupFacts, len(ids))
	facts, err := ledger.ReadGroupFacts(ctx, s.conn.Cmd, s.p, ids)
	if err == nil {
		for i := range facts {
			all[i] = &facts[i]
		}
		return all, nil
	}
	for i := 0; !call.IsUnavailable(err) && ctx.Err() == nil; i++ {
		if i == len(ids) {
			return all, nil
		}
		var one []ledger.GroupFacts
		if one, err = ledger.ReadGroupFacts(ctx, s.conn.Cmd, s.p, ids[i:i+1]); err == nil {
			all[i] = &one[0]
		}
	}
	return nil, cmp.Or(err, ctx.Err())
}

// skipReason returns why a group that matches is not changed, "" if it is.
func skipReason(do string, g *ledger.GroupFacts) string {
	switch {
	case do == api.OpCancel && g.Status == api.StatusCancelled:
		return api.SkipAlready
	case do == api.OpCancel || do == api.OpPause || do == api.OpResume:
		if g.Status.Ended() {
			return api.SkipEnded
		}
		if do != api.OpCancel && g.Paused == (do == api.OpPause) {
			return api.SkipAlready
		}
		return ""
	case g.Status == api.StatusCancelled:
		return api.SkipCancelled
	case !g.Status.Ended():
		return api.SkipNotEnded
	case !g.FailedJobs:
		return api.SkipNoFailedJobs
	}
	return ""
}

// letters reads dead letters that are behind this one, the newest first.
func (s scan) letters(ctx context.Context, behind string) (last string, n int, more bool, err error) {
	f, oldest := &s.o.Filter, ""
	if f.Since != nil {
		oldest = strconv.FormatInt(f.Since.UnixMilli(), 10)
	}
	before := cmp.Or(behind, strconv.FormatInt(s.end(), 10))
	letters, err := ledger.DeadLetters(ctx, s.conn.Cmd, s.p, before, oldest, letterPage)
	if err != nil || len(letters) == 0 {
		return "", 0, false, err
	}
	last, more = letters[len(letters)-1].EntryID, len(letters) == letterPage
	if s.o.Tenant != "" { // others' letters are not even counted
		letters = slices.DeleteFunc(letters, func(d api.DeadLetter) bool { return d.Tenant != s.o.Tenant })
	}
	n = len(letters)
	q := messages.DeadLetterQuery{Tenant: s.tenant, Group: f.Group, Type: f.Type, Code: f.Code}
	letters = slices.DeleteFunc(letters, func(d api.DeadLetter) bool { return !groups.Matches(q, d) })
	if s.o.Do == api.OpDeleteDeadLetters {
		for _, d := range letters {
			s.page.Items = append(s.page.Items, ledger.Item{ID: d.EntryID})
		}
		return last, n, more, nil
	}
	jobs := map[string][]int64{}
	var ids []string
	for _, d := range letters {
		if jobs[d.Group] == nil {
			ids = append(ids, d.Group)
		}
		jobs[d.Group] = append(jobs[d.Group], d.Ordinal)
	}
	facts, err := s.facts(ctx, ids)
	if err != nil {
		return "", 0, false, err
	}
	for i, id := range ids {
		reason, g := "", facts[i]
		switch {
		case !api.ValidID(id) || g == nil:
			reason = api.SkipUnreadable
		case g.Status == "" || s.tenant != "" && g.Tenant != s.tenant:
			reason = api.SkipGone
		case g.Status.Ended() || !ledger.OpenedBy(s.o.ID, g):
			reason = skipReason(s.o.Do, g)
		}
		if reason == "" {
			s.page.Items = append(s.page.Items, ledger.Item{ID: id, Jobs: jobs[id]})
			continue
		}
		for _, ordinal := range jobs[id] {
			s.page.Skips.Add(reason, fmt.Sprintf("%s.%d", id, ordinal), 1)
		}
	}
	return last, n, more, nil
}

// act does what the page of an operation says, and counts it, unless that has to wait.
func (r *Runner) act(ctx context.Context, lead Lead, o *ledger.Operation) (worked bool, err error) {
	p := r.space.Partition(o.Page.Partition)
	changed, skips := int64(0), o.Page.Skips
	if skips == nil {
		skips = ledger.Skips{}
	}
	if !o.DryRun && o.Do == api.OpDeleteDeadLetters && len(o.Page.Items) > 0 {
		if err := r.deleteLetters(ctx, lead, p, o.Page.Items); err != nil {
			return false, err
		}
	}
	began, settling := time.Now(), true
	for i, item := range o.Page.Items {
		err := error(nil)
		if i%burst == 0 && !o.DryRun && o.Do != api.OpDeleteDeadLetters {
			if err := redisx.Sleep(ctx, Rest(began)); err != nil {
				return false, err
			}
			if settling { // if not, the watcher can't move groups on, or not soon: one wait a page is enough
				if settling, err = r.awaitSettled(ctx, p); err != nil {
					return false, err
				}
			}
			began = time.Now()
		}
		if !o.DryRun && o.Do != api.OpDeleteDeadLetters {
			if lead() == 0 {
				return false, ledger.ErrFenced
			}
			err = r.do(ctx, o, p, item)
		}
		reason := ""
		switch {
		case err == nil:
			changed += item.N()
			continue
		case errors.Is(err, ledger.ErrMoving) && o.Do == api.OpRetryDeadLetters:
			return true, redisx.Sleep(ctx, settlePause) // those of an earlier page: soon
		case errors.Is(err, api.ErrNotFound):
			reason = api.SkipGone
		case errors.Is(err, api.ErrConflict):
			reason = api.SkipChanged
		case call.IsUnavailable(err) || call.IsOOM(err) || ctx.Err() != nil:
			return false, err
		default:
			r.log.Warn("an operation has skipped a group", "operation", o.ID, "group", item.ID, "error", err)
			reason = api.SkipUnreadable
		}
		skips.Add(reason, item.ID, item.N())
	}
	count := func(ctx context.Context) error {
		return ledger.CountOperation(ctx, r.conn.Cmd, r.space, lead(), o, changed, skips)
	}
	switch {
	case o.State == api.OperationCancelling:
		err = r.end(ctx, o, api.OperationCancelled, changed, skips, count)
	case o.Last:
		err = r.end(ctx, o, api.OperationCompleted, changed, skips, count)
	default:
		err = count(ctx)
	}
	return true, err
}

// awaitSettled waits until the watcher of a partition has few groups to move on, for some seconds: then
// it returns false. Some groups may stay for ever: damaged ones, and cancelled ones whose reducer no
// watcher has.
func (r *Runner) awaitSettled(ctx context.Context, p keyspace.Partition) (ok bool, err error) {
	for range 50 {
		if n, err := ledger.Unsettled(ctx, r.conn.Cmd, p); err != nil || n <= maxUnsettled {
			return err == nil, err
		}
		if err := redisx.Sleep(ctx, settlePause); err != nil {
			return false, err
		}
	}
	return false, nil
}

func (r *Runner) deleteLetters(ctx context.Context, lead Lead, p keyspace.Partition, items []ledger.Item) error {
	if lead() == 0 {
		return ledger.ErrFenced
	}
	ids := make([]string, len(items))
	for i, item := range items {
		ids[i] = item.ID
	}
	return ledger.DeleteDeadLetters(ctx, r.conn.Cmd, p, ids...)
}

// do changes one group. Its repetition changes nothing.
func (r *Runner) do(ctx context.Context, o *ledger.Operation, p keyspace.Partition, item ledger.Item) error {
	c := r.conn.Cmd
	switch o.Do {
	case api.OpCancel:
		return ledger.Cancel(ctx, c, p, item.ID)
	case api.OpPause:
		return ledger.Pause(ctx, c, p, ledger.PauseGroup, item.ID)
	case api.OpResume:
		return ledger.Resume(ctx, c, p, ledger.PauseGroup, item.ID)
	case api.OpRetry:
		choice := ledger.RetryChoice{}
		if o.Filter.Code != "" {
			choice.Codes = []string{o.Filter.Code}
		}
		_, err := ledger.Reopen(ctx, c, p, item.ID, o.ID+"/"+o.Seq, choice)
		return err
	}
	return ledger.RetryMore(ctx, c, p, item.ID, o.ID, o.Seq, ledger.RetryChoice{Jobs: item.Jobs})
}

// Forget deletes operations whose retention is over.
func (r *Runner) Forget(ctx context.Context) error {
	return ledger.ForgetOperations(ctx, r.conn.Cmd, r.space, time.Now().Add(-api.KeepOperations), api.MaxEndedOperations)
}
