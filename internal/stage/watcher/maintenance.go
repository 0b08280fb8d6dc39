package watcher

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
)

// maintain does what is due only now and then, and goes on at once while there is more of it.
func (p *partitionLoop) maintain(ctx context.Context) (bool, error) {
	every := maintenanceInterval
	if timeout := p.cfg.NoProcessorTimeout; timeout > 0 {
		every = min(every, timeout)
	}
	if time.Since(p.maintainedAt) <= every {
		return false, nil
	}
	more := false
	for _, task := range []func(context.Context) (bool, error){
		p.expireGroups, p.expireResults, p.trim, p.trimEntryIDs, p.failUnserved, p.recheckSetup,
	} {
		some, err := task(ctx)
		switch {
		case err == nil:
			more = more || some
		case errors.Is(err, ledger.ErrFenced) || call.IsUnavailable(err) || ctx.Err() != nil:
			return false, err
		case call.IsOOM(err):
			p.logOOM(err)
		default:
			p.log.Error("maintenance task failed, trying again in the next pass", "error", err)
		}
	}
	if !more {
		p.maintainedAt = time.Now()
	}
	return more, nil
}

// expireGroups forgets groups that ended long ago.
func (p *partitionLoop) expireGroups(ctx context.Context) (bool, error) {
	keep := p.cfg.Retention.Groups
	if keep <= 0 {
		return false, nil
	}
	ended, err := p.endedGroups(ctx, "-inf", millisAgo(keep), groupBatch)
	if err != nil {
		return false, err
	}
	for _, z := range ended {
		if err := p.expireGroup(ctx, z.Member.(string)); err != nil {
			return false, err
		}
	}
	return len(ended) == groupBatch, nil
}

// expireGroup drops a group and then its name; the name stays, or comes back, when the group was
// made anew meanwhile.
func (p *partitionLoop) expireGroup(ctx context.Context, id string) error {
	tenant, err := p.conn.Cmd.HGet(ctx, p.p.Group(id), "tenant").Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return fmt.Errorf("forget group %s: %w", id, err)
	}
	if err := ledger.Expire(ctx, p.conn.Cmd, p.p, id, p.fence, false); err != nil {
		return err
	}
	left, err := p.conn.Cmd.Exists(ctx, p.p.Group(id)).Result()
	if err == nil && left == 0 {
		name := p.space.OfGroup(id).Owner(id)
		if err = p.conn.Cmd.Del(ctx, name).Err(); err == nil && tenant != "" {
			if left, err = p.conn.Cmd.Exists(ctx, p.p.Group(id)).Result(); left > 0 {
				err = p.conn.Cmd.SetNX(ctx, name, tenant, 0).Err()
			}
		}
	}
	if err != nil {
		return fmt.Errorf("forget group %s: %w", id, err)
	}
	return nil
}

// expireResults drops the result lines of groups that are kept themselves, once each while this
// process leads.
func (p *partitionLoop) expireResults(ctx context.Context) (bool, error) {
	keep := p.cfg.Retention.Results
	if keep <= 0 || (p.cfg.Retention.Groups > 0 && keep >= p.cfg.Retention.Groups) {
		return false, nil
	}
	ended, err := p.endedGroups(ctx, "("+formatMillis(p.resultsExpiredTo), millisAgo(keep), groupBatch)
	if err != nil || len(ended) == 0 {
		return false, err
	}
	// The batch may end among groups that ended in the same millisecond: those are done as a whole.
	last := ended[len(ended)-1].Score
	same, err := p.endedGroups(ctx, formatMillis(last), last, 0)
	if err != nil {
		return false, err
	}
	for _, z := range append(ended, same...) {
		if err := ledger.Expire(ctx, p.conn.Cmd, p.p, z.Member.(string), p.fence, true); err != nil {
			return false, err
		}
	}
	p.resultsExpiredTo = last
	return len(ended) == groupBatch, nil
}

