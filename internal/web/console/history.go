package console

import (
	"math"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

const (
	historyWidth, historyHeight = 600, 190
	// historyPoints is about the highest number of points of a chart's line, so that the chart
	// takes few bytes.
	historyPoints = 60
	// historyFresh: a newest point that is at most this old counts as the present rate.
	historyFresh = time.Minute
	// failedHours is the time for which the overview counts the jobs that have failed.
	failedHours = time.Hour
)

// historyView is what the overview shows of the history.
type historyView struct {
	Charts []historyChart    // none: there are no points
	Now    *api.HistoryPoint // the newest point; nil: it is too old, or there is none
	Failed int64             // how often a job has failed in the hour before the newest point
}

type historyChart struct {
	Label, Title string // Title names the fields of the API
	Lines        lineChart
}

// line is a line of a chart of the history.
type line struct {
	name, class string
	value       func(api.HistoryPoint) float64
}

// historyRates and historyJobs list the lines of the two charts: name, CSS class, and the value of
// a point.
var (
	historyRates = []line{
		{"accepted", "edge", func(p api.HistoryPoint) float64 { return p.Accepted }},
		{"started", "in-flight", func(p api.HistoryPoint) float64 { return p.Started }},
		{"done", "done", func(p api.HistoryPoint) float64 { return p.Done }},
		{"failed", "failed", func(p api.HistoryPoint) float64 { return p.Failed }},
	}
	historyJobs = []line{
		{"waiting", "edge", func(p api.HistoryPoint) float64 { return float64(p.Waiting) }},
		{"non-ready", "non-ready", func(p api.HistoryPoint) float64 { return float64(p.NonReady) }},
		{"ready", "ready", func(p api.HistoryPoint) float64 { return float64(p.Ready) }},
		{"in flight", "in-flight", func(p api.HistoryPoint) float64 { return float64(p.InFlight) }},
	}
)

// newHistoryView returns the view of the `minutes` before the newest point of a history. h must
// have at least the last hour, because failed jobs are counted over that time.
func newHistoryView(h api.History, minutes int, now time.Time) historyView {
	var v historyView
	if len(h.Points) == 0 {
		return v
	}
	step := time.Duration(h.StepSeconds) * time.Second
	newest := h.Points[len(h.Points)-1]
	if now.Sub(newest.T) <= historyFresh {
		v.Now = &newest
	}
	failed := 0.0
	for i, p := range h.Points {
		if newest.T.Sub(p.T) < failedHours {
			since := step
			if i > 0 {
				since = p.T.Sub(h.Points[i-1].T)
			}
			failed += p.Failed * min(since, failedHours).Seconds()
		}
	}
	v.Failed = int64(math.Round(failed))
	columns := columnsOf(h.Points, newest.T.Add(-time.Duration(minutes)*time.Minute), step)
	for _, c := range []historyChart{
		{Label: "Jobs per second", Title: "history: accepted, started, done, failed"},
		{Label: "Jobs that have not ended", Title: "history: waiting, non_ready, ready, in_flight"},
	} {
		lines := historyRates
		if len(v.Charts) > 0 {
			lines = historyJobs
		}
		var series []lineSeries
		for _, l := range lines {
			series = append(series, lineSeries{Name: l.name, Class: l.class, Points: l.points(columns)})
		}
		var ok bool
		if c.Lines, ok = newLineChart(historyWidth, historyHeight, series, decimal); !ok {
			return historyView{Now: v.Now, Failed: v.Failed}
		}
		v.Charts = append(v.Charts, c)
	}
	return v
}

// column is one point of a chart's line: the average of several points of the history. A column
// without points is a gap in the line.
type column struct {
	at     time.Time
	points []api.HistoryPoint
}

// columnsOf groups the points after from into columns of equal duration, about historyPoints of
// them. A gap in the history that is longer than one column and longer than three steps gets a
// single column without points.
func columnsOf(points []api.HistoryPoint, from time.Time, step time.Duration) (all []column) {
	first := slices.IndexFunc(points, func(p api.HistoryPoint) bool { return p.T.After(from) })
	if first < 0 || step <= 0 {
		return nil
	}
	points = points[first:]
	span := points[len(points)-1].T.Sub(points[0].T)
	width := step * (1 + span/(step*historyPoints))
	before := points[0].T
	for _, p := range points {
		if p.T.Sub(before) > max(width, 3*step) {
			all = append(all, column{at: before.Add(step)})
		}
		before = p.T
		at := p.T.Truncate(width)
		if n := len(all); n == 0 || !all[n-1].at.Equal(at) {
			all = append(all, column{at: at})
		}
		last := &all[len(all)-1]
		last.points = append(last.points, p)
	}
	return all
}

// points returns the average of the line's values in each column; NaN for a column without points.
func (l line) points(columns []column) []linePoint {
	all := make([]linePoint, len(columns))
	for i, c := range columns {
		sum := 0.0
		for _, p := range c.points {
			sum += l.value(p)
		}
		all[i] = linePoint{T: c.at, Value: sum / float64(len(c.points))} // NaN without a point
	}
	return all
}
