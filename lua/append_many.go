package lua

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Request is what one message brings to a group: stored whole or not at all. Its id makes a repeated one harmless.
type Request struct {
	ID   string // as AppendArgs.Request, but no piece of a submission
	Jobs []NewJob
}

// AppendResult is what became of a Request; Err as Append's.
type AppendResult struct {
	AppendReply
	Err error
}

// AppendMany stores what several requests bring to one group, in order, each as if by an Append of its own. Together they have
// at most MaxAppend jobs and MaxAppendBytes of payload. The error is of the call as a whole: it may have been carried
// out or not, and may be repeated.
func AppendMany(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, limit int64, requests []Request) ([]AppendResult, error) {
	out := make([]AppendResult, len(requests))
	for i, r := range requests {
		reply, err := Append(ctx, c, p, AppendArgs{Group: group, Request: r.ID, Limit: limit, Jobs: r.Jobs})
		if err != nil && !errors.Is(err, api.ErrNotFound) && !errors.Is(err, api.ErrSealed) && !errors.Is(err, api.ErrConflict) {
			return nil, err
		}
		out[i] = AppendResult{AppendReply: reply, Err: err}
	}
	return out, nil
}
