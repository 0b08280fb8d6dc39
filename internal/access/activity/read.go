package activity

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

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
