package console

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

const (
	maxAggregate = 64 << 10 // bytes; a page leaves out aggregates if they are larger
	barWidth     = 1000
	failedShown  = 10
	failedPages  = 5  // pages of jobs among which failed ones are looked for
	valuesShown  = 12 // counts of an aggregate, and error codes
	// whyInterval is how often, at most, an open page of a group reads why the group is waiting,
	// and its failed jobs.
	whyInterval = 2 * time.Second
)

type groupData struct {
	api.Group
	Complete   bool // Aggregate is not left out
	FormID     string
	Why        *api.Why
	Bar        []barPart
	Legend     []quantity
	Map        *jobMap
	Steps      []step
	Rate       float64 // jobs that end per second; 0: unknown
	Codes      []quantity
	MoreCodes  int
	Aggregates []aggregate
	FailedJobs []api.Job
}

// Submit returns the path of the form to submit a group with the same settings.
func (g groupData) Submit() string {
	q := chosen(map[string]string{
		"type": g.Type, "tenant": g.Tenant, "name": g.Name, "priority": g.Priority, "callback_url": g.CallbackURL,
		"tags": strings.Join(g.Tags.Pairs(), "\n"),
	})
	return root + "/submit?" + q.Encode()
}

// Downloads are the names of the group's files.
func (g groupData) Downloads() []string {
	if g.Counts.Failed == 0 {
		return downloads[:2]
	}
	return downloads
}

// Unfinished is the number of jobs that have not ended.
func (g groupData) Unfinished() int64 { return g.Counts.Accepted - g.Counts.Ended() }

// step is a state of the group's round that it has reached.
type step struct {
	Status  string
	At      time.Time
	Before  string  // the step before; "": this is the first one
	Seconds float64 // since then
}

func (p groupPages) group(r *http.Request) (view, error) {
	id, err := pathID(r, "id")
	if err != nil {
		return view{}, err
	}
	data, err := p.reader(id)(r.Context())
	if err != nil {
		return view{}, err
	}
	title := titleOf(data.(groupData).Group)
	return view{name: "group", title: "Group " + title, data: data, topic: "group:" + id}, nil
}

// titleOf returns what people call a group: its name, or its id if it has none.
func titleOf(g api.Group) string { return cmp.Or(g.Name, g.ID) }

func (p groupPages) openGroup(ctx context.Context, id string) (func(context.Context) (any, error), error) {
	if !api.ValidID(id) {
		return nil, api.ErrNotFound
	}
	_, _, err := p.backend.GroupSummary(ctx, id, 0)
	return p.reader(id), unlessAway(err)
}

// reader returns a function that reads the data of a group's page: the group on each call,
// expensive parts such as the reason why it waits less often.
func (p groupPages) reader(id string) func(context.Context) (any, error) {
	var why *api.Why
	var failed []api.Job
	var whyAt, failedAt time.Time
	var failedCount int64
	readMap := p.mapReader(id)
	return func(ctx context.Context) (any, error) {
		g, complete, err := p.backend.GroupSummary(ctx, id, maxAggregate)
		if err != nil {
			return nil, err
		}
		d := newGroupData(g, complete)
		switch waiting := g.Counts.Waiting + g.Counts.NonReady + g.Counts.Ready; {
		case g.Status.Ended() || waiting == 0:
			why, whyAt = nil, time.Time{}
		case time.Since(whyAt) >= whyInterval:
			w, err := p.backend.Why(ctx, id)
			if why = nil; err == nil && w.Detail != "" {
				why = &w
			}
			whyAt = time.Now()
		}
		if n := g.Counts.Failed; n != failedCount && time.Since(failedAt) >= whyInterval {
			if failed, err = p.failedJobs(ctx, id); err != nil {
				return nil, err
			}
			failedCount, failedAt = n, time.Now()
		}
		if d.Map, err = readMap(ctx); err != nil {
			return nil, err
		}
		d.Why, d.FailedJobs = why, failed
		d.FormID = fmt.Sprintf("again.%s.%d.%d", id, g.Round, g.Counts.Failed) // the same failed jobs run again once
		return d, nil
	}
}

