package groups

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/auth"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// DeadLetterQuery selects a page of dead letters. An empty Tenant, Group, Type or Code matches
// every dead letter; Since is the oldest time, the zero time sets none; Cursor is that of the page
// before.
type DeadLetterQuery struct {
	Tenant, Group, Type, Code string
	Since                     time.Time
	Cursor                    string
	Limit                     int
}

func (q DeadLetterQuery) filters() bool { return q.Tenant+q.Group+q.Type+q.Code != "" }

func (q DeadLetterQuery) matches(d api.DeadLetter) bool {
	is := func(wanted, got string) bool { return wanted == "" || wanted == got }
	return is(q.Tenant, d.Tenant) && is(q.Group, d.Group) && is(q.Type, d.Type) && is(q.Code, d.Code)
}

const (
	deadLetterChunk   = 500    // dead letters that one round of reads returns, if the page has a filter
	minLetterChunk    = 20     // the least of them that one command reads
	maxScannedLetters = 10_000 // dead letters that one call looks at
)

// DeadLetters returns a page of dead letters, the newest first. The cursor holds the last entry of
// each partition that the call has looked at. A principal of one tenant gets those of this tenant.
// One call looks at maxScannedLetters dead letters at most, so that a page with a filter may be
// short, or empty, although it has a cursor.
func (s *views) DeadLetters(ctx context.Context, q DeadLetterQuery) (api.DeadLetterList, error) {
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
	from, err := newLetterScan(s.access, parts, q)
	if err != nil {
		return list, err
	}
	sees := auth.SeesPayloads(ctx)
	for len(list.DeadLetters) < q.Limit && list.Scanned < maxScannedLetters {
		d, ok, err := from.next(ctx)
		if err != nil {
			return list, apiError(err)
		}
		if !ok {
			return list, nil
		}
		list.Scanned++
		if !q.matches(d) {
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

// letterScan reads the dead letters of some partitions, the newest first.
type letterScan struct {
	*access
	parts  []keyspace.Partition
	oldest string             // the lowest id of an entry
	chunk  int                // entries that one command reads
	before []string           // by partition: the last entry that next has returned; "": none
	read   [][]api.DeadLetter // by partition: entries that were read and are not returned yet
	ended  []bool             // by partition: it has no entry behind those that were read
}

func newLetterScan(a *access, parts []keyspace.Partition, q DeadLetterQuery) (*letterScan, error) {
	s := &letterScan{
		access: a, parts: parts, chunk: q.Limit,
		before: make([]string, len(parts)), read: make([][]api.DeadLetter, len(parts)), ended: make([]bool, len(parts)),
	}
	if q.filters() {
		s.chunk = max(minLetterChunk, deadLetterChunk/len(parts))
	}
	if !q.Since.IsZero() {
		s.oldest = strconv.FormatInt(q.Since.UnixMilli(), 10)
	}
	if q.Cursor != "" {
		s.before = strings.Split(q.Cursor, ",")
	}
	if len(s.before) != len(parts) || slices.ContainsFunc(s.before, func(id string) bool {
		return id != "" && !messages.ValidEntryID(id)
	}) {
		return nil, badCursor()
	}
	return s, nil
}

// next returns the newest dead letter that it has not returned yet; false: there is none.
func (s *letterScan) next(ctx context.Context) (api.DeadLetter, bool, error) {
	newest := -1
	for i, p := range s.parts {
		if len(s.read[i]) == 0 && !s.ended[i] {
			found, err := ledger.DeadLetters(ctx, s.conn.Cmd, p, s.before[i], s.oldest, s.chunk)
			if err != nil {
				return api.DeadLetter{}, false, err
			}
			s.read[i], s.ended[i] = found, len(found) < s.chunk
		}
		if len(s.read[i]) > 0 && (newest < 0 || s.read[i][0].At.After(s.read[newest][0].At)) {
			newest = i
		}
	}
	if newest < 0 {
		return api.DeadLetter{}, false, nil
	}
	d := s.read[newest][0]
	s.read[newest], s.before[newest] = s.read[newest][1:], d.EntryID
	return d, true, nil
}

// cursor returns where the next page begins, "" if nothing is left.
func (s *letterScan) cursor() string {
	for i := range s.parts {
		if len(s.read[i]) > 0 || !s.ended[i] {
			return strings.Join(s.before, ",")
		}
	}
	return ""
}
