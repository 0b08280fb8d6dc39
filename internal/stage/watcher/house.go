package watcher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/lua"
)

// keepHouse does what is due only now and then.
func (p *partition) keepHouse(ctx context.Context) error {
	for _, chore := range []func(context.Context) error{p.expireGroups, p.expireResults, p.trim, p.forgetEntries, p.buryUnserved} {
		if err := chore(ctx); err != nil {
			if errors.Is(err, lua.ErrFenced) {
				p.fence = 0
				return nil
			}
			return err
		}
	}
	return nil
}

// expireGroups forgets groups that ended long ago.
func (p *partition) expireGroups(ctx context.Context) error {
	keep := p.cfg.Retention.Groups
	if keep <= 0 {
		return nil
	}
	for {
		ids, err := p.endedBefore(ctx, time.Now().Add(-keep), 0)
		if err != nil || len(ids) == 0 {
			return err
		}
		for _, id := range ids {
			if err := lua.Expire(ctx, p.conn.Cmd, p.p, id, p.fence, false); err != nil {
				return err
			}
			if err := p.conn.Cmd.Del(ctx, p.space.OfGroup(id).Owner(id)).Err(); err != nil {
				return fmt.Errorf("forget group %s: %w", id, err)
			}
		}
	}
}

// expireResults drops the result lines of groups that are kept themselves.
func (p *partition) expireResults(ctx context.Context) error {
	keep := p.cfg.Retention.Results
	if keep <= 0 || (p.cfg.Retention.Groups > 0 && keep >= p.cfg.Retention.Groups) {
		return nil
	}
	for offset := int64(0); ; offset += attendBatch {
		ids, err := p.endedBefore(ctx, time.Now().Add(-keep), offset)
		if err != nil || len(ids) == 0 {
			return err
		}
		for _, id := range ids {
			if err := lua.Expire(ctx, p.conn.Cmd, p.p, id, p.fence, true); err != nil {
				return err
			}
		}
	}
}

func (p *partition) endedBefore(ctx context.Context, t time.Time, offset int64) ([]string, error) {
	ids, err := p.conn.Cmd.ZRangeByScore(ctx, p.p.Ended(), &redis.ZRangeBy{
		Min: "-inf", Max: strconv.FormatInt(t.UnixMilli(), 10), Offset: offset, Count: attendBatch,
	}).Result()
	if err != nil {
		return nil, fmt.Errorf("look for old groups: %w", err)
	}
	return ids, nil
}

// trim shortens what grows by time: ids of messages, dead letters, events, rejected messages.
func (p *partition) trim(ctx context.Context) error {
	r := p.cfg.Retention
	ms := func(keep time.Duration) string { return strconv.FormatInt(time.Now().Add(-keep).UnixMilli(), 10) }
	_, err := p.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		if r.MessageIDs > 0 {
			pipe.ZRemRangeByScore(ctx, p.p.Messages(), "-inf", ms(r.MessageIDs))
		}
		if r.DeadLetters > 0 {
			pipe.XTrimMinID(ctx, p.p.DeadLetters(), ms(r.DeadLetters))
		}
		return nil
	})
	if err == nil && p.p.Index() == 0 {
		_, err = p.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			if r.Events > 0 {
				pipe.XTrimMinID(ctx, p.space.Events(), ms(r.Events))
			}
			if r.DeadLetters > 0 {
				pipe.XTrimMinID(ctx, p.space.Rejected(), ms(r.DeadLetters))
			}
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("trim what is past its retention: %w", err)
	}
	return nil
}

