// Command producer submits a group of two jobs through the ingest stream, and prints the
// group's id.
package main

import (
	"cmp"
	"context"
	"fmt"
	"log"
	"os"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
)

func main() {
	url := cmp.Or(os.Getenv("BULKACTION_REDIS_URL"), "redis://127.0.0.1:6379/0")
	id, err := submit(context.Background(), url)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(id)
}

func submit(ctx context.Context, redisURL string) (string, error) {
	p, err := producer.New(ctx, redisURL)
	if err != nil {
		return "", err
	}
	defer func() { _ = p.Close() }() // Submit has returned: nothing is lost
	return p.Submit(ctx, client.Submission{
		Tenant: "acme", Type: "NOOP", Seal: true,
		Aggregate: []client.Aggregate{{As: "cost", Op: "sum", Field: "data.cost"}},
		Jobs: []client.NewJob{
			{Payload: map[string]any{"result": map[string]int{"cost": 2}}},
			{Payload: map[string]any{"result": map[string]int{"cost": 3}}},
		},
	})
}
