package worker

import (
	"slices"
	"sync"
)

// queue holds the tasks that have ended and are not reported. Adding never blocks, since neither
// the watchdog nor a process that stops may have to wait for Redis; what is held bounds it. One
// goroutine takes.
type reportQueue struct {
	mu     sync.Mutex
	tasks  []*task
	wakeAt int // so many are waited for
	closed bool
	wake   chan struct{} // gets a token when there are so many, or none will come
}

func newReportQueue() *reportQueue { return &reportQueue{wake: make(chan struct{}, 1)} }

func (q *reportQueue) add(t *task) {
	q.mu.Lock()
	q.tasks = append(q.tasks, t)
	enough := len(q.tasks) == q.wakeAt
	q.mu.Unlock()
	if enough {
		q.signal()
	}
}

// close says that nothing more will be added.
func (q *reportQueue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.signal()
}

func (q *reportQueue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// has says whether there are n tasks, or none will come any more. If not, a token follows
// when there are.
func (q *reportQueue) hasAtLeast(n int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.wakeAt = n
	return len(q.tasks) >= n || q.closed
}

// wait returns true once there is a task, false when none will come.
func (q *reportQueue) wait() bool {
	for !q.hasAtLeast(1) {
		<-q.wake
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.tasks) > 0
}

// take returns the oldest tasks, at most most of them and about so many bytes, but one at least.
func (q *reportQueue) take(most, bytes int) []*task {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := 0
	for n < min(most, len(q.tasks)) && (n == 0 || bytes > 0) {
		bytes -= q.tasks[n].size()
		n++
	}
	batch := slices.Clone(q.tasks[:n])
	q.tasks = slices.Delete(q.tasks, 0, n)
	return batch
}