// endedGroups lists groups that ended between two times (ms), oldest first, at most so many; 0 is
// all.
func (p *partitionLoop) endedGroups(ctx context.Context, from string, until float64, most int64) ([]redis.Z, error) {
	ended, err := p.conn.Cmd.ZRangeByScoreWithScores(ctx, p.p.Ended(),
		&redis.ZRangeBy{Min: from, Max: formatMillis(until), Count: most}).Result()
	if err != nil {
		return nil, fmt.Errorf("look for old groups: %w", err)
	}
	return ended, nil
}

// millisAgo is the time (ms) that lies so far back.
func millisAgo(keep time.Duration) float64 { return float64(time.Now().Add(-keep).UnixMilli()) }

func formatMillis(t float64) string { return strconv.FormatFloat(t, 'f', 0, 64) }

// trim shortens what grows by time: ids of messages, dead letters, events, rejected messages.
func (p *partitionLoop) trim(ctx context.Context) (bool, error) {
	r := p.cfg.Retention
	_, err := p.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		if r.MessageIDs > 0 {
			pipe.ZRemRangeByScore(ctx, p.p.Messages(), "-inf", formatMillis(millisAgo(r.MessageIDs)))
		}
		if r.DeadLetters > 0 {
			pipe.XTrimMinID(ctx, p.p.DeadLetters(), formatMillis(millisAgo(r.DeadLetters)))
		}
		return nil
	})
	if err == nil && p.p.Index() == 0 {
		_, err = p.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			if r.Events > 0 {
				pipe.XTrimMinID(ctx, p.space.Events(), formatMillis(millisAgo(r.Events)))
			}
			if r.DeadLetters > 0 {
				pipe.XTrimMinID(ctx, p.space.Rejected(), formatMillis(millisAgo(r.DeadLetters)))
			}
			return nil
		})
	}
	if err != nil {
		return false, fmt.Errorf("trim what is past its retention: %w", err)
	}
	return false, nil
}

// recheckSetup looks again at what was looked at when the process started: that Redis evicts
// nothing, and the number of partitions, which is written again where it was lost, before a process
// with another one is let in.
func (p *partitionLoop) recheckSetup(ctx context.Context) (bool, error) {
	if p.p.Index() > 0 {
		return false, nil
	}
	return false, errors.Join(stage.CheckPartitions(ctx, p.conn, p.space), p.conn.CheckEviction(ctx))
}

// maxIngestFreeze is how long a stopped process may take to go on without harm.
const maxIngestFreeze = 5 * time.Minute

// trimEntryIDs drops the ids of ingest entries that can't come again: they are older than
// everything that is still pending or was not delivered.
func (p *partitionLoop) trimEntryIDs(ctx context.Context) (bool, error) {
	groups, err := p.conn.Cmd.XInfoGroups(ctx, p.space.Ingest()).Result()
	if call.IsUnavailable(err) {
		return false, err
	}
	for _, g := range groups { // none: nobody has published yet
		if g.Name != keyspace.GroupIngest {
			continue
		}
		oldest := g.LastDeliveredID
		pending, err := p.conn.Cmd.XPendingExt(ctx,
			&redis.XPendingExtArgs{Stream: p.space.Ingest(), Group: g.Name, Start: "-", End: "+", Count: 1}).Result()
		if err != nil {
			return false, fmt.Errorf("look for pending messages: %w", err)
		}
		if len(pending) > 0 {
			oldest = pending[0].ID
		}
		text, _, _ := strings.Cut(oldest, "-")
		ms, _ := strconv.ParseInt(text, 10, 64)
		// An ingest that was frozen with an entry in its hands may come back although another
		// has stored it.
		ms = min(ms, time.Now().Add(-maxIngestFreeze).UnixMilli())
		if err := p.conn.Cmd.ZRemRangeByScore(ctx, p.p.Entries(), "-inf",
			"("+strconv.FormatInt(ms, 10)).Err(); err != nil {
			return false, fmt.Errorf("forget entries: %w", err)
		}
	}
	return false, nil
}
