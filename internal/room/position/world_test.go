package position

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// world is a fake Source for tests: a partition in memory that behaves as Redis does. The answer of
// Snapshot is of one instant, Numbers yields everybody who is in the queue throughout, and Moves
// skips trimmed entries, and returns nothing after an id beyond the end of the stream. It is not
// safe for concurrent use.
type world struct {
	queues map[string]*queue
	stream []waitingroom.Move
	last   stream.ID
	behind time.Duration // how far Redis's clock is behind

	between func() // runs between the pages of Numbers, and before the answer of each call
	late    func() // runs when an answer of Snapshot is ready, before it arrives
	page    int
	most    int   // entries in an answer of Moves
	err     error // of the next call
	ghosts  int64 // how many users too many snapshots show in each queue
	calls   map[string]int
}

func newWorld(events ...string) *world {
	w := &world{queues: map[string]*queue{}, between: func() {}, late: func() {}, page: 10, most: 1000, calls: map[string]int{}}
	for _, name := range events {
		w.queues[name] = newQueue()
	}
	return w
}

// backup returns a copy of the data.
func (w *world) backup() *world {
	c := &world{queues: map[string]*queue{}, stream: slices.Clone(w.stream), last: w.last}
	for name, q := range w.queues {
		c.queues[name] = q.clone()
	}
	return c
}

// restore sets the world back to an earlier copy, like a failover that loses the writes since then.
func (w *world) restore(c *world) {
	c = c.backup()
	w.queues, w.stream, w.last = c.queues, c.stream, c.last
}

func (w *world) now() time.Time { return time.Now().Add(-w.behind) }

// leave lets numbers leave a queue and writes the move.
func (w *world) leave(event string, numbers ...int64) {
	m := w.queues[event].leave(numbers...)
	id := stream.ID{MS: uint64(w.now().UnixMilli()), Seq: 0}
	if !id.After(w.last) {
		id = stream.ID{MS: w.last.MS, Seq: w.last.Seq + 1}
	}
	w.last = id
	m.ID, m.Event = id.String(), event
	w.stream = append(w.stream, m)
}

// trim keeps the newest entries of the stream.
func (w *world) trim(keep int) {
	w.stream = w.stream[max(0, len(w.stream)-keep):]
}

func (w *world) call(ctx context.Context, name string) error {
	w.calls[name]++
	w.between()
	err := w.err
	w.err = nil
	return errors.Join(ctx.Err(), err)
}

func (w *world) Snapshot(ctx context.Context, events ...string) (waitingroom.Snapshots, error) {
	if err := w.call(ctx, "snapshot"); err != nil {
		return waitingroom.Snapshots{}, err
	}
	if len(events) > waitingroom.MostUsers {
		return waitingroom.Snapshots{}, errors.New("too many events")
	}
	answer := waitingroom.Snapshots{LastMove: w.last.String(), At: w.now()}
	for _, name := range events {
		if q := w.queues[name]; q != nil {
			answer.Events = append(answer.Events, waitingroom.Snapshot{
				Event: name, Tail: q.tail, Change: q.change, Waiting: int64(len(q.in)) + w.ghosts,
				Settings: waitingroom.Settings{Mode: api.ModeOpen},
				Counters: map[string]int64{"promoted": q.tail - int64(len(q.in))},
			})
		}
	}
	late := w.late
	w.late = func() {}
	late()
	return answer, nil
}