// forgetEntries drops the ids of ingest entries that can't come again: they are older than everything that
// is still pending or was not delivered.
func (p *partition) forgetEntries(ctx context.Context) error {
	groups, err := p.conn.Cmd.XInfoGroups(ctx, p.space.Ingest()).Result()
	if err != nil {
		if redisx.IsUnavailable(err) {
			return err
		}
		return nil // nobody has published yet
	}
	for _, g := range groups {
		if g.Name != keyspace.GroupIngest {
			continue
		}
		oldest := g.LastDeliveredID
		pending, err := p.conn.Cmd.XPendingExt(ctx, &redis.XPendingExtArgs{Stream: p.space.Ingest(), Group: g.Name, Start: "-", End: "+", Count: 1}).Result()
		if err != nil {
			return fmt.Errorf("look for pending messages: %w", err)
		}
		if len(pending) > 0 {
			oldest = pending[0].ID
		}
		ms, _, _ := strings.Cut(oldest, "-")
		return p.conn.Cmd.ZRemRangeByScore(ctx, p.p.Entries(), "-inf", "("+ms).Err()
	}
	return nil
}

// buryUnserved fails the jobs of types that no live worker has served for long.
func (p *partition) buryUnserved(ctx context.Context) error {
	workers, err := stage.Workers(ctx, p.conn, p.space)
	if err != nil {
		return err
	}
	var served []string
	for _, w := range workers {
		served = append(served, w.Types...)
	}
	types, err := p.conn.Cmd.ZRangeWithScores(ctx, p.p.Types(), 0, -1).Result()
	if err != nil {
		return fmt.Errorf("list types: %w", err)
	}
	now := time.Now()
	for _, z := range types {
		typ := z.Member.(string)
		if slices.Contains(served, typ) {
			if err := p.conn.Cmd.ZAddXX(ctx, p.p.Types(), redis.Z{Score: float64(now.UnixMilli()), Member: typ}).Err(); err != nil {
				return fmt.Errorf("note that type %s is served: %w", typ, err)
			}
			continue
		}
		if p.cfg.NoProcessorTimeout <= 0 || now.Sub(time.UnixMilli(int64(z.Score))) < p.cfg.NoProcessorTimeout {
			continue
		}
		if err := p.bury(ctx, typ); err != nil {
			return err
		}
	}
	return nil
}

// bury takes a type's ready jobs as a worker would and reports them as failed. The fetcher sends more after
// them; the next round goes on.
func (p *partition) bury(ctx context.Context, typ string) error {
	stream := p.p.Ready(typ)
	reader := redisx.NewReader(p.conn, keyspace.GroupWorkers, p.id)
	defer func() {
		_, _ = lua.DropConsumer(ctx, p.conn.Cmd, stream, keyspace.GroupWorkers, p.id, 0)
	}()
	until := time.Now().Add(leaderRenew)
	for time.Now().Before(until) {
		batches, err := reader.Read(ctx, []string{stream}, 100, 50*time.Millisecond)
		if err != nil || len(batches) == 0 {
			return err
		}
		buried := 0
		for _, e := range batches[0].Entries {
			n, err := p.buryOne(ctx, typ, e)
			if err != nil {
				return err
			}
			buried += n
		}
		p.log.Warn("failed jobs of a type that no worker serves", "type", typ, "jobs", buried)
	}
	return nil
}

func (p *partition) buryOne(ctx context.Context, typ string, e redisx.Entry) (int, error) {
	d, err := lua.ParseDelivered(e.Get(lua.Field))
	if err != nil {
		return 0, nil // left pending: a worker or reclaim sets it aside
	}
	started, err := lua.Start(ctx, p.conn.Cmd, p.p, typ, []lua.StartGroup{{Group: d.Group, Jobs: []lua.StartJob{{Entry: e.ID, Ordinal: d.Ordinal, Attempt: d.Attempt}}}})
	if err != nil || started.Tokens[0] < 0 {
		return 0, err
	}
	_, err = lua.Outcome(ctx, p.conn.Cmd, p.p, typ, lua.Congestion{}, []lua.GroupOutcome{{Group: d.Group, Others: []lua.OtherJob{{
		Entry: e.ID, Ordinal: d.Ordinal, Attempt: int(started.Tokens[0]), Kind: lua.OutcomeFailed, Waits: d.Waits, Queued: []byte(d.Queued),
		Code: "NO_PROCESSOR", Text: fmt.Sprintf("no live worker has served the type %s for %s: start a worker that has a processor for it, then retry the group", typ, p.cfg.NoProcessorTimeout),
	}}}})
	return 1, err
}
