package worker

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/processor"
)

func startRates(r *rates, now time.Time) map[string]float64 {
	perSecond, _, _ := r.report(now)
	return perSecond
}

func TestStartRates(t *testing.T) {
	t.Parallel()
	s := newRates()
	now := time.Unix(1_900_000_000, 0)
	require.Empty(t, startRates(s, now))

	// 10 starts every 100 ms: a steady rate.
	run := func(n int, span time.Duration) {
		for range int(span / (100 * time.Millisecond)) {
			s.started(now, "T", n)
			now = now.Add(100 * time.Millisecond)
		}
	}
	run(10, time.Second)
	require.InDelta(t, 100, startRates(s, now)["T"], 1, "soon after the first start")
	run(10, 9*time.Second)
	require.InDelta(t, 100, startRates(s, now)["T"], 6)
	run(20, 2*time.Second)
	require.Greater(t, startRates(s, now)["T"], 130.0, "it rises before a whole rateSpan has passed")
	run(20, 8*time.Second)
	require.InDelta(t, 200, startRates(s, now)["T"], 12)

	now = now.Add(rateSpan + time.Second)
	require.Empty(t, startRates(s, now), "a type without recent starts has no rate")
}

// TestStartRatesAreSteadyDespiteBursts: when jobs start in one burst at the beginning of each
// second, the rate is about the same at any time within the second.
func TestStartRatesAreSteadyDespiteBursts(t *testing.T) {
	t.Parallel()
	s := newRates()
	start := time.Unix(1_900_000_000, 0)
	for at := time.Duration(0); at < 20*time.Second; at += 100 * time.Millisecond {
		if at%time.Second == 0 {
			s.started(start.Add(at), "T", 6)
		}
		if at > rateSpan {
			require.InDelta(t, 6, startRates(s, start.Add(at))["T"], 1.5, "%v", at)
		}
	}
}

func TestStartRatesCountAtLeastHalfASecond(t *testing.T) {
	t.Parallel()
	s := newRates()
	now := time.Unix(1_900_000_000, 0)
	s.started(now, "T", 5)
	require.InDelta(t, 10, startRates(s, now)["T"], 0.001, "the span is at least minSpan")
	require.InDelta(t, 10, startRates(s, now)["T"], 0.001, "a second call returns the same")
}

func TestRunTimes(t *testing.T) {
	r, now := newRates(), time.Now()
	milliseconds := func(now time.Time) map[string]float64 {
		_, runMS, _ := r.report(now)
		return runMS
	}
	require.Empty(t, milliseconds(now))
	r.ran("A", 2, 40*time.Millisecond)
	r.ran("B", 1, time.Second)
	r.ran("C", 0, 0)
	require.Equal(t, map[string]float64{"A": 20, "B": 1000}, milliseconds(now.Add(500*time.Millisecond)))
	require.Equal(t, map[string]float64{"A": 20, "B": 1000}, milliseconds(now.Add(time.Second)), "a type without new jobs keeps its mean")
	r.ran("A", 1, 120*time.Millisecond)
	got := milliseconds(now.Add(time.Second + runAge))
	require.InDelta(t, 20+100*(1-1/math.E), got["A"], 0.01)
	require.InDelta(t, 1000, got["B"], 0)
}

func TestReportQueue(t *testing.T) {
	q := newReportQueue()
	q.add(&task{currentAttempt: 1})
	q.add(&task{currentAttempt: 2, result: make([]byte, 10)})
	q.add(&task{currentAttempt: 3, result: make([]byte, 100)})
	q.add(&task{currentAttempt: 4, verdict: processor.Verdict{Message: "0123456789"}})
	q.close()
	var got [][]int
	for q.wait() {
		var batch []int
		for _, t := range q.take(3, 50) {
			batch = append(batch, t.currentAttempt)
		}
		got = append(got, batch)
	}
	require.Equal(t, [][]int{{1, 2, 3}, {4}}, got) // the third task exceeds the bytes, and is the last one by number as well
	require.Empty(t, q.tasks)

	q = newReportQueue()
	for range 3 {
		q.add(&task{result: make([]byte, 100)})
	}
	require.Len(t, q.take(3, 50), 1)
	require.Len(t, q.take(3, 150), 2)
}

func TestJittered(t *testing.T) {
	for _, d := range []time.Duration{time.Millisecond, time.Second, 24 * time.Hour} {
		for range 100 {
			got := jittered(d)
			require.LessOrEqual(t, got, d)
			require.GreaterOrEqual(t, got, d*9/10-1)
		}
	}
}

