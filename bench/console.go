package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

// ConsoleOptions say how much the web console shows, and to how many people.
type ConsoleOptions struct {
	Options
	Groups  int // groups with a tenant each, of the part lists
	Jobs    int // of the large group of the part group, and of each round of the part throughput
	Viewers int // of one page, in the part viewers
	Few     int // viewers of the running group, in the part throughput
	Rounds  int // of the part throughput
	Only    []string
}

// Console has the figures of the web console. A part that did not run is missing.
type Console struct {
	Lists      *ConsoleLists      `json:"lists,omitempty"`
	Group      *ConsoleGroup      `json:"group,omitempty"`
	Viewers    *ConsoleViewers    `json:"viewers,omitempty"`
	Throughput *ConsoleThroughput `json:"throughput,omitempty"`
	Overrides  map[string]string  `json:"overrides,omitempty"`
}

// ConsolePage has the times of reading one page of the console, from the request to the first byte
// of the answer, and the page's size.
type ConsolePage struct {
	Page     string  `json:"page"`
	P50MS    float64 `json:"first_byte_p50_ms"`
	P95MS    float64 `json:"first_byte_p95_ms"`
	KB       float64 `json:"kb"`       // of HTML, without compression
	Elements int     `json:"elements"` // of HTML and SVG
}

// ConsoleLists has the times of the console's list pages while there are many tenants and groups.
type ConsoleLists struct {
	Groups  int           `json:"groups"`
	Tenants int           `json:"tenants"`
	Pages   []ConsolePage `json:"pages"`
}

// ConsoleGroup has how fast the console shows a group: the page and the first frame of the stream
// of a large group that runs at full speed, and Change, of another group.
type ConsoleGroup struct {
	Jobs         int         `json:"jobs"`
	Page         ConsolePage `json:"page"`
	FirstFrameMS float64     `json:"first_frame_max_ms"` // from the request of the stream, the slowest of 20
	// Change is the time from the request that pauses or resumes a group until a stream of the
	// console has sent the region that shows it. It is measured with another, slower group.
	Change Quantiles `json:"change_shown"`
}

// ConsoleViewers has what the viewers of a group's page cost.
type ConsoleViewers struct {
	Viewers int `json:"viewers"`
	// CommandsOfOne and CommandsOfAll are the Redis commands a second, those in scripts included,
	// that one viewer or all viewers of a paused group add to those without viewers.
	CommandsOfOne float64 `json:"redis_commands_per_second_of_one"`
	CommandsOfAll float64 `json:"redis_commands_per_second_of_all"`
	CommandsRatio float64 `json:"redis_commands_ratio"` // of all / of one
	// CoreOfOne and CoreOfAll are the CPU time of ingest a second that one viewer or all viewers of
	// a running group add to that without viewers.
	CoreOfOne float64 `json:"core_of_one"`
	CoreOfAll float64 `json:"core_of_all"`
	CoreAfter float64 `json:"core_after"` // what remains of it after all viewers have left
	// KBEach is the resident memory of ingest that each viewer after the first adds.
	KBEach          float64 `json:"kb_each"`
	FramesPerSecond float64 `json:"frames_per_second_of_each"`
}

// ConsoleThroughput compares the speed of a group with and without viewers who look at it.
type ConsoleThroughput struct {
	Jobs    int       `json:"jobs"`
	Viewers int       `json:"viewers"`
	Without []float64 `json:"jobs_per_second_without"`
	With    []float64 `json:"jobs_per_second_with"`
	Ratio   float64   `json:"ratio"` // of the medians
}

var consoleParts = []struct {
	name string
	run  func(ctx context.Context, o ConsoleOptions, out *Console) error
}{
	{"lists", func(ctx context.Context, o ConsoleOptions, out *Console) (err error) {
		out.Lists, err = measureLists(ctx, o, out)
		return err
	}},
	{"group", func(ctx context.Context, o ConsoleOptions, out *Console) (err error) {
		out.Group, err = measureLargeGroup(ctx, o, out)
		return err
	}},
	{"viewers", func(ctx context.Context, o ConsoleOptions, out *Console) (err error) {
		out.Viewers, err = measureViewers(ctx, o, out)
		return err
	}},
	{"throughput", func(ctx context.Context, o ConsoleOptions, out *Console) (err error) {
		out.Throughput, err = measureViewedThroughput(ctx, o, out)
		return err
	}},
}

