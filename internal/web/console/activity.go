package console

import (
	"net/http"
	"strings"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const (
	activityOnPage = 50
	maxActor       = 256 // most bytes of the filter for an actor
)

// activityPage shows the activity log.
type activityPage struct {
	log httpapi.Activity // nil: there is none
}

// activityData is the data of the page of the activity log.
type activityData struct {
	Off      bool // there is no log
	Entries  []activityRow
	Actor    string
	Tenant   string
	Since    string // a day
	Scanned  int
	Next     string // path of the next page
	First    bool   // this is the first page
	Filtered bool
}

type activityRow struct {
	api.Activity
	Was, Is string // what the action changes, before and after it
}

func (p activityPage) view(r *http.Request) (view, error) {
	v := view{name: "activity", title: "Activity", data: activityData{Off: true}}
	if p.log == nil {
		return v, nil
	}
	q := r.URL.Query()
	query := activity.Query{Actor: strings.TrimSpace(q.Get("actor")), Limit: activityOnPage}
	var err error
	if query.Tenant, err = idOf(q, "tenant"); err != nil {
		return view{}, err
	}
	if query.Cursor, err = cursorOf(q); err != nil {
		return view{}, err
	}
	if query.Since, err = dayOf(q, "since"); err != nil {
		return view{}, err
	}
	switch {
	case len(query.Actor) > maxActor:
		return view{}, invalid("actor", "must be at most %d bytes", maxActor)
	case query.Cursor != "" && !activity.ValidCursor(query.Cursor):
		return view{}, invalid("cursor", "must be the cursor of an earlier page")
	}
	l, err := p.log.Read(r.Context(), query)
	if err != nil {
		return view{}, err
	}
	d := activityData{
		Actor: query.Actor, Tenant: query.Tenant, Since: q.Get("since"), Scanned: l.Scanned,
		First: query.Cursor == "", Next: nextPage(root+"/activity", q, l.Cursor),
		Filtered: query.Actor+query.Tenant != "" || !query.Since.IsZero(),
	}
	for _, e := range l.Activity {
		d.Entries = append(d.Entries, activityRow{e, shortened(string(e.Before)), shortened(string(e.After))})
	}
	v.data = d
	return v, nil
}
