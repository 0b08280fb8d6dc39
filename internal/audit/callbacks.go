package audit

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// checkCallbacks checks the queues of callbacks, the dead callbacks, and those that [Run] has found in
// neither.
func (s *scope) checkCallbacks(ctx context.Context) error {
	queues := map[string]bool{}
	err := s.ScanMembers(ctx, s.p.Callbacks(), func(queue string) error { queues[queue] = true; return nil })
	if err == nil {
		err = s.ScanHash(ctx, s.p.CallbackBytes(), func(queue, _ string) error { queues[queue] = true; return nil })
	}
	if err != nil {
		return err
	}
	for _, queue := range slices.Sorted(maps.Keys(queues)) {
		if err := s.checkQueue(ctx, queue); err != nil {
			return err
		}
	}
	if err := s.ReadByScore(ctx, s.p.DeadCallbacks(), func(ids []string) error { return s.checkDead(ctx, ids) }); err != nil {
		return err
	}
	var at []placed
	for _, id := range s.opts.orphans[s.p.Index()] {
		at = append(at, placed{p: s.p, id: id})
	}
	orphans, err := orphanCallbacks(ctx, s.Reader, at)
	for _, o := range orphans {
		s.reportCallback(o.id, Repair{Kind: Redeliver}, "it exists, but is neither in a queue nor among the dead callbacks")
	}
	return err
}

func (s *scope) reportCallback(id string, r Repair, format string, args ...any) {
	if r.Kind == Redeliver {
		r.Callback = id
	}
	s.found.add(newFinding(LawCallbacks, "", "", "callback "+id+" "+format, "callback "+id+": "+format, args...).repairedBy(r))
}

// queueReading is what one instant says of a queue.
type queueReading struct {
	due, ages, bytes int64
	next             string  // the first one that is due
	first, noted     float64 // when that is, and when the set of queues says that it is: later, if its turn is later
	misplaced        bool    // the set of queues is wrong
}

func (s *scope) readQueue(ctx context.Context, queue string) (r queueReading, err error) {
	var due, ages *redis.IntCmd
	var first *redis.ZSliceCmd
	var noted *redis.FloatCmd
	var bytes *redis.StringCmd
	var clock *redis.TimeCmd
	err = s.Transaction(ctx, func(p redis.Pipeliner) {
		due, ages = p.ZCard(ctx, s.p.CallbackQueue(queue)), p.ZCard(ctx, s.p.CallbackAges(queue))
		first, noted = p.ZRangeWithScores(ctx, s.p.CallbackQueue(queue), 0, 0), p.ZScore(ctx, s.p.Callbacks(), queue)
		bytes, clock = p.HGet(ctx, s.p.CallbackBytes(), queue), p.Time(ctx)
	})
	if err != nil {
		return r, err
	}
	r = queueReading{due: due.Val(), ages: ages.Val(), noted: noted.Val(), bytes: read.Int(bytes.Val())}
	if len(first.Val()) > 0 {
		r.first, r.next = first.Val()[0].Score, first.Val()[0].Member.(string)
	}
	r.misplaced = (noted.Err() == nil) != (r.due > 0) || r.noted < r.first || r.noted > max(r.first, float64(clock.Val().UnixMilli()))
	return r, nil
}

// checkQueue checks the callbacks of a queue, and what is noted of the queue if it did not change
// meanwhile.
func (s *scope) checkQueue(ctx context.Context, queue string) error {
	before, err := s.readQueue(ctx, queue)
	if err != nil {
		return err
	}
	var seen, bytes int64
	check := func(other string) func([]string) error {
		return func(ids []string) error {
			n, size, err := s.checkQueued(ctx, queue, other, ids)
			seen, bytes = seen+n, bytes+size
			return err
		}
	}
	if err := s.ReadByScore(ctx, s.p.CallbackQueue(queue), check(s.p.CallbackAges(queue))); err != nil {
		return err
	}
	inQueue, size := seen, bytes
	if before.ages != before.due {
		if err := s.ReadByScore(ctx, s.p.CallbackAges(queue), check(s.p.CallbackQueue(queue))); err != nil {
			return err
		}
	}
	after, err := s.readQueue(ctx, queue)
	if err != nil || before != after || inQueue != after.due {
		return err
	}
	if after.misplaced {
		s.found.add(newFinding(LawCallbacks, "", "", "queue "+queue,
			"queue %s has %d callbacks, the first is due at %.0f; the set of queues says %.0f", queue, after.due, after.first, after.noted).
			repairedBy(Repair{Kind: Redeliver, Callback: after.next}))
	}
	if after.bytes != size {
		s.found.add(newFinding(LawCallbacks, "", "", "bytes "+queue,
			"the bodies of queue %s have %d bytes, but %d are counted", queue, size, after.bytes).repairedBy(Repair{
			Kind: RepairCounter, Counter: ledger.Counter{Callbacks: true, Of: "callbacks:bytes", Name: queue, Have: after.bytes, Want: size},
		}))
	}
	return nil
}

