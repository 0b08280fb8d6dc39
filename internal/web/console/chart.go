package console

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// This file computes the geometry of charts: scales, ticks, and how small values stay visible. It
// knows no HTML: templates write the results as SVG.

type axisTick struct {
	At    float64 // its place along the axis, in units of the figure
	Label string
	Time  string // of a time within a day, as RFC 3339: scripts show it in the reader's zone
}

// linePoint is a value at a time. A NaN leaves a gap.
type linePoint struct {
	T     time.Time
	Value float64
}

type lineSeries struct {
	Name, Class string // Class names its color, see app.css
	Points      []linePoint
}

// drawnLine is a line or an area that is ready to be drawn.
type drawnLine struct {
	Name, Class string
	Paths       []string // the attribute points of a polyline or polygon, one for each part without a gap
	Last        string   // the last value; "": there is none
}

// chartMark is an invisible column of a line chart, with the values at its time, which it shows while
// a pointer is over it.
type chartMark struct {
	X, Width, TextX float64
	Anchor          string   // of the text
	Time, Clock     string   // the time as in axisTick, and as text
	Text            []string // the values
}

// Box is the size of the box behind the text of a mark, in em.
func (m chartMark) Box() struct{ Width, Height float64 } {
	longest := len(m.Clock)
	for _, line := range m.Text {
		longest = max(longest, utf8.RuneCountInString(line))
	}
	return struct{ Width, Height float64 }{round(0.6*float64(longest) + 0.8), round(1.3*float64(len(m.Text)+1) + 0.6)}
}

type lineChart struct {
	Width, Height            float64
	Left, Right, Top, Bottom float64 // the edges of the plot
	X, Y                     []axisTick
	Stacked                  bool
	Lines                    []drawnLine
	Marks                    []chartMark
}

const (
	marginLeft, marginRight, marginTop, marginBottom = 56, 28, 8, 22
	yTicks                                           = 4
	pixelsOfTick                                     = 100 // on the axis of time
)

// newLineChart returns the geometry of a line chart; of a stacked one, in which the areas of the series
// lie on each other. The y axis goes from 0 to the first tick that is not below the greatest value;
// write formats its values. All series must have points at the same times. ok is false if there are
// no points with a value.
func newLineChart(
	width, height float64, stacked bool, series []lineSeries, write func(float64) string,
) (c lineChart, ok bool) {
	drawn := series
	if stacked {
		drawn = stack(series)
	}
	c = lineChart{
		Stacked: stacked, Width: width, Height: height, Left: marginLeft, Right: width - marginRight,
		Top: marginTop, Bottom: height - marginBottom,
	}
	var from, to time.Time
	most := 0.0
	for _, s := range drawn {
		for _, p := range s.Points {
			if math.IsNaN(p.Value) {
				continue
			}
			if !ok || p.T.Before(from) {
				from = p.T
			}
			if !ok || p.T.After(to) {
				to = p.T
			}
			ok, most = true, max(most, p.Value)
		}
	}
	if !ok {
		return lineChart{}, false
	}
	span := max(to.Sub(from), time.Second)
	step := niceStep(most, yTicks)
	most = max(step, step*math.Ceil(most/step))
	x := func(t time.Time) float64 {
		return c.Left + (c.Right-c.Left)*float64(t.Sub(from))/float64(span)
	}
	y := func(v float64) float64 { return c.Bottom - (c.Bottom-c.Top)*v/most }
	for i := 0.0; i*step <= most*1.001; i++ {
		c.Y = append(c.Y, axisTick{At: round(y(i * step)), Label: axisLabel(i*step, write)})
	}
	c.X = timeTicks(from, span, time.Duration(width/pixelsOfTick), x)
	if last := len(c.X) - 1; last >= 0 && c.X[last].At > c.Right-3.2*float64(len(c.X[last].Label)) {
		c.X[last].Label = "" // it would pass the edge of the plot
	}
	for i, s := range drawn {
		l := drawnLine{Name: s.Name, Class: s.Class}
		var path, back []string // back: the lower edge of an area
		end := func() {
			if len(path) > 0 {
				slices.Reverse(back)
				l.Paths = append(l.Paths, strings.Join(append(path, back...), " "))
			}
			path, back = nil, nil
		}
		for j, p := range s.Points {
			if math.IsNaN(p.Value) {
				end()
				continue
			}
			at := coordinate(x(p.T)) + ","
			path = append(path, at+coordinate(y(p.Value)))
			if stacked {
				back = append(back, at+coordinate(y(p.Value-series[i].Points[j].Value)))
			}
			l.Last = write(series[i].Points[j].Value)
		}
		end()
		c.Lines = append(c.Lines, l)
	}
	c.Marks = marks(series, x, c.Left, c.Right, write)
	return c, true
}

