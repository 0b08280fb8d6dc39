package groups

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// listFor returns the ledger's list of groups that the query reads. The groups of one tenant, and
// those of a tenant with a tag, are in one list only, by creation.
func listFor(q *messages.ListQuery) ledger.GroupList {
	if q.Tenant != "" {
		return ledger.AllGroups
	}
	return ledger.ListWith(q.Status)
}

// selective reports whether the list may contain many groups that the query does not select.
func selective(q *messages.ListQuery) bool {
	status := q.Status != "" && listFor(q) != ledger.FailedGroups
	since := !q.Since.IsZero() && listFor(q) != ledger.AllGroups
	tags := len(q.Tags) > 1 || len(q.Tags) == 1 && q.Tenant == ""
	return status || since || tags || q.Type != "" || q.Paused != nil || q.FailedJobs != nil ||
		q.Name != "" || q.Prefix != ""
}

// byPrefixOnly reports whether the query selects groups of the list by their ids alone, so that
// nothing else of them must be read.
func byPrefixOnly(q *messages.ListQuery) bool {
	rest := *q
	rest.Prefix = ""
	return q.Prefix != "" && !selective(&rest)
}

// Selects reports whether a group with these facts fits the query's Status, Type, Paused,
// FailedJobs, Tags, Name and Since. The group may change after the facts were read.
func Selects(q *messages.ListQuery, f *ledger.GroupFacts) bool {
	return (q.Status == "" || f.Status == q.Status) && (q.Type == "" || f.HasType(q.Type)) &&
		(q.Paused == nil || f.Paused == *q.Paused) &&
		(q.Name == "" || f.Name == q.Name) && (q.FailedJobs == nil || f.FailedJobs == *q.FailedJobs) && f.Tags.Include(q.Tags) && !f.Created.Before(q.Since.Truncate(time.Millisecond))
}

// maxScanned is the number of groups after which a call of Groups ends. Its last step may look at
// more.
const maxScanned = 5000

// maxIDs and idPage take the place of maxScanned and scanPage where only ids are read.
const (
	maxIDs = 100_000
	idPage = 5000
)

// scanPage is the least number of groups of the list that a selective query reads in one step.
const scanPage = 500

// Groups returns a page of groups, the newest first. With a status other than CANCELLED and without
// a tenant, groups are ordered by when they were opened or ended last; otherwise by creation. The
// cursor names the last group that Groups has looked at, so new groups neither shift nor repeat a
// page. The page may be short, or empty, although it has a cursor: one call looks at about
// maxScanned groups at most, or at maxIDs if their ids are all that the query asks for. A principal of one tenant gets the groups of this tenant.
func (s *Store) Groups(ctx context.Context, q messages.ListQuery) (api.GroupList, error) {
	list := api.GroupList{Groups: []api.Group{}}
	_, tenant, err := callFor(ctx, q.Tenant)
	if err != nil {
		return list, err
	}
	q.Tenant = tenant
	parts := s.space.All()
	if q.Tenant != "" {
		parts = []keyspace.Partition{s.space.OfTenant(q.Tenant)}
	}
	read := ledger.GroupRange{List: listFor(&q), Tenant: q.Tenant, Since: q.Since}
	if read.Before, err = parseCursor(read.List, q.Cursor); err != nil {
		return list, err
	}
	if q.Tenant != "" && len(q.Tags) > 0 {
		if read.Tag, err = ledger.RarestTag(ctx, s.conn.Cmd, parts[0], q.Tenant, q.Tags); err != nil {
			return list, apiError(err)
		}
	}
	step, most := q.Limit, maxScanned
	switch {
	case byPrefixOnly(&q):
		step, most = idPage, maxIDs
	case selective(&q):
		step = max(step, scanPage)
	}
	if q.Brief {
		most = step
	}
	for len(list.Groups) < q.Limit {
		if list.Scanned >= most {
			list.Cursor = formatCursor(read)
			break
		}
		page, err := s.newest(ctx, parts, read, step)
		if err != nil {
			return list, apiError(err)
		}
		if len(page) == 0 {
			break
		}
		found, scanned, err := s.choose(ctx, page, &q, q.Limit-len(list.Groups))
		if err != nil {
			return list, apiError(err)
		}
		list.Groups = append(list.Groups, found...)
		list.Scanned += scanned
		read.Before = page[scanned-1].ListedGroup
		if len(list.Groups) == q.Limit {
			list.Cursor = formatCursor(read)
		}
	}
	return list, nil
}

// listedGroup is an entry of a list of groups, with the partition that it was read from.
type listedGroup struct {
	ledger.ListedGroup
	p keyspace.Partition
}

// formatCursor returns the cursor for the page that begins after r.Before in the list.
func formatCursor(r ledger.GroupRange) string {
	return string(r.List) + strconv.FormatFloat(r.Before.At, 'f', 0, 64) + "." + r.Before.ID
}

