package groups

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/reducer"
)

// withoutData returns a result line with null as its data and without its last error. Of a damaged line nothing else is left.
func withoutData(result []byte) []byte {
	var r map[string]json.RawMessage
	_ = json.Unmarshal(result, &r) // of a damaged result, nothing is shown
	if r == nil {
		r = map[string]json.RawMessage{}
	}
	r["data"] = json.RawMessage("null")
	delete(r, "last_error")
	out, err := json.Marshal(r)
	if err != nil {
		return []byte("{}")
	}
	return out
}

// Results calls yield with the result of each reduced job of a group, in the order in which they
// were reduced. For a principal that may not see payloads, the results have null as their data. It
// stops at the first error of yield and returns it.
func (s *Store) Results(ctx context.Context, id string, yield func(result []byte) error) error {
	if !auth.SeesPayloads(ctx) {
		all := yield
		yield = func(result []byte) error { return all(withoutData(result)) }
	}
	return eachOf(ctx, s, id, ledger.Results, yield)
}

// failedPayload returns the payload of a failed job; "" if the payload is lost.
func (s *Store) failedPayload(ctx context.Context, group string, e *ledger.JobError) (string, error) {
	if e.Payload != "" {
		return e.Payload, nil
	}
	p, _, err := s.locateGroup(ctx, group)
	if err != nil {
		return "", err
	}
	large, err := ledger.Payloads(ctx, s.conn.Cmd, p, []ledger.JobRef{{Group: group, Ordinal: e.Ordinal}})
	if err != nil {
		return "", apiError(err)
	}
	return large[0], nil
}

// eachOf calls yield with each item that read finds in a group. It converts errors of read to those
// of package api, and returns an error of yield unchanged.
func eachOf[T any](
	ctx context.Context, s *Store, id string,
	read func(context.Context, redis.Cmdable, keyspace.Partition, string, func(T) error) error,
	yield func(T) error,
) error {
	p, _, err := s.locateGroup(ctx, id)
	if err != nil {
		return err
	}
	return s.whole(ctx, p, id, func() error {
		var refused error
		err := read(ctx, s.conn.Cmd, p, id, func(item T) error {
			refused = yield(item)
			return refused
		})
		if refused != nil {
			return refused
		}
		return apiError(err)
	})
}

// whole calls read, which reads what a group has in several steps. It returns an error if the group,
// or its results, were deleted meanwhile: otherwise what was left would look like all.
func (s *Store) whole(ctx context.Context, p keyspace.Partition, id string, read func() error) error {
	before, err := ledger.ReadLife(ctx, s.conn.Cmd, p, id)
	if err != nil {
		return apiError(err)
	}
	if err := read(); err != nil {
		return err
	}
	after, err := ledger.ReadLife(ctx, s.conn.Cmd, p, id)
	if err == nil && before.Ended(after) {
		err = fmt.Errorf("group %s was deleted while it was read, and what was read is not all: %w", id, api.ErrNotFound)
	}
	return apiError(err)
}

const (
	failureStep     = 500     // records that one step of a page reads
	maxFailureSteps = 10      // steps of a page
	maxPageBytes    = 8 << 20 // bytes of payloads after which a page ends
)

// Failures calls yield with each failed job that the query selects: all, each once, in no particular order,
// or a page of them, in the order of their ordinals. next is the cursor of the next page; a page
// may be short, or empty, although there is one: one call looks at failureStep · maxFailureSteps
// records at most. It stops at an error of yield and returns it.
func (s *Store) Failures(
	ctx context.Context, id string, q messages.FailureQuery, yield func(api.Failure) error,
) (next string, err error) {
	show := func(e ledger.JobError) (size int, err error) {
		f, err := s.failure(ctx, id, &e, q.Payloads)
		if err != nil {
			return 0, err
		}
		return len(f.Payload), yield(f)
	}
	if q.Limit > 0 {
		p, _, err := s.locateGroup(ctx, id)
		if err != nil {
			return "", err
		}
		err = s.whole(ctx, p, id, func() (err error) {
			next, err = s.failurePage(ctx, p, id, q, show)
			return err
		})
		return next, err
	}
	return "", eachOf(ctx, s, id, ledger.Failures, func(e ledger.JobError) error {
		if q.Code != "" && e.Code != q.Code {
			return nil
		}
		_, err := show(e)
		return err
	})
}

// failure returns the view of a failed job.
func (s *Store) failure(ctx context.Context, id string, e *ledger.JobError, payload bool) (api.Failure, error) {
	f := api.Failure{
		Ordinal: e.Ordinal, Key: e.Key, Code: e.Code, Error: e.Error, Attempts: e.Attempts, At: e.Time(),
	}
	if !auth.SeesPayloads(ctx) {
		f.Error = ""
		return f, nil
	}
	if payload {
		data, err := s.failedPayload(ctx, id, e)
		if err != nil {
			return f, err
		}
		if f.Payload = json.RawMessage(data); data == "" {
			f.Payload, f.PayloadLost = json.RawMessage("null"), true
		}
		if e.Job != nil {
			f.Type = e.Job.Type
		}
	}
	return f, nil
}

