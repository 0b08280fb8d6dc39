package watcher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/callbacks"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// advancer moves the groups of one partition through their states: dirty groups at once, and all
// open groups from time to time.
type advancer struct {
	*partition
	// cursor is where the pass over all open groups continues (a ZSCAN cursor); 0: a new pass
	// begins.
	cursor       uint64
	reconciledAt time.Time // when the last page of open groups was advanced
	settleUntil  time.Time // see settleTime
}

// groupBatch is about how many groups at most one piece of work advances or expires in a step.
const groupBatch = 100

// forEver is longer than any reduction takes.
const forEver = 24 * time.Hour

// advanceDirty advances up to groupBatch dirty groups. They are chosen at random, so that groups
// that stay dirty don't hold up the others. It returns whether there were any.
func (a *advancer) advanceDirty(ctx context.Context) (bool, error) {
	ids, err := a.Conn.Cmd.SRandMemberN(ctx, a.Dirty(), groupBatch).Result()
	if err != nil {
		return false, fmt.Errorf("read dirty groups: %w", err)
	}
	ids = slices.DeleteFunc(ids, a.isHeld)
	return len(ids) > 0, a.advanceAll(ctx, ids)
}

// settleTime is how long one call of advanceAll completes cancellations and reopenings. What is left
// then is done in the next steps, so that a large group does not delay the others.
const settleTime = 50 * time.Millisecond

// advanceAll advances the groups ids. Then it completes the cancellations and reopenings among them
// that are unfinished, for settleTime in all, and advances these groups. A group that needs more
// memory than Redis has stays dirty, and the others advance all the same; the returned error then
// says that memory was missing.
func (a *advancer) advanceAll(ctx context.Context, ids []string) error {
	var unsettled []string
	var oom error
	for chunk := range slices.Chunk(ids, ledger.MaxAdvance) {
		replies, err := ledger.Advance(ctx, a.Conn.Cmd, a.Partition, chunk...)
		if err != nil && !endsStep(ctx, err) && !call.IsOOM(err) { // one group must not hold up the others
			replies = make([]ledger.AdvanceReply, len(chunk))
			for i, id := range chunk {
				if one, err := ledger.Advance(ctx, a.Conn.Cmd, a.Partition, id); err != nil {
					replies[i].Err = err
				} else {
					replies[i] = one[0]
				}
			}
		} else if err != nil {
			return err
		}
		for i, r := range replies {
			if r.Unsettled {
				unsettled = append(unsettled, chunk[i])
				continue
			}
			if err := a.afterAdvance(ctx, chunk[i], r); call.IsOOM(err) {
				oom = err
			} else if err != nil {
				return err
			}
		}
	}
	a.settleUntil = time.Now().Add(settleTime)
	for _, id := range unsettled {
		done, err := a.settle(ctx, id)
		if err == nil && done {
			err = a.advanceOne(ctx, id)
		}
		if call.IsOOM(err) {
			oom = err
		} else if err != nil {
			return err
		}
	}
	return oom
}

// advanceOne advances a group that is settled.
func (a *advancer) advanceOne(ctx context.Context, id string) error {
	replies, err := ledger.Advance(ctx, a.Conn.Cmd, a.Partition, id)
	if err != nil {
		return a.skipGroup(ctx, id, err)
	}
	return a.afterAdvance(ctx, id, replies[0])
}

// afterAdvance reduces the failures of a group that needs it, and advances it again. An error that
// concerns this group alone is logged and not returned, so that the other groups advance.
func (a *advancer) afterAdvance(ctx context.Context, id string, r ledger.AdvanceReply) error {
	err := r.Err
	if err == nil && r.Failures > 0 {
		var later bool
		if later, err = a.reduceFailuresOf(ctx, id, r); err == nil && !later {
			return a.advanceOne(ctx, id)
		}
	}
	if err != nil {
		return a.skipGroup(ctx, id, err)
	}
	return nil
}

// failureReduction is a group whose failed jobs are to be reduced.
type failureReduction struct {
	id    string
	reply ledger.AdvanceReply
}

const (
	// quickFailures is how many failed jobs are reduced at once, between the steps of other groups.
	quickFailures = 500
	// maxFailureReductions bounds the groups that wait. Any further one waits for the next pass over
	// all open groups.
	maxFailureReductions = 1000
)