// axisLabel returns the short label of a value on the y axis, which has no space for long numbers.
func axisLabel(v float64, write func(float64) string) string {
	for _, unit := range []struct {
		size float64
		name string
	}{{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if v >= max(unit.size, 1e4) {
			return strconv.FormatFloat(v/unit.size, 'g', 4, 64) + unit.name
		}
	}
	return write(v)
}

// stack returns the series with the values of those before added to each.
func stack(series []lineSeries) []lineSeries {
	all := slices.Clone(series)
	for i := range all {
		all[i].Points = slices.Clone(all[i].Points)
		for j := range all[i].Points {
			if i > 0 {
				all[i].Points[j].Value += all[i-1].Points[j].Value
			}
		}
	}
	return all
}

// marks returns the Marks of a line chart: one for each time of the series. If these are more than
// 40, only every second, third, … time has a mark.
func marks(series []lineSeries, x func(time.Time) float64, left, right float64, write func(float64) string) []chartMark {
	const most = 40
	n := 0
	for _, s := range series {
		n = max(n, len(s.Points))
	}
	step := max(1, (n+most-1)/most)
	var all []chartMark
	for i := 0; i < n; i += step {
		var at time.Time
		var lines []string
		for _, s := range series {
			if i < len(s.Points) && !math.IsNaN(s.Points[i].Value) {
				at = s.Points[i].T
				lines = append(lines, s.Name+" "+write(s.Points[i].Value))
			}
		}
		if len(lines) == 0 {
			continue
		}
		width := (right - left) * float64(step) / float64(max(n, 1))
		from, to := max(left, x(at)-width/2), min(right, x(at)+width/2)
		m := chartMark{
			X: round(from), Width: round(to - from), TextX: round(to + 4), Anchor: "start",
			Time: at.UTC().Format(time.RFC3339), Clock: at.UTC().Format("15:04:05 UTC"), Text: lines,
		}
		if from > (left+right)/2 {
			m.TextX, m.Anchor = round(from-4), "end"
		}
		all = append(all, m)
	}
	return all
}

func coordinate(v float64) string { return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64) }

// niceStep returns the distance of ticks on an axis from 0 to most: the smallest of 1, 2 or 5 times
// a power of ten with which the axis has at most n steps.
func niceStep(most float64, n int) float64 {
	if most <= 0 {
		return 1
	}
	raw := most / float64(n)
	power := math.Pow(10, math.Floor(math.Log10(raw)))
	for _, nice := range []float64{1, 2, 5} {
		if raw <= nice*power*1.0001 {
			return nice * power
		}
	}
	return 10 * power
}

// timeSteps are the distances of ticks on an axis of time.
var timeSteps = []time.Duration{
	time.Second, 5 * time.Second, 10 * time.Second, 30 * time.Second, time.Minute, 2 * time.Minute, 5 * time.Minute,
	10 * time.Minute, 15 * time.Minute, 30 * time.Minute, time.Hour, 2 * time.Hour, 4 * time.Hour, 6 * time.Hour,
	12 * time.Hour, 24 * time.Hour,
}

func timeTicks(from time.Time, span, most time.Duration, x func(time.Time) float64) []axisTick {
	step := timeSteps[len(timeSteps)-1]
	for _, s := range timeSteps {
		if span/s <= most {
			step = s
			break
		}
	}
	for span/step > 2*most {
		step *= 2
	}
	format := "15:04"
	switch {
	case step < time.Minute:
		format = "15:04:05"
	case step >= 24*time.Hour:
		format = "Jan 2"
	}
	var ticks []axisTick
	iso := ""
	if step < 24*time.Hour {
		iso = time.RFC3339
	}
	first := from.UTC().Truncate(step)
	for t := first; !t.After(from.Add(span)); t = t.Add(step) {
		if !t.Before(from) {
			ticks = append(ticks, axisTick{round(x(t)), t.Format(format), t.Format(iso)})
		}
	}
	return ticks
}

// quantity is a number with a name.
type quantity struct {
	Name, Class string // Class names its color, see app.css
	Number      int64
}

type barPart struct {
	quantity
	X, Width float64
	Title    string
}

// minWidth is the width of a part whose share of the bar is narrower, so that it stays visible.
const minWidth = 3

