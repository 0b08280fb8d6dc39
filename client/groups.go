package client

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// GroupFilter selects the groups that match all fields. An empty field matches every group.
type GroupFilter struct {
	Tenant string
	Status api.Status
	Type   string // the group's type, or that of one of its jobs
	Paused *bool  // whether the group itself is paused; a pause of its tenant or type does not count
	// FailedJobs is whether at least one job of the group has failed. A group with few failed jobs
	// is COMPLETED, not FAILED.
	FailedJobs *bool
	Prefix     string    // the beginning of the id
	Since      time.Time // the group was created then or later
}

// Groups iterates over groups, newest first, and fetches one page after the other. The newest group
// is the one that was created last. With a Status other than CANCELLED and without a Tenant, it is
// the one that was opened or has ended last. An error ends the iteration.
func (a *API) Groups(ctx context.Context, f GroupFilter) iter.Seq2[api.Group, error] {
	query := url.Values{}
	for name, value := range map[string]string{
		"tenant": f.Tenant, "status": string(f.Status), "type": f.Type, "prefix": f.Prefix,
	} {
		if value != "" {
			query.Set(name, value)
		}
	}
	if f.Paused != nil {
		query.Set("paused", strconv.FormatBool(*f.Paused))
	}
	if f.FailedJobs != nil {
		query.Set("failed_jobs", strconv.FormatBool(*f.FailedJobs))
	}
	if !f.Since.IsZero() {
		query.Set("since", f.Since.UTC().Format(time.RFC3339Nano))
	}
	return pages(ctx, a.transport, "groups", query,
		func(l api.GroupList) ([]api.Group, string) { return l.Groups, l.Cursor })
}

// FailureQuery selects a page of the failed jobs of a group.
type FailureQuery struct {
	Code     string // only jobs that failed with this code; "": all
	Payloads bool   // with the payloads of the jobs
	Cursor   string // FailurePage.Cursor of the page before; "" for the first page
	Limit    int    // 1 to 1,000; 0 for the server's default
}

// FailurePage is a page of failed jobs, in the order of their ordinals. Its Cursor is "" on the
// last page.
type FailurePage struct {
	Failures []api.Failure
	Cursor   string
}

// FailurePage returns a page of the group's failed jobs. A page may have fewer jobs than q.Limit,
// even none, although more pages follow.
func (a *API) FailurePage(ctx context.Context, group string, q FailureQuery) (page FailurePage, err error) {
	c := callOn("list failures of", http.MethodGet, "group", group, "/failures")
	c.query = url.Values{"cursor": {q.Cursor}}
	if q.Limit != 0 {
		c.query.Set("limit", strconv.Itoa(q.Limit))
	}
	if q.Code != "" {
		c.query.Set("code", q.Code)
	}
	if q.Payloads {
		c.query.Set("payload", "true")
	}
	resp, err := a.do(ctx, c)
	if err != nil {
		return page, err
	}
	defer resp.Body.Close()
	defer drain(resp.Body)
	d := json.NewDecoder(resp.Body)
	for d.More() {
		var f api.Failure
		if err := d.Decode(&f); err != nil {
			return page, fmt.Errorf("%s: read answer: %w", c.action, err)
		}
		page.Failures = append(page.Failures, f)
	}
	page.Cursor = nextCursor(resp.Header.Get("Link"))
	return page, nil
}

// nextCursor returns the cursor in the header Link of a page; "" on the last page.
func nextCursor(link string) string {
	target, rest, _ := strings.Cut(strings.TrimPrefix(link, "<"), ">")
	u, err := url.Parse(target)
	if err != nil || !strings.Contains(rest, `rel="next"`) {
		return ""
	}
	return u.Query().Get("cursor")
}

// FailureSummary counts the group's failed jobs by error code and, as far as the API key may see
// payloads, up to 5,000 of them by what their errors have in common.
func (a *API) FailureSummary(ctx context.Context, group string) (api.FailureSummary, error) {
	return doJSON[api.FailureSummary](ctx, a.transport,
		callOn("summarize failures of", http.MethodGet, "group", group, "/failures/summary"))
}

// JobMap divides the group's jobs by ordinal into ranges, and counts the jobs of each range by
// state. buckets is the number of ranges, 1 to 1,000; a group with fewer jobs has a range for each
// job. The answer may be two seconds old.
func (a *API) JobMap(ctx context.Context, group string, buckets int) (api.JobMap, error) {
	c := callOn("map jobs of", http.MethodGet, "group", group, "/map")
	c.query = url.Values{"buckets": {strconv.Itoa(buckets)}}
	return doJSON[api.JobMap](ctx, a.transport, c)
}