// reduceFailuresOf reduces the failed jobs of a group if they are few. Otherwise it leaves that to
// the loop reduceFailures, and later is true: the group becomes dirty again afterwards.
func (a *advancer) reduceFailuresOf(ctx context.Context, id string, r ledger.AdvanceReply) (later bool, err error) {
	if err := a.store.CanReduce(ctx, a.Partition, id); err != nil {
		return false, err
	}
	if r.Failures <= quickFailures {
		return false, a.store.ReduceFailures(ctx, a.Partition, id, r)
	}
	if a.isHeld(id) {
		return true, nil
	}
	a.held.Store(id, time.Now().Add(forEver))
	select {
	case a.failures <- failureReduction{id, r}:
	default:
		a.leaveAlone(id)
	}
	return true, nil
}

// reduceFailures does one reduction of many failed jobs. If it fails, the next pass over all open
// groups asks for it again. It needs no leadership: Redis refuses what is out of date.
func (p *partition) reduceFailures(ctx context.Context) (time.Duration, error) {
	select {
	case f := <-p.failures:
		if err := p.store.ReduceFailures(ctx, p.Partition, f.id, f.reply); err != nil && ctx.Err() == nil {
			p.log.Warn("the failures of a group can't be reduced, trying again later", "group", f.id, "error", err)
			p.leaveAlone(f.id)
			return 0, nil
		}
		p.held.Delete(f.id)
	case <-ctx.Done():
	}
	return 0, nil
}

// settle completes a group's cancellation (all its jobs that have not ended become cancelled, those
// in flight too) or reopening (its failed jobs wait again) in chunks, until settleUntil, and renews
// the leader lease between chunks. If it is not done then, the group stays dirty.
func (a *advancer) settle(ctx context.Context, id string) (done bool, err error) {
	for _, chunk := range []func() (bool, error){
		func() (bool, error) {
			more, steps, err := ledger.Sweep(ctx, a.Conn.Cmd, a.Partition, id)
			for _, s := range steps {
				a.Tel.RecordStep(ctx, a.Group(id), telemetry.JobStep(s))
			}
			return more, err
		},
		func() (bool, error) { return ledger.Requeue(ctx, a.Conn.Cmd, a.Partition, id) },
	} {
		for more := true; more; {
			var err error
			if more, err = chunk(); err != nil {
				return false, a.skipGroup(ctx, id, err)
			}
			if err := a.keepLead(ctx); err != nil {
				return false, err
			}
			if more && time.Now().After(a.settleUntil) {
				return false, a.Conn.Cmd.SAdd(ctx, a.Dirty(), id).Err()
			}
		}
	}
	return true, nil
}

// skipGroup handles an error about one group. An error that concerns the whole partition, or that
// says that Redis has no memory left, is returned. Any other error is logged and the group is taken
// out of the dirty groups, so that it can't keep the watcher busy; the next pass over all open
// groups tries it again.
func (a *advancer) skipGroup(ctx context.Context, id string, err error) error {
	if endsStep(ctx, err) || call.IsOOM(err) {
		return err
	}
	var lacks *ledger.MissingReducerError
	if errors.As(err, &lacks) {
		if err := a.handOver(ctx, id, lacks); err != nil {
			return err
		}
	}
	a.log.Warn("group can't be advanced, trying again later", "group", id, "error", err)
	a.leaveAlone(id)
	return nil
}

// leaveAlone keeps a dirty group from being advanced before the next pass over all open groups. It
// stays dirty, because a cancelled group is on no other list.
func (p *partition) leaveAlone(id string) {
	p.held.Store(id, time.Now().Add(max(p.cfg.Interval, time.Second)))
}

// isHeld reports whether a dirty group is left alone now.
func (p *partition) isHeld(id string) bool {
	until, held := p.held.Load(id)
	if held && !time.Now().Before(until.(time.Time)) {
		p.held.Delete(id)
		return false
	}
	return held
}

