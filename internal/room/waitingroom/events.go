package waitingroom

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// DeclareOptions say when Declare changes an event.
type DeclareOptions struct {
	Rev      int64 // the rev that the caller has seen; 0: any
	IfAbsent bool  // change nothing if the event exists
}

// Declared is the answer of Declare and Change.
type Declared struct {
	Code string // CREATED, CHANGED or SAME
	Rev  int64  // of the event now
	Over int64  // slots in use above the limit: nobody loses a slot
}

// Declare creates an event, or replaces its settings. Settings without a mode keep the event's
// mode; a new event is open. But an event that is not closed is sold out while no seats are left,
// and a sold-out event that gets seats, or has no stock any more, is open. It returns ErrRev, and
// changes nothing, if the event has another rev than the caller gave.
//
// Twice: SAME; with a rev ErrRev, if the first call has changed something, and with it the rev.
func (r *Rooms) Declare(ctx context.Context, event string, s Settings, o DeclareOptions) (Declared, error) {
	how := "put"
	if o.IfAbsent {
		how = "absent"
	}
	return r.declare(ctx, event, how, o.Rev, s.fields()...)
}

// Changes are the settings that Change changes.
type Changes struct {
	Mode       string // an api.Mode constant; "": as it is
	Capacity   *int64
	Left       *int64         // seats that are left
	Retention  *time.Duration // how long a closed event is kept
	SeatsKnown bool           // the seat service has answered
}

// Change changes some settings of an event. As in Declare, the seats that are left may decide about
// the mode. It returns ErrUnknown if there is no such event.
//
// Twice: SAME.
func (r *Rooms) Change(ctx context.Context, event string, c Changes) (Declared, error) {
	var fields []any
	if c.Mode != "" {
		fields = append(fields, "mode", c.Mode)
	}
	if c.Capacity != nil {
		fields = append(fields, "capacity", *c.Capacity)
	}
	if c.Left != nil {
		fields = append(fields, "left", *c.Left)
	}
	if c.Retention != nil {
		fields = append(fields, "retention", c.Retention.Milliseconds())
	}
	if c.SeatsKnown {
		fields = append(fields, "seats", "")
	}
	return r.declare(ctx, event, "change", 0, fields...)
}

func (r *Rooms) declare(ctx context.Context, event, how string, rev int64, fields ...any) (Declared, error) {
	args := append([]any{event, how, rev}, fields...)
	reply := r.run(ctx, declareScript, r.space.OfEvent(event), args...)
	d, err := call.Done(reply, Declared{
		Code: reply.Code("CREATED", "CHANGED", "SAME", "CONFLICT", string(Unknown)), Rev: reply.Number(), Over: reply.Number(),
	})
	switch d.Code {
	case "CONFLICT":
		return d, ErrRev
	case string(Unknown):
		return Declared{}, ErrUnknown
	}
	return d, err
}

// fields returns the settings as fields and values of the event's hash. The value "" removes the
// field. An empty Mode is left out: the event keeps its mode.
func (s Settings) fields() []any {
	var stock, seats, rate, burst any = "", "", "", ""
	if s.Stock != nil {
		stock = *s.Stock
	}
	if s.SeatsPending {
		seats = "1"
	}
	if s.Rate > 0 {
		rate, burst = strconv.FormatFloat(s.Rate, 'f', -1, 64), s.Burst
	}
	fields := []any{
		"capacity", s.Capacity, "stock", stock, "rate", rate,
		"burst", burst, "max_waiting", s.MaxWaiting,
		"token_ttl", s.TokenTTL.Milliseconds(), "leeway", s.Leeway.Milliseconds(),
		"max_session", s.MaxSession.Milliseconds(), "ready", s.Ready.Milliseconds(),
		"grace", s.Grace.Milliseconds(), "on_close", s.OnClose, "no_show", s.NoShow,
		"return_url", s.ReturnURL, "retention", s.Retention.Milliseconds(), "seats", seats,
	}
	if s.Mode != "" {
		fields = append(fields, "mode", s.Mode)
	}
	return fields
}

// counters are the fields of an event's hash that count.
var counters = []string{
	"entered", "promoted", "admitted", "completed", "sold", "left", "expired", "no_shows", "refused",
}

// Snapshots are the states of several events of one partition, all as of one instant.
type Snapshots struct {
	Events   []Snapshot // without unknown events
	LastMove string     // id of the newest entry of the stream moves
	At       time.Time  // Redis's time
}

// Snapshot reads the states of these events of a partition. The caller gives at most 200.
func (r *Rooms) Snapshot(ctx context.Context, p keyspace.Partition, events ...string) (Snapshots, error) {
	args := make([]any, len(events))
	for i, event := range events {
		args[i] = event
	}
	reply := r.run(ctx, snapshotScript, p, args...)
	s := Snapshots{At: reply.Time(), LastMove: reply.Text()}
	for _, event := range events {
		fields := map[string]string{}
		for hash := reply.List(); hash.More(); {
			name := hash.Text()
			fields[name] = hash.Text()
		}
		waiting, used, users := reply.Number(), reply.Number(), reply.Number()
		if fields["rev"] == "" {
			continue
		}
		s.Events = append(s.Events, newSnapshot(event, fields, waiting, used, users))
	}
	return call.Done(reply, s)
}

