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
