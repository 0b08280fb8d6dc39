package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"

	"github.com/bulkaction/bulkaction/api"
)

// RejectedQuery selects a page of rejected messages.
type RejectedQuery struct {
	Cursor string // RejectedPage.Cursor of the page before; "" for the first page
	Limit  int    // 1 to 1,000; 0 for the server's default
	Data   bool   // the messages have their data
}

// RejectedPage is a page of rejected messages, newest first. Its Cursor is "" on the last page.
type RejectedPage = api.RejectedList

// Rejected returns a page of the messages that ingest could not accept, with the reasons. A page
// may have fewer messages than q.Limit although more pages follow.
func (a *operatorAPI) Rejected(ctx context.Context, q RejectedQuery) (RejectedPage, error) {
	c := apiCall{action: "list rejected messages", method: http.MethodGet, path: "/v1/rejected", query: url.Values{}}
	if q.Cursor != "" {
		c.query.Set("cursor", q.Cursor)
	}
	if q.Limit != 0 {
		c.query.Set("limit", strconv.Itoa(q.Limit))
	}
	if q.Data {
		c.query.Set("data", "true")
	}
	return doJSON[RejectedPage](ctx, a.transport, c)
}
