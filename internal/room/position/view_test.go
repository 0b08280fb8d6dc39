package position

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
)

// queue is the naive model of one event: a set of numbers.
type queue struct {
	tail, change int64
	in           map[int64]bool
	moves        []waitingroom.Move // of all changes, oldest first
}

func newQueue() *queue { return &queue{in: map[int64]bool{}} }

func (q *queue) clone() *queue {
	return &queue{q.tail, q.change, maps.Clone(q.in), slices.Clone(q.moves)}
}

func (q *queue) enter(n int) {
	for range n {
		q.tail++
		q.in[q.tail] = true
	}
}

// leave removes numbers from the test's queue in one change, and returns that change.
func (q *queue) leave(numbers ...int64) waitingroom.Move {
	slices.Sort(numbers)
	for _, n := range numbers {
		delete(q.in, n)
	}
	q.change++
	m := waitingroom.Move{Change: q.change, Gone: rangesOf(numbers)}
	q.moves = append(q.moves, m)
	return m
}

func rangesOf(numbers []int64) []waitingroom.Range {
	var ranges []waitingroom.Range
	for _, n := range numbers {
		if i := len(ranges) - 1; i >= 0 && ranges[i].First+ranges[i].Count == n {
			ranges[i].Count++
		} else {
			ranges = append(ranges, waitingroom.Range{First: n, Count: 1})
		}
	}
	return ranges
}

func (q *queue) numbers() []int64 { return slices.Sorted(maps.Keys(q.in)) }

// gone makes ranges from pairs of first and count.
func gone(pairs ...int64) []waitingroom.Range {
	var ranges []waitingroom.Range
	for pair := range slices.Chunk(pairs, 2) {
		ranges = append(ranges, waitingroom.Range{First: pair[0], Count: pair[1]})
	}
	return ranges
}

// draw returns some random numbers of the queue: either the lowest ones, or any.
func (q *queue) draw(t *rapid.T) []int64 {
	all := q.numbers()
	if len(all) == 0 {
		return nil
	}
	n := rapid.IntRange(1, min(len(all), 90)).Draw(t, "leaving")
	if !rapid.Bool().Draw(t, "lowest") {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	}
	return all[:n]
}

// requireEqual compares all that a view tells with the model.
func requireEqual(t require.TestingT, q *queue, v *View) {
	require.Equal(t, q.change, v.Change())
	require.Equal(t, q.tail, v.Tail())
	require.Equal(t, int64(len(q.in)), v.Total())
	lower := int64(0) // numbers in the queue
	for n := int64(-1); n <= q.tail+70; n++ {
		want := int64(0)
		in := q.in[n] || n > q.tail
		if in {
			lower++
			want = lower
		}
		if got, ok := v.Position(n); ok != in || got != want {
			require.Equal(t, want, got, "number %d", n)
			require.Equal(t, in, ok, "number %d", n)
		}
	}
}

// loadOf loads a view of the test's queue in pages. between runs after each page and may change the
// queue.
func loadOf(t require.TestingT, q *queue, page int, between func()) *View {
	order := slices.Sorted(maps.Keys(q.in))
	rand.New(rand.NewPCG(uint64(q.change), 1)).Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	v, err := Load(q.change, q.tail, func(yield func([]int64)) error {
		for numbers := range slices.Chunk(order, page) {
			yield(slices.DeleteFunc(slices.Clone(numbers), func(n int64) bool { return !q.in[n] }))
			between()
		}
		return nil
	})
	require.NoError(t, err)
	return v
}

