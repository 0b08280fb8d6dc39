package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const (
	overviewGroups  = 8
	overviewTenants = 10
	overviewMinutes = 60 // of the history, unless the query says it
	guardsLooked    = 10 // most guards whose members are looked at for open breakers
	runningInterval = 2 * time.Second
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
	stats    *redisx.Cache[string, statsSample]
	history  *redisx.Cache[string, historyView]
	system   *redisx.Cache[string, systemState]
	busiest  *redisx.Cache[string, api.TenantList]
	running  *redisx.Cache[string, []api.Group]
	failures *redisx.Cache[string, []api.Group]
}

func newOverviewPage(b httpapi.Backend) *overviewPage {
	return &overviewPage{
		backend: b, stats: newCache[statsSample](time.Second), history: newCache[historyView](seldomInterval),
		system: newCache[systemState](seldomInterval), busiest: newCache[api.TenantList](seldomInterval),
		running: newCache[[]api.Group](runningInterval), failures: newCache[[]api.Group](seldomInterval),
	}
}

// statsSample is the figures of which the overview shows several parts, which must agree.
type statsSample struct {
	api.Stats
	at time.Time
}

// systemState is what the overview reads seldom to say whether all is well.
type systemState struct {
	audit         api.AuditState
	limits        api.Limits
	breakers      []string // guards with open breakers
	deadCallbacks bool     // some have died lately
}

func (p *overviewPage) readSystem(ctx context.Context) (systemState, error) {
	audit, err1 := p.backend.Audit(ctx)
	limits, err2 := p.backend.Limits(ctx)
	dead, err3 := p.backend.Callbacks(ctx, api.CallbackQuery{State: api.CallbackDead, Limit: 1})
	guards, err4 := p.backend.Guards(ctx, guard.Query{Limit: guardsPage})
	s := systemState{audit: audit, limits: limits}
	s.deadCallbacks = slices.ContainsFunc(dead.Callbacks, func(c api.Callback) bool {
		return c.DiedAt != nil && time.Since(*c.DiedAt) < 24*time.Hour
	})
	looked := 0
	for _, g := range guards.Guards {
		if g.Cooling == 0 || g.Members > manyMembers || looked == guardsLooked {
			continue // a member whose breaker is open is cooling
		}
		looked++
		all, err := p.backend.Guard(ctx, g.Name)
		if err == nil && slices.ContainsFunc(all.Members, func(m api.GuardMember) bool { return m.Breaker == "open" }) {
			s.breakers = append(s.breakers, g.Name)
		}
	}
	return s, errors.Join(err1, err2, err3, err4)
}

// newCache returns a cache of the answers to an expensive read, which all pages and readers share.
func newCache[T any](interval time.Duration) *redisx.Cache[string, T] {
	const most = 100
	return redisx.NewCache[string, T](interval, most)
}

// overviewData is the template data of the overview. Fields that the reader may not see are empty.
type overviewData struct {
	Stats    *api.Stats
	At       time.Time     // of Stats
	Load     api.TypeStats // the sum over all types
	Slots    int
	Busy     int
	Missing  []string // roles without a live process
	History  historyView
	Minutes  int // of the history
	Ranges   []historyRange
	system   *systemState
	Problems []problem
	Busiest  []tenantLoad
	Counted  *time.Time // when Busiest was read
	Tenants  bool       // the reader may see all tenants
	Newest   []api.Group
	Running  bool // Newest are the newest that run
	Failures []api.Group
	Groups   bool // the reader may see groups
}

func (p *overviewPage) view(r *http.Request) (view, error) {
	minutes, err := minutesOf(r.URL.Query().Get("minutes"))
	if err != nil {
		return view{}, err
	}
	if r.URL.Query().Has("done") {
		p.stats.Delete("") // the page shows what the action has changed
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
		s, err := p.stats.GetOr("", func() (statsSample, error) {
			s, err := p.backend.Stats(ctx)
			return statsSample{s, time.Now()}, err
		})
		if err != nil {
			return nil, err
		}
		d.summarize(s)
		if d.History, err = p.readHistory(ctx, minutes); err != nil {
			return nil, err
		}
	}
	if who.May(auth.ReadSystem) {
		s, err := p.system.GetOr("", func() (systemState, error) { return p.readSystem(ctx) })
		if err != nil {
			return nil, err
		}
		d.system = &s
	}
	d.Problems = healthOf(d)
	if d.Tenants {
		l, err := p.busiest.GetOr("", func() (api.TenantList, error) { return p.backend.BusiestTenants(ctx, overviewTenants) })
		if err != nil {
			return nil, err
		}
		d.Busiest, d.Counted = loadsOf(l.Tenants), l.AsOf
	}
	if !d.Groups {
		return d, nil
	}
	groups := func(status api.Status) func() ([]api.Group, error) {
		return func() ([]api.Group, error) {
			l, err := p.backend.Groups(ctx, messages.ListQuery{Status: status, Limit: overviewGroups})
			return l.Groups, err
		}
	}
	var err error
	if d.Newest, err = p.running.GetOr(classOf(who), groups(api.StatusRunning)); err != nil {
		return nil, err
	}
	if d.Running = len(d.Newest) > 0; !d.Running {
		if d.Newest, err = groups("")(); err != nil {
			return nil, err
		}
	}
	d.Failures, err = p.failures.GetOr(classOf(who), groups(api.StatusFailed))
	return d, err
}

