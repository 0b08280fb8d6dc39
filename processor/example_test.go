package processor_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/bulkaction/bulkaction/processor"
)

// A processor for a custom type greets people by name. It returns a permanent error for a payload
// that can never work, and a retry when the downstream API is down.
func Example() {
	greet := processor.Func("GREET", func(ctx context.Context, job processor.Job) (any, error) {
		var payload struct {
			Name string `json:"name"`
		}
		if err := json.Unmarshal(job.Payload, &payload); err != nil || payload.Name == "" {
			return nil, processor.Permanent(processor.CodeInvalidPayload, errors.New("name is missing"))
		}
		if job.Attempt == 1 {
			return nil, processor.Retry("GREETER_DOWN", errors.New("the greeter is away"))
		}
		return map[string]string{"greeting": "Hello, " + payload.Name, "key": job.ID()}, nil
	})

	run := func(attempt int, payload string) {
		job := processor.Job{
			Group: "welcome", Ordinal: 7, Type: greet.Type(), Attempt: attempt, Payload: json.RawMessage(payload),
		}
		result, err := greet.Process(context.Background(), job)
		v := processor.Classify(err)
		fmt.Println(v.Kind, v.Code, v.Message, result)
	}
	run(1, `{"name":"Ada"}`)
	run(2, `{"name":"Ada"}`)
	run(1, `{}`)

	// Output:
	// retry GREETER_DOWN the greeter is away <nil>
	// done   map[greeting:Hello, Ada key:welcome.7]
	// fail INVALID_PAYLOAD name is missing <nil>
}

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
