package ingest

import (
	"context"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/groups"
	"github.com/bulkaction/bulkaction/internal/httpapi"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// backend is the store as the API wants it.
type backend struct{ *groups.Store }

func (b backend) Submit(ctx context.Context, g *messages.SubmitGroup, o httpapi.SubmitOptions) (api.Accepted, error) {
	return b.Store.Submit(ctx, g, groups.Origin{IdempotencyKey: o.IdempotencyKey, MadeUpID: o.MadeUpID, TraceParent: o.TraceParent, At: time.Now()})
}

func (b backend) Append(ctx context.Context, group string, jobs []messages.Job, o httpapi.AppendOptions) error {
	return b.Store.Append(ctx, group, jobs, o.RequestID, groups.Origin{TraceParent: o.TraceParent, At: time.Now()})
}

func (b backend) Groups(ctx context.Context, q httpapi.ListQuery) (api.GroupList, error) {
	return b.Store.Groups(ctx, groups.ListQuery(q))
}