// parseCursor returns the entry with which the previous page ended. It refuses a cursor of another
// list.
func parseCursor(list ledger.GroupList, cursor string) (ledger.ListedGroup, error) {
	if cursor == "" {
		return ledger.Newest(), nil
	}
	place, same := strings.CutPrefix(cursor, string(list))
	ms, id, ok := strings.Cut(place, ".")
	at, err := strconv.ParseInt(ms, 10, 64)
	if !same || !ok || err != nil || !api.ValidID(id) {
		return ledger.ListedGroup{}, badCursor()
	}
	return ledger.ListedGroup{At: float64(at), ID: id}, nil
}

// newest returns the first `limit` groups of a range in these partitions, merged, newest first. It
// asks all partitions at once for a few groups more than their share. Only a partition of which all
// of these are on the page, because its tenants have most of the newest groups, is asked again.
func (s *Store) newest(
	ctx context.Context, parts []keyspace.Partition, r ledger.GroupRange, limit int,
) ([]listedGroup, error) {
	found := make([][]listedGroup, len(parts))
	read := func(of []int, n int) error {
		return concurrently(ctx, len(of), func(ctx context.Context, i int) error {
			p := parts[of[i]]
			groups, err := ledger.ListGroups(ctx, s.conn.Cmd, p, r, n)
			found[of[i]] = make([]listedGroup, len(groups))
			for k, g := range groups {
				found[of[i]][k] = listedGroup{g, p}
			}
			return err
		})
	}
	all := make([]int, len(parts))
	for i := range all {
		all[i] = i
	}
	share := min(limit, shareOf(limit, len(parts)))
	if err := read(all, share); err != nil {
		return nil, err
	}
	page := mergeNewest(found, limit)
	var more []int
	for i, of := range found {
		if len(of) == share && share < limit && (len(page) < limit || !of[share-1].OlderThan(page[limit-1].ListedGroup)) {
			more = append(more, i)
		}
	}
	if err := read(more, limit); err != nil {
		return nil, err
	}
	return mergeNewest(found, limit), nil
}

func mergeNewest(found [][]listedGroup, limit int) []listedGroup {
	page := slices.Concat(found...)
	slices.SortFunc(page, func(a, b listedGroup) int {
		return cmp.Or(cmp.Compare(b.At, a.At), cmp.Compare(b.ID, a.ID))
	})
	return page[:min(len(page), limit)]
}

// choose returns the first limit groups of a page that a query selects. scanned is how many groups
// of the page it has looked at. It leaves out groups that were deleted, or whose status has
// changed, before they were read in full.
func (s *Store) choose(
	ctx context.Context, page []listedGroup, q *messages.ListQuery, limit int,
) (found []api.Group, scanned int, err error) {
	selected := page
	if selective(q) {
		if selected, err = s.selected(ctx, page, q); err != nil {
			return nil, 0, err
		}
	}
	scanned = len(page)
	if len(selected) >= limit {
		selected = selected[:limit]
		scanned = 1 + slices.Index(page, selected[limit-1])
	}
	views, err := s.viewPage(ctx, selected)
	if err != nil {
		return nil, 0, err
	}
	for _, at := range selected {
		if v, ok := views[at.ID]; ok && (q.Status == "" || v.Status == q.Status) {
			found = append(found, v)
		}
	}
	return found, scanned, nil
}

func (s *Store) selected(ctx context.Context, page []listedGroup, q *messages.ListQuery) ([]listedGroup, error) {
	if q.Prefix != "" {
		page = slices.DeleteFunc(slices.Clone(page), func(g listedGroup) bool {
			return !strings.HasPrefix(g.ID, q.Prefix)
		})
	}
	if byPrefixOnly(q) {
		return page, nil
	}
	parts, ids := byPartition(page)
	facts := make([][]ledger.GroupFacts, len(parts))
	err := concurrently(ctx, len(parts), func(ctx context.Context, i int) (err error) {
		facts[i], err = ledger.ReadGroupFacts(ctx, s.conn.Cmd, parts[i], ids[i])
		return err
	})
	selected := make(map[string]bool, len(page))
	for i := range facts {
		for k := range facts[i] {
			selected[ids[i][k]] = Selects(q, &facts[i][k])
		}
	}
	return slices.DeleteFunc(slices.Clone(page), func(g listedGroup) bool { return !selected[g.ID] }), err
}

func byPartition(page []listedGroup) (parts []keyspace.Partition, ids [][]string) {
	for _, at := range page {
		i := slices.Index(parts, at.p)
		if i < 0 {
			i, parts, ids = len(parts), append(parts, at.p), append(ids, nil)
		}
		ids[i] = append(ids[i], at.ID)
	}
	return parts, ids
}

// viewPage returns the groups of a page by id. It leaves out groups that do not exist.
func (s *Store) viewPage(ctx context.Context, page []listedGroup) (map[string]api.Group, error) {
	parts, ids := byPartition(page)
	views := make([][]api.Group, len(parts))
	err := concurrently(ctx, len(parts), func(ctx context.Context, i int) (err error) {
		views[i], err = s.ReadViews(ctx, parts[i], ids[i])
		return err
	})
	all := make(map[string]api.Group, len(page))
	for _, v := range slices.Concat(views...) {
		all[v.ID] = v
	}
	return all, err
}

func badCursor() error { return badField("cursor", "must be one that an earlier page gave") }
