package position

import (
	"cmp"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
)

// TestViewsAgainstModel follows two events in two brokers, while users enter, leave and move from
// one broker to the other, the stream moves is trimmed, calls fail, and Redis loses data. The
// position that a user is shown never rises, unless Redis has lost data. Some time after the last
// change, all positions are exact.
func TestViewsAgainstModel(t *testing.T) {
	bubble(t, func(t *testing.T) {
		rapidtest.Check(struct{ rapid.TB }{t}, 0, checkViews) // a bubble has no Deadline, which *testing.T has
	})
}

// user is what a user of the model was shown.
type user struct {
	broker   int
	change   int64 // of the last enter
	position int64
}

func checkViews(t *rapid.T) {
	events := names(2)
	w := newWorld(events...)
	w.most = 5
	brokers := []*Views{New(w), New(w)}
	for _, views := range brokers {
		for _, name := range events {
			views.Open(name)
		}
	}
	users := map[string]map[int64]*user{} // by event and number
	for _, name := range events {
		users[name] = map[int64]*user{}
	}
	lost := false // Redis has lost data since all was exact
	backup := w.backup()
	event := func() string { return rapid.SampledFrom(events).Draw(t, "event") }
	enter := func() {
		name := event()
		q := w.queues[name]
		if len(q.in) > 100 {
			return
		}
		q.enter(rapid.IntRange(1, 20).Draw(t, "entering"))
		for _, n := range q.numbers() {
			if users[name][n] == nil {
				users[name][n] = &user{broker: rapid.IntRange(0, 1).Draw(t, "broker"), change: q.change}
			}
		}
	}
	leave := func() {
		name := event()
		if leaving := w.queues[name].draw(t); len(leaving) > 0 {
			w.leave(name, leaving...)
		}
	}
	check := func() {
		if lost {
			return
		}
		for i, name := range events {
			views := []*Event{brokers[0].Open(name), brokers[1].Open(name)}
			for n := range w.queues[name].in {
				u := users[name][n]
				p := views[u.broker].Place(n, u.change)
				if !p.Known {
					continue
				}
				if p.Left || p.Position < 1 || p.Position > p.Total || p.Position > cmp.Or(u.position, p.Position) {
					require.Failf(t, "wrong place", "%+v of number %d of event %d, shown before: %+v", p, n, i, *u)
				}
				u.position = p.Position
			}
			views[0].Close()
			views[1].Close()
		}
	}
	settle := func() {
		w.err = nil
		for _, views := range brokers {
			rounds(t, views, doubtInterval+10*time.Second)
			requireExact(t, w, views)
		}
		lost = false
		for _, name := range events {
			for n := range users[name] {
				users[name][n].position, users[name][n].change = 0, 0
			}
		}
	}
	t.Repeat(map[string]func(*rapid.T){
		"enter": func(*rapid.T) { enter() },
		"leave": func(*rapid.T) { leave() },
		"leave more": func(*rapid.T) {
			leave()
			time.Sleep(time.Millisecond)
			leave()
		},
		"READY at once": func(*rapid.T) {
			name := event()
			w.queues[name].enter(1)
			w.leave(name, w.queues[name].tail)
		},
		"come back": func(*rapid.T) { // to the other broker, with the same numbers
			name := event()
			for n := range w.queues[name].in {
				u := users[name][n]
				u.broker, u.change = 1-u.broker, w.queues[name].change
			}
		},
		"round": func(t *rapid.T) {
			busy := rapid.IntRange(0, 10).Draw(t, "busy")
			w.between = func() {
				if busy > 0 {
					busy--
					rapid.SampledFrom([]func(){enter, leave, check}).Draw(t, "between")()
				}
			}
			w.page = rapid.IntRange(1, 30).Draw(t, "page")
			err := brokers[rapid.IntRange(0, 1).Draw(t, "broker")].Round(context.Background())
			w.between = func() {}
			if err != nil {
				require.ErrorIs(t, err, errAway)
			}
		},
		"wait": func(t *rapid.T) {
			name := event()
			e := brokers[rapid.IntRange(0, 1).Draw(t, "broker")].Open(name)
			defer e.Close()
			if e.Wait(context.Background(), w.queues[name].change) && !lost {
				for n := range w.queues[name].in {
					require.True(t, e.Place(n, w.queues[name].change).Known)
				}
			}
		},
		"time passes": func(t *rapid.T) {
			time.Sleep(time.Duration(rapid.IntRange(0, 1500).Draw(t, "ms")) * time.Millisecond)
		},
		"trim": func(t *rapid.T) {
			// The test does not trim the stream after a loss of data: the real stream has 10,000
			// entries, so a broker always reads some of the changes that replaced lost ones before
			// they are trimmed.
			if !lost {
				w.trim(rapid.IntRange(0, 3).Draw(t, "keep"))
			}
		},
		"fail":    func(*rapid.T) { w.err = errAway },
		"back up": func(*rapid.T) { backup = w.backup() },
		"lose data": func(t *rapid.T) {
			if rapid.IntRange(0, 4).Draw(t, "seldom") > 0 {
				return
			}
			w.restore(backup)
			time.Sleep(time.Millisecond) // new entries have new ids
			lost = true
		},
		"declare again": func(t *rapid.T) {
			if rapid.IntRange(0, 4).Draw(t, "seldom") > 0 {
				return
			}
			name := event()
			w.queues[name], users[name] = newQueue(), map[int64]*user{}
			backup = w.backup()
			lost = true
		},
		"settle": func(*rapid.T) { settle() },
		"": func(*rapid.T) {
			for _, name := range events {
				for n := range w.queues[name].in { // restored ones
					if users[name][n] == nil {
						users[name][n] = &user{}
					}
				}
			}
			check()
		},
	})
	settle()
}
