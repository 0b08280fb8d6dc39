package waitingroom

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// The names of the laws of events. The scripts keep the laws; a violation means that another
// program wrote the keys, or that Redis has lost data.
const (
	LawState  = "room-state"  // each user is in the sets of the user's state, each event in its list
	LawNumber = "room-number" // numbers are unique and at most the last one given
	LawSlots  = "room-slots"  // each slot lasts long enough and has a fence of its own; the seats left are right
)

// Finding is a violation of a law by an event. It never contains a user's id, because ids are
// sensitive: it gives the user's number instead.
type Finding struct {
	Event  string
	Law    string
	Detail string
	Key    string // recognizes the finding in the next audit
	Count  int64  // of the findings that Detail sums up; 0: it is one
}

// mostFindings is the most findings of one law in one event that Audit returns one by one. One more
// finding says how many others there are.
const mostFindings = 100

// Audit returns what breaks a law in an event. It changes nothing, and users may change state
// meanwhile. Each finding is certain. Most compare data of one instant. Numbers and fences that two
// users have are found over several reads; that is safe, because neither is ever given again. pace
// is called between two pages, with the users and bytes that the first one returned, and may wait;
// nil: no waits.
func (r *Rooms) Audit(
	ctx context.Context, event string, pace func(ctx context.Context, elements, bytes int) error,
) ([]Finding, error) {
	a := newRoomAudit(r, event, pace)
	for _, list := range []string{"event", "users", "waiting", "away", "slots"} {
		if err := a.read(ctx, list, func(row auditRow) { a.note(row) }); err != nil {
			return nil, fmt.Errorf("audit event %s: %w", event, err)
		}
	}
	if err := a.confirmTwice(ctx); err != nil {
		return nil, fmt.Errorf("audit event %s: %w", event, err)
	}
	for _, law := range []string{LawState, LawNumber, LawSlots} {
		if more := a.laws[law] - mostFindings; more > 0 {
			a.found = append(a.found, Finding{
				Event: event, Law: law, Key: "more", Detail: fmt.Sprintf("and %d more like these", more), Count: more,
			})
		}
	}
	return a.found, nil
}

type roomAudit struct {
	rooms *Rooms
	event string
	p     keyspace.Partition
	pace  func(ctx context.Context, elements, bytes int) error

	found     []Finding
	laws      map[string]int64 // number of findings, by law
	seen      map[string]bool  // laws and keys of found: the same user may be read twice
	tail      int64            // the last number given, as the newest page says it
	recreated bool             // the event was deleted and created again meanwhile

	numbers bitmap
	fences  map[string]string // by fence: the user
	// twice has the numbers and fences that were read more than once, with the users who have them.
	// They are only candidates: the same user may have been read twice.
	twice map[string]map[string]bool
}

func newRoomAudit(
	r *Rooms, event string, pace func(ctx context.Context, elements, bytes int) error,
) *roomAudit {
	return &roomAudit{
		rooms: r, event: event, p: r.space.OfEvent(event), pace: pace,
		laws: map[string]int64{}, seen: map[string]bool{}, fences: map[string]string{},
	}
}

// auditRow has what the audit needs of a user's record.
type auditRow struct {
	user   string
	number int64
	fence  string
}

// read reads one list of the event in pages and adds the script's findings. Only the list users has
// rows: read calls each with every one.
func (a *roomAudit) read(ctx context.Context, list string, each func(auditRow)) error {
	for cursor := "0"; ; {
		reply := a.rooms.run(ctx, auditScript, a.p, a.event, list, cursor, MostUsers)
		cursor = reply.Text()
		tail, rows := reply.Number(), reply.List()
		a.recreated = a.recreated || tail < a.tail
		a.tail = tail
		elements, bytes := 0, 0
		for rows.More() {
			row := auditRow{rows.Text(), rows.Number(), rows.Text()}
			elements++
			bytes += len(row.user) + len(row.fence)
			each(row)
		}
		for reply.More() {
			a.add(readFinding(reply.List()))
		}
		if err := reply.Err(); err != nil {
			return err
		}
		if cursor == "0" {
			return nil
		}
		if a.pace != nil {
			if err := a.pace(ctx, elements, bytes); err != nil {
				return err
			}
		}
	}
}

// note records the number and the fence of a row, to find those that two users have. It skips a
// number that can't have been given: that is a finding by itself.
func (a *roomAudit) note(row auditRow) {
	if row.number >= 1 && row.number <= a.tail && !a.numbers.add(row.number) {
		a.candidate(fmt.Sprint("number ", row.number))
	}
	if row.fence == "" {
		return
	}
	if user, ok := a.fences[row.fence]; ok && user != row.user {
		a.candidate("fence " + row.fence)
	}
	a.fences[row.fence] = row.user
}

