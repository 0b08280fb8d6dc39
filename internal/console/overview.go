package console

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/auth"
	"github.com/bulkaction/bulkaction/internal/httpapi"
)

const (
	overviewGroups = 8
	// failuresInterval is how often an open overview looks for new failures: that may read many
	// groups.
	failuresInterval = 10 * time.Second
)

// overviewPage shows the system as a whole.
type overviewPage struct{ backend httpapi.Backend }

// overviewData is the data of the overview. What the reader may not see is nil.
type overviewData struct {
	Stats    *api.Stats
	Load     api.TypeStats // the sum over all types
	Slots    int
	Busy     int
	Missing  []string // roles without a live process
	Newest   []api.Group
	Failures []api.Group
	Groups   bool // the reader may see groups
}

func (p overviewPage) view(r *http.Request) (view, error) {
	data, err := p.reader()(r.Context())
	return view{name: "overview", title: "Overview", data: data, topic: "overview"}, err
}

func (p overviewPage) open(
	_ context.Context, arg string,
) (func(context.Context) (any, error), error) {
	if arg != "" {
		return nil, api.ErrNotFound
	}
	return p.reader(), nil
}

// reader returns a function that reads the overview, and the newest failures less often.
func (p overviewPage) reader() func(context.Context) (any, error) {
	var failures []api.Group
	var readAt time.Time
	return func(ctx context.Context) (any, error) {
		who, _ := auth.From(ctx)
		var d overviewData
		if who.May(auth.ReadMetrics) {
			s, err := p.backend.Stats(ctx)
			if err != nil {
				return nil, err
			}
			d.summarize(s)
		}
		if d.Groups = who.May(auth.Read); !d.Groups {
			return d, nil
		}
		newest, err := p.backend.Groups(ctx, httpapi.ListQuery{Limit: overviewGroups})
		if err != nil {
			return nil, err
		}
		if time.Since(readAt) >= failuresInterval {
			l, err := p.backend.Groups(ctx, httpapi.ListQuery{Status: api.StatusFailed, Limit: overviewGroups})
			if err != nil {
				return nil, err
			}
			failures, readAt = l.Groups, time.Now()
		}
		d.Newest, d.Failures = newest.Groups, failures
		return d, nil
	}
}

// neededRoles are the roles without which jobs don't end.
var neededRoles = []string{"ingest", "fetcher", "dispatcher", "worker", "aggregator", "watcher"}

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
	for _, role := range neededRoles {
		alive := slices.ContainsFunc(s.Stages, func(p api.StageStatus) bool { return p.Role == role && p.Running })
		if !alive && (role != "worker" || len(s.Workers) == 0) {
			d.Missing = append(d.Missing, role)
		}
	}
}

// pauseType returns an action that pauses a type, or lets it go on.
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
