package worker

import "sync"

// slotQueue holds the started tasks that wait for a free slot, first in, first out. freeCapacity
// bounds it: while enough tasks wait, the process reads no jobs.
type slotQueue struct {
	mu        sync.Mutex
	changed   sync.Cond // signalled when a task is added or a slot is closed
	tasks     []*task
	idleSlots int // slots that wait in next
}

func newSlotQueue() *slotQueue {
	l := &slotQueue{}
	l.changed.L = &l.mu
	return l
}

// add appends tasks, and wakes one idle slot for each of them.
func (l *slotQueue) add(tasks []*task) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tasks = append(l.tasks, tasks...)
	for range min(l.idleSlots, len(tasks)) {
		l.changed.Signal()
	}
}

// next removes and returns the oldest task; it waits until there is one. It returns nil as soon as
// slot sl is closed, even if tasks wait.
func (l *slotQueue) next(sl *slot) *task {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		if sl.closed.Load() {
			if len(l.tasks) > 0 {
				l.changed.Signal() // this slot may have consumed the signal of another one
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

// wake makes all waiting slots check whether they were closed.
func (l *slotQueue) wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.changed.Broadcast()
}

// clear removes and returns all waiting tasks.
func (l *slotQueue) clear() []*task {
	l.mu.Lock()
	defer l.mu.Unlock()
	tasks := l.tasks
	l.tasks = nil
	return tasks
}