// failurePage calls show with each failed job of a page, and returns the cursor of the next page.
// show returns the size in bytes of the payload that it passed on: a page is bounded in bytes.
func (s *Store) failurePage(
	ctx context.Context, p keyspace.Partition, id string, q messages.FailureQuery, show func(ledger.JobError) (size int, err error),
) (next string, err error) {
	from := int64(0)
	if q.Cursor != "" {
		if from, err = strconv.ParseInt(q.Cursor, 10, 64); err != nil || from < 0 || from > messages.MaxTotal {
			return "", badCursor()
		}
	}
	found, bytes := 0, 0
	for range maxFailureSteps {
		step := failureStep
		if q.Code == "" {
			step = min(step, q.Limit-found)
		}
		jobs, after, err := ledger.ListJobs(ctx, s.conn.Cmd, p, id, ledger.Failed.Word(), from, step)
		if err != nil {
			return "", apiError(err)
		}
		for i := range jobs {
			e := jobs[i].LastError()
			if e == nil || q.Code != "" && e.Code != q.Code {
				continue
			}
			size, err := show(*e)
			if err != nil {
				return "", err
			}
			bytes += size
			if found++; found == q.Limit || bytes >= maxPageBytes {
				return strconv.FormatInt(jobs[i].Ordinal+1, 10), nil
			}
		}
		if after < 0 {
			return "", nil
		}
		from = after
	}
	return strconv.FormatInt(from, 10), nil
}

// CanReduce returns a *ledger.MissingReducerError if this process lacks a reducer of a group.
func (s *Store) CanReduce(ctx context.Context, p keyspace.Partition, id string) error {
	_, err := s.workPlan(ctx, p, id)
	return err
}

// workPlan returns the plan of a group's aggregates; nil if there is no such group.
func (s *Store) workPlan(ctx context.Context, p keyspace.Partition, id string) (*reducer.Plan, error) {
	groups, err := ledger.ReadGroups(ctx, s.conn.Cmd, p, []string{id})
	if err != nil || len(groups) == 0 {
		return nil, err
	}
	return s.WorkPlan(groups[0].Aggregates)
}

// WorkPlan is ledger.WorkPlan with the reducers of this process.
func (s *Store) WorkPlan(encoded string) (*reducer.Plan, error) {
	return ledger.WorkPlan(s.reducers, encoded)
}

