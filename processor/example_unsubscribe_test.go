package processor_test

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/bulkaction/bulkaction/processor"
)

// Mail is the payload of a NEWSLETTER job.
type Mail struct {
	Email string `json:"email"`
}

// Sent is the result of a NEWSLETTER job.
type Sent struct {
	Skipped bool `json:"skipped"`
}

// unsubscribed stands in for a database table of the people who want no more mails.
type unsubscribed map[string]bool

func (u unsubscribed) Unsubscribed(_ context.Context, email string) (bool, error) {
	return u[email], nil
}

// deliver stands for the call of the mail service.
func deliver(_ context.Context, m Mail, idempotencyKey string) error {
	fmt.Println("send to", m.Email, "with key", idempotencyKey)
	return nil
}

// A job asks the list of those who have unsubscribed just before it sends: somebody who
// unsubscribes while the group runs gets no mail.
func ExampleTyped_unsubscribe() {
	list := unsubscribed{"bob@example.com": true}
	send := func(ctx context.Context, job processor.Job, m Mail) (Sent, error) {
		gone, err := list.Unsubscribed(ctx, m.Email)
		switch {
		case err != nil:
			return Sent{}, processor.Retry("LIST_UNAVAILABLE", err) // when in doubt, do not send
		case gone:
			return Sent{Skipped: true}, nil // done, and the results show it
		}
		return Sent{}, deliver(ctx, m, job.ID())
	}

	newsletter := processor.Typed("NEWSLETTER", send)
	for i, payload := range []string{`{"email":"ann@example.com"}`, `{"email":"bob@example.com"}`} {
		job := processor.Job{Group: "november", Ordinal: int64(i), Payload: json.RawMessage(payload)}
		fmt.Println(newsletter.Process(context.Background(), job))
	}

	// Output:
	// send to ann@example.com with key november.0
	// {false} <nil>
	// {true} <nil>
}
