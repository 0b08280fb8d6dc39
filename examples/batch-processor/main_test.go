package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/bulktest"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

// serveMailAPI starts a fake bulk mail API. It refuses mails to nobody, is busy for bob, refuses a call
// with a mail to "?" as a whole, and, if busy, every call.
func serveMailAPI(t *testing.T, busy bool) mailer {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var items []item
		_ = json.NewDecoder(r.Body).Decode(&items)
		statuses := make([]status, len(items))
		for i, it := range items {
			switch it.To {
			case "":
				statuses[i].Error = "no such mailbox"
			case "bob":
				statuses[i] = status{Error: "the mailbox is busy", Again: true}
			default:
				statuses[i].ID = "mail-" + strconv.Itoa(i)
			}
		}
		switch {
		case busy:
			w.Header().Set("Retry-After", "7")
			w.WriteHeader(http.StatusTooManyRequests)
		case slices.ContainsFunc(items, func(it item) bool { return it.To == "?" }):
			w.WriteHeader(http.StatusUnprocessableEntity)
		default:
			_ = json.NewEncoder(w).Encode(statuses)
		}
	}))
	t.Cleanup(server.Close)
	return mailer{server.URL}
}

// mailTo returns a job for each address.
func mailTo(t *testing.T, addresses ...string) (jobs []processor.Job) {
	for _, to := range addresses {
		jobs = append(jobs, processor.Job{Payload: bulktest.JSON(t, Mail{To: to, Text: "Hello"})})
	}
	return jobs
}

// TestEachMailHasItsOwnOutcome: in one call, ann's mail is sent, that to nobody fails for good, and
// bob's is tried again.
func TestEachMailHasItsOwnOutcome(t *testing.T) {
	outcomes := bulktest.AttemptBatch(t, run.Config{}, serveMailAPI(t, false).batcher(), mailTo(t, "ann", "", "bob")...)
	require.Equal(t, processor.Done, outcomes[0].Kind)
	require.JSONEq(t, `{"id": "mail-0"}`, string(outcomes[0].Result))
	require.Equal(t, processor.Fail, outcomes[1].Kind)
	require.Equal(t, "MAIL_REFUSED", outcomes[1].Code)
	require.Equal(t, processor.RetryLater, outcomes[2].Kind)
}

// TestOneBadMail: the API refuses the whole call. No job has used a retry, and alone, ann's mail is
// sent and the bad one fails.
func TestOneBadMail(t *testing.T) {
	mails := serveMailAPI(t, false).batcher()
	jobs := mailTo(t, "ann", "?")
	for _, outcome := range bulktest.AttemptBatch(t, run.Config{}, mails, jobs...) {
		require.Equal(t, processor.RetryLater, outcome.Kind)
		require.Equal(t, processor.CodeBatchRejected, outcome.Code)
	}
	require.Equal(t, processor.Done, bulktest.AttemptBatch(t, run.Config{}, mails, jobs[0])[0].Kind)
	require.Equal(t, processor.Fail, bulktest.AttemptBatch(t, run.Config{}, mails, jobs[1])[0].Kind)
}

// TestTheAPIAsksToWait: all jobs of the call wait as long as the API has asked for.
func TestTheAPIAsksToWait(t *testing.T) {
	for _, outcome := range bulktest.AttemptBatch(t, run.Config{}, serveMailAPI(t, true).batcher(), mailTo(t, "ann", "eve")...) {
		require.Equal(t, processor.Throttle, outcome.Kind)
		require.Equal(t, 7*time.Second, outcome.After)
	}
}
