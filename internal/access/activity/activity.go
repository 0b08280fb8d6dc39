// Package activity is the activity log: who changed what, and when. It hides how entries lie in the
// stream activity, how long they are kept, and that an entry is stored before its effect.
//
// The log has an entry for every change but submissions, appends and what a service does with entry
// tokens: these are the installation's daily traffic, and would push everything else out.
package activity

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/lua"
)

var addScript = call.NewScript("add", lua.Source("activity/add"))

// retryTime is for how long storing an entry is tried again while Redis does not answer.
const retryTime = 5 * time.Second

// maxEntries is about how many entries the log keeps at most.
const maxEntries = 100_000

// maxValue is the largest length of one field's text, in bytes. Longer text is cut; a longer Before
// or After is left out.
const maxValue = 8 << 10

// Log is the activity log of one installation. It is safe for concurrent use.
type Log struct {
	redis redis.Cmdable
	key   string
	keep  time.Duration
	slog  *slog.Logger
}

// New returns the activity log that is stored in this Redis. When an entry is stored, those older
// than keep (0: of any age) are deleted, and those that have about 100,000 newer ones.
func New(c redis.Cmdable, space keyspace.Space, keep time.Duration, log *slog.Logger) *Log {
	return &Log{redis: c, key: space.Activity(), keep: keep, slog: log}
}

// Do stores the entry e, then carries out the change do, and returns do's error. If the entry can't
// be stored, do is not called. If do fails, a second entry stores the error; if that can't be
// stored, the first entry still shows that the change was begun. e needs an Action and an Object,
// and may have Before and After; Do sets the other fields (see WithActor).
func (l *Log) Do(ctx context.Context, e api.Activity, do func(context.Context) error) error {
	e = by(ctx, e)
	if err := l.store(ctx, e); err != nil {
		return fmt.Errorf("store the activity %s of %s before it is carried out: %w", e.Action, e.Object, err)
	}
	err := do(ctx)
	if err == nil {
		return nil
	}
	e.Outcome = "failed: " + err.Error()
	kept, cancel := context.WithTimeout(context.WithoutCancel(ctx), outcomeTimeout)
	defer cancel()
	if lost := l.store(kept, e); lost != nil {
		l.slog.ErrorContext(ctx, "could not store how an activity ended",
			"action", e.Action, "object", e.Object, "request_id", e.RequestID, "error", lost)
	}
	return err
}

// outcomeTimeout is the longest time for storing the second entry, which says that a change has
// failed.
const outcomeTimeout = 3 * time.Second

// JSON returns v as JSON, for the fields Before and After of an entry. It returns nil if v is nil
// or can't be encoded.
func JSON(v any) json.RawMessage {
	if v == nil {
		return nil
	}
	b, err := json.Marshal(v)
	if err != nil {
		return nil
	}
	return b
}

// fields are the names of an entry's text fields in the Redis stream, in the order in which they
// are written, each with a function that returns the field's place in an api.Activity.
var fields = []struct {
	name string
	of   func(*api.Activity) *string
}{
	{"actor", func(a *api.Activity) *string { return &a.Actor }},
	{"role", func(a *api.Activity) *string { return &a.Role }},
	{"via", func(a *api.Activity) *string { return &a.Via }},
	{"ip", func(a *api.Activity) *string { return &a.IP }},
	{"request_id", func(a *api.Activity) *string { return &a.RequestID }},
	{"action", func(a *api.Activity) *string { return &a.Action }},
	{"object", func(a *api.Activity) *string { return &a.Object }},
	{"tenant", func(a *api.Activity) *string { return &a.Tenant }},
	{"outcome", func(a *api.Activity) *string { return &a.Outcome }},
}

func (l *Log) store(ctx context.Context, e api.Activity) error {
	values := make([]any, 0, 2*len(fields)+6)
	attrs := make([]slog.Attr, 0, len(fields))
	for _, f := range fields {
		if v := *f.of(&e); v != "" {
			v = strings.ToValidUTF8(v[:min(len(v), maxValue)], "?")
			values = append(values, f.name, v)
			attrs = append(attrs, slog.String(f.name, v))
		}
	}
	now := time.Now().UTC()
	values = append(values, "at", now.Format(time.RFC3339Nano))
	for _, doc := range []struct {
		name  string
		value json.RawMessage
	}{{"before", e.Before}, {"after", e.After}} {
		if len(doc.value) > 0 && len(doc.value) <= maxValue {
			values = append(values, doc.name, string(doc.value))
		}
	}
	oldest := int64(0)
	if l.keep > 0 {
		oldest = now.Add(-l.keep).UnixMilli()
	}
	// A lost reply may have the entry stored twice, which does no harm.
	err := redisx.RetryWhile(ctx, retryTime, call.IsUnavailable, func(ctx context.Context) error {
		_, err := addScript.Run(ctx, l.redis, []string{l.key}, append([]any{oldest, maxEntries}, values...))
		return err
	})
	switch {
	case call.IsUnavailable(err), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", api.ErrUnavailable, err)
	case err != nil:
		return err
	}
	l.slog.LogAttrs(ctx, slog.LevelInfo, "activity", attrs...)
	return nil
}

