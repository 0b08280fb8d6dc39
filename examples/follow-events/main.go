// Command follow-events prints the state changes of all groups until it is interrupted.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"

	"github.com/bulkaction/bulkaction/client/stream"
)

func main() {
	url := flag.String("redis-url", "redis://127.0.0.1:6379/0", "the installation's Redis")
	group := flag.String("group", "", "consumer group; empty: every event from now on")
	flag.Parse()
	if err := follow(*url, *group); err != nil {
		log.Fatal(err)
	}
}

func follow(url, group string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	sub, err := stream.NewSubscriber(ctx, url, stream.Config{Group: group})
	if err != nil {
		return err
	}
	defer func() { _ = sub.Close() }()
	messages, err := sub.Subscribe(ctx, sub.Events())
	if err != nil {
		return err
	}
	for msg := range messages {
		event, err := stream.Event(msg)
		switch {
		case err != nil:
			log.Println("skipped an entry:", err)
		case event.Group != nil:
			fmt.Println(event.Type, event.Group.ID, event.Group.Counts.Ended(), "of", event.Group.Counts.Accepted)
		default:
			fmt.Println(event.Type, event.ID)
		}
		msg.Ack()
	}
	return nil
}