// ReduceFailures reduces the failed jobs of a group that asked for an aggregate of them, and stores
// their partial aggregate. The group can't advance before that.
func (s *Store) ReduceFailures(ctx context.Context, p keyspace.Partition, id string, a ledger.AdvanceReply) error {
	plan, err := s.workPlan(ctx, p, id)
	if err != nil || plan == nil {
		return err
	}
	state := plan.New()
	var refused error
	err = ledger.Failures(ctx, s.conn.Cmd, p, id, func(e ledger.JobError) error {
		data, err := json.Marshal(map[string]any{"code": e.Code, "error": e.Error, "attempts": e.Attempts})
		if err != nil {
			return err
		}
		r := reducer.Result{Ordinal: e.Ordinal, Attempts: e.Attempts, DurationMS: math.NaN(), Data: data, Failed: true}
		if err := state.Add(r); err != nil {
			refused = err
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case state.Count() != a.Failures:
		return fmt.Errorf("group %s: found %d records of %d failed jobs", id, state.Count(), a.Failures)
	case refused != nil:
		s.tel.Log.WarnContext(ctx, "a reducer refused failures", "group", id, "last_error", refused)
	}
	encoded, err := state.Encode()
	if err != nil {
		return err
	}
	return ledger.ReduceFailures(ctx, s.conn.Cmd, p, id, a, encoded)
}

const (
	summaryRecords  = 5000 // records that a summary reads
	maxFingerprints = 20   // fingerprints that a summary shows of one code
	maxSamples      = 5    // failures that a summary shows of one fingerprint
	maxErrorShown   = 500  // bytes of an error in a summary
	maxSummaryCodes = 100  // codes that a summary shows

	// summaryAge is how long FailureSummary uses the same records again, unless the number of
	// failed jobs of a code changes.
	summaryAge       = 10 * time.Second
	maxKeptSummaries = 16 // groups whose records are used again; those of one have 5 MB at most
)

// failureReading is what was read of a group's failed jobs.
type failureReading struct {
	counts map[string]int64 // by code, at that time
	read   *failureCounts
}

// FailureSummary counts the failed jobs of a group by code, and up to summaryRecords of them by
// fingerprint. For a principal that may not see payloads it reads no record. Records that were read
// are used again for summaryAge, so that repeated calls cost little.
func (s *Store) FailureSummary(ctx context.Context, id string) (sum api.FailureSummary, err error) {
	p, tenant, err := s.locateGroup(ctx, id)
	if err != nil {
		return sum, err
	}
	counts, err := ledger.FailureCodes(ctx, s.conn.Cmd, p, id)
	if err != nil {
		return sum, apiError(err)
	}
	if !auth.SeesPayloads(ctx) {
		return newFailureCounts().summary(counts), nil
	}
	unchanged := func(r failureReading) bool { return maps.Equal(r.counts, counts) }
	r, err := s.summaries.get(ctx, tenant+"/"+id, unchanged, func() (failureReading, error) {
		records, err := ledger.SomeFailures(ctx, s.conn.Cmd, p, id, summaryRecords)
		if err != nil {
			return failureReading{}, err
		}
		read := newFailureCounts()
		for i := range records {
			read.add(&records[i])
		}
		return failureReading{counts, read}, nil
	})
	if err != nil {
		return sum, apiError(err)
	}
	return r.read.summary(counts), nil
}

// failureCounts counts failed jobs by code and fingerprint. After the last call of add, goroutines
// may use it concurrently.
type failureCounts struct {
	seen   int64
	byCode map[string]*codeCounts
}

type codeCounts struct {
	seen   int64
	byText map[string]*api.FailureFingerprint
}

func newFailureCounts() *failureCounts { return &failureCounts{byCode: map[string]*codeCounts{}} }

// add counts a failed job.
func (c *failureCounts) add(e *ledger.JobError) {
	c.seen++
	code := c.byCode[e.Code]
	if code == nil {
		code = &codeCounts{byText: map[string]*api.FailureFingerprint{}}
		c.byCode[e.Code] = code
	}
	code.seen++
	shown := shorten(e.Error)
	text := fingerprint(shown)
	f := code.byText[text]
	if f == nil {
		f = &api.FailureFingerprint{Text: text}
		code.byText[text] = f
	}
	if f.Sampled++; len(f.Samples) < maxSamples {
		f.Samples = append(f.Samples, api.FailureSample{Ordinal: e.Ordinal, At: e.Time(), Error: shown})
	}
}

// summary returns the summary of a group that has these failed jobs by code.
func (c *failureCounts) summary(counts map[string]int64) api.FailureSummary {
	sum := api.FailureSummary{Seen: c.seen, Codes: []api.FailureCode{}}
	for code, n := range counts {
		sum.Total += n
		sum.Codes = append(sum.Codes, api.FailureCode{
			Code: code, Count: n, Fingerprints: c.byCode[code].fingerprints(n),
		})
	}
	slices.SortFunc(sum.Codes, func(a, b api.FailureCode) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Code, b.Code))
	})
	sum.Codes = sum.Codes[:min(len(sum.Codes), maxSummaryCodes)]
	return sum
}

// fingerprints returns the most frequent fingerprints of a code that n jobs have failed with. If
// not all n jobs were read, each Count is an estimate. It assumes that the other jobs are like
// those that were: Redis returns the records in an order that does not depend on the errors.
func (c *codeCounts) fingerprints(n int64) []api.FailureFingerprint {
	all := []api.FailureFingerprint{}
	if c == nil {
		return all
	}
	for _, counted := range c.byText {
		f := *counted
		f.Count = f.Sampled
		if n > c.seen {
			f.Count = (f.Sampled*n + c.seen/2) / c.seen
		}
		all = append(all, f)
	}
	slices.SortFunc(all, func(a, b api.FailureFingerprint) int {
		return cmp.Or(cmp.Compare(b.Sampled, a.Sampled), cmp.Compare(a.Text, b.Text))
	})
	all = all[:min(len(all), maxFingerprints)]
	for i := range all {
		all[i].Samples = slices.Clone(all[i].Samples)
	}
	return all
}

// variable matches the parts of an error that differ from job to job: UUIDs, host names with an
// optional user before an @, IPv6 addresses in brackets, IPv4 addresses, and digits.
var variable = regexp.MustCompile(`[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}` +
	`|(?:[A-Za-z0-9_.+-]+@)?(?:[A-Za-z0-9_-]+\.)+[a-z]{2,}\b` +
	`|\[[0-9a-fA-F]*:[0-9a-fA-F:.]*\]` +
	`|(?:[0-9]{1,3}\.){3}[0-9]{1,3}` +
	`|[0-9]+`)

// fingerprint returns an error with its variable parts replaced by <uuid>, <address> (user@host),
// <host> (also for an IP address) and <n>.
func fingerprint(text string) string {
	return variable.ReplaceAllStringFunc(text, func(part string) string {
		switch {
		case strings.Contains(part, "@"):
			return "<address>"
		case len(part) == 36 && part[8] == '-' && strings.Count(part, "-") == 4 && !strings.Contains(part, "."):
			return "<uuid>"
		case strings.ContainsAny(part, ".:"):
			return "<host>"
		}
		return "<n>"
	})
}

// shorten cuts an error that is longer than maxErrorShown bytes there, and adds an ellipsis.
func shorten(text string) string {
	if len(text) <= maxErrorShown {
		return text
	}
	end := maxErrorShown
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + "…"
}