// TestViewAgainstModel lets users enter and leave, and delivers the changes late, twice or not at
// all. The positions of numbers that stay never rise, also across loads during which users leave. A
// view that includes all changes is exact, and a view that misses one says that it needs a load.
func TestViewAgainstModel(t *testing.T) {
	t.Parallel()
	rapidtest.Check(t, 0, func(t *rapid.T) {
		q := newQueue()
		q.enter(rapid.IntRange(0, 300).Draw(t, "users"))
		v := loadOf(t, q, 10, func() {})
		requireEqual(t, q, v)
		next := 0 // the next of q.moves to be delivered
		shown := map[int64]int64{}
		change := func() {
			if leaving := q.draw(t); len(leaving) > 0 {
				q.leave(leaving...)
			}
		}
		enter := func() {
			if len(q.in) < 500 {
				q.enter(rapid.IntRange(1, 100).Draw(t, "entering"))
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"enter": func(*rapid.T) { enter() },
			"leave": func(*rapid.T) { change() },
			"READY at once": func(*rapid.T) {
				q.enter(1)
				q.leave(q.tail)
			},
			"deliver": func(t *rapid.T) {
				for range min(len(q.moves)-next, rapid.IntRange(1, 5).Draw(t, "entries")) {
					m := q.moves[next]
					next++
					missing := v.NeedsLoad() || m.Change > v.Change()+1
					require.Equal(t, !missing, v.Apply(m.Change, m.Gone))
				}
			},
			"deliver again": func(t *rapid.T) {
				if next > 0 {
					m := q.moves[rapid.IntRange(0, next-1).Draw(t, "entry")]
					before, missed := v.Change(), v.NeedsLoad()
					v.Apply(m.Change, m.Gone)
					if m.Change == before+1 && !missed { // it was lost, and comes late
						before++
					}
					require.Equal(t, before, v.Change())
				}
			},
			"lose": func(t *rapid.T) {
				if next < len(q.moves) && rapid.IntRange(0, 9).Draw(t, "seldom") == 0 {
					next++
				}
			},
			"load": func(t *rapid.T) {
				next = len(q.moves) // those before the snapshot are skipped by their numbers
				meanwhile := rapid.IntRange(0, 5).Draw(t, "meanwhile")
				v = loadOf(t, q, rapid.IntRange(1, 50).Draw(t, "page"), func() {
					if meanwhile > 0 {
						meanwhile--
						enter()
						change()
					}
				})
			},
			"": func(t *rapid.T) {
				for n := range q.in {
					pos, ok := v.Position(n)
					if before := cmp.Or(shown[n], pos); !ok || pos < 1 || pos > before {
						require.True(t, ok, "number %d is in the queue", n)
						require.Positive(t, pos)
						require.LessOrEqual(t, pos, before, "the position of %d rises", n)
					}
					shown[n] = pos
				}
				if v.Change() == q.change && !v.NeedsLoad() {
					v.Extend(q.tail)
					requireEqual(t, q, v)
				}
			},
		})
		for ; next < len(q.moves); next++ {
			v.Apply(q.moves[next].Change, q.moves[next].Gone)
		}
		v.Extend(q.tail)
		if v.Change() == q.change {
			requireEqual(t, q, v)
		} else {
			v = loadOf(t, q, 100, func() {})
			requireEqual(t, q, v)
		}
	})
}

// TestViewDropsItsFront: the bitmap starts at the lowest number in the queue, so it stays small
// even if very many numbers have been given.
func TestViewDropsItsFront(t *testing.T) {
	t.Parallel()
	v, err := Load(0, 0, func(func([]int64)) error { return nil })
	require.NoError(t, err)
	for i := range int64(10_000) {
		v.Extend((i + 2) * 200)
		require.True(t, v.Apply(i+1, gone(i*200+1, 200)))
		require.LessOrEqual(t, len(v.left), 4)
		require.LessOrEqual(t, cap(v.left), 64)
	}
	pos, ok := v.Position(2_000_001)
	require.True(t, ok)
	require.Equal(t, int64(1), pos)
	require.Equal(t, int64(200), v.Total())
	_, ok = v.Position(2_000_000)
	require.False(t, ok)
}

// TestViewRefusesNonsense: a change with impossible ranges makes the view need a load, and
// allocates no memory for them.
func TestViewRefusesNonsense(t *testing.T) {
	t.Parallel()
	for name, ranges := range map[string][]waitingroom.Range{
		"huge count":      gone(1, 1_000_000_000_000),
		"largest count":   gone(1, math.MaxInt64),
		"overflow":        gone(math.MaxInt64-1, 10),
		"huge number":     gone(1_000_000_000_000, 1),
		"far ahead":       gone(100+maxAhead, 2),
		"number 0":        gone(0, 5),
		"negative number": gone(-5, 10),
		"no count":        gone(5, 0),
		"negative count":  gone(5, -1),
		"lowest count":    gone(5, math.MinInt64),
		"one of several":  gone(1, 1, 3, 1<<40),
		"much in all":     slices.Repeat(gone(1, maxAhead), 20),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			q := newQueue()
			q.enter(100)
			v := loadOf(t, q, 100, func() {})
			words := cap(v.left)
			require.False(t, v.Apply(1, ranges))
			require.Equal(t, words, cap(v.left), "memory for nonsense")
			require.True(t, v.NeedsLoad())
			require.False(t, v.Apply(2, gone(1, 1)))
			require.Equal(t, int64(0), v.Change())
			pos, ok := v.Position(100)
			require.True(t, ok)
			require.Equal(t, int64(99), pos, "later changes count all the same")
		})
	}
}

