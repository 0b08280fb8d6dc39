package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// KeptErrors is the most errors of a job that errors:GROUP keeps, and the most that a JobStatus
// has: those of the job's latest attempts in this round that have ended with an error.
const KeptErrors = 3

// JobError is the record of an attempt that ended with an error or was deferred. Scripts write it
// as JSON to errors:GROUP and failures:GROUP.
type JobError struct {
	Ordinal  int64  `json:"ordinal"`
	Code     string `json:"code"`
	Error    string `json:"error"`
	Attempts int    `json:"attempts"`
	At       int64  `json:"at"`     // ms
	Until    int64  `json:"until"`  // due time of the next attempt, ms; 0: there is none
	Reason   string `json:"reason"` // a Reason, why the job became non-ready
	Letter   string `json:"letter"` // the entry of a failed job in the dead letters
	Key      string `json:"-"`      // the job's key, in a record of a failed job; "": it has none
	Payload  string `json:"-"`      // the job's payload, in such a record; "": it is stored separately
	Trace    string `json:"-"`      // the job's traceparent, in such a record; "": it was not sampled
	Job      *Job   `json:"-"`      // the job, in such a record
}

// Time returns when the attempt ended, from the field At.
func (e *JobError) Time() time.Time { return time.UnixMilli(e.At).UTC() }

// parseFailure reads a record of failures:GROUP: the error as JSON, a newline, and the job's moving
// blob.
func parseFailure(record string) (JobError, error) {
	text, blob, _ := strings.Cut(record, recordSeparator)
	e, err := parseJobError(text)
	if j, bad := ParseJob(blob); bad == nil {
		e.Trace, e.Payload, e.Key, e.Job = j.Trace, j.Payload, j.Key(), &j
	}
	return e, err
}

func parseJobError(text string) (JobError, error) {
	var e JobError
	if err := json.Unmarshal([]byte(text), &e); err != nil {
		return e, fmt.Errorf("read error record: %w", err)
	}
	return e, nil
}

// parseJobErrors decodes one record of errors:GROUP, the errors of a job. It skips bad lines.
func parseJobErrors(record string) []JobError {
	var all []JobError
	for line := range strings.SplitSeq(record, recordSeparator) {
		if e, err := parseJobError(line); err == nil {
			all = append(all, e)
		}
	}
	return all
}

// withoutDeferrals removes the deferrals from errs.
func withoutDeferrals(errs []JobError) []JobError {
	return slices.DeleteFunc(errs, func(e JobError) bool { return e.Reason == string(ReasonResource) })
}

// JobStatus is a job's state and its last errors.
type JobStatus struct {
	State State
	// Errors are the errors of the job's latest attempts in this round, at most KeptErrors, newest
	// first. Only the first one may be a deferral. A done job has none.
	Errors []JobError
}

// LastError returns the newest record of Errors, which may be a deferral; nil if there is none.
func (s JobStatus) LastError() *JobError {
	if len(s.Errors) == 0 {
		return nil
	}
	return &s.Errors[0]
}

// ReadJob reads a job's state and last errors in one round trip. Errors: api.ErrNotFound.
func ReadJob(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64,
) (JobStatus, error) {
	field := strconv.FormatInt(ordinal, 10)
	var state, failure, errs *redis.StringCmd
	// Each reply has the error of the pipeline or its own.
	_, _ = c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		state = pipe.GetRange(ctx, p.States(group), StateBytes*ordinal, StateBytes*ordinal+StateBytes-1)
		failure = pipe.HGet(ctx, p.Failures(group), field)
		errs = pipe.HGet(ctx, p.Errors(group), field)
		return nil
	})
	for _, cmd := range []*redis.StringCmd{state, failure, errs} {
		if err := cmd.Err(); err != nil && !errors.Is(err, redis.Nil) {
			return JobStatus{}, fmt.Errorf("read job %s.%d: %w", group, ordinal, err)
		}
	}
	if len(state.Val()) != StateBytes {
		return JobStatus{}, fmt.Errorf("job %s.%d: %w", group, ordinal, api.ErrNotFound)
	}
	return JobStatus{State: State(state.Val()), Errors: parseErrors(failure.Val(), errs.Val())}, nil
}