// handOver gives up the leadership of the partition for a while if another watcher has the reducers
// of a group, of which this process lacks some. Otherwise it does nothing. It returns ErrFenced after
// it has given up the leadership.
func (p *partition) handOver(ctx context.Context, id string, lacks *ledger.MissingReducerError) error {
	if has, err := presence.HasReducers(ctx, p.Conn, p.Space, "watcher", lacks.Ops); err != nil || !has {
		return err
	}
	p.log.Info("another watcher has the reducer of a group, handing over the partition", "group", id, "reducers", lacks.Missing)
	// The group is dirty again, so that the next leader advances it at once.
	if err := p.Conn.Cmd.SAdd(ctx, p.Dirty(), id).Err(); err != nil {
		return fmt.Errorf("hand over group %s: %w", id, err)
	}
	if _, err := ledger.Lead(ctx, p.Conn.Cmd, p.Partition, p.ID, 0); err != nil {
		return err
	}
	p.noLeadUntil = time.Now().Add(handOverPause)
	return fmt.Errorf("hand over partition %d: %w", p.Index(), ledger.ErrFenced)
}

// reconcile advances a page of the open groups. A pass over all of them begins Interval after the
// end of the last one: it finds groups that could advance and are missing in the set of dirty
// groups. reconcile returns whether more pages of this pass follow.
func (a *advancer) reconcile(ctx context.Context) (bool, error) {
	if a.cursor == 0 && time.Since(a.reconciledAt) <= a.cfg.Interval {
		return false, nil
	}
	if a.cursor == 0 {
		a.held.Range(func(id, _ any) bool { a.isHeld(id.(string)); return true }) // forgets what is over
	}
	page, next, err := a.Conn.Cmd.ZScan(ctx, a.Open(), a.cursor, "", groupBatch).Result()
	if err != nil {
		return false, fmt.Errorf("read open groups: %w", err)
	}
	ids := make([]string, 0, len(page)/2)
	for i := 0; i < len(page); i += 2 {
		ids = append(ids, page[i])
	}
	if err := a.advanceAll(ctx, ids); err != nil {
		return false, err
	}
	a.cursor, a.reconciledAt = next, time.Now()
	return next != 0, nil
}

// eventBatch is how many entries of the outbox are published together. maxEventBatches is how many
// such batches one step publishes before it goes on with other work.
const (
	eventBatch      = 100
	maxEventBatches = 10
)

// outbox publishes the events of one partition that scripts have stored in its outbox.
type outbox struct {
	*partition
	keyless time.Time // when the log last said that this process sends no callbacks
}

// publishAll publishes the events of the outbox, oldest first, and removes them: up to 1,000 in one
// call (see maxEventBatches). It returns whether there were any. If the removal of published events
// fails, they are published again with the same ids.
func (o *outbox) publishAll(ctx context.Context) (worked bool, err error) {
	for range maxEventBatches {
		entries, err := ledger.ReadOutbox(ctx, o.Conn.Cmd, o.Partition, eventBatch)
		if err != nil {
			return false, err
		}
		if len(entries) == 0 {
			break
		}
		if err := o.publishBatch(ctx, entries); err != nil {
			return false, err
		}
		worked = true
	}
	return worked, nil
}

// publishBatch publishes these entries of the outbox in their order and removes them. An entry
// that can't be turned into an event is quarantined and removed. If it can't be quarantined, it
// stays in the outbox; then publishBatch returns an error after it has removed the others.
func (o *outbox) publishBatch(ctx context.Context, entries []ledger.OutboxEntry) error {
	for i := range entries {
		e := &entries[i]
		if e.Err != nil || e.Ended() == nil { // the event of its end shows the aggregates
			continue
		}
		_, err := o.store.WorkPlan(e.Ended().After.Aggregates)
		if lacks, ok := errors.AsType[*ledger.MissingReducerError](err); ok {
			if err := o.handOver(ctx, e.Group, lacks); err != nil {
				return err
			}
		}
	}
	var msgs []*message.Message
	var calls []ledger.NewCallback
	var done, unreadable []string
	var add []func(redis.Pipeliner)
	quarantine := stream.Quarantine{Key: o.Quarantine(), Source: "outbox"}
	for i := range entries {
		e := &entries[i]
		events, told, err := o.eventsOf(e)
		if err == nil {
			msgs, calls, done = append(msgs, events...), append(calls, told...), append(done, e.ID)
			continue
		}
		o.log.Warn("unreadable event of the outbox", "entry", e.ID, "error", err)
		unreadable = append(unreadable, e.ID)
		add = append(add, func(pipe redis.Pipeliner) { quarantine.AddText(ctx, pipe, e.ID, err, e.Text()) })
	}
	if len(msgs) > 0 {
		if err := o.publish(msgs...); err != nil {
			return err
		}
	}
	// Last, because one that was delivered would be added again while the events can't be published,
	// for want of memory.
	if err := o.addCallbacks(ctx, calls); err != nil {
		return err
	}
	_, quarantineErr := o.Conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, add := range add {
			add(pipe)
		}
		return nil
	})
	if quarantineErr != nil {
		quarantineErr = fmt.Errorf("quarantine events of the outbox: %w", quarantineErr)
	} else {
		done = append(done, unreadable...)
	}
	if len(done) > 0 {
		if err := o.Conn.Cmd.XDel(ctx, o.Outbox(), done...).Err(); err != nil {
			return fmt.Errorf("clear outbox: %w", err)
		}
	}
	return quarantineErr
}

