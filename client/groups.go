package client

import (
	"context"
	"iter"
	"net/url"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// GroupFilter selects the groups that match all fields. An empty field matches every group.
type GroupFilter struct {
	Tenant string
	Status api.Status
	Type   string    // the group's type, or that of one of its jobs
	Paused *bool     // whether the group itself is paused; a pause of its tenant or type does not count
	Prefix string    // the beginning of the id
	Since  time.Time // the group was created then or later
}

// Groups iterates over groups, newest first, and fetches one page after the other. With a Status
// and without a Tenant, the newest is the group that was opened or has ended last, except for
// CANCELLED; otherwise it is the one that was created last. An error ends the iteration.
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
	if !f.Since.IsZero() {
		query.Set("since", f.Since.UTC().Format(time.RFC3339Nano))
	}
	return pages(ctx, a.transport, "groups", query,
		func(l api.GroupList) ([]api.Group, string) { return l.Groups, l.Cursor })
}