// checkQueued checks callbacks of one of the two sets of a queue, and returns how many there are, and the
// bytes of their bodies. other is the other set.
func (s *scope) checkQueued(ctx context.Context, queue, other string, ids []string) (n, bytes int64, err error) {
	type reply struct {
		hash   *redis.SliceCmd
		inBoth *redis.FloatCmd
	}
	replies, err := read.Ask(ctx, s.Pipeline, read.PageSize/2, ids, func(p redis.Pipeliner, id string) reply {
		return reply{p.HMGet(ctx, s.p.Callback(id), "state", "queue", "size"), p.ZScore(ctx, other, id)}
	})
	for i, r := range replies {
		v := r.hash.Val()
		bytes += read.Int(v[2])
		switch state := read.Text(v[0]); {
		case state == "":
			s.reportCallback(ids[i], Repair{}, "it is in queue %s, but does not exist", queue)
		case read.Text(v[1]) != queue:
			s.reportCallback(ids[i], Repair{}, "it is in queue %s, but belongs in %s", queue, read.Text(v[1]))
		case state != api.CallbackPending:
			s.reportCallback(ids[i], Repair{Kind: Redeliver}, "it is %s, but in queue %s", state, queue)
		case errors.Is(r.inBoth.Err(), redis.Nil):
			s.reportCallback(ids[i], Repair{Kind: Redeliver}, "it is in only one of the two sets of queue %s", queue)
		}
	}
	return int64(len(ids)), bytes, err
}

// checkDead checks dead callbacks.
func (s *scope) checkDead(ctx context.Context, ids []string) error {
	replies, err := read.Ask(ctx, s.Pipeline, read.PageSize, ids, func(p redis.Pipeliner, id string) *redis.SliceCmd {
		return p.HMGet(ctx, s.p.Callback(id), "state", "size")
	})
	for i, r := range replies {
		switch state := read.Text(r.Val()[0]); {
		case state == "":
			s.reportCallback(ids[i], Repair{}, "it is among the dead callbacks, but does not exist")
		case state != api.CallbackDead:
			s.reportCallback(ids[i], Repair{Kind: Redeliver}, "it is %s, but among the dead callbacks", state)
		case read.Int(r.Val()[1]) != 0:
			s.reportCallback(ids[i], Repair{}, "it is dead, but has a body")
		}
	}
	return err
}

// orphanCallbacks returns those of the callbacks that exist, and are not where their state says.
func orphanCallbacks(ctx context.Context, r read.Reader, all []placed) (orphans []placed, err error) {
	hashes, err := read.Ask(ctx, r.Pipeline, read.PageSize, all, func(p redis.Pipeliner, of placed) *redis.SliceCmd {
		return p.HMGet(ctx, of.p.Callback(of.id), "state", "queue")
	})
	if err != nil {
		return nil, err
	}
	var known []placed
	for i, hash := range hashes {
		switch v := hash.Val(); read.Text(v[0]) {
		case "":
			continue
		case api.CallbackDead:
			all[i].set = all[i].p.DeadCallbacks()
		default:
			all[i].set = all[i].p.CallbackQueue(read.Text(v[1]))
		}
		known = append(known, all[i])
	}
	scores, err := read.Ask(ctx, r.Pipeline, read.PageSize, known, func(p redis.Pipeliner, of placed) *redis.FloatCmd {
		return p.ZScore(ctx, of.set, of.id)
	})
	for i, score := range scores {
		if errors.Is(score.Err(), redis.Nil) {
			orphans = append(orphans, known[i])
		}
	}
	return orphans, err
}
