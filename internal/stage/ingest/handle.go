package ingest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/groups"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
)

// groupWait is how long a message waits for its group, whose submission may still be on its way.
const groupWait = 30 * time.Second

// redisErrorRetryTime is how long a message is tried to which Redis answers an error: what is wrong there may
// be mended, and what was accepted is to be stored. A message that can't be mended must not be in
// the way for ever.
const redisErrorRetryTime = 10 * time.Minute

// What a rejected entry keeps of a field, and how many rejected entries are kept.
const (
	maxRejectedField = 256 << 10
	maxRejected      = 100_000
)

// quietLogger keeps the router's everyday talk out of the log, and what it says of each message.
type quietLogger struct{ watermill.LoggerAdapter }

func routerLog(log *slog.Logger) watermill.LoggerAdapter {
	levels := map[slog.Level]slog.Level{slog.LevelInfo: slog.LevelDebug, slog.LevelError: slog.LevelDebug}
	return quietLogger{watermill.NewSlogLoggerWithLevelMapping(log, levels)}
}

func (quietLogger) Trace(string, watermill.LogFields) {}

func (q quietLogger) With(fields watermill.LogFields) watermill.LoggerAdapter {
	return quietLogger{q.LoggerAdapter.With(fields)}
}

// errRetryLater puts a message off: what it needs may be on its way.
var errRetryLater = errors.New("not yet")

// decideOutcome turns what a handler answers into what becomes of the message: accepted, rejected with
// the reason, or handed out again later. Nothing is dropped, and nothing is repeated at once.
func (in *Ingest) decideOutcome(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		_, err := next(msg)
		if err == nil {
			return nil, nil
		}
		var full *api.BackpressureError
		if errors.As(err, &full) {
			in.lastRefusal.Store(time.Now().UnixNano())
		}
		if errors.Is(err, errRetryLater) || errors.Is(err, api.ErrUnavailable) || errors.As(err, &full) ||
			msg.Context().Err() != nil {
			in.tel.Log.Debug("message put off", "entry", msg.Metadata.Get(wm.MetadataEntryID), "reason", err)
			return nil, err
		}
		var refused redis.Error
		if entry := msg.Metadata.Get(wm.MetadataEntryID); errors.As(err, &refused) &&
			min(entryAge(entry), time.Since(in.created)) < redisErrorRetryTime {
			in.tel.Log.Warn("redis refused to store a message, trying again", "entry", entry, "error", err)
			return nil, err
		}
		if err := in.reject(msg, err); err != nil {
			return nil, err
		}
		return nil, nil
	}
}

// reject quarantines a message with the reason.
func (in *Ingest) reject(msg *message.Message, reason error) error {
	e, _ := wm.EntryOf(msg)
	values := []any{"reason", reason.Error(), "entry", e.ID, "at", time.Now().UTC().Format(time.RFC3339Nano)}
	for i := 0; i+1 < len(e.Fields); i += 2 {
		v := e.Fields[i+1]
		if len(v) > maxRejectedField {
			v = v[:maxRejectedField] + fmt.Sprintf("… (%d more bytes)", len(v)-maxRejectedField)
		}
		values = append(values, e.Fields[i], v)
	}
	in.tel.Log.Info("message rejected", "entry", e.ID, "type", fmt.Sprintf("%.64q", e.Get(wm.FieldType)))
	err := in.conn.Cmd.XAdd(msg.Context(),
		&redis.XAddArgs{Stream: in.space.Rejected(), MaxLen: maxRejected, Approx: true, Values: values}).Err()
	if err != nil {
		return fmt.Errorf("reject entry %s: %w", e.ID, err)
	}
	return nil
}

// handleMessage stores what a message asks for.
func (in *Ingest) handleMessage(msg *message.Message) error {
	e, ok := wm.EntryOf(msg)
	if !ok {
		return errors.New("message without an entry")
	}
	env, err := messages.ParseFields(e.ID, e.Fields)
	if err != nil {
		return err
	}
	// Nothing is promised to a message that finds no room: it is stored, and is tried again until
	// there is some.
	ctx, request := groups.WithPatience(msg.Context())
	defer request.End()
	origin := groups.Origin{TraceParent: env.TraceParent, At: time.Now(), Published: true}
	switch env.Type {
	case messages.TypeGroupSubmit:
		return in.handleSubmit(ctx, env, origin)
	case messages.TypeJobsAppend:
		return in.handleAppend(ctx, env, e.ID, origin)
	case messages.TypeGroupSeal:
		return in.handleSeal(ctx, env, e.ID)
	default:
		return in.handleCancel(ctx, env, e.ID)
	}
}

