package main

import (
	"context"
	"encoding/json"
	"fmt"
	"html"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

var plotsBenchmark = benchmark{
	"plots", "Draw the pictures of docs/plots and fill the tables of goals in docs, from the JSON files there",
	func(f *flags) runner {
		docs := f.String("docs", "../docs", "folder of the documents")
		f.noRoles = true
		return func(context.Context, options) (any, error) {
			folder := filepath.Join(*docs, "plots")
			results := readResults(folder)
			for name, c := range chartsOf(results) {
				check(os.WriteFile(filepath.Join(folder, name+".svg"), []byte(c.svg()), 0o644))
			}
			for _, file := range must(filepath.Glob(filepath.Join(*docs, "*.md"))) {
				text := string(must(os.ReadFile(file)))
				if filled := fillTables(text, results); filled != text {
					check(os.WriteFile(file, []byte(filled), 0o644))
				}
			}
			return nil, nil
		}
	},
}

// readResults returns the results that the benchmarks have stored in a folder, by benchmark.
func readResults(folder string) map[string]any {
	results := map[string]any{}
	for _, file := range must(filepath.Glob(filepath.Join(folder, "*.json"))) {
		var v any
		check(attempt(file, func() { check(json.Unmarshal(must(os.ReadFile(file)), &v)) }))
		results[strings.TrimSuffix(filepath.Base(file), ".json")] = v
	}
	return results
}

// goalRow matches a row of a table of goals in a document, such as
//
//	| `congestion.makespan_ratio` | makespan / ideal | ≤ 1.03 | 0.997 | yes |
//
// The first cell names a figure: a benchmark, and the path of the figure in its JSON. The goal is
// written by hand; fillTables writes the last two cells. A step of the path is the name of a field
// or, where there is a list, a condition like limiter=fixed that selects elements; without a
// condition all elements count. Of several values the worst is compared with the goal.
var goalRow = regexp.MustCompile("(?m)^\\| `([a-z]+)\\.([^`]+)` \\|([^|\n]*)\\| " + // figure, what
	"(≥|≤|<|=) ([\\d,.]+)([^|\n]*)\\|[^|\n]*\\|[^|\n]*\\|$") // goal, measured, reached

// fillTables returns the document with the measured values in its tables of goals, and whether each
// reaches its goal. A row whose figure was not measured stays as it is.
func fillTables(document string, results map[string]any) string {
	return goalRow.ReplaceAllStringFunc(document, func(row string) string {
		m := goalRow.FindStringSubmatch(row)
		what, path, text, op, goal, unit := m[1], m[2], m[3], m[4], m[5], m[6]
		measured := lookUp(results[what], strings.Split(path, "."))
		limit, err := strconv.ParseFloat(strings.ReplaceAll(goal, ",", ""), 64)
		if len(measured) == 0 || err != nil {
			return row
		}
		value := slices.Max(measured)
		if op == "≥" {
			value = slices.Min(measured)
		}
		reached := "**no**"
		if map[string]bool{"≥": value >= limit, "≤": value <= limit, "<": value < limit, "=": value == limit}[op] {
			reached = "yes"
		}
		if value >= 1000 {
			value = math.Round(value)
		}
		return fmt.Sprintf("| `%s.%s` |%s| %s %s%s| %s | %s |",
			what, path, text, op, goal, unit, formatNumber(value), reached)
	})
}

// lookUp returns the numbers at a path in a JSON document.
func lookUp(v any, path []string) (out []float64) {
	switch v := v.(type) {
	case float64:
		if len(path) == 0 {
			out = []float64{v}
		}
	case map[string]any:
		if len(path) > 0 {
			out = lookUp(v[path[0]], path[1:])
		}
	case []any:
		name, want, conditional := "", "", false
		if len(path) > 0 {
			name, want, conditional = strings.Cut(path[0], "=")
		}
		if conditional {
			path = path[1:]
		}
		for _, element := range v {
			fields, _ := element.(map[string]any)
			if !conditional || fmt.Sprint(fields[name]) == want {
				out = append(out, lookUp(element, path)...)
			}
		}
	}
	return out
}

// chart is an SVG picture of one or two lines over the numbers from 0, with a vertical axis that
// begins at 0.
type chart struct {
	title, x, y string
	names       []string // of the lines
	lines       [][]float64
	steps       bool    // lines keep a value until the next point
	limit       float64 // a dashed line; 0: none
}

// chartsOf returns the charts by name. It leaves out those of parts that were not measured.
func chartsOf(results map[string]any) map[string]chart {
	at := func(path string) []float64 {
		what, in, _ := strings.Cut(path, ".")
		return lookUp(results[what], strings.Split(in, "."))
	}
	limitOf := func(what string) float64 { return slices.Max(append(at(what+".rps"), 0)) }
	all := map[string]chart{
		"congestion-rate": {
			"Congestion: permits and starts in each second", "second of the run", "a second", []string{"permits", "starts"},
			[][]float64{at("congestion.per_second.permits"), at("congestion.per_second.starts")}, true, limitOf("congestion"),
		},
	}
	for _, n := range []string{"1", "4"} {
		window := "limits.elastic.partitions=" + n + ".per_window."
		all["elastic-"+n] = chart{
			"One busy tenant among nine idle ones, partitions: " + n, "window", "permits",
			[]string{"busy tenant", "nine others"}, [][]float64{at(window + "busy"), at(window + "others")}, true,
			limitOf("limits"),
		}
	}
	for name, of := range map[string][3]string{
		"noisy":      {"Small groups beside a noisy tenant", "small_solo_seconds", "small_seconds"},
		"noisy-long": {"Small groups beside jobs 50 times as long", "long_small_solo_seconds", "long_small_seconds"},
		"behind":     {"Small groups behind a huge one of their own tenant", "behind_solo_seconds_each", "behind_seconds"},
	} {
		all[name] = chart{
			of[0], "percentile of groups", "ms from accepted to COMPLETED", []string{"alone", "beside it"},
			[][]float64{percentiles(at("fairness." + of[1])), percentiles(at("fairness." + of[2]))}, false, 0,
		}
	}
	for name, c := range all {
		if len(c.lines[0]) == 0 {
			delete(all, name)
		}
	}
	return all
}

// percentiles returns the percentiles 0 to 100 of some seconds, in ms.
func percentiles(seconds []float64) (out []float64) {
	for p := range min(101, 101*len(seconds)) {
		out = append(out, 1000*percentile(seconds, float64(p)))
	}
	return out
}

const (
	width, height = 720.0, 380.0
	left, right   = 70.0, 20.0
	top, bottom   = 84.0, 60.0
	plotW, plotH  = width - left - right, height - top - bottom
)

var colours = []string{"#2563eb", "#f59e0b"}

func (c chart) svg() string {
	var out strings.Builder
	add := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	text := func(x, y float64, anchor, style, s string) {
		add(`<text x="%.1f" y="%.1f" text-anchor="%s" %s>%s</text>`, x, y, anchor, style, html.EscapeString(s))
	}
	add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" `+
		`font-family="system-ui, sans-serif" font-size="12" fill="#334155" role="img" aria-label="%s">`,
		width, height, width, height, html.EscapeString(c.title))
	add(`<rect width="%g" height="%g" fill="#ffffff"/>`, width, height)
	text(left, 26, "start", `font-size="16" font-weight="600" fill="#0f172a"`, c.title)
	points, most := 0, c.limit
	for _, line := range c.lines {
		points, most = max(points, len(line)), max(most, slices.Max(append(slices.Clone(line), 0)))
	}
	step := roundStep(most / 5)
	most = step * math.Ceil(most*1.08/step)
	x := func(i int) float64 { return left + plotW*float64(i)/float64(max(1, points-1)) }
	y := func(v float64) float64 { return top + plotH*(1-v/most) }
	for v := 0.0; v <= most+step/2; v += step {
		add(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#e2e8f0"/>`, left, y(v), left+plotW, y(v))
		text(left-8, y(v)+4, "end", "", formatNumber(v))
	}
	for i := 0; i < points; i += max(1, int(roundStep(float64(points)/10))) {
		text(x(i), top+plotH+16, "middle", "", strconv.Itoa(i))
	}
	for k, line := range c.lines {
		path := ""
		for i, v := range line {
			switch {
			case i == 0:
				path = fmt.Sprintf("M%.1f %.1f", x(i), y(v))
			case c.steps:
				path += fmt.Sprintf(" H%.1f V%.1f", x(i), y(v))
			default:
				path += fmt.Sprintf(" L%.1f %.1f", x(i), y(v))
			}
		}
		add(`<path d="%s" fill="none" stroke="%s" stroke-width="2" stroke-linejoin="round"/>`, path, colours[k])
		at := left + 160*float64(k)
		add(`<rect x="%.1f" y="56" width="12" height="12" rx="2" fill="%s"/>`, at, colours[k])
		text(at+17, 66, "start", "", c.names[k])
	}
	if c.limit > 0 {
		add(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#dc2626" stroke-dasharray="6 4"/>`,
			left, y(c.limit), left+plotW, y(c.limit))
		text(left+plotW, y(c.limit)-5, "end", `fill="#dc2626"`, "limit")
	}
	text(left+plotW/2, height-12, "middle", "", c.x)
	add(`<text transform="translate(16 %.1f) rotate(-90)" text-anchor="middle">%s</text>`,
		top+plotH/2, html.EscapeString(c.y))
	add(`</svg>`)
	return out.String()
}

// roundStep rounds the distance between two numbers on an axis up to 1, 2, 5 or 10 times a power of
// ten.
func roundStep(x float64) float64 {
	if x <= 0 {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(x)))
	for _, f := range []float64{1, 2, 5} {
		if x <= f*power {
			return f * power
		}
	}
	return 10 * power
}

func formatNumber(v float64) string {
	return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.4f", v), "0"), ".")
}
