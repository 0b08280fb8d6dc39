package groups

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

// Matches reports whether a dead letter fits the Tenant, Group, Type and Code of a query.
func Matches(q messages.DeadLetterQuery, d api.DeadLetter) bool {
	is := func(wanted, got string) bool { return wanted == "" || wanted == got }
	return is(q.Tenant, d.Tenant) && is(q.Group, d.Group) && is(q.Type, d.Type) && is(q.Code, d.Code)
}

// These constants bound one call of DeadLetters. Payloads have up to 256 KiB, and a page contains
// them, so bytes count, too.
const (
	maxScannedLetters = 10_000   // dead letters that it looks at
	maxScannedBytes   = 16 << 20 // their size; it ends with the letter that passes this bound
	maxLetterChunk    = 500      // dead letters of all partitions that it has in memory
	letterChunkBytes  = 8 << 20  // their size, as long as sizes do not change much
)

// DeadLetters returns a page of dead letters, the newest first. The cursor names the last entry
// that the call has looked at. A principal of one tenant gets only the dead letters of this tenant;
// one that may not see payloads gets them without payloads and error texts. One call looks at a
// bounded number of dead letters and of bytes, so that a page may be short, or empty, although it
// has a cursor.
func (s *Store) DeadLetters(ctx context.Context, q messages.DeadLetterQuery) (api.DeadLetterList, error) {
	list := api.DeadLetterList{DeadLetters: []api.DeadLetter{}}
	if _, err := ownTenant(ctx); err != nil {
		return list, err
	}
	_, tenant, err := callFor(ctx, q.Tenant)
	if err != nil {
		return list, err
	}
	q.Tenant = tenant
	parts := s.space.All()
	if tenant != "" {
		parts = []keyspace.Partition{s.space.OfTenant(tenant)}
	}
	from, err := newLetterScan(s, parts, q)
	if err != nil {
		return list, err
	}
	if err := concurrently(ctx, len(parts), from.readMore); err != nil {
		return list, apiError(err)
	}
	sees := auth.SeesPayloads(ctx)
	for size := 0; len(list.DeadLetters) < q.Limit && list.Scanned < maxScannedLetters && size < maxScannedBytes; {
		d, ok, err := from.next(ctx)
		if err != nil {
			return list, apiError(err)
		}
		if !ok {
			return list, nil
		}
		list.Scanned++
		size += letterSize(d)
		if !Matches(q, d) {
			continue
		}
		if !sees {
			d.Error, d.Payload = "", nil
		}
		list.DeadLetters = append(list.DeadLetters, d)
	}
	list.Cursor = from.cursor()
	return list, nil
}

// letterSize returns about how many bytes a dead letter has in Redis.
func letterSize(d api.DeadLetter) int { return 256 + len(d.Error) + len(d.Payload) }

// letterScan iterates over the dead letters of some partitions, the newest first. Dead letters of
// the same millisecond are ordered by partition. So a cursor needs only the last entry, however
// many partitions there are.
type letterScan struct {
	store  *Store
	parts  []keyspace.Partition
	oldest string // entries with a lower id are left out; "": none are
	from   []letterPart
	last   string // the cursor of the entry that next has returned last
}

// letterPart is what a letterScan knows of a partition.
type letterPart struct {
	before string           // entries with lower ids were not read yet; "": no entry was read
	chunk  int              // how many entries the next command reads
	read   []api.DeadLetter // entries that next has not returned yet
	ms     uint64           // time of the first of them, by its id
	ended  bool             // there is no entry behind those that were read
}

func newLetterScan(store *Store, parts []keyspace.Partition, q messages.DeadLetterQuery) (*letterScan, error) {
	s := &letterScan{store: store, parts: parts, from: make([]letterPart, len(parts))}
	if !q.Since.IsZero() {
		s.oldest = strconv.FormatInt(q.Since.UnixMilli(), 10)
	}
	var id stream.ID
	at := 0
	if q.Cursor != "" {
		text, index, _ := strings.Cut(q.Cursor, ",")
		var err, errIndex error
		id, err = stream.ParseID(text)
		at, errIndex = strconv.Atoi(index)
		if err != nil || id.MS == 0 || errIndex != nil || at < 0 || at >= len(parts) {
			return nil, badCursor()
		}
	}
	for i := range s.from {
		p := &s.from[i]
		p.chunk = max(1, letterChunkBytes/messages.MaxPayloadBytes/len(parts))
		switch {
		case q.Cursor == "":
		case i < at: // those of this millisecond were returned
			p.before = stream.ID{MS: id.MS}.String()
		case i == at:
			p.before = id.String()
		default: // those of this millisecond come next
			p.before = stream.ID{MS: id.MS, Seq: math.MaxUint64}.String()
		}
	}
	return s, nil
}

// next returns the newest dead letter that it has not returned yet; false if there is none.
func (s *letterScan) next(ctx context.Context) (api.DeadLetter, bool, error) {
	newest := -1
	for i := range s.from {
		p := &s.from[i]
		if len(p.read) == 0 && !p.ended {
			if err := s.readMore(ctx, i); err != nil {
				return api.DeadLetter{}, false, err
			}
		}
		if len(p.read) > 0 && (newest < 0 || p.ms > s.from[newest].ms) {
			newest = i
		}
	}
	if newest < 0 {
		return api.DeadLetter{}, false, nil
	}
	p := &s.from[newest]
	d := p.read[0]
	s.last = d.EntryID + "," + strconv.Itoa(newest)
	p.set(p.read[1:])
	return d, true, nil
}

// set sets the entries that next has not returned yet.
func (p *letterPart) set(read []api.DeadLetter) {
	if p.read = read; len(read) > 0 {
		id, _ := stream.ParseID(read[0].EntryID) // Redis has made the id
		p.ms = id.MS
	}
}

// readMore reads the next entries of a partition. The average size of these entries sets how many
// entries the next call reads.
func (s *letterScan) readMore(ctx context.Context, i int) error {
	p := &s.from[i]
	found, err := ledger.DeadLetters(ctx, s.store.conn.Cmd, s.parts[i], p.before, s.oldest, p.chunk)
	if err != nil {
		return err
	}
	p.set(found)
	if p.ended = len(found) < p.chunk; len(found) == 0 {
		return nil
	}
	p.before = found[len(found)-1].EntryID
	size := 0
	for _, d := range found {
		size += letterSize(d)
	}
	n := letterChunkBytes / len(s.parts) * len(found) / size
	p.chunk = max(1, min(n, maxLetterChunk/len(s.parts)))
	return nil
}

// cursor returns the cursor with which the next page begins; "" if it is known that no dead letter
// is left.
func (s *letterScan) cursor() string {
	for _, p := range s.from {
		if len(p.read) > 0 || !p.ended {
			return s.last
		}
	}
	return ""
}

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
func (s *Store) Rejected(ctx context.Context, cursor string, limit int, data bool) (api.RejectedList, error) {
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