// ConsoleParts returns the names of the parts of RunConsole.
func ConsoleParts() (names []string) {
	for _, p := range consoleParts {
		names = append(names, p.name)
	}
	return names
}

// RunConsole measures the web console: each part on a fleet of its own.
func RunConsole(ctx context.Context, o ConsoleOptions) (Console, error) {
	var out Console
	for _, p := range consoleParts {
		if len(o.Only) > 0 && !slices.Contains(o.Only, p.name) {
			continue
		}
		if err := p.run(ctx, o, &out); err != nil {
			return out, fmt.Errorf("part %s: %w", p.name, err)
		}
	}
	return out, nil
}

// consoleRun is a run with the address of its console.
type consoleRun struct {
	*run
	url string // without a slash at its end
	api *client.API
}

func startConsoleRun(ctx context.Context, o Options, out *Console) (*consoleRun, error) {
	addr := childproc.FreeAddr()
	r, err := start(ctx, o, false, noGlobalLimit, "BULKACTION_API_ADDR="+addr)
	if err != nil {
		return nil, err
	}
	out.Overrides = r.overrides
	v := &consoleRun{run: r, url: "http://" + addr, api: client.NewAPI("http://" + addr)}
	if err := errors.Join(r.awaitAPI(ctx, addr), r.warmUp(ctx, nil, perMessage)); err != nil {
		r.close()
		return nil, err
	}
	return v, nil
}

const (
	pageReads  = 100
	frameReads = 20
	slowJobMS  = 100
)

func measureLists(ctx context.Context, o ConsoleOptions, out *Console) (*ConsoleLists, error) {
	v, err := startConsoleRun(ctx, o.Options, out)
	if err != nil {
		return nil, err
	}
	defer v.close()
	fails, done := []byte(`{"payload":{"fail":"permanent"}}`), []byte(`{"payload":{}}`)
	groups := divideJobs(v.name, o.Groups, o.Groups, 1, func(i int) []byte {
		if i%2 == 0 {
			return fails
		}
		return done
	})
	if err := v.create(ctx, groups, perMessage); err != nil {
		return nil, err
	}
	if err := v.awaitIdle(ctx, "lists", o.Groups); err != nil {
		return nil, err
	}
	l := &ConsoleLists{Groups: o.Groups, Tenants: o.Groups}
	for _, path := range []string{
		"/", "/groups", "/groups?status=FAILED", "/groups?prefix=" + v.name + "-7", "/tenants", "/tenants?sort=backlog",
		"/dead-letters",
	} {
		page, err := v.page(ctx, path, nil)
		if err != nil {
			return nil, err
		}
		l.Pages = append(l.Pages, page)
	}
	return l, nil
}

// awaitIdle waits until ingest has handled all messages, and all jobs have ended. The progress is
// shown as that of part, of `jobs` jobs.
func (v *consoleRun) awaitIdle(ctx context.Context, part string, jobs int) error {
	return v.await(ctx, "the end of all jobs", pollInterval, func() (int, error) {
		s, err := v.api.Stats(ctx)
		if err != nil {
			return 0, err
		}
		unread, err := v.conn.Cmd.XLen(ctx, v.space.Ingest()).Result()
		left := int(unread)
		for _, t := range s.Types {
			left += int(t.Waiting + t.NonReady + t.Ready + t.InFlight)
		}
		v.options.progress(part, jobs-min(left, jobs), jobs)
		return left, err
	})
}

var element = regexp.MustCompile(`<[a-z]`)