// FindKey returns the ordinal of the job with a key; -1 if the group has no such job. unique says
// whether the group has unique keys: without them there is no index, and the ordinal is -1.
func FindKey(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group, key string,
) (ordinal int64, unique bool, err error) {
	var asked, found *redis.StringCmd
	_, _ = c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		asked = pipe.HGet(ctx, p.Group(group), groupUniqueKeys)
		found = pipe.HGet(ctx, p.KeyIndex(group), key)
		return nil
	})
	for _, cmd := range []*redis.StringCmd{asked, found} {
		if err := cmd.Err(); err != nil && !errors.Is(err, redis.Nil) {
			return -1, false, fmt.Errorf("find a key in group %s: %w", group, err)
		}
	}
	if found.Val() == "" {
		return -1, asked.Val() != "", nil
	}
	return integer(found.Val()), true, nil
}

// ListedJob is a job of a list, with its ordinal.
type ListedJob struct {
	Ordinal int64
	JobStatus
}

// listPieces is how many pieces of a group's states one call of ListJobs reads at most: together 1
// MiB, the states of 524,288 jobs.
const listPieces = 16

// ListJobs returns jobs of a group from ordinal from on, `most` at most; with a state, named as in
// the API, only jobs in this state. One call looks at listPieces pieces of the states at most, so
// it may return fewer than `most` jobs before the end. next is the ordinal for the next call, -1 at
// the end of the group.
func ListJobs(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group, state string, from int64, most int,
) (jobs []ListedJob, next int64, err error) {
	const piece = 64 << 10 // bytes
	next = from
	for range listPieces {
		at := next * StateBytes
		states, err := c.GetRange(ctx, p.States(group), at, at+piece-1).Result()
		if err != nil {
			return nil, 0, fmt.Errorf("list jobs of group %s: %w", group, err)
		}
		n := int64(len(states)) / StateBytes
		for i := range n {
			s := StateAt(states, i)
			if word := s.Letter().Word(); word == "" || state != "" && word != state {
				continue
			}
			if len(jobs) == most {
				return jobs, next + i, readErrors(ctx, c, p, group, jobs)
			}
			jobs = append(jobs, ListedJob{Ordinal: next + i, JobStatus: JobStatus{State: s}})
		}
		if next += n; n < piece/StateBytes {
			return jobs, -1, readErrors(ctx, c, p, group, jobs)
		}
	}
	return jobs, next, readErrors(ctx, c, p, group, jobs)
}

// HasCode reports whether failed jobs of a group have an error code.
func HasCode(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group, code string) (bool, error) {
	n, err := c.HExists(ctx, p.Codes(group), code).Result()
	if err != nil {
		return false, fmt.Errorf("look for an error code of group %s: %w", group, err)
	}
	return n, nil
}

// readErrors reads the last errors of jobs of one group, in one round trip, and sets their Errors.
func readErrors(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, jobs []ListedJob,
) error {
	if len(jobs) == 0 {
		return nil
	}
	ordinals := make([]string, len(jobs))
	for i, j := range jobs {
		ordinals[i] = strconv.FormatInt(j.Ordinal, 10)
	}
	var failures, errs *redis.SliceCmd
	_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		failures = pipe.HMGet(ctx, p.Failures(group), ordinals...)
		errs = pipe.HMGet(ctx, p.Errors(group), ordinals...)
		return nil
	})
	if err != nil {
		return fmt.Errorf("read errors of group %s: %w", group, err)
	}
	for i := range jobs {
		jobs[i].Errors = parseErrors(values(failures.Val()).str(i), values(errs.Val()).str(i))
	}
	return nil
}

// parseErrors returns the last errors of a job from its records in failures:GROUP and errors:GROUP.
// It leaves out what it can't read.
func parseErrors(failure, earlier string) []JobError {
	errs := parseJobErrors(earlier)
	if failure == "" {
		return errs
	}
	errs = withoutDeferrals(errs)
	if e, err := parseFailure(failure); err == nil {
		errs = slices.Insert(errs, 0, e)
	}
	return errs[:min(len(errs), KeptErrors)]
}

