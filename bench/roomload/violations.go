package roomload

import (
	"fmt"
	"sync"
)

// mostViolations is the largest number of violations that a process describes in words. It counts
// all of them.
const mostViolations = 20

// violations collects what must not happen.
type violations struct {
	mu    sync.Mutex
	texts []string
	n     int
}

func (v *violations) addf(format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.n++; len(v.texts) < mostViolations {
		v.texts = append(v.texts, fmt.Sprintf(format, args...))
	}
}

func (v *violations) all() ([]string, int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.texts, v.n
}
