package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// ActivityQuery selects a page of the activity log. An empty Actor or Tenant matches every entry.
type ActivityQuery struct {
	Actor  string    // the id of a key, or cli:USER
	Tenant string    // of the key
	Since  time.Time // the oldest time; zero: none
	Cursor string    // ActivityPage.Cursor of the page before; "" for the first page
	Limit  int       // 1 to 1,000; 0 for the server's default
}

// ActivityPage is a page of the activity log, newest first. Its Cursor is "" on the last page.
type ActivityPage = api.ActivityList

// Activity returns a page of the log of who changed what. If the API asks for keys, it must be that
// of an admin. A page may have fewer entries than q.Limit, even none, although more pages follow.
func (a *operatorAPI) Activity(ctx context.Context, q ActivityQuery) (ActivityPage, error) {
	c := apiCall{action: "list the activity log", method: http.MethodGet, path: "/v1/activity", query: url.Values{}}
	for name, value := range map[string]string{"actor": q.Actor, "tenant": q.Tenant, "cursor": q.Cursor} {
		if value != "" {
			c.query.Set(name, value)
		}
	}
	if !q.Since.IsZero() {
		c.query.Set("since", q.Since.UTC().Format(time.RFC3339Nano))
	}
	if q.Limit != 0 {
		c.query.Set("limit", strconv.Itoa(q.Limit))
	}
	return doJSON[ActivityPage](ctx, a.transport, c)
}
