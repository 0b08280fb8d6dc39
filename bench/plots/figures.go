package main

import (
	"fmt"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// goalRow matches a row of a table of goals in a document, such as
//
//	| `congestion.makespan_ratio` | makespan / ideal | ≤ 1.03 | 0.997 | yes |
//
// The first cell names a figure: a JSON file in the folder, without its ending, and the path of the
// figure in it. The goal is written by hand; fillTables writes the last two cells. A step of the
// path is the name of a field or, where there is a list, a condition like limiter=fixed that
// selects elements; without a condition all elements count. Of several values the worst is compared
// with the goal.
var goalRow = regexp.MustCompile("(?m)^\\| `([a-z]+)\\.([^`]+)` \\|([^|\n]*)\\| " + // figure, what
	"(≥|≤|<|=) ([\\d,.]+)([^|\n]*)\\|[^|\n]*\\|[^|\n]*\\|$") // goal, measured, reached

// fillTables returns the document with the measured values in its tables of goals, and whether each
// reaches its goal. A row whose figure was not measured stays as it is. results has the benchmarks'
// JSON results by name of the file.
func fillTables(document string, results map[string]any) string {
	return goalRow.ReplaceAllStringFunc(document, func(row string) string {
		m := goalRow.FindStringSubmatch(row)
		file, path, what, op, goal, unit := m[1], m[2], m[3], m[4], m[5], m[6]
		values := lookUp(results[file], strings.Split(path, "."))
		limit, err := strconv.ParseFloat(strings.ReplaceAll(goal, ",", ""), 64)
		if len(values) == 0 || err != nil {
			return row
		}
		value := slices.Max(values)
		if op == "≥" {
			value = slices.Min(values)
		}
		reached := "**no**"
		if map[string]bool{"≥": value >= limit, "≤": value <= limit, "<": value < limit, "=": value == limit}[op] {
			reached = "yes"
		}
		if value >= 1000 {
			value = math.Round(value)
		}
		return fmt.Sprintf("| `%s.%s` |%s| %s %s%s| %s | %s |",
			file, path, what, op, goal, unit, formatNumber(value), reached)
	})
}

// lookUp returns the numbers at a path in a JSON document.
func lookUp(v any, path []string) []float64 {
	switch v := v.(type) {
	case float64:
		if len(path) == 0 {
			return []float64{v}
		}
	case map[string]any:
		if len(path) > 0 {
			return lookUp(v[path[0]], path[1:])
		}
	case []any:
		name, want, conditional := "", "", false
		if len(path) > 0 {
			name, want, conditional = strings.Cut(path[0], "=")
		}
		if conditional {
			path = path[1:]
		}
		var out []float64
		for _, element := range v {
			fields, _ := element.(map[string]any)
			if !conditional || fmt.Sprint(fields[name]) == want {
				out = append(out, lookUp(element, path)...)
			}
		}
		return out
	}
	return nil
}

// updateDocument fills the tables of goals in a document's file. It writes the file only if a table
// has changed.
func updateDocument(file string, results map[string]any) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	text := fillTables(string(b), results)
	if text == string(b) {
		return nil
	}
	return os.WriteFile(file, []byte(text), 0o644)
}
