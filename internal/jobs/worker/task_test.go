package worker

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// TestNumbersFollowFromStates: after each of many random moves of tasks with and without a gate, each
// number is that of the tasks in its states. A move from a state that a task is not in changes nothing.
func TestNumbersFollowFromStates(t *testing.T) {
	t.Parallel()
	h, g, random := newHeldTasks(), newGate(nil, "G", nil), rand.New(rand.NewPCG(1, 2))
	tasks := make([]*task, 40)
	for i := range tasks {
		tasks[i] = &task{}
		if i%2 == 0 {
			tasks[i].gate = g
		}
	}
	count := func(states state, gated bool) (n int) {
		for _, t := range tasks {
			if t.currentState()&states != 0 && (!gated || t.gate != nil) {
				n++
			}
		}
		return n
	}
	for range 5000 {
		some := tasks[random.IntN(len(tasks))]
		from, to := state(1<<random.IntN(6)), state(1<<random.IntN(6))
		if random.IntN(2) == 0 {
			from = some.currentState()
		}
		was := some.currentState()
		moved := h.move(from, to, some)
		require.Equal(t, from == was, moved)
		if !moved {
			require.Equal(t, was, some.currentState())
		}
		for _, c := range []*number{&h.all, &h.active, &h.unfinished} {
			require.Equal(t, count(c.states, false), c.value())
		}
		for _, c := range []*number{&g.waiting, &g.ahead, &g.admitted} {
			require.Equal(t, count(c.states, true), c.value())
		}
	}
	require.Equal(t, stateRead|stateAdmitting|stateAdmitted|stateRunning|stateEnded, h.all.states)
	require.Equal(t, h.all.states&^stateAdmitting, h.active.states)
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