func TestAppendMillis(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		0: "0", 999 * time.Nanosecond: "0", time.Microsecond: "0.001", 1500 * time.Microsecond: "1.5", 20*time.Millisecond + 40*time.Microsecond: "20.04",
		time.Hour: "3600000", 999999 * time.Microsecond: "999.999", 100 * time.Microsecond: "0.1", 101 * time.Microsecond: "0.101",
	} {
		require.Equal(t, want, string(appendMillis(nil, d)))
	}
}

// TestJobContextBehavesLikeAContext: a job's context behaves like a standard context that began
// with the job, no matter when it is first used.
func TestJobContextBehavesLikeAContext(t *testing.T) {
	t.Parallel()
	type key struct{}
	parent := context.WithValue(context.Background(), key{}, "v")
	begin := func(limit time.Duration) *jobContext {
		c := &jobContext{}
		c.begin(parent, monotonicNow(), limit)
		return c
	}

	c := begin(time.Hour)
	require.NoError(t, c.endCause(monotonicNow()))
	require.Nil(t, c.ctx, "created only when it is used")
	deadline, ok := c.Deadline()
	require.True(t, ok)
	require.WithinDuration(t, time.Now().Add(time.Hour), deadline, time.Minute)
	require.NoError(t, c.Err())
	require.Equal(t, "v", c.Value(key{}))
	child, cancel := context.WithCancel(c)
	defer cancel()
	c.stop(errLeaseLost)
	<-child.Done()
	require.Equal(t, errLeaseLost, context.Cause(child))
	require.Equal(t, errLeaseLost, context.Cause(c))
	require.Equal(t, errLeaseLost, c.endCause(monotonicNow()))
	c.stop(errShutdown)
	require.Equal(t, errLeaseLost, c.stopCause(), "the first cause counts")
	c.finish()

	c = begin(time.Hour)
	c.stop(errCancelled) // stop comes before the first use
	<-c.Done()
	require.Equal(t, errCancelled, context.Cause(c))
	c.finish()

	c = &jobContext{}
	c.stop(errLeaseLost) // stop comes before begin
	c.begin(parent, monotonicNow(), time.Hour)
	require.Equal(t, errLeaseLost, c.endCause(monotonicNow()))
	require.ErrorIs(t, c.Err(), context.Canceled)
	c.finish()

	c = begin(0)
	require.Equal(t, context.DeadlineExceeded, c.endCause(monotonicNow()))
	c.stop(errShutdown)
	require.Equal(t, context.DeadlineExceeded, c.endCause(monotonicNow()), "the timeout came first")
	<-c.Done()
	require.Equal(t, context.DeadlineExceeded, c.Err())
	c.finish()

	c = begin(time.Millisecond)
	<-c.Done()
	require.Equal(t, context.DeadlineExceeded, context.Cause(c))
	c.finish()

	ctx, giveUp := context.WithCancelCause(context.Background())
	c = &jobContext{}
	c.begin(ctx, monotonicNow(), time.Hour)
	giveUp(errors.New("the parent's cause"))
	require.EqualError(t, context.Cause(c), "the parent's cause")
	c.finish()

	c = begin(time.Hour)
	c.finish()
	require.ErrorIs(t, c.Err(), context.Canceled, "a processor that keeps it finds it ended")
	c.stop(errLeaseLost)
	require.Equal(t, context.Canceled, context.Cause(c))
}

func divide(a, b int) int { return a / b }

func TestPanickedAt(t *testing.T) {
	t.Parallel()
	at := func(f func()) (place string) {
		defer func() {
			if recover() != nil {
				place = panickedAt()
			}
		}()
		f()
		return
	}
	require.Contains(t, at(func() { panic("x") }), "TestPanickedAt.func")
	require.Regexp(t, `worker\.divide \(.*internal_test\.go:\d+\)`, at(func() { require.Zero(t, divide(1, 0)) }))
}

func TestSlotPoolGivesTasks(t *testing.T) {
	t.Parallel()
	s := newSlotPool(0)
	open, shut := &slot{}, &slot{closed: true}
	first, second := &task{}, &task{}
	require.True(t, s.add([]*task{first, second}))
	require.Nil(t, nextTask(s, shut), "a closed slot takes no more")
	require.Same(t, first, nextTask(s, open))
	_, active := s.sizeAndActive()
	require.Equal(t, 1, active)
	require.Equal(t, []*task{second}, s.block())
	s.unblock()

	// Two slots wait and one of them is closed: the other one gets the next task, no matter which
	// one was woken.
	got := make(chan *task, 2)
	leaving := &slot{}
	go func() { got <- nextTask(s, open) }()
	go func() { got <- nextTask(s, leaving) }()
	s.mu.Lock()
	leaving.closed = true
	s.mu.Unlock()
	s.unblock() // wakes all
	require.Nil(t, <-got)
	require.True(t, s.add([]*task{first}))
	require.Same(t, first, <-got)
}