func (in *Ingest) handleSubmit(ctx context.Context, env messages.Envelope, o groups.Origin) error {
	g, err := in.decoder.DecodeSubmit(env.Data)
	if err != nil {
		return err
	}
	if g.ID == "" {
		g.ID = env.ID
	}
	_, err = in.store.Submit(ctx, g, o)
	return err
}

func (in *Ingest) handleAppend(ctx context.Context, env messages.Envelope, entry string, o groups.Origin) error {
	a, err := in.decoder.DecodeAppendEntry(env)
	if err != nil {
		return err
	}
	id := env.ID
	if id == entry {
		id = ""
	}
	return in.waitForGroup(ctx, entry, in.store.AppendEntry(ctx, a.Group, a.Jobs, entry, id, o))
}

// handleSeal takes effect when its total is reached; without one, when no older message is pending: an
// append among them may be for this group, and another process may be at it.
func (in *Ingest) handleSeal(ctx context.Context, env messages.Envelope, entry string) error {
	s, err := in.decoder.DecodeSeal(env.Data)
	if err != nil {
		return err
	}
	if s.Total == nil {
		older, err := in.hasOlderPending(ctx, entry)
		if err != nil {
			return err
		}
		if older {
			return errRetryLater
		}
	}
	_, err = in.store.Seal(ctx, s.Group, s.Total)
	return in.waitForGroup(ctx, entry, err)
}

func (in *Ingest) handleCancel(ctx context.Context, env messages.Envelope, entry string) error {
	c, err := in.decoder.DecodeCancel(env.Data)
	if err != nil {
		return err
	}
	_, err = in.store.Cancel(ctx, c.Group)
	return in.waitForGroup(ctx, entry, err)
}

// waitForGroup puts off a message whose group is not there: while older messages are pending, and for
// a grace period, since messages of one group may come in any order.
func (in *Ingest) waitForGroup(ctx context.Context, entry string, err error) error {
	if !errors.Is(err, api.ErrNotFound) {
		return err
	}
	if entryAge(entry) < groupWait {
		return errRetryLater
	}
	older, pendingErr := in.hasOlderPending(ctx, entry)
	if pendingErr != nil || older {
		return errRetryLater
	}
	return err
}

func entryAge(entry string) time.Duration {
	ms, _, _ := strings.Cut(entry, "-")
	n, _ := strconv.ParseInt(ms, 10, 64)
	return time.Since(time.UnixMilli(n))
}

// oldestPending remembers the oldest pending entry for a moment, so that many seals at once ask once.
type oldestPending struct {
	mu     sync.Mutex
	id     string
	readAt time.Time
}

func (in *Ingest) hasOlderPending(ctx context.Context, entry string) (bool, error) {
	o := &in.oldest
	o.mu.Lock()
	defer o.mu.Unlock()
	if time.Since(o.readAt) < 5*time.Millisecond && !entryBefore(o.id, entry) {
		return false, nil // it was the oldest a moment ago: nothing older can have come since
	}
	id, ok, err := in.sub.OldestPending(ctx, in.space.Ingest())
	if err != nil {
		return false, fmt.Errorf("%w: %w", api.ErrUnavailable, err)
	}
	if !ok {
		return true, nil // not even this one: the group was lost, and is to deliver everything again
	}
	o.id, o.readAt = id, time.Now()
	return entryBefore(id, entry), nil
}

// entryBefore compares ids of entries.
func entryBefore(a, b string) bool {
	ams, aseq := parseEntryID(a)
	bms, bseq := parseEntryID(b)
	return ams < bms || (ams == bms && aseq < bseq)
}

func parseEntryID(id string) (ms, seq int64) {
	m, s, _ := strings.Cut(id, "-")
	ms, _ = strconv.ParseInt(m, 10, 64)
	seq, _ = strconv.ParseInt(s, 10, 64)
	return ms, seq
}
