package httpapi

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

var failedAt = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// Failures yields two failed jobs. With the limit 1 it yields the first, and returns the cursor "1"
// for the other.
func (f *fakeBackend) Failures(_ context.Context, id string, q FailureQuery, yield func(api.Failure) error) (string, error) {
	if _, err := f.groupByID(id); err != nil {
		return "", err
	}
	f.mu.Lock()
	f.calls = append(f.calls, fmt.Sprintf("failures %+v", q))
	f.mu.Unlock()
	for i := range int64(2) {
		if q.Cursor == "1" && i == 0 {
			continue
		}
		failure := api.Failure{Ordinal: i, Code: "PERMANENT", Error: "no such mailbox", Attempts: 1, At: failedAt}
		if q.Payloads {
			failure.Payload = json.RawMessage(`{"to":"a"}`)
		}
		if err := yield(failure); err != nil {
			return "", err
		}
		if q.Limit == 1 && i == 0 {
			return "1", nil
		}
	}
	return "", nil
}

func (f *fakeBackend) FailureSummary(_ context.Context, id string) (api.FailureSummary, error) {
	if _, err := f.groupByID(id); err != nil {
		return api.FailureSummary{}, err
	}
	return api.FailureSummary{Total: 3, Seen: 3, Codes: []api.FailureCode{{
		Code: "PERMANENT", Count: 3, Fingerprints: []api.FailureFingerprint{{
			Text: "no mailbox <n>", Count: 3, Sampled: 3,
			Samples: []api.FailureSample{{Ordinal: 1, At: failedAt, Error: "no mailbox 7"}},
		}},
	}}}, nil
}

func (f *fakeBackend) JobMap(_ context.Context, id string, buckets int) (api.JobMap, error) {
	if _, err := f.groupByID(id); err != nil {
		return api.JobMap{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, fmt.Sprint("map ", buckets))
	return api.JobMap{Jobs: 2, Buckets: []api.MapBucket{{To: 1, Done: 1, Failed: 1}}}, nil
}
