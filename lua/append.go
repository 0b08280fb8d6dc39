package lua

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var appendJobs = script("append")

// MaxAppend is the most jobs that one call takes, MaxAppendBytes the most bytes of payload.
const (
	MaxAppend      = 200
	MaxAppendBytes = 1 << 20
)

// NewJob is a job that enters a group.
type NewJob struct {
	Type    string // the group's when empty
	RunAt   time.Time
	Trace   string // traceparent, "" when the job is not sampled
	Payload []byte
}

// AppendMode says whether a submission ends with these jobs; such a call needs no request id.
type AppendMode string

// Modes of an Append.
const (
	AppendMore AppendMode = ""
	AppendLast AppendMode = "last"
	AppendSeal AppendMode = "seal" // and the group takes no more jobs
)

// SubmissionPrefix begins the request ids of a submission's pieces; their numbers follow, from 0.
const SubmissionPrefix = "="

// ErrGap says that a failover has lost earlier pieces of a submission. From the first one on, each that is there is taken for a repetition.
var ErrGap = fmt.Errorf("%w: earlier pieces of the submission are missing: repeat it from the first", api.ErrUnavailable)

// EntryRequest is the request id of an entry of the ingest stream.
func EntryRequest(entry string) string { return "@" + entry }

// AppendArgs are jobs of one group. Request makes a repeated call harmless.
type AppendArgs struct {
	Group   string
	Request string
	Limit   int64 // most jobs of a group
	Mode    AppendMode
	Jobs    []NewJob
}

// AppendReply says which ordinals the jobs got.
type AppendReply struct {
	First, N  int64
	Duplicate bool // the request was applied before; First and N are unknown
}

// Append stores jobs. Errors: ErrGap, api.ErrNotFound, api.ErrSealed, api.ErrConflict (more jobs than announced or allowed).
func Append(ctx context.Context, c redis.Cmdable, p keyspace.Partition, a AppendArgs) (AppendReply, error) {
	plain := true
	for i := range a.Jobs {
		j := &a.Jobs[i]
		plain = plain && j.Type == "" && j.RunAt.IsZero() && j.Trace == ""
	}
	args := make([]any, 0, 5+4*len(a.Jobs))
	args = append(args, a.Group, a.Request, a.Limit, string(a.Mode))
	if plain {
		args = append(args, "plain")
	} else {
		args = append(args, "")
	}
	for i := range a.Jobs {
		j := &a.Jobs[i]
		if plain {
			args = append(args, j.Payload)
			continue
		}
		at := int64(0)
		if !j.RunAt.IsZero() {
			at = j.RunAt.UnixMilli()
		}
		args = append(args, j.Type, at, j.Trace, j.Payload)
	}
	r, err := run(ctx, c, appendJobs, p, args...)
	if err != nil {
		return AppendReply{}, err
	}
	switch r.str(0) {
	case "OK":
		return AppendReply{First: r.num(1), N: r.num(2)}, nil
	case "DUP":
		return AppendReply{Duplicate: true}, nil
	case "GAP":
		return AppendReply{}, fmt.Errorf("group %s: piece %s: %d are there: %w", a.Group, strings.TrimPrefix(a.Request, SubmissionPrefix), r.num(1), ErrGap)
	case "NOGROUP":
		return AppendReply{}, fmt.Errorf("group %s: %w", a.Group, api.ErrNotFound)
	case "SEALED":
		return AppendReply{}, fmt.Errorf("group %s is %s and takes no more jobs: start another group: %w", a.Group, r.str(1), api.ErrSealed)
	case "TOTAL":
		return AppendReply{}, fmt.Errorf("group %s: %d jobs were announced, %d are there, %d more are too many: %w", a.Group, r.num(1), r.num(2), len(a.Jobs), api.ErrConflict)
	case "LIMIT":
		return AppendReply{}, fmt.Errorf("group %s: a group holds at most %d jobs, %d are there: start another group: %w", a.Group, a.Limit, r.num(1), api.ErrConflict)
	}
	return AppendReply{}, fmt.Errorf("script append: unknown reply %q", r.str(0))
}
