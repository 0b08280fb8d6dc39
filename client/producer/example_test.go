package producer_test

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
)

// Publish a group to Redis without an API server, and wait while too many messages are unprocessed.
func ExampleProducer() {
	ctx := context.Background()
	p, err := producer.New(ctx, "redis://127.0.0.1:6379/0")
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close()

	group := client.Submission{ID: "spring-2030", Tenant: "acme", Type: "SEND_EMAIL", Seal: true,
		Jobs: []client.NewJob{{Payload: map[string]string{"to": "a@example.com"}}}}
	for {
		_, err := p.Submit(ctx, group)
		full, ok := errors.AsType[*producer.BacklogError](err)
		if !ok {
			if err != nil {
				log.Fatal(err)
			}
			return
		}
		time.Sleep(full.Wait)
	}
}
