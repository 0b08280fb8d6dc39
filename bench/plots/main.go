// Command plots draws what the benchmarks measured:
//
//	plots docs/plots docs/flow-control.md …
//
// It reads congestion.json, limits.json, fairness.json and performance.json in the folder, writes
// SVG pictures into the same folder, and writes the tables of figures into the documents. It leaves
// out the pictures and figures of a file or part that is missing.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: plots FOLDER [DOCUMENT…]")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2:]...); err != nil {
		fmt.Fprintln(os.Stderr, "plots:", err)
		os.Exit(1)
	}
}

func run(dir string, documents ...string) error {
	var r results
	for name, into := range map[string]any{
		"congestion.json":  &r.congestion,
		"limits.json":      &r.limits,
		"fairness.json":    &r.fairness,
		"performance.json": &r.performance,
	} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			fmt.Fprintf(os.Stderr,
				"plots: there is no %s: `make bench-flow` or `make bench-performance` measures it\n", name)
			continue
		}
		if err != nil {
			return err
		}
		if err := json.Unmarshal(b, into); err != nil {
			return fmt.Errorf("read %s: %w", name, err)
		}
	}
	charts := r.charts()
	for _, name := range slices.Sorted(maps.Keys(charts)) {
		if err := os.WriteFile(filepath.Join(dir, name+".svg"), []byte(charts[name].svg()), 0o644); err != nil {
			return err
		}
	}
	for _, file := range documents {
		if err := r.updateDocument(file); err != nil {
			return err
		}
	}
	return nil
}

// charts returns all charts that can be drawn from the results, by file name without ending.
func (r results) charts() map[string]chart {
	out := map[string]chart{}
	if r.congestion.Jobs > 0 {
		addCongestionCharts(r.congestion, out)
	}
	addLimitCharts(r.limits, out)
	addFairnessCharts(r.fairness, out)
	return out
}
