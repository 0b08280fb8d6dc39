package groups

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

// These limits bound what one page of rejected messages reads: of a message's data, up to 256 KiB
// are stored.
const (
	rejectedChunk = 20      // entries read by one command
	rejectedBytes = 8 << 20 // a page ends with the chunk that exceeds it
)

// Rejected returns a page of rejected messages, newest first, which may be shorter than limit.
// cursor is that of the previous page: the id of its last entry. With data false, or for a
// principal that may not see payloads, the messages have no data. They belong to no tenant, because
// nobody knows whose they are.
func (s *views) Rejected(ctx context.Context, cursor string, limit int, data bool) (api.RejectedList, error) {
	list := api.RejectedList{Rejected: []api.RejectedMessage{}}
	who, err := caller(ctx)
	switch {
	case err != nil:
		return list, err
	case !who.May(auth.ReadSystem):
		return list, api.ErrNotAllowed
	}
	top := "+"
	if cursor != "" {
		if id, err := stream.ParseID(cursor); err != nil || id.MS == 0 {
			return list, badCursor()
		}
		top = "(" + cursor
	}
	for size := int64(0); len(list.Rejected) < limit && size < rejectedBytes; {
		n := min(rejectedChunk, limit-len(list.Rejected))
		entries, err := s.conn.Cmd.XRevRangeN(ctx, s.space.Rejected(), top, "-", int64(n)).Result()
		if err != nil {
			return list, apiError(fmt.Errorf("read rejected messages: %w", err))
		}
		for _, e := range entries {
			m := rejectedMessage(e)
			size += m.Bytes
			if !data || !who.Payloads {
				m.Data = ""
			}
			list.Rejected = append(list.Rejected, m)
			top = "(" + e.ID
		}
		if len(entries) < n {
			return list, nil
		}
	}
	list.Cursor = list.Rejected[len(list.Rejected)-1].ID
	return list, nil
}

// rejectedMessage parses an entry of the Redis stream of rejected messages, as package
// redisx/stream writes it. A missing or invalid field is empty.
func rejectedMessage(e redis.XMessage) api.RejectedMessage {
	text := func(field string) string { v, _ := e.Values[field].(string); return v }
	m := api.RejectedMessage{
		ID: e.ID, Reason: text("reason"), Entry: text("entry"),
		MessageID: text("id"), Type: text("type"), Data: text("data"),
	}
	m.Bytes = int64(len(m.Data))
	if at, err := time.Parse(time.RFC3339Nano, text("at")); err == nil {
		m.At = &at
	}
	return m
}