// TestBlockedSlotsBeginNoTask: while the pool is blocked, a slot does not get the task that waits.
// It gets it after unblock.
func TestBlockedSlotsBeginNoTask(t *testing.T) {
	t.Parallel()
	s := newSlotPool(0)
	s.block()
	s.waiting = []*task{{}}
	got := make(chan *task, 1)
	go func() { got <- nextTask(s, &slot{}) }()
	select {
	case <-got:
		require.Fail(t, "the pool is blocked")
	case <-time.After(20 * time.Millisecond):
	}
	s.unblock()
	require.NotNil(t, <-got)
}

// TestBlockedPoolAcceptsNoTasks: a pool that is blocked or closed gives back its waiting tasks, and
// accepts no others.
func TestBlockedPoolAcceptsNoTasks(t *testing.T) {
	s := newSlotPool(1)
	first, second := []*task{{}}, []*task{{}}
	require.True(t, s.add(first))
	require.Equal(t, first, s.block())
	require.False(t, s.add(second))
	s.unblock()
	require.True(t, s.add(second))
	require.Equal(t, second, s.close())
	require.False(t, s.add(first))
}

func TestOverdue(t *testing.T) {
	now := time.Now()
	tasks := func(since ...time.Duration) []*task { // oldest first
		var all []*task
		for i, d := range since {
			all = append(all, &task{currentAttempt: i, startedAt: now.Add(-d)})
		}
		return all
	}
	attempts := func(tasks []*task) (attempts []int) {
		for _, t := range tasks {
			attempts = append(attempts, t.currentAttempt)
		}
		return attempts
	}
	const long, short = maxSlotWait, maxSlotWait - time.Millisecond
	for name, tt := range map[string]struct {
		waiting []*task
		size    int
		each    time.Duration
		want    []int // places of the overdue tasks
		stay    []int
	}{
		"no task waits":                           {nil, 4, time.Hour, nil, nil},
		"slow jobs: all that wait for long":       {tasks(long, long, short), 4, time.Hour, []int{0, 1}, []int{2}},
		"tasks that get a slot soon stay":         {tasks(long, long, long), 2, maxSlotWait, []int{2}, []int{0, 1}},
		"all tasks get a slot soon":               {tasks(long, long, long), 3, maxSlotWait, nil, []int{0, 1, 2}},
		"quick jobs":                              {tasks(long, long, long), 1, 0, nil, []int{0, 1, 2}},
		"no task has waited for long":             {tasks(short, short), 1, time.Hour, nil, []int{0, 1}},
		"the order of starts counts, not the age": {tasks(short, long), 1, maxSlotWait, []int{1}, []int{0}},
		"one of the later tasks stays":            {tasks(long, short, long), 1, maxSlotWait, []int{2}, []int{0, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSlotPool(tt.size)
			require.True(t, s.add(tt.waiting))
			require.Empty(t, s.takeOverdue(tt.each, now), "slots are free")
			s.active = tt.size
			require.Equal(t, tt.want, attempts(s.takeOverdue(tt.each, now)))
			require.Equal(t, tt.stay, attempts(s.waiting))
		})
	}
}

// TestNumbersFollowFromStates: after each of many random moves of tasks with and without a gate, each
// number is that of the tasks in its states. A move from a state that a task is not in changes nothing.
func TestNumbersFollowFromStates(t *testing.T) {
	t.Parallel()
	h, g, random := newHeldTasks(), newGate(nil, "G", nil), rand.New(rand.NewPCG(1, 2))
	tasks := make([]*task, 40)
	for i := range tasks {
		tasks[i] = &task{}
		switch i % 3 {
		case 0:
			tasks[i].gate = g
		case 1:
			tasks[i].batchType = &batchType{}
		}
	}
	anyTask := func(*task) bool { return true }
	batched := func(t *task) bool { return t.batchType != nil }
	count := func(states state, of func(*task) bool) (n int) {
		for _, t := range tasks {
			if t.currentState()&states != 0 && of(t) {
				n++
			}
		}
		return n
	}
	for range 5000 {
		some := tasks[random.IntN(len(tasks))]
		from, to := state(1<<random.IntN(7)), state(1<<random.IntN(7))
		if random.IntN(2) == 0 {
			from = some.currentState()
		}
		was := some.currentState()
		moved := h.move(from, to, some)
		require.Equal(t, from == was, moved)
		if !moved {
			require.Equal(t, was, some.currentState())
		}
		for _, c := range []*number{&h.all, &h.active} {
			require.Equal(t, count(c.states, anyTask), c.value())
		}
		require.Equal(t, count(h.batched.states, batched), h.batched.value())
		require.Equal(t, count(h.unfinished.states, func(t *task) bool { return !batched(t) }), h.unfinished.value())
		for _, c := range []*number{&g.waiting, &g.ahead, &g.admitted} {
			require.Equal(t, count(c.states, func(t *task) bool { return t.gate != nil }), c.value())
		}
	}
	require.Equal(t, stateRead|stateAdmitting|stateGathering|stateAdmitted|stateRunning|stateEnded, h.all.states)
	require.Equal(t, h.all.states&^stateAdmitting&^stateGathering, h.active.states)
	require.Equal(t, h.active.states&^stateEnded, h.unfinished.states)
}

