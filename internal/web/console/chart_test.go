package console

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func write(v float64) string { return fmt.Sprintf("%g", v) }

var start = time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC)

func points(values ...float64) (all []linePoint) {
	for i, v := range values {
		all = append(all, linePoint{T: start.Add(time.Duration(i) * time.Minute), Value: v})
	}
	return all
}

func TestLines(t *testing.T) {
	t.Parallel()
	c, ok := newLineChart(600, 200, false, []lineSeries{{Name: "started", Class: "a", Points: points(0, 37, 74)}}, write)
	require.True(t, ok)
	require.Equal(t, []string{"0", "20", "40", "60", "80"}, labels(c.Y))
	require.Equal(t, c.Bottom, c.Y[0].At)
	require.Equal(t, c.Top, c.Y[4].At)
	require.Equal(t, []string{"03:04:00", "03:04:30", "03:05:00", "03:05:30", ""}, labels(c.X))
	require.Equal(t, c.Left, c.X[0].At)
	require.InDelta(t, c.Right, c.X[4].At, 0.01)
	require.Equal(t, []string{"56,178 314,99.4 572,20.8"}, c.Lines[0].Paths)
	require.Equal(t, "74", c.Lines[0].Last)
	require.Len(t, c.Marks, 3)
	require.Equal(t, []string{"started 37"}, c.Marks[1].Text)
}

// TestStacked: areas lie on each other, and the axis reaches to their sum; tips and legend have the
// values themselves.
func TestStacked(t *testing.T) {
	t.Parallel()
	c, ok := newLineChart(600, 200, true, []lineSeries{{Name: "a", Points: points(10, 20)}, {Name: "b", Points: points(30, 20)}}, write)
	require.True(t, ok)
	require.Equal(t, []string{"0", "10", "20", "30", "40"}, labels(c.Y))
	require.Equal(t, []string{"56,135.5 572,93 572,178 56,178"}, c.Lines[0].Paths)
	require.Equal(t, []string{"56,8 572,8 572,93 56,135.5"}, c.Lines[1].Paths)
	require.Equal(t, "20", c.Lines[1].Last)
	require.Equal(t, []string{"a 10", "b 30"}, c.Marks[0].Text)
}

// TestGaps: a missing value is a gap, not a zero.
func TestGaps(t *testing.T) {
	t.Parallel()
	c, ok := newLineChart(600, 200, false, []lineSeries{
		{Name: "a", Points: points(1, 2, math.NaN(), 4)}, {Name: "b", Points: points(math.NaN(), 1, 1, 1)},
	}, write)
	require.True(t, ok)
	require.Len(t, c.Lines[0].Paths, 2)
	require.Len(t, strings.Fields(c.Lines[0].Paths[0]), 2)
	require.Len(t, c.Lines[1].Paths, 1)
	require.Equal(t, []string{"b 1"}, c.Marks[2].Text)
	require.Equal(t, "end", c.Marks[2].Anchor, "the text is inside the chart")
}

func TestNoLines(t *testing.T) {
	t.Parallel()
	for _, series := range [][]lineSeries{nil, {{Name: "a"}}, {{Name: "a", Points: points(math.NaN())}}} {
		_, ok := newLineChart(600, 200, false, series, write)
		require.False(t, ok)
	}
	c, ok := newLineChart(600, 200, false, []lineSeries{{Name: "a", Points: points(0)}}, write)
	require.True(t, ok, "one point, and nothing but zeros")
	require.Equal(t, []string{"0", "1"}, labels(c.Y))
	require.Equal(t, []string{"56,178"}, c.Lines[0].Paths)
}

// TestAxis: the labels of the Y axis are round numbers, from 10,000 on with k, M, G or T.
func TestAxis(t *testing.T) {
	t.Parallel()
	for most, want := range map[float64][]string{
		9999: {"0", "5000", "10k"}, 1.2e4: {"0", "5000", "10k", "15k"}, 2e6: {"0", "500k", "1M", "1.5M", "2M"},
		3e9: {"0", "1G", "2G", "3G"}, 4e12: {"0", "1T", "2T", "3T", "4T"},
	} {
		c, ok := newLineChart(600, 200, false, []lineSeries{{Name: "a", Points: points(most)}}, write)
		require.True(t, ok)
		require.Equal(t, want, labels(c.Y))
	}
}