// divideBar divides a bar of the given width among values in proportion. Parts that would be narrower
// than minWidth get minWidth, at the cost of the others. Values of 0 or less get no part. It
// returns nil if no value is above 0, or if the bar is too narrow for all parts.
func divideBar(width float64, values []quantity) []barPart {
	var total, small float64
	n := 0
	for _, v := range values {
		if v.Number > 0 {
			total += float64(v.Number)
			n++
		}
	}
	if n == 0 || width < minWidth*float64(n) {
		return nil
	}
	// Small parts get minWidth; the others share what is left.
	rest := total
	for _, v := range values {
		if v.Number > 0 && width*float64(v.Number)/total < minWidth {
			small += minWidth
			rest -= float64(v.Number)
		}
	}
	var parts []barPart
	x := 0.0
	for _, v := range values {
		if v.Number <= 0 {
			continue
		}
		w := float64(minWidth)
		if width*float64(v.Number)/total >= minWidth {
			w = (width - small) * float64(v.Number) / rest
		}
		parts = append(parts, barPart{v, round(x), round(w), fmt.Sprintf("%s: %d (%.1f%%)", v.Name, v.Number,
			100*float64(v.Number)/total)})
		x += w
	}
	return parts
}

func round(v float64) float64 { return math.Round(v*100) / 100 }

type histogramBar struct {
	Name, Title, Label string
	X, Y, Width        float64
	Height             float64
}

// histogram is a chart of upright bars.
type histogram struct {
	Width, Height, Bottom float64
	Bars                  []histogramBar
}

// newHistogram returns a histogram with a bar for each of numbers, in this order. names has the
// names of the bars; if the lengths differ, there are no bars. write formats the numbers.
func newHistogram(width, height float64, names []string, numbers []float64, write func(float64) string) histogram {
	h := histogram{Width: width, Height: height, Bottom: height - marginBottom}
	most := 0.0
	for _, n := range numbers {
		if !math.IsNaN(n) && !math.IsInf(n, 0) {
			most = max(most, n)
		}
	}
	if len(numbers) == 0 || len(names) != len(numbers) {
		return h
	}
	const gap, top = 0.2, 16
	slot := width / float64(len(numbers))
	for i, n := range numbers {
		size := 0.0
		if most > 0 && n > 0 && !math.IsInf(n, 0) {
			size = max(1, (h.Bottom-top)*n/most)
		}
		h.Bars = append(h.Bars, histogramBar{
			Name: names[i], Title: names[i] + ": " + write(n), Label: write(n),
			X: round(slot * (float64(i) + gap/2)), Width: round(slot * (1 - gap)),
			Y: round(h.Bottom - size), Height: round(size),
		})
	}
	return h
}

// Middle returns the x coordinate of the middle of a bar, where its name stands.
func (b histogramBar) Middle() float64 { return round(b.X + b.Width/2) }

// Above returns the y coordinate of a bar's label, just above the bar.
func (b histogramBar) Above() float64 { return round(b.Y - 4) }

// mapArea is the part of a map that values of one class cover.
type mapArea struct {
	Name, Class string
	Path        string // the attribute d of a path
}

// columnMap is the geometry of a chart of columns, each divided among values from the bottom up.
type columnMap struct {
	Width, Height float64
	Areas         []mapArea // of the classes that the columns have, in the order of their first values
}

// newColumnMap returns a map of columns of the same width. All parts of a class share one SVG path.
// Parts of a class at the same height in neighboring columns share one rectangle. So a map takes few
// bytes.
func newColumnMap(width, height float64, columns [][]quantity) columnMap {
	m := columnMap{Width: width, Height: height}
	type part struct{ x, y, width, height float64 }
	parts := map[string][]part{}
	each := width / float64(max(len(columns), 1))
	for i, column := range columns {
		left := round(float64(i) * each)
		right := round(float64(i+1) * each)
		for _, p := range divideBar(height, column) {
			if !slices.ContainsFunc(m.Areas, func(a mapArea) bool { return a.Class == p.Class }) {
				m.Areas = append(m.Areas, mapArea{Name: p.Name, Class: p.Class})
			}
			next := part{left, round(height - p.X - p.Width), right - left, p.Width}
			of := parts[p.Class]
			if n := len(of) - 1; n >= 0 {
				last := &of[n]
				if round(last.x+last.width) == left && last.y == next.y && last.height == next.height {
					last.width = right - last.x
					continue
				}
			}
			parts[p.Class] = append(of, next)
		}
	}
	for i, a := range m.Areas {
		var path strings.Builder
		for _, p := range parts[a.Class] {
			fmt.Fprintf(&path, "M%g %gh%gv%gh%gz", p.x, p.y, round(p.width), p.height, -round(p.width))
		}
		m.Areas[i].Path = path.String()
	}
	return m
}