func (p *overviewPage) readHistory(ctx context.Context, minutes int) (historyView, error) {
	return p.history.GetOr(strconv.Itoa(minutes), func() (historyView, error) {
		h, err := p.backend.History(ctx, max(minutes, int(failedHours/time.Minute)))
		return newHistoryView(h, minutes, time.Now()), err
	})
}

// summarize fills in what the overview shows of the system.
func (d *overviewData) summarize(s statsSample) {
	d.Stats, d.At = &s.Stats, s.at
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

// problem is something that somebody should look at.
type problem struct {
	Subject    string // an id or a name, before Text; may be ""
	Text       string
	Link, Path string // to the page that says more; Path "": there is none for the reader
}

const (
	longWait    = 10 * time.Minute // of the oldest waiting job
	fullMemory  = 85               // percent
	fewFailures = 10               // in lately
	lately      = 10 * time.Minute
)

// healthOf returns what is not well in d, the worst first.
func healthOf(d overviewData) (all []problem) {
	check := func(bad bool, subject, text, link, path string) {
		if bad {
			all = append(all, problem{subject, text, link, path})
		}
	}
	if s := d.Stats; s != nil {
		for _, role := range d.Missing {
			check(true, "", "No live process has the role "+role+": jobs can't end without it.", "Workers", "/ui/workers")
		}
		for _, t := range s.Types {
			check(t.Backlog > 0 && t.Workers == 0 && !t.Paused, t.Type,
				"has "+plural(t.Backlog, "job", "jobs")+", but no worker.", "Workers", "/ui/workers")
		}
		check(s.Memory.Max > 0 && s.Memory.Used > s.Memory.Max/100*fullMemory, "",
			"Redis uses "+percent(s.Memory.Used, s.Memory.Max)+" of its memory.", "Types", "/ui/#types-title")
		if s.OldestWaiting != nil {
			waited := d.At.Sub(*s.OldestWaiting)
			check(waited > longWait && s.StartedPerSec == 0, "", "No job starts, and the next one has waited for "+duration(waited.Seconds())+".", "Types", "/ui/#types-title")
		}
		failed, ended, letters := d.History.FailedLately, d.History.EndedLately, ""
		if d.Groups {
			letters = "/ui/dead-letters"
		}
		check(failed > fewFailures && failed > ended/100, "", fmt.Sprintf("%s of the %s that ended in the last 10 minutes have failed.",
			decimal(math.Round(failed)), plural(int64(ended), "job", "jobs")), "Dead letters", letters)
	}
	if s := d.system; s != nil {
		laws, open := openLaws(s.audit)
		names := make([]string, len(laws))
		for i, law := range laws {
			names[i] = law.Name + " " + count(law.Number)
		}
		check(open > 0, strings.Join(names, ", "), "– the audit has "+plural(open, "open violation", "open violations")+".", "Audit", "/ui/audit")
		for _, g := range s.breakers {
			check(true, g, "has an open breaker.", "Guard", "/ui/guards/"+url.PathEscape(g))
		}
		check(s.deadCallbacks, "", "Callbacks have died in the last day: they are sent again only on request.", "Callbacks", "/ui/callbacks")
		check(len(s.limits.PendingPartitions) > 0, "", "The last change of limits is not in effect everywhere.", "Limits", "/ui/limits")
		check(len(s.limits.ProcessesThatDiffer) > 0, "", "The environments of processes have different limits.", "Limits", "/ui/limits")
	}
	return all
}

// Limit returns the global rate limit as text, such as "100/s" or "50 in 5 s".
func (d overviewData) Limit() string {
	l := d.Stats.RateLimit
	if l.WindowMS == 0 || l.WindowMS == 1000 {
		return count(l.RPS) + "/s"
	}
	return fmt.Sprintf("%s in %s", count(max(1, l.RPS*l.WindowMS/1000)), duration(float64(l.WindowMS)/1000))
}

// DonePerSecond returns the present rate of jobs, as the legend has it; "–" if it is not known.
func (d overviewData) DonePerSecond() string {
	if d.History.Now == nil {
		return "–"
	}
	return decimal(d.History.Now.Done)
}

// Backlog is the legend of the chart of the backlog, from Stats.
func (d overviewData) Backlog() []drawnLine {
	var all []drawnLine
	now := api.HistoryPoint{Gauges: api.Gauges{
		Waiting: d.Load.Waiting, NonReady: d.Load.NonReady, Ready: d.Load.Ready, InFlight: d.Load.InFlight,
	}}
	for _, l := range historyJobs {
		all = append(all, drawnLine{Name: l.name, Class: l.class, Last: decimal(l.value(now))})
	}
	return all
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
	historyWidth, historyHeight = 400, 190
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
	Rates, Jobs, Delays *lineChart        // nil: there are no points
	Now                 *api.HistoryPoint // the newest point; nil: it is too old, or there is none
	Failed              int64             // how often a job has failed in the hour before the newest point
	// Jobs that have failed or ended in the last minutes (lately).
	FailedLately, EndedLately float64
}

// line is a line of a chart of the history.
type line struct {
	name, class string
	value       func(api.HistoryPoint) float64
}

// historyRates, historyJobs and historyDelays list the lines of the charts: name, CSS class, and the
// value of a point.
var (
	historyRates = []line{
		{"done", "done", func(p api.HistoryPoint) float64 { return p.Done }},
		{"failed", "failed", func(p api.HistoryPoint) float64 { return p.Failed }},
		{"retried", "non-ready", func(p api.HistoryPoint) float64 { return p.Retried }},
	}
	historyJobs = []line{
		{"waiting", "edge", func(p api.HistoryPoint) float64 { return float64(p.Waiting) }},
		{"non-ready", "non-ready", func(p api.HistoryPoint) float64 { return float64(p.NonReady) }},
		{"ready", "ready", func(p api.HistoryPoint) float64 { return float64(p.Ready) }},
		{"in flight", "in-flight", func(p api.HistoryPoint) float64 { return float64(p.InFlight) }},
	}
	historyDelays = []line{
		{"p50", "in-flight", func(p api.HistoryPoint) float64 { return secondsOf(p.StartDelayP50MS) }},
		{"p99", "non-ready", func(p api.HistoryPoint) float64 { return secondsOf(p.StartDelayP99MS) }},
	}
)

// secondsOf returns a number of ms in seconds; NaN: there is none.
func secondsOf(v *float64) float64 {
	if v == nil {
		return math.NaN()
	}
	return *v / 1000
}

// delay formats a number of seconds in one unit.
func delay(seconds float64) string {
	if math.IsNaN(seconds) {
		return "–"
	}
	if seconds < 1 {
		return decimal(seconds*1000) + " ms"
	}
	return decimal(seconds) + " s"
}

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
		age := newest.T.Sub(p.T)
		if age >= failedHours {
			continue
		}
		since := step
		if i > 0 {
			since = p.T.Sub(h.Points[i-1].T)
		}
		failed += p.Failed * min(since, failedHours).Seconds()
		if age < lately {
			v.FailedLately += p.Failed * min(since, lately).Seconds()
			v.EndedLately += (p.Done + p.Failed) * min(since, lately).Seconds()
		}
	}
	v.Failed = int64(math.Round(failed))
	columns := columnsOf(h.Points, newest.T.Add(-time.Duration(minutes)*time.Minute), step)
	v.Rates = newHistoryChart(historyRates, columns, newest, decimal)
	v.Jobs = newHistoryChart(historyJobs, columns, newest, decimal)
	v.Delays = newHistoryChart(historyDelays, columns, newest, delay)
	return v
}

// newHistoryChart returns a chart with the newest point in its legend; nil if it has no values. All but
// that of the delays are stacked.
func newHistoryChart(
	lines []line, columns []column, newest api.HistoryPoint, write func(float64) string,
) *lineChart {
	var series []lineSeries
	for _, l := range lines {
		series = append(series, lineSeries{Name: l.name, Class: l.class, Points: l.points(columns)})
	}
	c, ok := newLineChart(historyWidth, historyHeight, lines[0].name != historyDelays[0].name, series, write)
	if !ok {
		return nil
	}
	for i, l := range lines {
		c.Lines[i].Last = write(l.value(newest))
	}
	return &c
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

// points returns the average of the line's values in each column; NaN for a column without values.
func (l line) points(columns []column) []linePoint {
	all := make([]linePoint, len(columns))
	for i, c := range columns {
		sum, n := 0.0, 0.0
		for _, p := range c.points {
			if v := l.value(p); !math.IsNaN(v) {
				sum, n = sum+v, n+1
			}
		}
		all[i] = linePoint{T: c.at, Value: sum / n}
	}
	return all
}