// TestTicksAreFew: 8640 points over a span of 1 s to 9000 h have 1 to 13 labels on the X axis, and
// at most 40 marks, all inside the  For nine maxima, the Y axis has 2 to 6 labels.
func TestTicksAreFew(t *testing.T) {
	t.Parallel()
	for _, span := range []time.Duration{time.Second, 15 * time.Minute, 7 * time.Hour, 24 * time.Hour, 90 * 24 * time.Hour, 9000 * time.Hour} {
		var all []linePoint
		for i := range 8640 {
			all = append(all, linePoint{T: start.Add(span * time.Duration(i) / 8640), Value: float64(i)})
		}
		c, ok := newLineChart(600, 200, false, []lineSeries{{Name: "a", Points: all}}, write)
		require.True(t, ok)
		require.LessOrEqual(t, len(c.X), 13, span)
		require.NotEmpty(t, c.X, span)
		require.LessOrEqual(t, len(c.Marks), 40)
		for _, m := range c.Marks {
			require.GreaterOrEqual(t, m.X, c.Left)
			require.Positive(t, m.Width)
			require.LessOrEqual(t, m.X+m.Width, c.Right+0.01)
		}
	}
	for _, most := range []float64{0.003, 1, 4, 9.9, 10, 11, 99, 1e6, 3e12} {
		c, _ := newLineChart(600, 200, false, []lineSeries{{Name: "a", Points: points(most)}}, write)
		require.GreaterOrEqual(t, len(c.Y), 2, most)
		require.LessOrEqual(t, len(c.Y), 6, most)
	}
}

func labels(ticks []axisTick) (all []string) {
	for _, t := range ticks {
		all = append(all, t.Label)
	}
	return all
}

// TestDivide: the parts fill a bar 600 wide, and 1 of a million is 3 wide. Values of 0 have no
// part. Without positive values, or for two parts in a width of 3, there are no parts at all.
func TestDivide(t *testing.T) {
	t.Parallel()
	parts := divideBar(600, []quantity{
		{Name: "done", Number: 999_000}, {Name: "failed", Number: 1}, {Name: "ready"}, {Name: "waiting", Number: 999},
	})
	require.Len(t, parts, 3)
	require.Equal(t, 3.0, parts[1].Width)
	require.Equal(t, "failed: 1 (0.0%)", parts[1].Title)
	x := 0.0
	for _, p := range parts {
		require.InDelta(t, x, p.X, 0.02)
		x += p.Width
	}
	require.InDelta(t, 600, x, 0.1)
	require.Empty(t, divideBar(600, nil))
	require.Empty(t, divideBar(600, []quantity{{Number: 0}, {Number: -1}}))
	require.Empty(t, divideBar(3, []quantity{{Number: 1}, {Number: 1}}), "no place")
}

func TestHistogram(t *testing.T) {
	t.Parallel()
	h := newHistogram(300, 120, []string{"p50", "p90", "p99"}, []float64{10, 20, 0}, write)
	require.Len(t, h.Bars, 3)
	require.Equal(t, histogramBar{Name: "p90", Title: "p90: 20", Label: "20", X: 110, Y: 16, Width: 80, Height: 82}, h.Bars[1])
	require.Equal(t, 41.0, h.Bars[0].Height)
	require.Zero(t, h.Bars[2].Height)
	require.Equal(t, 150.0, h.Bars[1].Middle())
	require.Equal(t, 12.0, h.Bars[1].Above())
	require.Empty(t, newHistogram(300, 120, []string{"a"}, nil, write).Bars)
	require.Zero(t, newHistogram(300, 120, []string{"a"}, []float64{math.Inf(1)}, write).Bars[0].Height)
}

func TestMap(t *testing.T) {
	t.Parallel()
	done := func(done, failed int64) []quantity {
		return []quantity{{Name: "done", Class: "d", Number: done}, {Name: "failed", Class: "f", Number: failed}}
	}
	m := newColumnMap(400, 50, [][]quantity{done(10, 0), done(10, 0), done(5, 5), done(0, 0)})
	require.Equal(t, columnMap{Width: 400, Height: 50, Areas: []mapArea{
		{Name: "done", Class: "d", Path: "M0 0h200v50h-200zM200 25h100v25h-100z"},
		{Name: "failed", Class: "f", Path: "M200 0h100v25h-100z"},
	}}, m)
	require.Empty(t, newColumnMap(400, 50, nil).Areas)

	rare := newColumnMap(400, 50, [][]quantity{done(1_000_000, 1)})
	require.Equal(t, "M0 0h400v3h-400z", rare.Areas[1].Path, "one failed job among a million can be seen")

	var many [][]quantity
	for range 500 {
		many = append(many, done(3, 1))
	}
	even := newColumnMap(1000, 48, many)
	require.Equal(t, 1, strings.Count(even.Areas[0].Path, "M"))
}
