package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

// rolling runs a phase in which, several times under load, one process of every role is replaced at
// the same time, with SIGTERM. Each process must end within the constant grace, with exit code 0.
// In the end there may be one connection for each slot more than at the start.
func rolling(t testing.TB, s scene, rng *rand.Rand, m mix, rounds int) *phase {
	w := newWorld(t, s)
	before := w.connections()
	groups := plan(rng, "rolling", m)
	produced := w.produce(t.Context(), groups)
	for round := range rounds {
		w.replaceAll(round)
	}
	require.NoError(t, produced())
	require.Empty(t, w.oracle.awaitEnded(t.Context(), groups, 2*endWithin, false), "not ended after the last restart")
	// Connection pools grow under load, so two processes of each role, which are all but some
	// workers, are replaced once more. The idle processes may then have as many connections as at
	// the start, and one for each process.
	for place := range 2 {
		w.replaceAll(place)
	}
	require.NoError(t, redisx.Sleep(t.Context(), time.Second))
	if after := w.connections(); after > before+len(w.fleet.slots) { // every stopped process would have leaked
		w.phase.violate("%d connections to Redis are open after all restarts, %d were before", after, before)
	}
	return w.settle(groups, 2*endWithin)
}

// replaceAll replaces one process of each role.
func (w *world) replaceAll(round int) {
	w.t.Helper()
	var under sync.WaitGroup
	var mu sync.Mutex
	byRole := map[string]int{}
	for _, s := range w.fleet.slots {
		place := byRole[s.role]
		byRole[s.role]++
		if place != round%many[s.role] {
			continue
		}
		under.Go(func() {
			took, err := s.replace(w.t.Context())
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				w.phase.violate("replace a %s: %v", s.role, err)
			}
			w.phase.Faults[replaceRole]++
			w.phase.SlowestStop = max(w.phase.SlowestStop, took.Seconds())
		})
	}
	under.Wait()
}

// replace stops the slot's process with SIGTERM, starts another, and returns how long the stop
// took. A process that still runs after grace is killed. In that case, or if the exit code is not
// 0, it starts no other process and returns an error.
func (s *slot) replace(ctx context.Context) (time.Duration, error) {
	p := s.running(ctx)
	if p == nil {
		return 0, ctx.Err()
	}
	s.mu.Lock()
	p.replaced = true
	s.mu.Unlock()
	asked := time.Now()
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return 0, err
	}
	select {
	case <-p.Done():
	case <-time.After(grace):
		p.Kill()
		return time.Since(asked), fmt.Errorf("%s still ran after %s: %s", p.name, grace, p.log)
	}
	took := time.Since(asked)
	if code := p.State().ExitCode(); code != 0 {
		return took, fmt.Errorf("%s ended with code %d: %s", p.name, code, p.log)
	}
	return took, s.start()
}

// connections returns the largest number of connections that all role processes together had open
// to Redis during two seconds. It recognizes them by their client names.
func (w *world) connections() (most int) {
	w.t.Helper()
	for range 20 {
		list, err := w.breaker.rdb.ClientList(w.t.Context()).Result()
		require.NoError(w.t, err)
		most = max(most, strings.Count(list, " name=")-strings.Count(list, " name= ")-strings.Count(list, " name=bulkaction-producer"))
		require.NoError(w.t, redisx.Sleep(w.t.Context(), 100*time.Millisecond))
	}
	return most
}
