package roomload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// Serve is the main function of a process that generates load on the waiting room. It reads tasks
// from in until that ends, carries them out, and writes answers to out.
func Serve(ctx context.Context, in io.Reader, out io.Writer) error {
	tasks, answers := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var t Task
		if err := tasks.Decode(&t); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read a task: %w", err)
		}
		if err := serve(ctx, t, tasks, answers); err != nil {
			if err := answers.Encode(Answer{Error: err.Error()}); err != nil {
				return fmt.Errorf("write an answer: %w", err)
			}
		}
	}
}

// generator is a task under way.
type generator struct {
	Task
	keys   *verifier
	client *http.Client // for all calls but streams
	ages   ages
	wrong  violations
	counts struct{ entered, open, shown, admitted, ended atomic.Int64 }
	rng    *rand.Rand

	running  sync.WaitGroup
	visitors []*visitor
	entries  *entries // of a task of this kind
}

func newGenerator(ctx context.Context, t Task) (*generator, error) {
	transport := &http.Transport{MaxIdleConnsPerHost: 64, MaxConnsPerHost: 64, IdleConnTimeout: 5 * time.Second}
	g := &generator{
		Task: t, client: &http.Client{Transport: transport, Timeout: 30 * time.Second},
		rng: rand.New(rand.NewPCG(t.Seed, uint64(t.First))),
	}
	if len(t.Brokers) == 0 || len(t.Events) == 0 {
		return nil, errors.New("a task needs a broker and an event")
	}
	switch t.Kind {
	case Entries:
		g.entries = &entries{generator: g}
		return g, nil
	case Streams:
	default:
		return nil, fmt.Errorf("there is no task %q", t.Kind)
	}
	var err error
	if g.keys, err = newVerifier(ctx, t.Keys, t.Issuer); err != nil {
		return nil, err
	}
	for i := t.First; i < t.First+t.Users; i++ {
		g.visitors = append(g.visitors, &visitor{
			generator: g, broker: i, acted: make(chan struct{}, 1),
			visit:   Visit{User: t.Prefix + strconv.Itoa(i), Event: t.Events[i%len(t.Events)]},
			session: time.Duration((0.5 + g.rng.Float64()) * float64(t.Session)),
		})
	}
	return g, nil
}

// serve carries out one task: it answers the steps of the parent until the task ends. It returns an
// error if the task cannot begin, or a step cannot be read or answered.
func serve(ctx context.Context, t Task, steps *json.Decoder, answers *json.Encoder) error {
	g, err := newGenerator(ctx, t)
	if err != nil {
		return err
	}
	defer g.client.CloseIdleConnections()
	ctx, cancel := context.WithCancel(ctx)
	defer g.running.Wait()
	defer cancel()
	entering, stopEntering := context.WithCancel(ctx)
	defer stopEntering()
	if err := answers.Encode(Answer{}); err != nil {
		return err
	}
	for {
		var s Step
		if err := steps.Decode(&s); err != nil {
			return fmt.Errorf("read a step: %w", err)
		}
		switch s.Do {
		case Begin:
			g.begin(ctx, entering)
		case Mark:
			g.ages.reset()
		case Act:
			g.act()
		case End:
			stopEntering()
			g.end()
		}
		if err := answers.Encode(g.answer(s.Do == End)); err != nil || s.Do == End {
			return err
		}
	}
}

// begin starts the users of the task in the background: no more of them after entering ends. Those
// that have started act until ctx ends.
func (g *generator) begin(ctx, entering context.Context) {
	if g.entries != nil {
		g.running.Go(func() { g.entries.run(entering) })
		return
	}
	g.running.Go(func() {
		free := make(chan struct{}, max(1, g.Parallel))
		began := time.Now()
		for i, v := range g.visitors {
			entered := func() {}
			if g.PerSecond > 0 {
				sleepUntil(entering, began.Add(time.Duration(float64(i)/g.PerSecond*float64(time.Second))))
			} else {
				select {
				case free <- struct{}{}:
					entered = func() { <-free }
				case <-entering.Done():
				}
			}
			if entering.Err() != nil {
				return
			}
			g.running.Go(func() { v.run(ctx, entered) })
		}
	})
}

// act plans what the users do at random times.
func (g *generator) act() {
	for _, v := range g.visitors {
		at := time.Duration(g.rng.Float64() * float64(g.Within))
		switch r := g.rng.Float64(); {
		case r < g.Close:
			v.doAfter(at, closeTab)
		case r < g.Close+g.Churn:
			v.doAfter(at, reload)
		}
	}
}

// end stops all users and waits for them.
func (g *generator) end() {
	for _, v := range g.visitors {
		v.do(stop)
	}
	g.running.Wait()
}

func (g *generator) answer(last bool) Answer {
	a := Answer{
		Counts: Counts{
			Entered: g.counts.entered.Load(), Open: g.counts.open.Load(), Shown: g.counts.shown.Load(),
			Admitted: g.counts.admitted.Load(), Ended: g.counts.ended.Load(),
		},
		Frames: g.ages.frames.Load(),
	}
	a.Violations, a.Wrong = g.wrong.all()
	if !last {
		return a
	}
	a.Ages = g.ages.byMS()
	for _, v := range g.visitors {
		if v.visit.Sent > 0 { // the others have not begun
			a.Visits = append(a.Visits, v.visit)
		}
	}
	if g.entries != nil {
		a.Waits = g.entries.waits
	}
	return a
}

// sleepUntil sleeps until t or until ctx ends.
func sleepUntil(ctx context.Context, t time.Time) {
	left := time.Until(t)
	if left <= 0 {
		return
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
