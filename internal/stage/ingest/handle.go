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
	"github.com/bulkaction/bulkaction/internal/groups/backpressure"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
)

// groupWait is how long a message waits at least for its group, whose submission may come later in
// the stream (see waitForGroup).
const groupWait = 30 * time.Second

// redisErrorRetryTime is how long a message is retried while Redis answers it with an error,
// counted from the message's arrival or the start of this process, whichever is later. The message
// was accepted and must be stored, and an operator may be able to repair the cause. After that time
// the message is rejected, so that it does not block others for ever.
const redisErrorRetryTime = 10 * time.Minute

// The limits of the stream of rejected entries: bytes of one field, and number of entries.
const (
	maxRejectedField = 256 << 10
	maxRejected      = 100_000
)

// quietLogger lowers the level of the router's messages and drops its trace messages, of which
// there are several per stream entry.
type quietLogger struct{ watermill.LoggerAdapter }

func routerLog(log *slog.Logger) watermill.LoggerAdapter {
	levels := map[slog.Level]slog.Level{slog.LevelInfo: slog.LevelDebug, slog.LevelError: slog.LevelDebug}
	return quietLogger{watermill.NewSlogLoggerWithLevelMapping(log, levels)}
}

func (quietLogger) Trace(string, watermill.LogFields) {}

func (q quietLogger) With(fields watermill.LogFields) watermill.LoggerAdapter {
	return quietLogger{q.LoggerAdapter.With(fields)}
}

// errRetryLater makes the subscription deliver a message again later, because what the message
// needs may still come.
var errRetryLater = errors.New("not yet")

// decideOutcome chooses, by the handler's error, what happens to a message: it is accepted,
// rejected with the reason, or delivered again later. No message is dropped, and none is delivered
// again at once; one that can't be rejected is delivered again. decideOutcome also notes when the
// backlog refused a message, for earlyCancel.
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
			in.Tel.Log.Debug("message postponed", "entry", msg.Metadata.Get(wm.MetadataEntryID), "reason", err)
			return nil, err
		}
		var refused redis.Error
		if entry := msg.Metadata.Get(wm.MetadataEntryID); errors.As(err, &refused) &&
			min(entryAge(entry), time.Since(in.created)) < redisErrorRetryTime {
			in.Tel.Log.Warn("redis answered a message with an error, trying again", "entry", entry, "error", err)
			return nil, err
		}
		if err := in.reject(msg, err); err != nil {
			return nil, err
		}
		return nil, nil
	}
}

// reject adds a message to the stream ingest:rejected, with the reason. It cuts fields that are
// larger than maxRejectedField.
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
	in.Tel.Log.Info("message rejected", "entry", e.ID, "type", fmt.Sprintf("%.64q", e.Get(wm.FieldType)))
	err := in.Conn.Cmd.XAdd(msg.Context(),
		&redis.XAddArgs{Stream: in.Space.Rejected(), MaxLen: maxRejected, Approx: true, Values: values}).Err()
	if err != nil {
		return fmt.Errorf("reject entry %s: %w", e.ID, err)
	}
	return nil
}

// handleMessage carries out one message of the ingest stream. decideOutcome handles its error.
func (in *Ingest) handleMessage(msg *message.Message) error {
	e, ok := wm.EntryOf(msg)
	if !ok {
		return errors.New("message without an entry")
	}
	env, err := messages.ParseFields(e.ID, e.Fields)
	if err != nil {
		return err
	}
	// A message gets no reservation when the backlog is full: it stays in the stream, and the
	// subscription delivers it again until there is space.
	ctx, request := backpressure.WithoutReservation(msg.Context())
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

// handleSeal seals a group. With a total the seal takes effect when the group has total jobs.
// Without one handleSeal returns errRetryLater until no older message is pending: an older append
// may be for this group and may be handled by another process.
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

// waitForGroup turns api.ErrNotFound into errRetryLater while the group may still come: for
// groupWait after the message's arrival, and then while older messages are pending or Redis can't
// tell. The messages of a group may arrive in any order. Any other err is returned as it is.
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

// oldestPending caches the id of the oldest pending entry for some milliseconds, so that many seals
// at the same time ask Redis once.
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
		return false, nil // entry was the oldest at the last read, and no older one can become pending
	}
	id, ok, err := in.sub.OldestPending(ctx, in.Space.Ingest())
	if err != nil {
		return false, fmt.Errorf("%w: %w", api.ErrUnavailable, err)
	}
	if !ok {
		// Not even this entry is pending: the consumer group was lost and created again, and
		// delivers all entries again.
		return true, nil
	}
	o.id, o.readAt = id, time.Now()
	return entryBefore(id, entry), nil
}

// entryBefore reports whether the entry id a is smaller than b.
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
