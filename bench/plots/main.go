// Command plots draws what the benchmarks measured:
//
//	plots docs/plots docs/flow-control.md …
//
// It reads congestion.json, limits.json, fairness.json, performance.json, guards.json, room.json
// and console.json, writes SVG pictures of the first three into the same folder, and writes
// measured values of all beside the goals in the documents. It leaves out the pictures and figures
// of a file or part that is missing.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/bulkaction/bulkaction/bench"
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
	var congestion bench.Congestion
	var limits bench.Limits
	var fairness bench.Fairness
	results := map[string]any{} // the documents by name, for the tables of goals
	for name, into := range map[string]any{
		"congestion": &congestion, "limits": &limits, "fairness": &fairness, "performance": nil,
		"guards": nil, "room": nil, "console": nil,
	} {
		b, err := os.ReadFile(filepath.Join(dir, name+".json"))
		if errors.Is(err, fs.ErrNotExist) {
			fmt.Fprintf(os.Stderr, "plots: there is no %s.json: one of make bench-flow, bench-performance, "+
				"bench-guards, bench-room and bench-console measures it\n", name)
			continue
		}
		if err != nil {
			return err
		}
		var all any
		err = json.Unmarshal(b, &all)
		if err == nil && into != nil {
			err = json.Unmarshal(b, into)
		}
		if err != nil {
			return fmt.Errorf("read %s.json: %w", name, err)
		}
		results[name] = all
	}
	charts := map[string]chart{}
	if congestion.Jobs > 0 {
		addCongestionCharts(congestion, charts)
	}
	addLimitCharts(limits, charts)
	addFairnessCharts(fairness, charts)
	for name, c := range charts {
		if err := os.WriteFile(filepath.Join(dir, name+".svg"), []byte(c.svg()), 0o644); err != nil {
			return err
		}
	}
	for _, file := range documents {
		if err := updateDocument(file, results); err != nil {
			return err
		}
	}
	return nil
}
