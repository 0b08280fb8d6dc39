package console

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const (
	overviewGroups  = 8
	overviewTenants = 10
	overviewMinutes = 60 // of the history, unless the query says it
	// seldomInterval is how often the overview reads what changes slowly or is expensive: the
	// history has one point in 10 s, the watchers update the busiest tenants each 20 s and, by
	// default, the audit each 15 s, and to find the newest failed groups may need a look at many.
	seldomInterval = 10 * time.Second
)

// historyRanges are the lengths of the history among which the reader of the overview can choose.
var historyRanges = []historyRange{{15, "15 min"}, {60, "1 h"}, {360, "6 h"}, {1440, "24 h"}}

type historyRange struct {
	Minutes int
	Name    string
}

// overviewPage serves the overview of the system. Its caches are shared by all readers.
type overviewPage struct {
	backend  httpapi.Backend
	history  *redisx.Cache[string, historyView]
	audit    *redisx.Cache[string, api.AuditState]
	limits   *redisx.Cache[string, limitsData]
	busiest  *redisx.Cache[string, []tenantLoad]
	failures *redisx.Cache[string, []api.Group]
}

func newOverviewPage(b httpapi.Backend) *overviewPage {
	return &overviewPage{
		backend: b, history: newCache[historyView](seldomInterval), audit: newCache[api.AuditState](seldomInterval),
		limits:  newCache[limitsData](seldomInterval),
		busiest: newCache[[]tenantLoad](seldomInterval), failures: newCache[[]api.Group](seldomInterval),
	}
}

// newCache returns a cache of the answers to an expensive read, which all pages and readers share.
func newCache[T any](interval time.Duration) *redisx.Cache[string, T] {
	const most = 100
	return redisx.NewCache[string, T](interval, most)
}

// overviewData is the template data of the overview. Fields that the reader may not see are empty.
type overviewData struct {
	Stats    *api.Stats
	Load     api.TypeStats // the sum over all types
	Slots    int
	Busy     int
	Missing  []string // roles without a live process
	History  historyView
	Minutes  int // of the history
	Ranges   []historyRange
	Audit    *api.AuditState
	Open     int64      // open violations of the audit
	Laws     []quantity // that they break
	Limits   *limitsData
	Busiest  []tenantLoad
	Tenants  bool // the reader may see all tenants
	Newest   []api.Group
	Failures []api.Group
	Groups   bool // the reader may see groups
}

func (p *overviewPage) view(r *http.Request) (view, error) {
	minutes, err := minutesOf(r.URL.Query().Get("minutes"))
	if err != nil {
		return view{}, err
	}
	topic := "overview"
	if minutes != overviewMinutes {
		topic += ":" + strconv.Itoa(minutes)
	}
	data, err := p.read(r.Context(), minutes)
	return view{name: "overview", title: "Overview", data: data, topic: topic}, err
}

func (p *overviewPage) open(_ context.Context, arg string) (func(context.Context) (any, error), error) {
	minutes, err := minutesOf(arg)
	return func(ctx context.Context) (any, error) { return p.read(ctx, minutes) }, err
}

// minutesOf parses the parameter minutes: one of historyRanges; "" is the default.
func minutesOf(text string) (int, error) {
	if text == "" {
		return overviewMinutes, nil
	}
	for _, r := range historyRanges {
		if text == strconv.Itoa(r.Minutes) {
			return r.Minutes, nil
		}
	}
	return 0, invalid("minutes", "must be 15, 60, 360 or 1440")
}

