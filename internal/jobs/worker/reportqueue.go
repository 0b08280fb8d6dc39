package worker

import (
	"slices"
	"sync"
)

// reportQueue holds the tasks whose outcome is set and whose report has not begun. Adding never
// blocks, so that neither the watchdog nor a stopping process waits for Redis; the bound on held
// tasks bounds the queue too. Many goroutines add tasks; only one, the taker, takes them out.
type reportQueue struct {
	mu     sync.Mutex
	tasks  []*task
	wakeAt int // number of tasks that the taker waits for; add then sends a token on wake
	closed bool
	wake   chan struct{} // gets a token when wakeAt tasks are there, or when the queue is closed
}

func newReportQueue() *reportQueue { return &reportQueue{wake: make(chan struct{}, 1)} }

// add appends a task. It wakes the taker when there are as many tasks as the taker waits for.
func (q *reportQueue) add(t *task) {
	q.mu.Lock()
	q.tasks = append(q.tasks, t)
	enough := len(q.tasks) == q.wakeAt
	q.mu.Unlock()
	if enough {
		q.signal()
	}
}

// close tells the taker that no task will be added any more.
func (q *reportQueue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.signal()
}

// signal puts a token into wake, unless there is one.
func (q *reportQueue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// hasAtLeast reports whether the queue holds n tasks or is closed, so that the taker need not wait.
// If it returns false, wake gets a token as soon as one of both is true.
func (q *reportQueue) hasAtLeast(n int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.wakeAt = n
	return len(q.tasks) >= n || q.closed
}

// wait blocks until there is a task and returns true, or returns false when the queue is closed and
// empty.
func (q *reportQueue) wait() bool {
	for !q.hasAtLeast(1) {
		<-q.wake
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.tasks) > 0
}

// take removes and returns the oldest tasks: up to the number most, and until they have bytes bytes
// together. The last task may exceed that.
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