// addCallbacks adds the callbacks of events to their queues.
func (o *outbox) addCallbacks(ctx context.Context, calls []ledger.NewCallback) error {
	if len(calls) == 0 {
		return nil
	}
	if o.cfg.Callbacks.Keys == nil && time.Since(o.keyless) > 10*time.Minute {
		o.keyless = time.Now()
		o.log.Warn("callbacks wait for a watcher with the file of BULKACTION_CALLBACK_MASTER_KEY_FILE, which this one does not have")
	}
	died, errs, err := ledger.AddCallbacks(ctx, o.Conn.Cmd, o.Partition, calls)
	for _, err := range errs {
		o.log.Error("a callback can't be stored", "error", err)
	}
	o.callbacks.Crowded(died)
	return err
}

// eventsOf returns the messages for the stream events, made from an outbox entry, and the callbacks of
// those of which somebody is told. Each contains the group as it was when it entered its new status,
// without its aggregate if that can't be read.
func (o *outbox) eventsOf(e *ledger.OutboxEntry) ([]*message.Message, []ledger.NewCallback, error) {
	if e.Err != nil {
		return nil, nil, e.Err
	}
	if e.EndpointErr != nil {
		o.log.Error("the callback endpoint of a tenant can't be read", "group", e.Group, "error", e.EndpointErr)
	}
	msgs := make([]*message.Message, len(e.Moves))
	var calls []ledger.NewCallback
	for i := range e.Moves {
		m := &e.Moves[i]
		view, err := o.store.View(&m.After, m.At)
		if err != nil {
			o.log.Warn("published an event without the group's aggregate", "group", e.Group, "error", err)
		}
		event := api.Event{
			ID: ledger.EventID(e.Group, e.Round, m.Status), Type: api.EventOf(m.Status), At: m.At, Group: &view,
		}
		if msgs[i], err = encode(event, event); err != nil {
			return nil, nil, err
		}
		told, wanted, err := callbacks.Of(e, m, event.ID, &view)
		if err != nil {
			return nil, nil, err
		}
		if wanted {
			calls = append(calls, told)
		}
	}
	return msgs, calls, nil
}

// publish publishes events, in their order.
func (p *partition) publish(events ...*message.Message) error {
	if err := p.events.Publish(p.Space.Events(), events...); err != nil {
		return fmt.Errorf("publish events from %s on: %w", events[0].UUID, err)
	}
	return nil
}

func encode(e api.Event, data any) (*message.Message, error) {
	encoded, err := json.Marshal(data)
	if err != nil {
		return nil, fmt.Errorf("encode event %s: %w", e.ID, err)
	}
	return wm.NewMessage(e.ID, e.Type, encoded), nil
}

// publishViolation publishes a violation and logs it. The event shows the group of the violation,
// unless the group can't be read: that may be what is wrong with it.
func (p *partition) publishViolation(ctx context.Context, id string, v api.Violation) error {
	e := api.AuditEvent{Event: api.Event{ID: id, Type: "audit.violation", At: time.Now().UTC()}, Violation: v}
	if v.Group != "" {
		shown, err := p.store.Group(auth.Trust(ctx), v.Group)
		switch {
		case err == nil:
			e.Group = &shown
		case call.IsUnavailable(err) || ctx.Err() != nil:
			return err
		default: // the group can't be read, which may be the violation: publish without it
		}
	}
	msg, err := encode(e.Event, e)
	if err != nil {
		return err
	}
	if err := p.publish(msg); err != nil {
		return err
	}
	log := p.log
	if v.Group != "" {
		log = log.With("group", v.Group)
	}
	if v.Ordinal != nil {
		log = log.With("ordinal", *v.Ordinal)
	}
	log.Error("the data in redis breaks a law", "law", v.Law, "detail", v.Detail, "event", id)
	return nil
}
