package position

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// Round does one round of the work for all views: snapshots once a second, loads, and one read of
// the stream moves, which waits for entries until the next snapshot is due. The caller calls it in
// a loop. After a read of few entries (fewer than manyMoves), Round first waits until readInterval
// has passed; after a full or an empty read it reads at once. Without events, it waits about a
// second for one. It returns errors of the source; the caller should then wait before the next
// call.
func (v *Views) Round(ctx context.Context) error {
	if err := v.pause(ctx); err != nil {
		return err
	}
	v.entries = 0
	events := v.followed()
	if len(events) == 0 {
		return nil
	}
	if _, set := v.progress.position(); !set || time.Since(v.snapshotAt) >= snapshotInterval {
		at := time.Now()
		if err := v.takeSnapshots(ctx, events); err != nil {
			return err
		}
		v.snapshotAt = at
	}
	if err := v.loadDue(ctx, events); err != nil {
		// After a failed load, still read moves for the other events. If Redis is away, this read
		// fails too.
		return errors.Join(err, v.readMoves(ctx, events, -1))
	}
	return v.readMoves(ctx, events, max(time.Until(v.snapshotAt.Add(snapshotInterval)), time.Millisecond))
}

// snapshots are the answer of the source, by event.
type snapshots struct {
	events map[string]waitingroom.Snapshot
	last   stream.ID // of moves
	at     time.Time
}

// takeSnapshots reads snapshots of all events and compares their views with them.
func (v *Views) takeSnapshots(ctx context.Context, events []*Event) error {
	for chunk := range slices.Chunk(events, waitingroom.MostUsers) {
		requested, set := v.progress.position()
		loads := make([]int, len(chunk))
		for i, e := range chunk {
			loads[i] = e.loadCount()
		}
		found, err := v.take(ctx, chunk)
		if err != nil {
			return err
		}
		if v.progress.follow(found.last, requested, set) {
			for _, e := range events {
				e.lose()
			}
		}
		for i, e := range chunk {
			if s, ok := found.events[e.name]; ok {
				e.noteSnapshot(s, found.at, found.last, loads[i])
			} else {
				e.noteUnknown(loads[i])
			}
		}
	}
	return nil
}

// take reads one snapshot of at most waitingroom.MostUsers events.
func (v *Views) take(ctx context.Context, events []*Event) (snapshots, error) {
	names := make([]string, len(events))
	for i, e := range events {
		names[i] = e.name
	}
	answer, err := v.source.Snapshot(ctx, names...)
	if err != nil {
		return snapshots{}, fmt.Errorf("snapshot of %d events: %w", len(names), err)
	}
	last, err := stream.ParseID(answer.LastMove)
	if err != nil {
		return snapshots{}, fmt.Errorf("snapshot of %d events: last id of moves: %w", len(names), err)
	}
	v.progress.setClock(answer.At)
	found := make(map[string]waitingroom.Snapshot, len(answer.Events))
	for _, s := range answer.Events {
		found[s.Event] = s
	}
	return snapshots{found, last, answer.At}, nil
}

// loadDue loads the views of events that need it, at most as many as one snapshot holds. Between
// the pages of a load it reads moves, so that the views of other events stay current.
func (v *Views) loadDue(ctx context.Context, events []*Event) error {
	var due []*Event
	for _, e := range events {
		if len(due) < waitingroom.MostUsers && e.needsLoad() {
			due = append(due, e)
		}
	}
	if len(due) == 0 {
		return nil
	}
	return v.load(ctx, due, math.MaxInt64, func() error {
		if time.Since(v.readAt) < readInterval {
			return nil
		}
		return v.readMoves(ctx, events, -1)
	})
}

// load loads the views of these events, at most waitingroom.MostUsers, except those that have a
// good view by now or that another goroutine is loading. It does not load a queue longer than
// longest: Round does that later. between, if not nil, is called after each page.
func (v *Views) load(ctx context.Context, events []*Event, longest int64, between func() error) error {
	var begun []*Event
	for _, e := range events {
		if e.beginLoad() {
			begun = append(begun, e)
		}
	}
	if len(begun) == 0 {
		return nil
	}
	found, err := v.take(ctx, begun)
	if err != nil {
		for _, e := range begun {
			e.endLoad(unavailable)
		}
		return err
	}
	v.progress.start(found.last)
	users := func(e *Event) int64 { s := found.events[e.name]; return s.Waiting + s.Away }
	slices.SortFunc(begun, func(a, b *Event) int { return cmp.Compare(users(a), users(b)) })
	for i, e := range begun {
		s, ok := found.events[e.name]
		switch {
		case !ok:
			e.endLoad(unknown)
			continue
		case users(e) > longest:
			e.endLoad(tooLong)
			continue
		}
		if err := v.loadOne(ctx, e, s, found, between); err != nil {
			for _, e := range begun[i+1:] {
				e.endLoad(abandoned)
			}
			return err
		}
	}
	return nil
}

// loadOne loads one event as of a snapshot.
func (v *Views) loadOne(
	ctx context.Context, e *Event, s waitingroom.Snapshot, found snapshots, between func() error,
) error {
	var betweenErr error
	view, err := Load(s.Change, s.Tail, func(yield func([]int64)) error {
		return v.source.Numbers(ctx, e.name, func(numbers []int64) {
			yield(numbers)
			if between != nil && betweenErr == nil {
				betweenErr = between()
			}
		})
	})
	switch {
	case err == nil:
		e.install(view, s, found.at, found.last)
		return betweenErr
	case ctx.Err() != nil:
		e.endLoad(abandoned)
		return ctx.Err()
	default:
		e.endLoad(failed)
		return errors.Join(fmt.Errorf("load the queue of event %s: %w", e.name, err), betweenErr)
	}
}

// readMoves reads the stream moves once and hands the entries to the views of events, all followed
// events.
func (v *Views) readMoves(ctx context.Context, events []*Event, block time.Duration) error {
	read, _ := v.progress.position()
	moves, err := v.source.Moves(ctx, read.String(), block)
	v.readAt = time.Now()
	if err != nil {
		return fmt.Errorf("read moves: %w", err)
	}
	v.entries = len(moves)
	for _, m := range moves {
		id, err := stream.ParseID(m.ID)
		if err != nil {
			return fmt.Errorf("read moves: %w", err)
		}
		if id.After(read) {
			read = id
		}
		if e := v.lookUp(m.Event); e != nil {
			e.read(entry{id, m})
		}
	}
	v.progress.advance(read, len(moves) == 0)
	for _, e := range events {
		e.checkAhead(read, len(moves) == 0)
	}
	return nil
}
