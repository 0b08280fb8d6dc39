package console

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const (
	guardsPage   = 50
	membersShown = 100
	// guardsInterval is how often an open list of guards is read, because a read searches the keys
	// of Redis. The page of a guard with more than manyMembers members is read as seldom.
	guardsInterval = 5 * time.Second
	manyMembers    = 1000
	notClosed      = "not_closed" // the filter for members whose breaker is not closed
)

// memberStates are the values by which the members of a guard can be filtered.
var memberStates = []string{"free", "cooling", "busy", "off", notClosed}

// guardPages show guards, and control their members.
type guardPages struct{ backend httpapi.Backend }

type guardsData struct {
	Guards []api.GuardSummary
	Kind   string
	Kinds  []string
	Next   string // path of the next page
	First  bool   // this is the first page
}

// readList parses the query of the list of guards. It returns a function that reads this page of
// the list, and the valid parameters of the query, which are part of the name of the page's live
// topic.
func (p guardPages) readList(q url.Values) (
	read func(context.Context) (any, error), filter url.Values, err error,
) {
	query := guard.Query{Kind: q.Get("kind"), Limit: guardsPage}
	if query.Cursor, err = cursorOf(q); err != nil {
		return nil, nil, err
	}
	if query.Kind != "" && !slices.Contains(guard.Kinds, query.Kind) {
		return nil, nil, notOneOf("kind", guard.Kinds)
	}
	filter = chosen(map[string]string{"kind": query.Kind, "cursor": query.Cursor})
	return func(ctx context.Context) (any, error) {
		l, err := p.backend.Guards(ctx, query)
		if err != nil {
			return nil, err
		}
		slices.SortFunc(l.Guards, func(a, b api.GuardSummary) int { return cmp.Compare(a.Name, b.Name) })
		return guardsData{
			Guards: l.Guards, Kind: query.Kind, Kinds: guard.Kinds,
			Next: nextPage(root+"/guards", filter, l.Cursor), First: query.Cursor == "",
		}, nil
	}, filter, nil
}

type guardData struct {
	api.Guard
	All    int               // members
	Shown  []api.GuardMember // by id; the other members are not kept, because a guard may have many
	Fit    int               // members that fit the filters
	State  string            // a filter: one of memberStates
	Prefix string            // a filter: of the member's id
	States []string
	sizes  map[string]int
	leases int64
}

// Size returns the number of members in a state; for notClosed, those whose breaker is not closed.
func (g guardData) Size(state string) int { return g.sizes[state] }

// Leases returns the number of leases that all members have together.
func (g guardData) Leases() int64 { return g.leases }

// Filtered reports whether the page has a filter for members.
func (g guardData) Filtered() bool { return g.State+g.Prefix != "" }

// Limit describes the rate limit that members have by default, such as "10 in any 1 s". A member
// may have its own limit.
func (g guardData) Limit() string {
	window := duration(float64(g.Spec.WindowMS) / 1000)
	switch g.Spec.Limiter {
	case "sliding":
		return count(g.Spec.Permits) + " in any " + window
	case "token":
		return count(g.Spec.Permits) + " per " + window + ", bursts of " + count(g.Spec.Burst)
	}
	return "none"
}

// Policy is the policy of the breakers in words.
func (g guardData) Policy() string {
	if g.Spec.Failures == 0 {
		return "none"
	}
	return fmt.Sprintf("opens after %s in a row for %s, closes after %s",
		plural(g.Spec.Failures, "failure", "failures"), duration(float64(g.Spec.OpenForMS)/1000),
		plural(g.Spec.Successes, "success", "successes"))
}

// IsLimiter reports whether the guard is a limiter, which has no members.
func (g guardData) IsLimiter() bool { return strings.HasPrefix(g.Name, "limiter/") }

// HasBreaker reports whether a member is known to have a breaker: from the guard's spec, or because
// it counts failures or is not closed. A member's own closed breaker without failures is not known.
func (g guardData) HasBreaker(m api.GuardMember) bool {
	return g.Spec.Failures > 0 || m.Failures > 0 || m.Breaker != "closed"
}

