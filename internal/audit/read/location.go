package read

import (
	"context"
	"encoding/json"
	"strconv"
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

// ParseFailure returns the ordinal and the attempt of the job in the record of a failure. A record
// is the error, a line break, and the job in the form in which the next round can run it. field is
// the record's field in the hash of failures. ok is false if the record is no failure of this
// group, or not of the job that the field names.
func ParseFailure(group, field, record string) (ordinal int64, attempt int, ok bool) {
	_, blob, ok := strings.Cut(record, "\n")
	d, err := ledger.ParseJob(blob)
	return d.Ordinal, d.Attempt, ok && err == nil && d.Group == group && strconv.FormatInt(d.Ordinal, 10) == field
}

// ParseResultLine returns the ordinal of a result line; ok is false if the line is no result.
func ParseResultLine(line string) (int64, bool) {
	if rest, ok := strings.CutPrefix(line, `{"ordinal":`); ok { // the form that workers write
		if end := strings.IndexAny(rest, ",}"); end > 0 {
			if n, err := strconv.ParseInt(rest[:end], 10, 64); err == nil && n >= 0 {
				return n, true
			}
		}
	}
	var r struct{ Ordinal *int64 }
	if json.Unmarshal([]byte(line), &r) != nil || r.Ordinal == nil || *r.Ordinal < 0 {
		return 0, false
	}
	return *r.Ordinal, true
}

// ErrorCode returns the error code in a failure's record; "" if the record can't be read.
func ErrorCode(record string) string {
	head, _, _ := strings.Cut(record, "\n")
	var e struct{ Code string }
	if json.Unmarshal([]byte(head), &e) != nil {
		return ""
	}
	return e.Code
}

// Text returns a value of a Redis reply as a string; "" if it is nil or no string.
func Text(v any) string { s, _ := v.(string); return s }

// Int returns a value of a Redis reply as a number; 0 if it is missing or not a number.
func Int(v any) int64 {
	n, _ := strconv.ParseInt(Text(v), 10, 64)
	return n
}

// AnyPartition returns a SCAN pattern that matches a key in any partition. ofZero is the
// pattern for partition 0.
func AnyPartition(ofZero string) string {
	before, after, _ := strings.Cut(ofZero, "{0}")
	escaped := strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(before)
	return escaped + "{*}" + after
}
