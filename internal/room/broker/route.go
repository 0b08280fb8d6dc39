package broker

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
	"github.com/bulkaction/bulkaction/internal/room/dispatch"
)

// routerLease is the idle time of a message in the stream entry after which another broker's router
// takes it over.
const routerLease = 10 * time.Second

// router hands the dispatch messages about promotions to the brokers that hold the users' streams.
type router struct{ *shared }

// consumer returns the consumer of a partition's Redis stream entry. It copies each message to the
// Redis stream of the broker that the message names.
func (b router) consumer(p keyspace.Partition) *stream.Consumer {
	return stream.NewConsumer(b.Conn, stream.ConsumerConfig{
		Stream: p.Entry(), Group: keyspace.GroupRouter, Name: b.ID,
		Rejected:    stream.Quarantine{Key: p.Quarantine(), Source: "entry"},
		Handle:      b.route,
		MaxInFlight: 1000, MaxBytes: 16 << 20, Block: redisx.MaxBlock, Lease: routerLease,
		RetryAfter: 100 * time.Millisecond, CloseTimeout: time.Second, Log: b.Tel.Log,
	})
}

// route copies messages of the stream entry to the Redis streams of the brokers that they name. It
// rejects what is no dispatch message about promotions, and drops a message for a dead broker: that
// broker's users connect to another broker, which claims.
func (b router) route(ctx context.Context, entries []stream.Entry) []stream.Verdict {
	verdicts := make([]stream.Verdict, len(entries))
	alive, err := b.alive(ctx)
	if err != nil {
		return verdicts // again, later
	}
	byBroker := map[string][]int{}
	for i, e := range entries {
		var p dispatch.Promotion
		err := json.Unmarshal([]byte(e.Get("data")), &p)
		switch {
		case err != nil || e.Get("type") != dispatch.TypePromoted || p.To == "":
			verdicts[i] = stream.Verdict{Action: stream.Reject, Reason: errors.New("no message entry.promoted")}
		case !alive[p.To]:
			verdicts[i] = stream.Verdict{Action: stream.Ack}
		default:
			byBroker[p.To] = append(byBroker[p.To], i)
		}
	}
	for to, list := range byBroker {
		msgs := make([]*message.Message, len(list))
		for j, i := range list {
			msgs[j] = wm.NewMessage(entries[i].ID, dispatch.TypePromoted, []byte(entries[i].Get("data")))
		}
		if b.publisher.Send(ctx, to, msgs...) != nil {
			continue // again, later
		}
		for _, i := range list {
			verdicts[i] = stream.Verdict{Action: stream.Ack}
		}
	}
	return verdicts
}