// ReadLetter reads the state letter of a job; 0 for an unknown job.
func ReadLetter(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64,
) (Letter, error) {
	letter, err := c.GetRange(ctx, p.States(group), StateBytes*ordinal, StateBytes*ordinal).Result()
	return letterOf(letter), err
}

// CountWaiting counts a group's waiting jobs whose ordinal is below before. It reads the states in
// pieces of 32,768 jobs.
func CountWaiting(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, before int64,
) (int64, error) {
	const piece = 64 << 10 // bytes
	n, end := int64(0), StateBytes*before
	for from := int64(0); from < end; from += piece {
		states, err := c.GetRange(ctx, p.States(group), from, min(from+piece, end)-1).Result()
		if err != nil {
			return 0, err
		}
		for i := 0; i < len(states); i += StateBytes {
			if Letter(states[i]) == Waiting {
				n++
			}
		}
	}
	return n, nil
}

// JobRef names a job.
type JobRef struct {
	Group   string
	Ordinal int64
}

// Payloads reads the large payloads of jobs, which are in payloads:GROUP and not in the jobs'
// blobs, in one round trip. A payload that is lost is "".
func Payloads(ctx context.Context, c redis.Cmdable, p keyspace.Partition, jobs []JobRef) ([]string, error) {
	reads, err := pipelined(ctx, c, jobs, func(pipe redis.Pipeliner, j JobRef) *redis.SliceCmd {
		return pipe.HMGet(ctx, p.Payloads(j.Group), strconv.FormatInt(j.Ordinal, 10))
	})
	if err != nil {
		return nil, fmt.Errorf("read payloads: %w", err)
	}
	payloads := make([]string, len(jobs))
	for i, read := range reads {
		payloads[i] = values(read.Val()).str(0)
	}
	return payloads, nil
}

// NonReadyJob is what the element of a non-ready or suspended job says about it.
type NonReadyJob struct {
	Ordinal int64
	Type    string
	Due     time.Time // of a suspended job: when it was suspended, or the latest resumption
	Reason  Reason
	Key     string // "": it has none
	Job     *Job
}

// FindNonReady finds a job of a group among its tenant's non-ready and suspended jobs; with
// [NextJob], the group's job that is due first. It returns false when it finds no such job. It
// scans all of the tenant's jobs, 1,000 with each command, because they are not ordered by group.
func FindNonReady(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant, group string, ordinal int64,
) (first NonReadyJob, found bool, err error) {
	pattern := group + "|*"
	if ordinal >= 0 {
		pattern = group + "|*|" + strconv.FormatInt(ordinal, 10) + "|*"
	}
	lowest := math.Inf(1) // score of first
	for _, key := range []string{p.NonReadyOf(tenant), p.SuspendedOf(tenant)} {
		for job, err := range scan(func(cursor uint64) *redis.ScanCmd {
			return c.ZScan(ctx, key, cursor, pattern, 1000)
		}) {
			if err != nil {
				return first, false, err
			}
			j, err := ParseJob(job[0])
			if err != nil || j.Group != group || ordinal >= 0 && j.Ordinal != ordinal {
				continue
			}
			score, err := strconv.ParseFloat(job[1], 64)
			if err != nil || score >= lowest {
				continue
			}
			lowest, found = score, true
			first = NonReadyJob{
				Ordinal: j.Ordinal, Type: j.Type, Due: time.UnixMilli(int64(score)), Reason: j.Reason, Key: j.Key(),
				Job: &j,
			}
			if ordinal >= 0 {
				break
			}
		}
	}
	return first, found, nil
}

// DueBefore counts a tenant's non-ready jobs that are due before a time, without suspended ones.
func DueBefore(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, at time.Time,
) (int64, error) {
	return c.ZCount(ctx, p.NonReadyOf(tenant), "-inf", "("+strconv.FormatInt(at.UnixMilli(), 10)).Result()
}

// ReadyJob is a job in a ready stream. It may be in flight.
type ReadyJob struct {
	Ordinal int64
	Type    string
	ID      string // of its entry
	Before  int64  // entries before it that no worker process has read; 0 if one has read it
	Key     string // "": it has none
	Job     *Job
}

