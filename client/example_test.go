package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/bulkaction/bulkaction/client"
)

// The JSON that the client sends for a group.
func ExampleGroup() {
	retries := 3
	body, err := json.MarshalIndent(client.Submission{
		Tenant:     "acme",
		Type:       "SEND_EMAIL",
		MaxRetries: &retries,
		JobTimeout: 30 * time.Second,
		Aggregate:  []client.Aggregate{{As: "cost", Op: "sum", Field: "data.cost"}},
		Jobs:       []client.NewJob{{Payload: map[string]string{"to": "a@example.com"}}},
		Seal:       true,
	}, "", "  ")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(body))
	// Output:
	// {
	//   "tenant": "acme",
	//   "type": "SEND_EMAIL",
	//   "max_retries": 3,
	//   "aggregate": [
	//     {
	//       "as": "cost",
	//       "op": "sum",
	//       "field": "data.cost"
	//     }
	//   ],
	//   "seal": true,
	//   "job_timeout": "30s",
	//   "jobs": [
	//     {
	//       "payload": {
	//         "to": "a@example.com"
	//       }
	//     }
	//   ]
	// }
}

// Submit a group, wait for its end and list the failed jobs.
func ExampleAPI() {
	ctx := context.Background()
	a := client.NewAPI("http://127.0.0.1:8080")
	accepted, err := a.Submit(ctx, client.Submission{
		Tenant: "acme",
		Type:   "SEND_EMAIL",
		Jobs:   []client.NewJob{{Payload: map[string]string{"to": "a@example.com"}}},
		Seal:   true,
	})
	if problem, ok := errors.AsType[*client.Error](err); ok {
		log.Fatalf("refused: %v", problem.Problem.Fields)
	} else if err != nil {
		log.Fatal(err)
	}

	group, err := a.Wait(ctx, accepted.ID)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s: %d done, %d failed\n", group.Status, group.Counts.Done, group.Counts.Failed)
	for failure, err := range a.Failures(ctx, accepted.ID) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(failure.Ordinal, failure.Code, failure.Error)
	}
}

// Append a CSV file of any length to a group. The idempotency key makes the program safe to repeat.
func ExampleAPI_AppendCSV() {
	ctx := context.Background()
	file, err := os.Open("recipients.csv")
	if err != nil {
		log.Fatal(err)
	}
	defer file.Close()

	a := client.NewAPI("http://127.0.0.1:8080")
	if _, err := a.Submit(ctx, client.Submission{ID: "spring-2030", Tenant: "acme", Type: "SEND_EMAIL"}); err != nil {
		log.Fatal(err)
	}
	appended, err := a.AppendCSV(ctx, "spring-2030", file, client.WithIdempotencyKey("spring-2030"))
	if err != nil {
		log.Fatal(err)
	}
	for _, line := range appended.Rejected {
		fmt.Printf("line %d %s\n", line.Line, line.Error)
	}
	if _, err := a.Seal(ctx, "spring-2030", nil); err != nil {
		log.Fatal(err)
	}
}

// Append jobs while the program generates them.
func ExampleAPI_Append() {
	a := client.NewAPI("http://127.0.0.1:8080")
	_, err := a.Append(context.Background(), "spring-2030", func(yield func(client.NewJob) bool) {
		for n := range 1_000_000 {
			if !yield(client.NewJob{Payload: map[string]int{"customer": n}}) {
				return
			}
		}
	})
	if err != nil {
		log.Fatal(err)
	}
}

// Follow a group's progress.
func ExampleAPI_Events() {
	a := client.NewAPI("http://127.0.0.1:8080")
	for event, err := range a.Events(context.Background(), "spring-2030", "") {
		if err != nil {
			log.Fatal(err)
		}
		if g := event.Group; g != nil {
			fmt.Println(event.Type, g.Counts.Ended(), "of", g.Counts.Accepted)
		}
	}
}