func newSnapshot(event string, fields map[string]string, waiting, used, users int64) Snapshot {
	number := func(name string) int64 {
		n, _ := strconv.ParseInt(fields[name], 10, 64)
		return n
	}
	pointer := func(name string) *int64 {
		if fields[name] == "" {
			return nil
		}
		n := number(name)
		return &n
	}
	duration := func(name string) time.Duration { return time.Duration(number(name)) * time.Millisecond }
	rate, _ := strconv.ParseFloat(fields["rate"], 64)
	s := Snapshot{
		Event: event, Rev: number("rev"), Tail: number("tail"), Change: number("change"), Left: pointer("stock"),
		Waiting: waiting, Away: max(0, users-used-waiting), Used: used, Counters: map[string]int64{},
		Settings: Settings{
			Capacity: number("capacity"), Stock: pointer("declared_stock"), Rate: rate, Burst: number("burst"),
			MaxWaiting: number("max_waiting"), TokenTTL: duration("token_ttl"), Leeway: duration("leeway"),
			MaxSession: duration("max_session"), Ready: duration("ready"), Grace: duration("grace"),
			OnClose: fields["on_close"], NoShow: fields["no_show"], Mode: fields["mode"],
			ReturnURL: fields["return_url"], Retention: duration("retention"), SeatsPending: fields["seats"] != "",
		},
	}
	limit := s.Settings.Capacity
	if s.Left != nil {
		limit = min(limit, *s.Left)
	}
	s.Free = max(0, limit-used)
	for _, name := range counters {
		s.Counters[name] = number(name)
	}
	return s
}

// Forget removes users from the queue of an event that is closed or sold out, at most 200 in a
// call, and deletes the event when it has no users and its retention is over. Other events it
// leaves as they are. It returns the number of users who still have a record, and how long there is
// nothing more to do; negative: for ever.
//
// Twice: removes the next users.
func (r *Rooms) Forget(ctx context.Context, event string) (left int64, wait time.Duration, err error) {
	reply := r.run(ctx, forgetScript, r.space.OfEvent(event), event)
	left, wait = reply.Number(), reply.Duration()
	return left, wait, reply.Err()
}

// Due returns at most n events of a partition in which something is due now, such as a promotion or
// the end of a place, and how long nothing is due in the other events: an hour at most; negative:
// there are none.
func (r *Rooms) Due(ctx context.Context, p keyspace.Partition, n int) ([]string, time.Duration, error) {
	pipe := r.rdb.Pipeline()
	now := pipe.Time(ctx)
	first := pipe.ZRangeWithScores(ctx, p.Rooms(), 0, int64(n))
	if _, err := pipe.Exec(ctx); err != nil {
		return nil, 0, fmt.Errorf("partition %d: read due events: %w", p.Index(), err)
	}
	var due []string
	for _, z := range first.Val() {
		event, _ := z.Member.(string)
		if wait := time.Duration(z.Score-float64(now.Val().UnixMilli())) * time.Millisecond; wait > 0 {
			return due, min(wait, time.Hour), nil
		}
		if len(due) == n {
			return due, 0, nil
		}
		due = append(due, event)
	}
	return due, -1, nil
}

// Postpone makes an event due only after d. It is for an event whose script has failed, so that it
// does not hold up other events.
func (r *Rooms) Postpone(ctx context.Context, p keyspace.Partition, event string, d time.Duration) error {
	now, err := r.rdb.Time(ctx).Result()
	if err != nil {
		return fmt.Errorf("partition %d: read the time: %w", p.Index(), err)
	}
	z := redis.Z{Score: float64(now.Add(d).UnixMilli()), Member: event}
	if err := r.rdb.ZAddXX(ctx, p.Rooms(), z).Err(); err != nil {
		return fmt.Errorf("partition %d: postpone event %s: %w", p.Index(), event, err)
	}
	return nil
}

// Events returns a page of the events of all partitions, and the cursor of the next page, "" after
// the last one. Within a partition, events are ordered by when something is due; an event that
// changes meanwhile may be listed twice or not at all.
func (r *Rooms) Events(ctx context.Context, cursor string, limit int) (events []string, next string, err error) {
	index, offset, err := parseCursor(cursor, r.space.Partitions())
	if err != nil {
		return nil, "", err
	}
	for ; index < r.space.Partitions(); index, offset = index+1, 0 {
		p := r.space.Partition(index)
		page, err := r.rdb.ZRange(ctx, p.Rooms(), offset, offset+int64(limit-len(events))-1).Result()
		if err != nil {
			return nil, "", fmt.Errorf("partition %d: list events: %w", index, err)
		}
		events = append(events, page...)
		if len(events) == limit {
			return events, fmt.Sprintf("%d-%d", index, offset+int64(len(page))), nil
		}
	}
	return slices.Clip(events), "", nil
}

// ErrCursor means that a cursor is none of Events.
var ErrCursor = errors.New("unknown cursor")

func parseCursor(cursor string, partitions int) (index int, offset int64, err error) {
	if cursor == "" {
		return 0, 0, nil
	}
	first, second, ok := strings.Cut(cursor, "-")
	index, err1 := strconv.Atoi(first)
	offset, err2 := strconv.ParseInt(second, 10, 64)
	if !ok || err1 != nil || err2 != nil || index < 0 || index >= partitions || offset < 0 {
		return 0, 0, ErrCursor
	}
	return index, offset, nil
}
