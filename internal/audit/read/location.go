package read

import (
	"context"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Job identifies a job. The zero Job stands for elements that can't be read as a job.
type Job struct {
	Group   string
	Ordinal int64
}

// Names of locations, as [ledger.Misplaced] has them.
const (
	Queue     = "queue"     // of a group, one for each type
	NonReady  = "non-ready" // of a tenant
	Suspended = "suspended" // of a tenant
	Ready     = "ready"     // the ready stream of a type
	Failures  = "failures"  // of a group
	Results   = "results"   // the results stream
	// ResultLines is the name of the location that is the list of a group's result lines; no repair
	// changes it.
	ResultLines = "result lines"
)

// Location identifies a key that holds jobs or their results.
type Location struct {
	Name  string // one of the constants above
	Owner string // the group, tenant or type; "" for the results stream
	Type  string // the type of a queue; for failures the ordinal, "" for all unreadable ones
}

// NonReadyOf returns the two locations of a tenant's non-ready jobs.
func NonReadyOf(tenant string) [2]Location {
	return [2]Location{{Name: NonReady, Owner: tenant}, {Name: Suspended, Owner: tenant}}
}

// Key returns the location's key.
func (at Location) Key(p keyspace.Partition) string {
	switch at.Name {
	case Queue:
		return p.Queue(at.Owner, at.Type)
	case NonReady:
		return p.NonReadyOf(at.Owner)
	case Suspended:
		return p.SuspendedOf(at.Owner)
	case Ready:
		return p.Ready(at.Owner)
	case Failures:
		return p.Failures(at.Owner)
	case Results:
		return p.ResultStream()
	}
	return p.Results(at.Owner)
}

// UnknownAttempt is an Element's Attempt if the location doesn't record the attempt of its jobs.
const UnknownAttempt = -1

// Element is one element of a location: a job, its failure or its result, or something that can't
// be read as one of these.
type Element struct {
	Job             // the zero Job if the element can't be read
	Readable bool   // whether the element is what belongs at such a location
	ID       string // the element itself, its entry's id in a stream, its field in a hash; "": a result line
	Attempt  int    // or UnknownAttempt
	Type     string // of the job; "" where the location doesn't say it
}

// element returns an element that is readable if ok is set.
func element(id, group string, ordinal int64, attempt int, typ string, ok bool) Element {
	if !ok {
		return Element{ID: id}
	}
	return Element{Job: Job{group, ordinal}, Readable: true, ID: id, Attempt: attempt, Type: typ}
}

// Elements calls fn with each element of a location; of a list only with the first n, of a queue
// perhaps with some more. Other clients may change the location meanwhile. An element that stays
// there is yielded once, but in a sorted set or hash perhaps more often.
func (r Reader) Elements(
	ctx context.Context, p keyspace.Partition, at Location, n int64, fn func(Element) error,
) error {
	key := at.Key(p)
	moving := func(id, blob string) error {
		d, err := ledger.ParseJob(blob)
		return fn(element(id, d.Group, d.Ordinal, d.Attempt, d.Type, err == nil))
	}
	results := func(id, group, lines string) error {
		for line := range strings.SplitSeq(lines, "\n") {
			ordinal, ok := ParseResultLine(line)
			if err := fn(element(id, group, ordinal, UnknownAttempt, "", ok)); err != nil {
				return err
			}
		}
		return nil
	}
	switch at.Name {
	case Queue:
		return r.ReadQueue(ctx, key, n, func(blob string) error {
			ordinal, ok := ledger.QueuedOrdinal(blob)
			return fn(element(blob, at.Owner, ordinal, UnknownAttempt, at.Type, ok))
		})
	case NonReady, Suspended:
		return r.ScanMembers(ctx, key, func(blob string) error { return moving(blob, blob) })
	case Ready:
		return r.ReadStream(ctx, key, func(e redis.XMessage) error {
			return moving(e.ID, ledger.MessageBlob(e.Values))
		})
	case Results:
		return r.ReadStream(ctx, key, func(e redis.XMessage) error {
			return results(e.ID, Text(e.Values["g"]), Text(e.Values["l"]))
		})
	case Failures:
		return r.ScanHash(ctx, key, func(field, record string) error {
			ordinal, attempt, ok := ParseFailure(at.Owner, field, record)
			return fn(element(field, at.Owner, ordinal, attempt, "", ok))
		})
	}
	return r.ReadList(ctx, key, n, func(chunk string) error { return results("", at.Owner, chunk) })
}