// failedJobs returns up to failedShown failed jobs of a group. It reads only a few pages of jobs,
// so in a large group it may miss some.
func (p groupPages) failedJobs(ctx context.Context, id string) (failed []api.Job, err error) {
	q := messages.JobQuery{State: "failed", Limit: failedShown}
	for range failedPages {
		l, err := p.backend.Jobs(ctx, id, q)
		if err != nil {
			return nil, err
		}
		failed = append(failed, l.Jobs...)
		if q.Cursor = l.Cursor; q.Cursor == "" || len(failed) >= failedShown {
			break
		}
	}
	return failed[:min(len(failed), failedShown)], nil
}

func newGroupData(g api.Group, complete bool) groupData {
	n := g.Counts
	d := groupData{Group: g, Complete: complete, Legend: values(n)}
	bar := d.Legend
	if g.Total != nil && *g.Total > n.Accepted {
		missing := quantity{Name: "announced", Class: "missing", Number: *g.Total - n.Accepted}
		bar = append(slices.Clone(bar), missing)
	}
	d.Bar = divideBar(barWidth, bar)
	if eta := g.ETASeconds; eta != nil && *eta > 0 {
		d.Rate = float64(d.Unfinished()) / *eta
	}
	d.Steps = steps(g.Timestamps)
	for code, count := range g.FailuresByCode {
		d.Codes = append(d.Codes, quantity{Name: code, Number: count})
	}
	d.Codes, d.MoreCodes = largest(d.Codes)
	for _, name := range slices.Sorted(maps.Keys(g.Aggregate)) {
		d.Aggregates = append(d.Aggregates, newAggregate(name, g.Aggregate[name]))
	}
	return d
}

// endedBar returns how the jobs of a group ended, and how many have not ended, as parts of a bar.
func endedBar(g api.Group) []barPart {
	missing := quantity{Class: "missing", Number: expected(g) - g.Counts.Ended()}
	return divideBar(barWidth, append(values(g.Counts)[:3], missing))
}

// values returns the counts of a group's jobs as chart values, in the order and with the CSS
// classes that all charts of the console use.
func values(n api.Counts) []quantity {
	return []quantity{
		{Name: "done", Class: "done", Number: n.Done}, {Name: "failed", Class: "failed", Number: n.Failed},
		{Name: "cancelled", Class: "cancelled", Number: n.Cancelled},
		{Name: "in flight", Class: "in-flight", Number: n.InFlight},
		{Name: "ready", Class: "ready", Number: n.Ready}, {Name: "non-ready", Class: "non-ready", Number: n.NonReady},
		{Name: "waiting", Class: "waiting", Number: n.Waiting},
	}
}

// steps returns the states that a group has reached, sorted by time.
func steps(times map[string]time.Time) (all []step) {
	for status, at := range times {
		all = append(all, step{Status: status, At: at})
	}
	order := func(status string) int {
		return slices.IndexFunc(statuses, func(s api.Status) bool { return strings.EqualFold(string(s), status) })
	}
	slices.SortFunc(all, func(a, b step) int {
		return cmp.Or(a.At.Compare(b.At), cmp.Compare(order(a.Status), order(b.Status)))
	})
	for i := 1; i < len(all); i++ {
		all[i].Before, all[i].Seconds = all[i-1].Status, all[i].At.Sub(all[i-1].At).Seconds()
	}
	return all
}

// largest returns the largest values, at most valuesShown, and how many others there are. It sorts
// its argument.
func largest(values []quantity) (some []quantity, more int) {
	slices.SortFunc(values, func(a, b quantity) int {
		return cmp.Or(cmp.Compare(b.Number, a.Number), cmp.Compare(a.Name, b.Name))
	})
	n := min(len(values), valuesShown)
	return values[:n], len(values) - n
}

// aggregate is the template data of one value in a group's aggregate. Only one form is set: Number,
// Text, Counts or Histogram.
type aggregate struct {
	Name      string
	Number    string     // a number
	Text      string     // any other value, as JSON
	Counts    []quantity // how often there was which value
	More      int        // values that Counts leaves out
	Most      int64      // the largest count
	Histogram *histogram // a distribution
	Count     int64      // of the distribution's numbers
	Numbers   []named    // the distribution in numbers
}

type named struct{ Name, Text string }

const maxAggregateText = 2000 // bytes of an aggregate that is shown as JSON

