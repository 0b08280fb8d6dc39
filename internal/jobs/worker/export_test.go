package worker

import "maps"

// Counts returns the numbers of tasks that are not 0.
func (w *Worker) Counts() map[string]int {
	counts := map[string]int{
		"held": w.held.all.value(), "active": w.held.active.value(), "unfinished": w.held.unfinished.value(),
		"tracked": len(w.held.tasks()),
	}
	_, counts["running"] = w.slots.sizeAndActive()
	for typ, g := range w.gates {
		counts["waiting "+typ], counts["ahead "+typ] = g.waiting.value(), g.ahead.value()
		counts["admitted "+typ] = g.admitted.value()
	}
	maps.DeleteFunc(counts, func(_ string, n int) bool { return n == 0 })
	return counts
}
