package bulktest

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/bulkaction/bulkaction/processor"
)

// calls records the calls of processors that have not returned yet, with their goroutines, so that
// a failing test can name them.
type calls struct {
	mu      sync.Mutex
	last    int
	running map[int]call
}

type call struct {
	job       processor.Job
	goroutine string // "goroutine 7 "
}

func newCalls() *calls { return &calls{running: map[int]call{}} }

// watch is middleware that records the calls.
func (c *calls) watch(next processor.Handler) processor.Handler {
	return func(ctx context.Context, job processor.Job) (any, error) {
		c.mu.Lock()
		c.last++
		id := c.last
		c.running[id] = call{job, goroutineID()}
		c.mu.Unlock()
		defer func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			delete(c.running, id)
		}()
		return next(ctx, job)
	}
}

// mostReported is how many running calls a report shows.
const mostReported = 3

// report describes the processors that have not returned: how many these are and, of at most three,
// the job and the stack of the goroutine. It returns "" if all processors have returned.
func (c *calls) report() string {
	c.mu.Lock()
	running := maps.Clone(c.running)
	c.mu.Unlock()
	if len(running) == 0 {
		return ""
	}
	stacks := allStacks()
	var b strings.Builder
	fmt.Fprintf(&b, "Processors that run: %d.", len(running))
	for _, id := range slices.Sorted(maps.Keys(running))[:min(len(running), mostReported)] {
		r := running[id]
		fmt.Fprintf(&b, "\nType %s, job %s, attempt %d:\n", r.job.Type, r.job.ID(), r.job.Attempt)
		for _, stack := range stacks {
			if strings.HasPrefix(stack, r.goroutine) {
				b.WriteString(stack + "\n")
			}
		}
	}
	return b.String()
}

// goroutineID returns the first words of the calling goroutine's stack, "goroutine N", which
// identify it.
func goroutineID() string {
	var b [64]byte
	head, _, _ := bytes.Cut(b[:runtime.Stack(b[:], false)], []byte("["))
	return string(head)
}

// allStacks returns the stacks of all goroutines.
func allStacks() []string {
	b := make([]byte, 1<<20)
	for {
		n := runtime.Stack(b, true)
		if n < len(b) || n >= 64<<20 {
			return strings.Split(string(b[:n]), "\n\n")
		}
		b = make([]byte, 2*len(b))
	}
}
