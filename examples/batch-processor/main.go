// Command batch-processor is a worker binary whose processor sends up to 100 mails in one call of a
// bulk mail API. Its address is in MAIL_API.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

// Mail is the payload of a job.
type Mail struct {
	To   string `json:"to"`
	Text string `json:"text"`
}

// item is a mail in a call of the API, which sends no mail with the same key twice.
type item struct {
	Key string `json:"key"`
	Mail
}

// status is what the API answers about one mail.
type status struct {
	ID    string `json:"id,omitempty"`
	Error string `json:"error,omitempty"`
	Again bool   `json:"again,omitempty"` // another attempt may succeed
}

// Receipt is the result of a job.
type Receipt struct {
	ID string `json:"id"`
}

// mailer calls the API at url.
type mailer struct{ url string }

func (m mailer) batcher() processor.Batcher {
	return processor.Batch("BULK_MAIL", processor.BatchOptions{Size: 100, Wait: 100 * time.Millisecond}, m.send)
}

func (m mailer) send(ctx context.Context, jobs []processor.BatchJob[Mail]) ([]processor.Outcome[Receipt], error) {
	items := make([]item, len(jobs))
	for i, job := range jobs {
		items[i] = item{job.ID(), job.Payload}
	}
	statuses, err := m.call(ctx, items)
	if err != nil {
		return nil, err // of all jobs
	}
	outcomes := make([]processor.Outcome[Receipt], len(statuses))
	for i, s := range statuses {
		switch {
		case s.Error == "":
			outcomes[i].Result = Receipt{s.ID}
		case s.Again:
			outcomes[i].Err = processor.Retry("MAILBOX_BUSY", errors.New(s.Error))
		default:
			outcomes[i].Err = processor.Permanent("MAIL_REFUSED", errors.New(s.Error))
		}
	}
	return outcomes, nil
}

func (m mailer) call(ctx context.Context, items []item) (statuses []status, err error) {
	body, err := json.Marshal(items)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, m.url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }() // it was only read
	err = fmt.Errorf("mail API: %s", response.Status)
	switch response.StatusCode {
	case http.StatusOK:
		err = json.NewDecoder(response.Body).Decode(&statuses)
		return statuses, err
	case http.StatusTooManyRequests:
		seconds, _ := strconv.Atoi(response.Header.Get("Retry-After"))
		return nil, processor.Throttled(time.Duration(seconds)*time.Second, err)
	case http.StatusUnprocessableEntity:
		if len(items) == 1 {
			return nil, processor.Permanent("MAIL_REFUSED", err)
		}
		return nil, processor.Retry(processor.CodeBatchRejected, err) // one mail is at fault: each is tried alone
	}
	return nil, err
}

func main() {
	run.Worker(mailer{os.Getenv("MAIL_API")}.batcher())
}