// page reads a page of the console pageReads times, but ends early when the function while returns
// false. It returns quantiles of the times, and the page's size.
func (v *consoleRun) page(ctx context.Context, path string, while func() bool) (ConsolePage, error) {
	p := ConsolePage{Page: "/ui" + path}
	var times []float64
	for range pageReads {
		var first time.Time
		traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
			GotFirstResponseByte: func() { first = time.Now() },
		})
		q, err := http.NewRequestWithContext(traced, http.MethodGet, v.url+"/ui"+path, http.NoBody)
		if err != nil {
			return p, err
		}
		began := time.Now()
		answer, err := http.DefaultClient.Do(q)
		if err != nil {
			return p, err
		}
		text, err := io.ReadAll(answer.Body)
		if err = errors.Join(err, answer.Body.Close()); err != nil {
			return p, err
		}
		if answer.StatusCode != http.StatusOK {
			return p, fmt.Errorf("page %s: status %d", path, answer.StatusCode)
		}
		times = append(times, first.Sub(began).Seconds()*1000)
		p.KB = max(p.KB, measure.Round2(float64(len(text))/1024))
		p.Elements = max(p.Elements, len(element.FindAll(text, -1)))
		if while == nil {
			continue
		}
		if !while() {
			break
		}
		if err := redisx.Sleep(ctx, 50*time.Millisecond); err != nil {
			return p, err
		}
	}
	p.P50MS, p.P95MS = measure.Round2(measure.Percentile(times, 50)), measure.Round2(measure.Percentile(times, 95))
	return p, nil
}

func measureLargeGroup(ctx context.Context, o ConsoleOptions, out *Console) (*ConsoleGroup, error) {
	v, err := startConsoleRun(ctx, o.Options, out)
	if err != nil {
		return nil, err
	}
	defer v.close()
	g := &ConsoleGroup{Jobs: o.Jobs}
	large := divideJobs(v.name, o.Jobs, 1, 1, nil)
	path, topic := "/groups/"+large[0].id, "group:"+large[0].id
	f := v.follow("group", large)
	err = f.waitBeside(ctx, func(ctx context.Context) error {
		if err := v.create(ctx, large, 0); err != nil {
			return err
		}
		if _, err := v.awaitFirst(ctx, large[0]); err != nil {
			return err
		}
		return errors.Join(v.fill(ctx, large, perMessage), func() (err error) {
			if g.Page, err = v.page(ctx, path, func() bool { return true }); err != nil {
				return err
			}
			for range frameReads {
				began := time.Now()
				if err := v.watch(ctx, topic, func(string) bool { return false }); err != nil {
					return err
				}
				g.FirstFrameMS = max(g.FirstFrameMS, measure.Round2(time.Since(began).Seconds()*1000))
			}
			return nil
		}())
	})
	if err != nil {
		return nil, err
	}
	g.Change, err = v.measureChanges(ctx)
	return g, err
}

// awaitFirst waits until a group exists.
func (v *consoleRun) awaitFirst(ctx context.Context, g group) (int, error) {
	return 0, v.await(ctx, "group "+g.id, pollInterval, func() (int, error) {
		_, err := v.api.Group(ctx, g.id)
		if errors.Is(err, client.ErrNotFound) {
			return 1, nil
		}
		return 0, err
	})
}

// measureChanges pauses and resumes a running group, frameReads times in all. It returns the times
// until a stream of the console shows the change.
func (v *consoleRun) measureChanges(ctx context.Context) (Quantiles, error) {
	slow := group{id: v.name + "-slow", tenant: "slow", jobs: 1000, job: sleeping(slowJobMS)}
	if err := v.create(ctx, []group{slow}, slow.jobs); err != nil {
		return Quantiles{}, err
	}
	if _, err := v.awaitFirst(ctx, slow); err != nil {
		return Quantiles{}, err
	}
	var times []float64
	var asked time.Time
	pauses := false // whether the last request was to pause the group
	ask := func() error {
		asked, pauses = time.Now(), !pauses
		var err error
		if pauses {
			_, err = v.api.Pause(ctx, slow.id)
		} else {
			_, err = v.api.Resume(ctx, slow.id)
		}
		return err
	}
	var failed error
	err := v.watch(ctx, "group:"+slow.id, func(data string) bool {
		switch {
		case asked.IsZero():
		case strings.Contains(data, map[bool]string{true: "do-resume", false: "do-pause"}[pauses]):
			times = append(times, time.Since(asked).Seconds()*1000)
		default:
			return true
		}
		if len(times) == frameReads {
			return false
		}
		failed = ask()
		return failed == nil
	})
	return quantilesOf(times), errors.Join(err, failed)
}
