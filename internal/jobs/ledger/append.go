package ledger

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var appendJobs = script("jobs/append", "blob", "signals", "tenants", "priority", "fair_queue", "non_ready")

// MaxAppend is the most jobs of one call of Append or AppendMany, MaxAppendBytes the most bytes of
// their payloads; their other fields are short and do not count. The callers keep to them: Append
// and AppendMany don't check.
const (
	MaxAppend      = 200
	MaxAppendBytes = 1 << 20
)

// NewJob is a job that enters a group. Its TraceParent is not the producer's, but the job's own
// trace context, "" if it is not sampled. Its key has no control characters.
type NewJob = messages.Job

// AppendMode says whether a call of Append is the last one of its submission. The last call needs
// no request id: once a submission has ended, the next such call is a duplicate.
type AppendMode string

// Modes of an Append.
const (
	AppendMore AppendMode = ""     // the submission goes on, or the jobs are not a part of one
	AppendLast AppendMode = "last" // the submission ends with these jobs
	AppendSeal AppendMode = "seal" // it ends with them, and the group is sealed
)

// SubmissionPrefix is the prefix of the request ids of a submission's pieces. The piece's number,
// from 0, follows it.
const SubmissionPrefix = "="

// ErrGap says that a failover has lost earlier pieces of a submission. The caller repeats the
// submission from its first piece: the pieces that Redis still has are duplicates.
var ErrGap = fmt.Errorf("%w: earlier pieces of the submission are missing: repeat it from the first",
	api.ErrUnavailable)

// EntryRequest returns how the request ids of the jobs begin that an entry of the main ingest
// stream adds, if its message has no id of its own: for the entry 5-1, the ids are @5-1#0, @5-1#1…
func EntryRequest(entry string) string { return "@" + entry }

// AppendArgs are the arguments of Append.
type AppendArgs struct {
	Group   string
	Request string // id by which a repeated call is recognized for some time; "": none
	Limit   int64  // most jobs of a group
	Mode    AppendMode
	Next    int64 // expected ordinal of the group's next job; if it is wrong, the script costs more
	Jobs    []NewJob
}

// AppendReply says which ordinals the jobs got: First and the N-1 behind it.
type AppendReply struct {
	First, N  int64
	Duplicate bool // the request was applied before; First and N are not known
	// Skipped are the jobs that were left out, by their number in the request from 0, because the
	// group has unique keys and another job has their key. They do not count in N. A duplicate with
	// a request id returns those of the first call.
	Skipped []int
}

// Append adds jobs to a group, all or none. They are waiting, or non-ready until their RunAt. A
// group that reaches its announced total is sealed. A group with unique keys gets no second job
// with the same key (see AppendReply).
//
// Twice: with a request id that is still stored, or with a mode, the second call reports a
// duplicate; without, it adds the jobs again. Errors:
//
//	ErrGap           earlier pieces of the submission are missing
//	api.ErrNotFound  there is no such group
//	api.ErrSealed    the group gets no more jobs
//	api.ErrConflict  the group would have more jobs than announced or allowed
func Append(ctx context.Context, c redis.Cmdable, p keyspace.Partition, a AppendArgs) (AppendReply, error) {
	one := []Request{{ID: a.Request, Jobs: a.Jobs}}
	results, err := appendAll(ctx, c, p, a, one)
	if err != nil {
		return AppendReply{}, err
	}
	return results[0].AppendReply, results[0].Err
}

// Request is the jobs that one HTTP request, or one message of the ingest stream, adds to a group,
// all or none. A repeated request is recognized by its id.
type Request struct {
	ID   string // as AppendArgs.Request; no piece of a submission
	Jobs []NewJob
}

// AppendResult is the result of one Request. Err is nil, or one of the errors that Append lists.
type AppendResult struct {
	AppendReply
	Err error
}

// AppendMany adds the jobs of several requests to one group, in order, each like an Append of its
// own: some may be refused and others accepted. limit and next are as in AppendArgs. The results
// are in the order of the requests. An error is of the whole call: the jobs may have been added or
// not. Twice: as Append.
func AppendMany(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition,
	group string, limit, next int64, requests []Request,
) ([]AppendResult, error) {
	return appendAll(ctx, c, p, AppendArgs{Group: group, Limit: limit, Next: next}, requests)
}

func appendAll(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, a AppendArgs, requests []Request,
) ([]AppendResult, error) {
	r := run(ctx, c, appendJobs, p, appendArguments(a, requests)...)
	results := make([]AppendResult, len(requests))
	for i := range requests {
		results[i] = appendResult(r.List(), a.Group, a.Limit, &requests[i])
	}
	return call.Done(r, results)
}

// largePayload is the size in bytes of the largest payload that is a part of the blob: LARGE in
// append.lua. A larger one is stored in payloads:GROUP.
const largePayload = 4096

func appendArguments(a AppendArgs, requests []Request) []any {
	ready, jobs, bytes := "ready", 0, 0
	for i := range requests {
		for j := range requests[i].Jobs {
			job := &requests[i].Jobs[j]
			if job.Type != "" || job.RunAt != nil || len(job.Payload) > largePayload {
				ready = ""
			}
			bytes += queuedSize(job)
		}
		jobs += len(requests[i].Jobs)
	}
	args := make([]any, 0, 5+2*len(requests)+4*jobs)
	args = append(args, a.Group, a.Limit, string(a.Mode), ready, len(requests))
	for i := range requests {
		args = append(args, requests[i].ID, len(requests[i].Jobs))
	}
	if ready != "" {
		return appendBlobs(args, a.Next, requests, bytes)
	}
	for i := range requests {
		for j := range requests[i].Jobs {
			job := &requests[i].Jobs[j]
			at := int64(0)
			if job.RunAt != nil {
				at = job.RunAt.UnixMilli()
			}
			payload := appendFields(slices.Clip(job.Payload), job)
			args = append(args, job.Type, at, job.TraceParent, payload)
		}
	}
	return args
}

// appendBlobs appends the queued blobs of all jobs to args; the first job has the ordinal next. The
// blobs are in one buffer of about the given number of bytes.
func appendBlobs(args []any, next int64, requests []Request, bytes int) []any {
	all := make([]byte, 0, bytes)
	compose := newComposer(time.Now())
	for i := range requests {
		for j := range requests[i].Jobs {
			job, first := &requests[i].Jobs[j], len(all)
			all = compose.append(all, next, job)
			args = append(args, all[first:len(all):len(all)])
			next++
		}
	}
	return args
}

func appendResult(r *call.Reply, group string, limit int64, request *Request) AppendResult {
	piece := strings.TrimPrefix(request.ID, SubmissionPrefix)
	if err := refused(r, appendJobs, group, limit, len(request.Jobs), piece); err != nil {
		return AppendResult{Err: err}
	}
	var a AppendReply
	switch r.Code("OK", "DUP") {
	case "OK":
		a.First, a.N = r.Number(), r.Number()
	case "DUP":
		a.Duplicate = true
	}
	if r.More() {
		a.Skipped = jobNumbers(r.Text())
	}
	return AppendResult{AppendReply: a}
}

// jobNumbers reads numbers that commas divide.
func jobNumbers(list string) (numbers []int) {
	if list == "" {
		return nil
	}
	for text := range strings.SplitSeq(list, ",") {
		numbers = append(numbers, int(integer(text)))
	}
	return numbers
}
