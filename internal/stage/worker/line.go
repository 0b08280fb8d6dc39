package worker

import "sync"

// line is where started jobs wait for a slot, first come, first served. The room that is
// left bounds it.
type line struct {
	mu    sync.Mutex
	some  sync.Cond // something waits, or a slot was closed
	tasks []*task
	idle  int // slots that wait for a job
}

func newLine() *line {
	l := &line{}
	l.some.L = &l.mu
	return l
}

// add puts jobs at the line's end, and wakes as many slots as can do with it.
func (l *line) add(tasks []*task) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tasks = append(l.tasks, tasks...)
	for range min(l.idle, len(tasks)) {
		l.some.Signal()
	}
}

// next waits for a job; nil when the slot was closed, also where jobs wait.
func (l *line) next(sl *slot) *task {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		if sl.closed.Load() {
			if len(l.tasks) > 0 {
				l.some.Signal() // it may have been woken in another's stead
			}
			return nil
		}
		if len(l.tasks) > 0 {
			t := l.tasks[0]
			l.tasks[0] = nil
			l.tasks = l.tasks[1:]
			return t
		}
		l.idle++
		l.some.Wait()
		l.idle--
	}
}

// wake has all slots look whether they were closed.
func (l *line) wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.some.Broadcast()
}

// clear takes everything out.
func (l *line) clear() []*task {
	l.mu.Lock()
	defer l.mu.Unlock()
	tasks := l.tasks
	l.tasks = nil
	return tasks
}
