package worker

import "sync"

// line is where started jobs wait for a slot, first come, first served. The room that is
// left bounds it.
type slotQueue struct {
	mu        sync.Mutex
	changed   sync.Cond // something waits, or a slot was closed
	tasks     []*task
	idleSlots int // slots that wait for a job
}

func newSlotQueue() *slotQueue {
	l := &slotQueue{}
	l.changed.L = &l.mu
	return l
}

// add puts jobs at the line's end, and wakes as many slots as can do with it.
func (l *slotQueue) add(tasks []*task) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tasks = append(l.tasks, tasks...)
	for range min(l.idleSlots, len(tasks)) {
		l.changed.Signal()
	}
}

// next waits for a job; nil when the slot was closed, also where jobs wait.
func (l *slotQueue) next(sl *slot) *task {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		if sl.closed.Load() {
			if len(l.tasks) > 0 {
				l.changed.Signal() // it may have been woken in another's stead
			}
			return nil
		}
		if len(l.tasks) > 0 {
			t := l.tasks[0]
			l.tasks[0] = nil
			l.tasks = l.tasks[1:]
			return t
		}
		l.idleSlots++
		l.changed.Wait()
		l.idleSlots--
	}
}

// wake has all slots look whether they were closed.
func (l *slotQueue) wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.changed.Broadcast()
}

// clear takes everything out.
func (l *slotQueue) clear() []*task {
	l.mu.Lock()
	defer l.mu.Unlock()
	tasks := l.tasks
	l.tasks = nil
	return tasks
}