func (w *world) Numbers(ctx context.Context, event string, yield func(numbers []int64)) error {
	if err := w.call(ctx, "numbers"); err != nil {
		return err
	}
	q := w.queues[event]
	if q == nil {
		return nil
	}
	for numbers := range slices.Chunk(slices.Collect(maps.Keys(q.in)), w.page) {
		if q := w.queues[event]; q != nil {
			yield(slices.DeleteFunc(slices.Clone(numbers), func(n int64) bool { return !q.in[n] }))
		}
		w.between()
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

func (w *world) Moves(ctx context.Context, after string, block time.Duration) ([]waitingroom.Move, error) {
	if err := w.call(ctx, "moves"); err != nil {
		return nil, err
	}
	id, err := stream.ParseID(after)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(w.stream, func(m waitingroom.Move) bool { return mustID(m.ID).After(id) })
	if i < 0 {
		if block > snapshotInterval {
			return nil, errors.New("blocks for " + block.String())
		}
		if block > 0 {
			time.Sleep(block)
		}
		return nil, nil
	}
	return slices.Clone(w.stream[i:min(len(w.stream), i+w.most)]), nil
}

func mustID(text string) stream.ID {
	id, err := stream.ParseID(text)
	if err != nil {
		panic(err)
	}
	return id
}

func names(n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = "event" + strconv.Itoa(i)
	}
	return all
}

func TestPace(t *testing.T) {
	t.Parallel()
	type step struct {
		second, promoted int64
		mode             string
		used             int64 // of 10 slots
	}
	for name, c := range map[string]struct {
		steps []step
		want  float64 // negative: unknown
	}{
		"nothing":                  {nil, -1},
		"one snapshot":             {[]step{{0, 5, api.ModeOpen, 0}}, -1},
		"too short":                {[]step{{0, 5, api.ModeOpen, 0}, {2, 500, api.ModeOpen, 0}}, -1},
		"ten a second":             {[]step{{0, 5, api.ModeOpen, 0}, {1, 5, api.ModeOpen, 0}, {10, 105, api.ModeOpen, 0}}, 10},
		"nobody":                   {[]step{{0, 5, api.ModeOpen, 0}, {10, 5, api.ModeOpen, 0}}, 0},
		"only the last minute":     {[]step{{0, 0, api.ModeOpen, 0}, {20, 1000, api.ModeOpen, 0}, {80, 1060, api.ModeOpen, 0}}, 1},
		"paused":                   {[]step{{0, 5, api.ModeOpen, 0}, {10, 105, api.ModePaused, 0}}, -1},
		"sold out":                 {[]step{{0, 5, api.ModeOpen, 0}, {10, 105, api.ModeSoldOut, 0}}, -1},
		"just resumed":             {[]step{{0, 5, api.ModeOpen, 0}, {10, 105, api.ModePaused, 0}, {11, 105, api.ModeOpen, 0}}, -1},
		"resumed":                  {[]step{{0, 5, api.ModeOpen, 0}, {10, 105, api.ModePaused, 0}, {20, 105, api.ModeOpen, 0}, {25, 115, api.ModeOpen, 0}}, 2},
		"Redis lost data":          {[]step{{0, 500, api.ModeOpen, 0}, {10, 400, api.ModeOpen, 0}, {14, 404, api.ModeOpen, 0}}, 1},
		"the first fill the slots": {[]step{{0, 0, api.ModeOpen, 0}, {1, 10, api.ModeOpen, 10}, {10, 10, api.ModeOpen, 10}}, 0},
		"and others follow":        {[]step{{0, 0, api.ModeOpen, 0}, {1, 10, api.ModeOpen, 10}, {10, 15, api.ModeOpen, 10}}, 0.5},
		"limited by the rate":      {[]step{{0, 0, api.ModeOpen, 0}, {5, 5, api.ModeOpen, 5}}, 1},
		"a slot is free for a moment": {
			[]step{{0, 20, api.ModeOpen, 10}, {5, 30, api.ModeOpen, 9}, {10, 40, api.ModeOpen, 9}}, 2,
		},
		"Redis's clock went back": {[]step{{100, 500, api.ModeOpen, 0}, {10, 600, api.ModeOpen, 0}}, -1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var p pace
			for _, s := range c.steps {
				p.add(time.Unix(1_700_000_000+s.second, 0), waitingroom.Snapshot{
					Settings: waitingroom.Settings{Mode: s.mode}, Counters: map[string]int64{"promoted": s.promoted},
					Used: s.used, Free: 10 - s.used,
				})
			}
			got, ok := p.perSecond()
			require.Equal(t, c.want >= 0, ok)
			require.InDelta(t, max(c.want, 0), got, 1e-9)
		})
	}
}

func TestETA(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		place Place
		want  float64
		ok    bool
	}{
		"known":        {Place{Position: 30, pace: 4}, 7.5, true},
		"pace unknown": {Place{Position: 30}, 0, false},
		"left":         {Place{Left: true, pace: 4}, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, ok := c.place.ETA()
			require.Equal(t, c.ok, ok)
			require.InDelta(t, c.want, got, 1e-9)
		})
	}
}