// TestHeldTasksNotifyAtResumeAt: a notification follows when at most resumeAt tasks are unfinished,
// whichever comes first: the call of setResumeAt or the end of the tasks.
func TestHeldTasksNotifyAtResumeAt(t *testing.T) {
	t.Parallel()
	h := newHeldTasks()
	freed := h.nextChange()
	all := []*task{{}, {}, {}}
	end := func(t *task) { h.move(stateRead, stateEnded, t) }
	h.move(0, stateRead, all...)
	h.setResumeAt(1)
	end(all[0])
	select {
	case <-freed:
		require.Fail(t, "two tasks are unfinished")
	default:
	}
	end(all[1])
	<-freed
	freed = h.nextChange()
	h.setResumeAt(1) // only one task is unfinished already
	<-freed
	freed = h.nextChange()
	h.setResumeAt(-1)
	end(all[2])
	select {
	case <-freed:
		require.Fail(t, "no notification was asked for")
	default:
	}
	h.track(all...)
	h.untrack(all[1])
	require.ElementsMatch(t, []*task{all[0], all[2]}, h.tasks())
	h.remove(all)
	<-freed
	require.Empty(t, h.tasks())
	require.Zero(t, h.all.value())
}

// TestAStopEndsInTime: a stop waits at most ten seconds after the grace period, even if the outcome
// of a task is never reported.
func TestAStopEndsInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		space, err := keyspace.New("t:", 1)
		require.NoError(t, err)
		w := &Worker{
			Process: stage.Process{ID: "w", Space: space, Tel: telemetry.Nop()}, cfg: Config{Grace: time.Minute},
			held: newHeldTasks(), slots: newSlotPool(0),
		}
		w.isolation = newIsolation(w)
		w.held.move(0, stateEnded, &task{})
		began, stopped := time.Now(), false
		w.drain(func() { stopped = true })
		require.True(t, stopped)
		require.Equal(t, time.Minute+10*time.Second, time.Since(began))
	})
}

// TestResultLine: a result line says all that is shown of a done job, and can be decoded.
func TestResultLine(t *testing.T) {
	at := time.UnixMilli(1764276245123)
	tk := &task{Job: ledger.Job{Ordinal: 7}, currentAttempt: 2, runTime: 1500 * time.Microsecond, result: []byte(`{"a":1}`), startedAt: at}
	require.Equal(t, `{"ordinal":7,"duration_ms":1.5,"attempts":2,"started_ms":1764276245123,"worker":"w-1","data":{"a":1}}`,
		string(appendResultLine(nil, tk, "w-1")))
	tk.lastError = &processor.AttemptError{Code: "BUSY", Text: "\"later\"", Attempt: 1, At: at}
	var r api.Result
	require.NoError(t, json.Unmarshal(appendResultLine(nil, tk, "w-1"), &r))
	require.Equal(t, "w-1", r.Worker)
	require.Equal(t, at.UnixMilli(), r.StartedMS)
	require.Equal(t, `"later"`, r.LastError.Error)
	require.True(t, at.Equal(r.LastError.At))
}

// TestDeadReason: a job that fails for good has the reason with which metrics count it.
func TestDeadReason(t *testing.T) {
	f := &feed{w: &Worker{cfg: Config{MaxRetries: 1, MaxThrottles: 1}}}
	f.w.waits.Store(&waits{backoff: time.Second, maxBackoff: time.Second})
	broke := errors.New("it broke")
	for reason, tk := range map[string]*task{
		telemetry.DeadPermanent: {verdict: processor.Classify(processor.Permanent("X", broke))},
		telemetry.DeadRetries:   {Job: ledger.Job{Retries: 1}, verdict: processor.Classify(broke)},
		telemetry.DeadThrottles: {Job: ledger.Job{Throttles: 1}, verdict: processor.Verdict{Kind: processor.Throttle}},
		"":                      {verdict: processor.Classify(broke)},
	} {
		tk.terms.MaxRetries = -1
		f.otherOutcome(tk)
		require.Equal(t, reason, tk.deadReason)
	}
}

