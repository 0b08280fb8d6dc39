package groups

import (
	"context"
	"encoding/json"
	"strconv"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// failures shows the failed jobs of groups.
type failures struct {
	*access
	recent recent[failureReading] // by tenant and group
}

func newFailures(a *access) *failures {
	return &failures{access: a, recent: recent[failureReading]{age: summaryAge, most: maxKeptSummaries}}
}

// FailureQuery selects the failed jobs of a group; with a Limit, only a page of them.
type FailureQuery struct {
	Code     string // "": any
	Payloads bool   // with the payloads of the jobs, if the principal may see them
	Cursor   string // of a page: where the page before ended
	Limit    int    // 0: all
}

const (
	failureStep     = 500     // records that one step of a page reads
	maxFailureSteps = 10      // steps of a page
	maxPageBytes    = 8 << 20 // bytes of payloads after which a page ends
)

// Failures calls yield with each failed job that the query selects: all, each once and in no order,
// or a page of them, in the order of their ordinals. next is the cursor of the next page; a page
// may be short, or empty, although there is one: one call looks at failureStep · maxFailureSteps
// records at most. It stops at an error of yield and returns it.
func (s *failures) Failures(
	ctx context.Context, id string, q FailureQuery, yield func(api.Failure) error,
) (next string, err error) {
	show := func(e ledger.JobError) (size int, err error) {
		f, err := s.failure(ctx, id, &e, q.Payloads)
		if err != nil {
			return 0, err
		}
		return len(f.Payload), yield(f)
	}
	if q.Limit > 0 {
		return s.failurePage(ctx, id, q, show)
	}
	return "", eachOf(ctx, s.access, id, ledger.Failures, func(e ledger.JobError) error {
		if q.Code != "" && e.Code != q.Code {
			return nil
		}
		_, err := show(e)
		return err
	})
}

// failure returns the view of a failed job.
func (s *failures) failure(ctx context.Context, id string, e *ledger.JobError, payload bool) (api.Failure, error) {
	f := api.Failure{
		Ordinal: e.Ordinal, Key: e.Key, Code: e.Code, Error: e.Error, Attempts: e.Attempts, At: e.Time(),
	}
	if !auth.SeesPayloads(ctx) {
		f.Error = ""
		return f, nil
	}
	if payload {
		data, err := failedPayload(ctx, s.access, id, *e)
		if err != nil {
			return f, err
		}
		f.Payload = json.RawMessage(data)
	}
	return f, nil
}

// failurePage calls show with each failed job of a page, and returns the cursor of the next page.
// show returns the size in bytes of the payload that it passed on: a page is bounded in bytes.
func (s *failures) failurePage(
	ctx context.Context, id string, q FailureQuery, show func(ledger.JobError) (size int, err error),
) (next string, err error) {
	from := int64(0)
	if q.Cursor != "" {
		if from, err = strconv.ParseInt(q.Cursor, 10, 64); err != nil || from < 0 || from > messages.MaxTotal {
			return "", badCursor()
		}
	}
	p, _, err := s.locateGroup(ctx, id)
	if err != nil {
		return "", err
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