// FindReady finds a job of a group in the ready streams of these types. With [NextJob], it finds
// the group's first job that no worker process has started, in the first of the streams that has
// one. FindReady reads the first 20,000 entries of each stream, and returns false if the job is not
// among them.
func FindReady(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, types []string, group string, ordinal int64,
) (ReadyJob, bool, error) {
	const page, pages = 500, 40
	for _, typ := range types {
		before, from := int64(0), "-"
		for range pages {
			entries, err := c.XRangeN(ctx, p.Ready(typ), from, "+", page).Result()
			if err != nil {
				return ReadyJob{}, false, err
			}
			for _, e := range entries {
				j, err := ParseJob(MessageBlob(e.Values))
				mine := err == nil && j.Group == group && (ordinal < 0 || j.Ordinal == ordinal)
				if mine && ordinal < 0 { // jobs in flight are in the stream too
					letter, err := ReadLetter(ctx, c, p, group, j.Ordinal)
					if err != nil {
						return ReadyJob{}, false, err
					}
					mine = letter == Ready
				}
				if mine {
					read, err := delivered(ctx, c, p, typ)
					job := ReadyJob{Ordinal: j.Ordinal, Type: typ, ID: e.ID, Before: max(0, before-read), Key: j.Key(), Job: &j}
					return job, err == nil, err
				}
				before++
			}
			if len(entries) < page {
				break
			}
			from = "(" + entries[len(entries)-1].ID
		}
	}
	return ReadyJob{}, false, nil
}

// delivered returns the number of entries in a ready stream that worker processes have read and not
// yet acknowledged.
func delivered(ctx context.Context, c redis.Cmdable, p keyspace.Partition, typ string) (int64, error) {
	pending, err := c.XPending(ctx, p.Ready(typ), keyspace.GroupWorkers).Result()
	if call.IsNoGroup(err) { // no worker process has served the type yet
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return pending.Count, nil
}

// ReadJobMap counts the jobs of a group by state, in `buckets` ranges of consecutive ordinals, or
// one range a job if the group has fewer jobs. It reads the states in pieces of 64 KiB, so the map
// is not of one instant. The map of a group that does not exist is empty. Errors: api.ErrNotFound
// if the group is deleted meanwhile.
func ReadJobMap(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, buckets int64,
) (m api.JobMap, err error) {
	const (
		piece = 64 << 10 // bytes
		// piecesPerTrip is the number of pieces that one round trip reads: each round trip may have
		// to wait for the scripts of other clients.
		piecesPerTrip = 8
	)
	size, err := c.StrLen(ctx, p.States(group)).Result()
	if err != nil {
		return m, fmt.Errorf("read length of the states of group %s: %w", group, err)
	}
	m.Jobs = size / StateBytes
	m.Buckets = make([]api.MapBucket, min(buckets, m.Jobs))
	n := int64(len(m.Buckets))
	for i := range n {
		m.Buckets[i].From, m.Buckets[i].To = i*m.Jobs/n, (i+1)*m.Jobs/n-1
	}
	at, end := 0, m.Jobs*StateBytes
	for from := int64(0); from < end; {
		var pieces []*redis.StringCmd
		next := from
		_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			for ; next < end && len(pieces) < piecesPerTrip; next += piece {
				pieces = append(pieces, pipe.GetRange(ctx, p.States(group), next, min(next+piece, end)-1))
			}
			return nil
		})
		if err != nil {
			return m, fmt.Errorf("read states of group %s: %w", group, err)
		}
		for _, read := range pieces {
			states := read.Val()
			if int64(len(states)) < min(piece, end-from) {
				return m, UnknownGroup(group)
			}
			for i := int64(0); i < int64(len(states)); i += StateBytes {
				for (from+i)/StateBytes > m.Buckets[at].To {
					at++
				}
				countState(&m.Buckets[at], Letter(states[i]))
			}
			from += int64(len(states))
		}
	}
	return m, nil
}

// countState adds a job with a state to a range.
func countState(b *api.MapBucket, l Letter) {
	switch l {
	case Waiting:
		b.Waiting++
	case NonReady:
		b.NonReady++
	case Ready:
		b.Ready++
	case InFlight:
		b.InFlight++
	case Done, Reduced:
		b.Done++
	case Failed:
		b.Failed++
	case Cancelled:
		b.Cancelled++
	}
}
