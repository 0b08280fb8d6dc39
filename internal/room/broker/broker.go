// Package broker is the role that runs the waiting room: it holds the streams of visitors, promotes
// users as slots become free, and delivers their entry tokens. Any number of brokers share the work
// without a leader. The package hides how a promotion finds the broker that holds the user's
// stream, and how users keep their places when messages are lost, brokers die or Redis stands
// still.
package broker

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/room/position"
	"github.com/bulkaction/bulkaction/internal/room/roomapi"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Config configures the role.
type Config struct {
	PublicURL        string        // issuer of the tokens
	Audience         string        // of the tokens; "": the event
	PromoteInterval  time.Duration // longest pause of the promoter
	PositionInterval time.Duration // time between two rounds that show positions
	Drain            time.Duration // how long a stopping broker takes to hand over its streams
	// Seats asks the seat service for the number of seats of an event that does not exist in Redis
	// yet, or whose number is still unknown. An error that wraps waitingroom.ErrUnknown means that the
	// service does not know the event. If the field is nil, the broker creates no events.
	Seats func(ctx context.Context, event string) (int64, error)
	// Defaults are the settings with which a broker creates an event that the seat service knows,
	// or that it has not answered about. The capacity is the number of seats, once it is known.
	Defaults waitingroom.Settings
}

// Broker is the broker of one process. Make it with New.
type Broker struct {
	stage.Process
	cfg          Config
	instance     string // names this broker in conns, statuses and streams
	rooms        *waitingroom.Rooms
	keys         *entrytoken.Keys
	metrics      *telemetry.RoomMetrics
	views        []*position.Views // by partition
	conns        connections
	endedStreams disconnects
	lookups      lookups
	// batchers has a batcher for each kind of enter's calls: visitors who come while a call runs share
	// the next one, because a call for one user costs Redis more than ten times as much as a user in a
	// large call.
	enters      sync.Mutex // held while a batcher is looked up and kept
	batchers    *redisx.Cache[enterKind, *redisx.Batcher[*enterCall]]
	draining    atomic.Bool
	suspended   atomic.Bool  // positions wait until all users have entered again
	positionAge atomic.Int64 // of the oldest positions that the last round has shown, in ms
	lastConn    atomic.Int64
	statusAt    time.Time          // when keepStatus wrote the last status
	loading     singleflight.Group // snapshots, and questions to the seat service
}

// New returns the broker of a process.
func New(p stage.Process, cfg Config, keys *entrytoken.Keys) *Broker {
	b := &Broker{
		Process: p, cfg: cfg, instance: instanceOf(p.ID), keys: keys,
		conns:        connections{events: map[string]map[string]*connection{}},
		endedStreams: disconnects{wake: make(chan struct{}, 1), byEvent: map[string][]waitingroom.Visitor{}},
		lookups:      lookups{events: map[string]*lookup{}},
		batchers:     redisx.NewCache[enterKind, *redisx.Batcher[*enterCall]](time.Minute, 4096),
	}
	b.metrics = telemetry.NewRoomMetrics(p.Tel.Meter)
	b.metrics.ShowGauges(p.Tel.Meter, func(ctx context.Context) int64 {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		return p.Conn.Cmd.XLen(ctx, p.Space.Dispatch(b.instance)).Val()
	})
	b.rooms = waitingroom.New(p.Conn, p.Space, b.metrics.Script)
	for _, part := range p.Space.All() {
		b.views = append(b.views, position.New(source{b, part}))
	}
	return b
}

// instanceOf returns the 8 hexadecimal digits at the end of a process's id, or random ones if the
// id has none.
func instanceOf(process string) string {
	i := strings.LastIndexByte(process, '-')
	if digits := process[i+1:]; len(digits) == 8 && strings.Trim(digits, "0123456789abcdef") == "" {
		return digits
	}
	return fmt.Sprintf("%08x", rand.Uint32())
}

// Run runs the broker's loops until ctx ends and the broker has drained: it hands its streams over
// to other brokers while the loops still run. It returns the error of a loop that fails.
func (b *Broker) Run(ctx context.Context) error {
	working, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	r := b.Runner()
	r.Add(func(working context.Context) error {
		select {
		case <-ctx.Done():
			b.drain(working)
		case <-working.Done(): // another loop has failed
		}
		stop()
		return nil
	})
	r.Every("status", statusInterval, b.keepStatus)
	r.Add(func(ctx context.Context) error { b.keys.Watch(ctx); return nil })
	if b.cfg.Seats != nil {
		r.Every("ask for seats", time.Second, b.askForSeats)
	}
	r.Add(b.followDispatch)
	r.Every("keep the stream", waitingroom.DispatchTTL/10, b.keepStream)
	r.Add(b.sendPositions)
	r.Add(b.sendDisconnects)
	for i, p := range b.Space.All() {
		name := fmt.Sprintf(" %d", i)
		r.Loop("promote"+name, p.Wake("promoter"), func(ctx context.Context) (time.Duration, error) {
			return b.promoteDue(ctx, p)
		})
		r.Add(b.router(p).Run)
		r.Add(func(ctx context.Context) error { return b.followMoves(ctx, b.views[i]) })
		cleanup := &cleanup{broker: b, partition: p}
		r.Loop("cleanup"+name, "", cleanup.step)
	}
	return r.Run(working)
}

// drain ends the streams of this broker in waves, so that its users do not all connect to other
// brokers at once. It does not call the script disconnect for them, so they keep their places: the
// room sweep makes those away who do not connect again.
func (b *Broker) drain(ctx context.Context) {
	b.draining.Store(true)
	all := b.conns.all()
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	const step = 100 * time.Millisecond
	waves := max(1, int(b.cfg.Drain/step))
	for wave := range waves {
		for _, c := range all[len(all)*wave/waves : len(all)*(wave+1)/waves] {
			handOver(c)
		}
		if b.conns.len() == 0 {
			break
		}
		if redisx.Sleep(ctx, min(step, b.cfg.Drain)) != nil {
			return
		}
	}
	for _, c := range b.conns.all() { // streams that began meanwhile
		handOver(c)
	}
}

// handOver ends a stream with the frame reconnect, so that the client connects to another broker.
// If the stream has ended already, it does nothing.
func handOver(c *connection) {
	if c.markOver() {
		c.mu.Lock()
		c.handedOver = true
		c.mu.Unlock()
		c.stream.Reconnect(roomapi.ReconnectDraining)
	}
}

// Metrics returns the metrics of this broker. The HTTP server of the waiting room adds its own
// counts, such as refused requests.
func (b *Broker) Metrics() *telemetry.RoomMetrics { return b.metrics }