type actorKey struct{}

// WithActor returns a context with an actor. Do copies the actor's fields Actor, Role, Via, IP,
// RequestID and Tenant into each entry that it stores with this context.
func WithActor(ctx context.Context, actor api.Activity) context.Context {
	return context.WithValue(ctx, actorKey{}, actor)
}

func by(ctx context.Context, e api.Activity) api.Activity {
	a, _ := ctx.Value(actorKey{}).(api.Activity)
	e.Actor, e.Role, e.Via, e.IP, e.RequestID, e.Tenant = a.Actor, a.Role, a.Via, a.IP, a.RequestID, a.Tenant
	if e.Actor == "" {
		e.Actor = Anonymous
	}
	return e
}

// Anonymous is the actor of a change that came without authentication.
const Anonymous = "anonymous"

const (
	readChunk  = 500    // entries that one command reads
	maxScanned = 10_000 // entries that one call of Read looks at
)

// Query selects a page of the log. An empty Actor or Tenant matches every entry. Since is the
// oldest time; the zero time means no bound. Cursor is the one that the page before returned.
type Query struct {
	Actor, Tenant string
	Since         time.Time
	Cursor        string
	Limit         int
}

// ValidCursor says whether text has the form of a cursor that Read returns.
func ValidCursor(text string) bool {
	id, err := stream.ParseID(text)
	return err == nil && id.MS > 0
}

// Read returns a page of the log, newest entries first. It looks at maxScanned entries at most: the
// page may have fewer than q.Limit entries although more follow, and then has a Cursor. q.Cursor
// must be empty or a ValidCursor; the caller checks that.
func (l *Log) Read(ctx context.Context, q Query) (api.ActivityList, error) {
	list := api.ActivityList{Activity: []api.Activity{}}
	top, oldest := "+", "-"
	if q.Cursor != "" {
		top = "(" + q.Cursor
	}
	since := q.Since
	if l.keep > 0 && time.Since(since) > l.keep { // an entry may lie there until the next one is stored
		since = time.Now().Add(-l.keep)
	}
	if !since.IsZero() {
		oldest = strconv.FormatInt(since.UnixMilli(), 10)
	}
	last := ""
	for list.Scanned < maxScanned {
		entries, err := l.redis.XRevRangeN(ctx, l.key, top, oldest, readChunk).Result()
		if err != nil {
			if call.IsUnavailable(err) {
				err = fmt.Errorf("%w: %w", api.ErrUnavailable, err)
			}
			return list, fmt.Errorf("read the activity log: %w", err)
		}
		for _, e := range entries {
			list.Scanned++
			last, top = e.ID, "("+e.ID
			a := parse(e)
			if q.Actor != "" && a.Actor != q.Actor || q.Tenant != "" && a.Tenant != q.Tenant {
				continue
			}
			if list.Activity = append(list.Activity, a); len(list.Activity) == q.Limit {
				list.Cursor = last
				return list, nil
			}
		}
		if len(entries) < readChunk {
			return list, nil
		}
	}
	list.Cursor = last
	return list, nil
}

// parse reads an entry. A missing or invalid field is empty.
func parse(e redis.XMessage) api.Activity {
	a := api.Activity{ID: e.ID}
	for _, f := range fields {
		*f.of(&a), _ = e.Values[f.name].(string)
	}
	if at, _ := e.Values["at"].(string); at != "" {
		a.At, _ = time.Parse(time.RFC3339Nano, at) // the zero time, if it is invalid
	}
	document := func(name string) json.RawMessage {
		if v, _ := e.Values[name].(string); json.Valid([]byte(v)) {
			return json.RawMessage(v)
		}
		return nil
	}
	a.Before, a.After = document("before"), document("after")
	return a
}