func (p guardPages) guard(r *http.Request) (view, error) {
	name, err := guardName(r.PathValue("name"))
	if err != nil {
		return view{}, err
	}
	read, filter, err := p.reader(name, r.URL.Query())
	if err != nil {
		return view{}, err
	}
	data, err := read(r.Context())
	topic := "guard:" + name + "?" + filter.Encode()
	return view{name: "guard", title: "Guard " + name, data: data, topic: topic}, err
}

// guardName checks the name of a guard from the path, and returns it as KIND/NAME. If the text
// can't be a name, the error is api.ErrNotFound.
func guardName(text string) (string, error) {
	kind, rest, ok := guard.ParseName(text)
	if !ok {
		return "", fmt.Errorf("guard %.128s: %w", strings.ToValidUTF8(text, "?"), api.ErrNotFound)
	}
	return kind + "/" + rest, nil
}

func (p guardPages) openGuard(ctx context.Context, arg string) (func(context.Context) (any, error), error) {
	text, query, _ := strings.Cut(arg, "?")
	name, err := guardName(text)
	if err != nil {
		return nil, err
	}
	q, err := url.ParseQuery(query)
	if err != nil {
		return nil, invalid("topics", "is malformed")
	}
	read, _, err := p.reader(name, q)
	if err != nil {
		return nil, err
	}
	_, err = read(ctx)
	return seldomIfLarge(read), unlessAway(err)
}

// seldomIfLarge wraps read, which reads a guard: it calls read only once per guardsInterval while
// the guard has more than manyMembers members.
func seldomIfLarge(read func(context.Context) (any, error)) func(context.Context) (any, error) {
	seldom, large := every(guardsInterval, read), false
	return func(ctx context.Context) (any, error) {
		next := read
		if large {
			next = seldom
		}
		data, err := next(ctx)
		if g, ok := data.(guardData); ok {
			large = g.All > manyMembers
		}
		return data, err
	}
}

// reader returns a function that reads the guard with this name, and the valid parameters of the
// query that filter its members.
func (p guardPages) reader(name string, q url.Values) (
	read func(context.Context) (any, error), filter url.Values, err error,
) {
	state := q.Get("state")
	if state != "" && !slices.Contains(memberStates, state) {
		return nil, nil, notOneOf("state", memberStates)
	}
	prefix, err := idOf(q, "prefix")
	if err != nil {
		return nil, nil, err
	}
	return func(ctx context.Context) (any, error) {
		g, err := p.backend.Guard(ctx, name)
		if err != nil {
			return nil, err
		}
		d := guardData{Guard: g, State: state, Prefix: prefix, States: memberStates, sizes: map[string]int{}}
		slices.SortFunc(d.Members, func(a, b api.GuardMember) int { return cmp.Compare(a.ID, b.ID) })
		for _, m := range d.Members {
			d.sizes[m.State]++
			d.leases += m.Held
			if m.Breaker != "closed" {
				d.sizes[notClosed]++
			}
			fits := state == "" || state == m.State || state == notClosed && m.Breaker != "closed"
			if !fits || !strings.HasPrefix(m.ID, prefix) {
				continue
			}
			if d.Fit++; d.Fit <= membersShown {
				d.Shown = append(d.Shown, m)
			}
		}
		d.All, d.Members = len(d.Members), nil
		return d, nil
	}, chosen(map[string]string{"state": state, "prefix": prefix}), nil
}

// control carries out the action of the pressed button on the guard's member in the path.
func (p guardPages) control(ctx context.Context, r *http.Request) (string, error) {
	name, err := guardName(r.PathValue("name"))
	if err != nil {
		return "", err
	}
	member, err := pathID(r, "id")
	if err != nil {
		return "", err
	}
	do := guard.Action(r.PostForm.Get("command"))
	if !slices.Contains(guard.Actions, do) {
		return "", notOneOf("command", guard.Actions)
	}
	to := root + "/guards/" + url.PathEscape(name) + "?done=guard-" + string(do)
	return to, p.backend.ControlGuard(ctx, name, member, do)
}