func nextTask(s *slotPool, sl *slot) *task {
	t, _ := s.next(sl)
	return t
}

// TestBatchesInTheirOrder: the batch whose oldest job has waited longest comes first, also before a
// full one. One that is neither full nor over its wait is left, unless the ready stream is empty.
func TestBatchesInTheirOrder(t *testing.T) {
	t.Parallel()
	s := newSlotPool(3)
	b := &batchType{options: processor.BatchOptions{Size: 2, Bytes: 1000, Wait: time.Hour}, open: map[batchKey]*batch{}, empty: []bool{false}}
	s.batches = []*batchType{b}
	of := func(tenant string) *task {
		return &task{batchType: b, terms: ledger.GroupTerms{Tenant: tenant}}
	}
	start := time.Now()
	require.True(t, s.gather([]*task{of("small")}, start))
	require.True(t, s.gather([]*task{of("flood"), of("flood")}, start.Add(time.Second)))
	first := s.firstBatch()
	require.Equal(t, "flood", first.key.by, "the small one may get a further job")
	s.makeDue(b.open[batchKey{by: "small"}])
	require.Equal(t, "small", s.firstBatch().key.by)
	s.take(s.firstBatch())
	s.take(first)
	require.Nil(t, s.firstBatch())
	require.Zero(t, b.jobs)

	require.True(t, s.gather([]*task{of("last")}, start))
	require.Nil(t, s.firstBatch())
	s.setEmpty(b, 0, true)
	require.Equal(t, "last", s.firstBatch().key.by)
	require.Len(t, s.block(), 1)
	require.False(t, s.gather([]*task{of("late")}, start))
	require.Empty(t, b.open)
}

// TestOverdueBatchesAreLeftToOthers: while calls are long, a batch that would wait as long again is
// given back.
func TestOverdueBatchesAreLeftToOthers(t *testing.T) {
	t.Parallel()
	s, now := newSlotPool(2), time.Now()
	b := &batchType{options: processor.BatchOptions{Size: 1, Bytes: 1000, Wait: time.Hour}, open: map[batchKey]*batch{}, empty: []bool{false}}
	s.batches, s.active = []*batchType{b}, 2
	for i := range 3 {
		require.True(t, s.gather([]*task{{batchType: b}}, now.Add(time.Duration(i)*time.Millisecond)))
	}
	wait := b.options.Wait + 2*maxSlotWait
	require.Empty(t, s.takeOverdue(maxSlotWait, now))
	require.Len(t, s.takeOverdue(maxSlotWait, now.Add(wait)), 1, "two slots end soon")
	s.active = 1
	require.Empty(t, s.takeOverdue(time.Hour, now.Add(wait)), "a slot is free")
	s.active = 2
	require.Len(t, s.takeOverdue(time.Hour, now.Add(wait)), 2)
}

// TestPassesForFreeSlots: no more batches of a gated type wait for a pass, or have one, than slots are
// free.
func TestPassesForFreeSlots(t *testing.T) {
	t.Parallel()
	s := newSlotPool(2)
	b := &batchType{w: &Worker{held: newHeldTasks()}, gate: &gate{}, options: processor.BatchOptions{Size: 1, Bytes: 1000, Wait: time.Hour}, open: map[batchKey]*batch{}, empty: []bool{false}}
	s.batches = []*batchType{b}
	admitting := make(chan *batch, 9)
	s.admit = func(b *batch) { admitting <- b }
	for range 5 {
		require.True(t, s.gather([]*task{{batchType: b}}, time.Now()))
	}
	ran := make(chan *batch)
	next := func() { _, b := s.next(&slot{}); ran <- b }
	go next()
	first, second := <-admitting, <-admitting
	select {
	case <-admitting:
		require.Fail(t, "two slots are free")
	case <-time.After(10 * time.Millisecond):
	}
	first.pass = &sharedPass{}
	require.True(t, s.giveBack(first, first.tasks))
	require.Same(t, first, <-ran)
	require.Equal(t, 1, b.gated)
	require.False(t, s.giveBack(second, nil))
	go next()
	third := <-admitting
	third.pass = &sharedPass{}
	require.True(t, s.giveBack(third, third.tasks))
	require.Same(t, third, <-ran)
	require.Zero(t, b.gated)
	require.Len(t, s.block(), 2)
}