func (a *roomAudit) candidate(what string) {
	if a.twice == nil {
		a.twice = map[string]map[string]bool{}
	}
	if len(a.twice) < 10*mostFindings {
		a.twice[what] = map[string]bool{}
	}
}

// confirmTwice reads the users again if numbers or fences were read more than once, and adds a
// finding for each that two users have. It adds none if the event was deleted and created again
// meanwhile: then its numbers have started again at 1.
func (a *roomAudit) confirmTwice(ctx context.Context) error {
	if len(a.twice) == 0 {
		return nil
	}
	// This second audit serves only to read the users again; its own findings are dropped, because
	// the first reading has found them already.
	again := newRoomAudit(a.rooms, a.event, a.pace)
	again.tail, again.recreated = a.tail, a.recreated
	err := again.read(ctx, "users", func(row auditRow) {
		for _, what := range []string{fmt.Sprint("number ", row.number), "fence " + row.fence} {
			if users := a.twice[what]; users != nil {
				users[row.user] = true
			}
		}
	})
	if err != nil || again.recreated {
		return err
	}
	for what, users := range a.twice {
		if len(users) < 2 {
			continue
		}
		f := Finding{Law: LawNumber, Key: what, Detail: fmt.Sprintf("%d users have the %s", len(users), what)}
		if strings.HasPrefix(what, "fence") {
			f.Law = LawSlots
		}
		a.add(f)
	}
	return nil
}

func (a *roomAudit) add(f Finding) {
	f.Event = a.event
	if a.seen[f.Law+" "+f.Key] {
		return
	}
	if a.laws[f.Law]++; a.laws[f.Law] <= mostFindings {
		a.seen[f.Law+" "+f.Key] = true
		a.found = append(a.found, f)
	}
}

func readFinding(row *call.Reply) Finding {
	law, what, number, have, want := row.Text(), row.Text(), row.Number(), row.Number(), row.Number()
	user := fmt.Sprintf("the user with number %d", number)
	if number == 0 {
		user = "a user"
	}
	var detail string
	switch what {
	case "settings":
		detail = "it has users, but no settings"
		if have > 0 {
			detail = "settings are missing"
		}
	case "unlisted":
		detail = "it is not in the list of events, so nothing happens in it"
	case "late":
		detail = fmt.Sprintf("something is due at %s, but the list of events says %s", clock(want), clock(have))
	case "record":
		detail = "the record of " + user + " can't be read"
	case "sets":
		detail = fmt.Sprintf("%s is %s, but should be %s", user, setsOf(have), setsOf(want))
	case "ghost":
		detail = fmt.Sprintf("%s is %s and has no record", user, setsOf(want))
		if number == 0 {
			detail += ", until " + clock(have)
		}
	case "tail":
		detail = fmt.Sprintf("%s has a number that was not given: the last one is %d", user, want)
	case "score":
		detail = fmt.Sprintf("%s waits in the place of number %d", user, have)
	case "fence":
		detail = user + " holds a slot under a fence that was not given"
	case "early":
		detail = fmt.Sprintf("the slot of %s ends at %s, but is promised until %s", user, clock(have), clock(want))
	case "seats":
		detail = fmt.Sprintf("%s are left, but %s should be", seats(have), seats(want))
	default:
		detail = "unknown finding " + what
	}
	return Finding{Law: "room-" + law, Detail: detail, Key: fmt.Sprint(what, " ", number, " ", want)}
}

func clock(ms int64) string {
	if ms >= 1<<53-1 {
		return "never"
	}
	return time.UnixMilli(ms).UTC().Format("2006-01-02T15:04:05.000Z")
}

func seats(n int64) string {
	if n < 0 {
		return "no limited seats"
	}
	return fmt.Sprint(n, " seats")
}

func setsOf(mask int64) string {
	var sets []string
	for i, name := range []string{"waiting", "away", "slots"} {
		if mask&(1<<i) != 0 {
			sets = append(sets, name)
		}
	}
	if len(sets) == 0 {
		return "in no set"
	}
	return "in " + strings.Join(sets, " and ")
}

// bitmap is a set of numbers, in pages of 65,536.
type bitmap map[int64]*[1024]uint64

// add adds a number, and returns false if it was there.
func (b *bitmap) add(n int64) bool {
	if *b == nil {
		*b = bitmap{}
	}
	page := (*b)[n>>16]
	if page == nil {
		page = new([1024]uint64)
		(*b)[n>>16] = page
	}
	word, bit := &page[n>>6&1023], uint64(1)<<(n&63)
	was := *word&bit != 0
	*word |= bit
	return !was
}