// newAggregate chooses the form in which the page shows an aggregate, by its JSON. A custom reducer
// may return any JSON.
func newAggregate(name string, text json.RawMessage) aggregate {
	a := aggregate{Name: name}
	var n float64
	if string(text) == "null" {
		a.Number = "no values"
		return a
	}
	if json.Unmarshal(text, &n) == nil {
		a.Number = decimal(n)
		return a
	}
	if a.distribution(text) {
		return a
	}
	var numbers map[string]float64
	if json.Unmarshal(text, &numbers) == nil && len(numbers) > 0 {
		for value, n := range numbers {
			if n != float64(int64(n)) || n < 0 {
				a.Counts = nil
				break
			}
			a.Counts = append(a.Counts, quantity{Name: value, Number: int64(n)})
		}
		if len(a.Counts) > 0 {
			a.Counts, a.More = largest(a.Counts)
			a.Most = a.Counts[0].Number
			return a
		}
	}
	a.Text = string(text)
	if len(a.Text) > maxAggregateText {
		a.Text = strings.ToValidUTF8(a.Text[:maxAggregateText], "") + "…"
	}
	return a
}

// distribution sets Histogram, Count and Numbers if the text is a distribution, and reports whether it
// is. The distribution of a group of an earlier version has no histogram.
func (a *aggregate) distribution(text json.RawMessage) bool {
	var d struct {
		Count, Min, P50, P90, P95, P99, Max, Mean, StdDev *float64

		Histogram [][3]float64
	}
	if json.Unmarshal(text, &d) != nil {
		return false
	}
	names := []string{"min", "p50", "p90", "p95", "p99", "max", "mean", "stddev"}
	for i, n := range []*float64{d.Min, d.P50, d.P90, d.P95, d.P99, d.Max, d.Mean, d.StdDev} {
		if n == nil || d.Count == nil {
			a.Numbers = nil
			return false
		}
		a.Numbers = append(a.Numbers, named{names[i], decimal(*n)})
	}
	a.Count = int64(*d.Count)
	var ranges []string
	var counts []float64
	for _, bar := range d.Histogram {
		ranges, counts = append(ranges, decimal(bar[0])+" to "+decimal(bar[1])), append(counts, bar[2])
	}
	if len(counts) == 0 {
		return true
	}
	h := newHistogram(420, 140, ranges, counts, decimal)
	const each = 5 // bars that have room for a name
	for i := range h.Bars {
		if b := &h.Bars[i]; len(h.Bars) > each {
			if b.Label, b.Name = "", ""; i%each == each/2 {
				b.Name = decimal(d.Histogram[i][0])
			}
		}
	}
	a.Histogram = &h
	return true
}

// indented returns JSON with line breaks and indentation. It does not change values.
func indented(text json.RawMessage) string {
	var b bytes.Buffer
	if json.Indent(&b, text, "", "  ") != nil {
		return string(text)
	}
	return b.String()
}

const (
	mapBuckets = 500
	// mapInterval is how often an open page of a group reads the map of its jobs. The store reads
	// the states of all jobs for a map, and caches the map for the same time.
	mapInterval = 2 * time.Second
)

// jobMap is a chart of a group's jobs: each column shows the states of a range of ordinals.
type jobMap struct {
	Jobs  int64
	Last  int64 // the last ordinal
	Each  int64 // the most jobs of a column
	Chart columnMap
}

// mapReader returns a function that reads the map of a group at most once per mapInterval. The
// function returns nil while the group has no jobs.
func (p groupPages) mapReader(id string) func(context.Context) (*jobMap, error) {
	return every(mapInterval, func(ctx context.Context) (*jobMap, error) {
		m, err := p.backend.JobMap(ctx, id, mapBuckets)
		return newJobMap(m), err
	})
}

func newJobMap(m api.JobMap) *jobMap {
	if m.Jobs == 0 || len(m.Buckets) == 0 {
		return nil
	}
	j := &jobMap{Jobs: m.Jobs}
	var columns [][]quantity
	for _, b := range m.Buckets {
		j.Last, j.Each = b.To, max(j.Each, b.To-b.From+1)
		columns = append(columns, values(api.Counts{
			Done: b.Done, Failed: b.Failed, Cancelled: b.Cancelled, InFlight: b.InFlight,
			Ready: b.Ready, NonReady: b.NonReady, Waiting: b.Waiting,
		}))
	}
	j.Chart = newColumnMap(barWidth, 48, columns)
	return j
}