func TestLoadRefusesNonsense(t *testing.T) {
	t.Parallel()
	none := func(func([]int64)) error { return nil }
	for name, c := range map[string]struct{ change, tail int64 }{
		"negative change": {-1, 5}, "negative tail": {5, -1}, "huge tail": {5, math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := Load(c.change, c.tail, none)
			require.Error(t, err)
		})
	}
	_, err := Load(1, maxNumber, func(yield func([]int64)) error { yield([]int64{7}); return nil })
	require.ErrorIs(t, err, ErrSpan)
	v, err := Load(1, maxNumber, func(yield func([]int64)) error {
		yield([]int64{-7, 0, math.MinInt64, math.MaxInt64, maxNumber})
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, int64(1), v.Total())
	broken := errors.New("broken")
	_, err = Load(1, 1, func(func([]int64)) error { return broken })
	require.ErrorIs(t, err, broken)
}

// million returns a view of a queue of 1,000,000 numbers, of which every tenth has left.
func million(b testing.TB) *View {
	const n = 1_000_000
	page := make([]int64, 0, n)
	for i := int64(1); i <= n; i++ {
		if i%10 != 0 {
			page = append(page, i)
		}
	}
	v, err := Load(0, n, func(yield func([]int64)) error { yield(page); return nil })
	require.NoError(b, err)
	return v
}

func BenchmarkRebuild(b *testing.B) {
	v := million(b)
	b.ReportAllocs()
	for b.Loop() {
		v.stale = true
		v.Rebuild()
	}
}

func BenchmarkPosition(b *testing.B) {
	v := million(b)
	v.Rebuild()
	b.ReportAllocs()
	n := int64(0)
	for b.Loop() {
		n = (n + 7919) % 1_000_000
		v.Position(n + 1)
	}
}

// BenchmarkApply applies changes of 201 numbers: the 200 that a promotion removes, and the last
// number given, so that the bitmap keeps its length. The variant with rebuild also prepares the
// view for reading after each change.
func BenchmarkApply(b *testing.B) {
	for name, rebuild := range map[string]bool{"alone": false, "with rebuild": true} {
		b.Run(name, func(b *testing.B) {
			v := million(b)
			ranges := gone(1, 200, v.Tail(), 1)
			b.ReportAllocs()
			for b.Loop() {
				if !v.Apply(v.Change()+1, ranges) {
					b.Fatal("a change is missing")
				}
				v.Extend(v.Tail() + 200)
				ranges[0].First, ranges[1].First = v.Change()*200+1, v.Tail()
				if rebuild {
					v.Rebuild()
				}
			}
			b.ReportMetric(float64(len(v.left)*8)/1000, "KB_of_bitmap")
		})
	}
}

func BenchmarkLoad(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		million(b)
	}
}

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

// TestLag: a second passes between two snapshots.
func TestLag(t *testing.T) {
	t.Parallel()
	type step struct {
		waiting, free, promoted int64
		mode                    string
	}
	due := step{1, 1, 5, api.ModeOpen}
	for name, c := range map[string]struct {
		rate  float64
		steps []step
		want  time.Duration
	}{
		"one snapshot":     {0, []step{due}, 0},
		"due":              {0, []step{due, due, due}, 2 * time.Second},
		"due for a moment": {0, []step{due, {1, 0, 6, api.ModeOpen}}, 0},
		"due again":        {0, []step{due, {1, 0, 5, api.ModeOpen}, due, due}, 2 * time.Second},
		"always promoting": {0, []step{due, {9, 9, 6, api.ModeOpen}, {9, 9, 7, api.ModeOpen}}, 0},
		"nobody waits":     {0, []step{due, due, {0, 1, 5, api.ModeOpen}}, 0},
		"paused":           {0, []step{due, due, {1, 1, 5, api.ModePaused}}, 0},
		"sold out":         {0, []step{due, due, {1, 1, 5, api.ModeSoldOut}}, 0},
		"no permit yet":    {0.5, []step{due, due, due}, 0},
		"a permit is due":  {0.5, []step{due, due, due, due}, time.Second},
		"Redis lost data":  {0, []step{due, due, {1, 1, 0, api.ModeOpen}}, 0},
	} {
		var l lag
		for i, s := range c.steps {
			l.add(time.Unix(1_700_000_000+int64(i), 0), waitingroom.Snapshot{
				Settings: waitingroom.Settings{Mode: s.mode, Rate: c.rate}, Waiting: s.waiting, Free: s.free,
				Counters: map[string]int64{"promoted": s.promoted},
			})
		}
		require.Equal(t, c.want, l.now, name)
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