// read reads what the principal of ctx may see.
func (p *overviewPage) read(ctx context.Context, minutes int) (any, error) {
	who, _ := auth.From(ctx)
	d := overviewData{
		Minutes: minutes, Ranges: historyRanges, Groups: who.May(auth.Read),
		Tenants: who.May(auth.Read) && who.May(auth.ReadMetrics),
	}
	if who.May(auth.ReadMetrics) {
		s, err := p.backend.Stats(ctx)
		if err != nil {
			return nil, err
		}
		d.summarize(s)
		if d.History, err = p.readHistory(ctx, minutes); err != nil {
			return nil, err
		}
	}
	if who.May(auth.ReadSystem) {
		a, err := p.audit.GetOr("", func() (api.AuditState, error) { return p.backend.Audit(ctx) })
		if err != nil {
			return nil, err
		}
		d.summarizeAudit(a)
		l, err := p.limits.GetOr("", func() (limitsData, error) { return limitsPage{p.backend}.read(ctx) })
		if err != nil {
			return nil, err
		}
		d.Limits = &l
	}
	var err error
	if d.Tenants {
		if d.Busiest, err = p.busiest.GetOr("", func() ([]tenantLoad, error) {
			l, err := p.backend.BusiestTenants(ctx, overviewTenants)
			return loadsOf(l.Tenants), err
		}); err != nil {
			return nil, err
		}
	}
	if !d.Groups {
		return d, nil
	}
	newest, err := p.backend.Groups(ctx, messages.ListQuery{Limit: overviewGroups})
	if err != nil {
		return nil, err
	}
	d.Newest = newest.Groups
	d.Failures, err = p.failures.GetOr(classOf(who), func() ([]api.Group, error) {
		l, err := p.backend.Groups(ctx, messages.ListQuery{Status: api.StatusFailed, Limit: overviewGroups})
		return l.Groups, err
	})
	return d, err
}

func (p *overviewPage) readHistory(ctx context.Context, minutes int) (historyView, error) {
	return p.history.GetOr(strconv.Itoa(minutes), func() (historyView, error) {
		h, err := p.backend.History(ctx, max(minutes, int(failedHours/time.Minute)))
		return newHistoryView(h, minutes, time.Now()), err
	})
}

// summarize fills in what the overview shows of the system.
func (d *overviewData) summarize(s api.Stats) {
	d.Stats = &s
	for _, t := range s.Types {
		d.Load.Backlog += t.Backlog
		d.Load.Waiting += t.Waiting
		d.Load.NonReady += t.NonReady
		d.Load.Ready += t.Ready
		d.Load.InFlight += t.InFlight
	}
	for _, w := range s.Workers {
		d.Slots += w.Workers
		d.Busy += w.Active
	}
	for _, role := range api.Roles {
		alive := slices.ContainsFunc(s.Stages, func(p api.StageStatus) bool { return p.Role == role && p.Running })
		if !alive && (role != "worker" || len(s.Workers) == 0) {
			d.Missing = append(d.Missing, role)
		}
	}
}

// summarizeAudit fills in the fields of the overview that show the audit.
func (d *overviewData) summarizeAudit(a api.AuditState) {
	d.Audit = &a
	d.Laws, d.Open = openLaws(a)
}

// Limit returns the global rate limit as text, such as "100/s" or "50 in 5 s".
func (d overviewData) Limit() string {
	l := d.Stats.RateLimit
	if l.WindowMS == 0 || l.WindowMS == 1000 {
		return count(l.RPS) + "/s"
	}
	return fmt.Sprintf("%s in %s", count(max(1, l.RPS*l.WindowMS/1000)), duration(float64(l.WindowMS)/1000))
}

// AcceptedPerSecond and EndedPerSecond return the present rates of jobs, from the newest point of
// the history; "–" if it is too old.
func (d overviewData) AcceptedPerSecond() string {
	return d.now(func(p api.HistoryPoint) float64 { return p.Accepted })
}

func (d overviewData) EndedPerSecond() string {
	return d.now(func(p api.HistoryPoint) float64 { return p.Done + p.Failed })
}

func (d overviewData) now(value func(api.HistoryPoint) float64) string {
	if d.History.Now == nil {
		return "–"
	}
	return decimal(value(*d.History.Now))
}

type tenantLoad struct {
	api.Tenant
	// Got is the number of the tenant's jobs that end per window of the rate limit, averaged over
	// the last seconds.
	Got float64
}

// GotOfLimit returns Got and the tenant's limit as text, such as "7.5 of 10".
func (t tenantLoad) GotOfLimit() string {
	return decimal(t.Got) + " of " + count(t.Window.Limit)
}

func loadsOf(tenants []api.Tenant) []tenantLoad {
	all := make([]tenantLoad, len(tenants))
	for i, t := range tenants {
		got := t.JobsPerSecond * float64(cmp.Or(t.Window.WindowMS, 1000)) / 1000
		all[i] = tenantLoad{t, got}
	}
	return all
}

// pauseType returns an action that pauses a type or resumes it.
func pauseType(
	do func(context.Context, string) error, done string,
) func(context.Context, *http.Request) (string, error) {
	return func(ctx context.Context, r *http.Request) (string, error) {
		typ, err := pathID(r, "type")
		if err != nil {
			return "", err
		}
		return root + "/?done=" + done, do(ctx, typ)
	}
}

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
