package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"regexp"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// console measures the web console: each part on a fleet of its own.
type console struct {
	options
	groups  int // groups with a tenant each, of the part lists
	jobs    int // of the large group of the part group, and of each round of the part throughput
	few     int // viewers of the running group, in the part throughput
	many    int // viewers of a page, in the part viewers
	seconds int // for which commands are counted, in the part viewers
	rounds  int // of the part throughput

	overrides map[string]string
}

var consoleBenchmark = benchmark{
	"console", "The web console: lists of many groups, a large group at full speed, with and without viewers",
	func(f *flags) runner {
		const mostViewers = 2000 // most event streams that one process of the console serves
		c := &console{}
		f.int(&c.groups, "groups", 100_000, 1, 0, "groups, each with a tenant of its own, of the part lists")
		f.int(&c.jobs, "jobs", 1_000_000, 1, 0, "jobs of the large group, and of each round of the part throughput")
		f.int(&c.few, "few-viewers", 50, 1, mostViewers, "viewers of the running group, in the part throughput")
		f.int(&c.many, "many-viewers", 500, 1, mostViewers, "viewers of a page, in the part viewers")
		f.int(&c.seconds, "view-seconds", 10, 1, 0, "seconds in which the commands are counted, in the part viewers")
		f.int(&c.rounds, "rounds", 3, 1, 0, "rounds with and without viewers, in the part throughput")
		parts := f.parts(
			part{"lists", c.lists}, part{"group", c.group}, part{"throughput", c.throughput}, part{"viewers", c.viewers})
		return func(ctx context.Context, o options) (any, error) {
			c.options = o
			out, err := runParts(ctx, o, parts(), false)
			return out.with(values{"overrides": c.overrides}), err
		}
	},
}

const (
	pageReads  = 100
	frameReads = 20
	slowJobMS  = 100
)

func (c *console) start(ctx context.Context) *run {
	r := startWithAPI(ctx, c.options, false, nil, noGlobalLimit)
	c.overrides = r.overrides
	check(attempt("warm up", func() { r.warmUp(ctx, nil, perMessage) }, r.close))
	return r
}

// lists measures the console's list pages while there are many tenants and groups, half of them
// failed.
func (c *console) lists(ctx context.Context) values {
	r := c.start(ctx)
	defer r.close()
	groups := divideJobs(r.name, c.groups, c.groups, 1, func(i int) []byte {
		return [][]byte{[]byte(`{"payload":{"fail":"permanent"}}`), []byte(`{"payload":{}}`)}[i%2]
	})
	check(r.create(ctx, groups, perMessage))
	check(r.await(ctx, "the end of all jobs", pollInterval, func() (int, error) {
		s, err := r.api.Stats(ctx)
		if err != nil {
			return 0, err
		}
		unread, err := r.conn.Cmd.XLen(ctx, r.space.Ingest()).Result()
		left := int(unread)
		for _, t := range s.Types {
			left += int(t.Waiting + t.NonReady + t.Ready + t.InFlight)
		}
		c.show("lists", c.groups-min(left, c.groups), c.groups)
		return left, err
	}))
	var pages []values
	for _, path := range []string{
		"/", "/groups", "/groups?status=FAILED", "/groups?prefix=" + r.name + "-7", "/tenants", "/tenants?sort=backlog",
		"/dead-letters", "/find?typed=&q=" + r.name + "-7", "/find?q=no+such+name", "/find?in=tenant:none&q=no+such+key",
	} {
		page, err := r.page(ctx, path, 0)
		check(err)
		pages = append(pages, page)
	}
	return values{"lists": values{"groups": c.groups, "tenants": c.groups, "pages": pages}}
}

var element = regexp.MustCompile(`<[a-z]`)

// page reads a page of the console pageReads times, with a pause after each. It returns quantiles of
// the times from the request to the first byte of the answer, and the page's size.
func (r *run) page(ctx context.Context, path string, pause time.Duration) (values, error) {
	var times []float64
	kb, elements := 0.0, 0
	for range pageReads {
		var first time.Time
		traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
			GotFirstResponseByte: func() { first = time.Now() },
		})
		began := time.Now()
		answer, err := get(traced, http.DefaultClient, r.apiURL+"/ui"+path)
		if err != nil {
			return nil, err
		}
		text, err := io.ReadAll(answer)
		if err = errors.Join(err, answer.Close(), redisx.Sleep(ctx, pause)); err != nil {
			return nil, err
		}
		times = append(times, millis(first.Sub(began)))
		kb, elements = max(kb, round2(float64(len(text))/1024)), max(elements, len(element.FindAll(text, -1)))
	}
	return values{
		"page": "/ui" + path, "first_byte_p50_ms": round2(percentile(times, 50)),
		"first_byte_p95_ms": round2(percentile(times, 95)),
		"kb":                kb,       // of HTML, without compression
		"elements":          elements, // of HTML and SVG
	}, nil
}

// get returns the body of a page. It is an error if the status is not 200.
func get(ctx context.Context, c *http.Client, address string) (io.ReadCloser, error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return nil, err
	}
	answer, err := c.Do(q)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode != http.StatusOK {
		return nil, errors.Join(fmt.Errorf("get %s: %s", address, answer.Status), answer.Body.Close())
	}
	return answer.Body, nil
}

// group measures how fast the console shows a group: the page, and the first frame of the stream, of
// a large group that runs at full speed; and a change of another group.
func (c *console) group(ctx context.Context) values {
	r := c.start(ctx)
	defer r.close()
	large := divideJobs(r.name, c.jobs, 1, 1, nil)
	topic := "group:" + large[0].id
	var page values
	var slowest float64
	check(r.follow("group", large).waitBeside(ctx, func(ctx context.Context) (err error) {
		if err := errors.Join(r.create(ctx, large, 0), r.awaitFirst(ctx, large[0])); err != nil {
			return err
		}
		if err := r.fill(ctx, large, perMessage); err != nil {
			return err
		}
		if page, err = r.page(ctx, "/groups/"+large[0].id, 50*time.Millisecond); err != nil {
			return err
		}
		for range frameReads {
			began := time.Now()
			if err := r.watch(ctx, topic, func(string) bool { return false }); err != nil {
				return err
			}
			slowest = max(slowest, millis(time.Since(began)))
		}
		return nil
	}))
	return values{"group": values{
		"jobs": c.jobs, "page": page, "first_frame_max_ms": round2(slowest), "change_shown": r.changes(ctx),
	}}
}

// awaitFirst waits until a group exists.
func (r *run) awaitFirst(ctx context.Context, g group) error {
	return r.await(ctx, "group "+g.id, pollInterval, func() (int, error) {
		_, err := r.api.Group(ctx, g.id)
		if errors.Is(err, client.ErrNotFound) {
			return 1, nil
		}
		return 0, err
	})
}

// changes pauses and resumes a running group, frameReads times in all. It returns the times until a
// stream of the console has sent the region that shows the change.
func (r *run) changes(ctx context.Context) Quantiles {
	slow := group{id: r.name + "-slow", tenant: "slow", jobs: 1000, job: sleeping(slowJobMS)}
	check(r.create(ctx, []group{slow}, slow.jobs))
	check(r.awaitFirst(ctx, slow))
	var times []float64
	var asked time.Time
	pauses := false // whether the last request was to pause the group
	check(r.watch(ctx, "group:"+slow.id, func(data string) bool {
		switch {
		case asked.IsZero():
		case strings.Contains(data, map[bool]string{true: "do-resume", false: "do-pause"}[pauses]):
			times = append(times, millis(time.Since(asked)))
		default:
			return true
		}
		if len(times) == frameReads {
			return false
		}
		if asked, pauses = time.Now(), !pauses; pauses {
			must(r.api.Pause(ctx, slow.id))
		} else {
			must(r.api.Resume(ctx, slow.id))
		}
		return true
	}))
	return quantilesOf(times)
}

// watch reads the console's event stream of a topic and calls show with the data of each frame,
// until show returns false, the server ends the stream, or ctx ends; none of these is an error.
func (r *run) watch(ctx context.Context, topic string, show func(data string) bool) error {
	stream, err := get(ctx, viewerClient, r.apiURL+"/ui/events?topics="+url.QueryEscape(topic))
	if err == nil {
		defer stream.Close()
		err = readFrames(stream, nil, func(f frame) bool { return len(f.data) == 0 || show(string(f.data)) })
	}
	if ctx.Err() != nil { // its end makes each open stream fail
		return nil
	}
	return err
}

// viewerClient is the HTTP client of simulated viewers. Each stream gets a connection of its own,
// as each browser has one.
var viewerClient = &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}

// view opens n event streams of a topic, and returns after each of them has got its first frame.
// stop ends the streams.
func (r *run) view(ctx context.Context, topic string, n int) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var begun atomic.Int64
	streams, watching := errgroup.WithContext(ctx)
	for range n {
		streams.Go(func() error {
			first := true
			err := r.watch(watching, topic, func(string) bool {
				if first {
					first = false
					begun.Add(1)
				}
				return true
			})
			if err == nil && watching.Err() == nil {
				err = errors.New("a stream has ended")
			}
			return err
		})
	}
	stop = func() {
		cancel()
		check(streams.Wait())
	}
	check(attempt("", func() {
		check(r.await(ctx, "streams", pollInterval, func() (int, error) { return n - int(begun.Load()), watching.Err() }))
	}, stop))
	return stop
}

// viewers counts the commands of Redis while one page, and then many pages, show the overview and a
// running group.
func (c *console) viewers(ctx context.Context) values {
	r := c.start(ctx)
	defer r.close()
	slow := group{id: r.name + "-slow", tenant: "slow", jobs: 100_000, job: sleeping(slowJobMS)}
	check(r.create(ctx, []group{slow}, perMessage))
	check(r.awaitFirst(ctx, slow))
	out := values{}
	for _, topic := range []string{"overview", "group:" + slow.id} {
		var rates [2]float64
		for i, n := range [2]int{1, c.many} {
			stop := r.view(ctx, topic, n)
			before := r.use(ctx).redis.commands
			check(redisx.Sleep(ctx, time.Duration(c.seconds)*time.Second))
			rates[i] = round2(float64(r.use(ctx).redis.commands-before) / float64(c.seconds))
			stop()
		}
		name, _, _ := strings.Cut(topic, ":")
		out[name] = values{"commands_per_second_1": rates[0], "commands_per_second_all": rates[1], "ratio": ratio(rates[1], rates[0])}
	}
	return values{"viewers": out.with(values{"viewers": c.many})}
}

// throughput compares the speed of a group with and without viewers who look at it, in turn.
func (c *console) throughput(ctx context.Context) values {
	r := c.start(ctx)
	defer r.close()
	var speeds [2][]float64 // without and with viewers
	for turn := range 2 * c.rounds {
		with := (turn + turn/2) % 2
		groups := []group{{id: fmt.Sprintf("%s-%d", r.name, turn), tenant: "one", jobs: c.jobs}}
		check(r.create(ctx, groups, 0))
		check(r.awaitFirst(ctx, groups[0]))
		stop := r.view(ctx, "group:"+groups[0].id, with*c.few)
		began := must(r.now(ctx))
		f := r.follow("throughput", groups)
		err := f.waitBeside(ctx, func(ctx context.Context) error { return r.fill(ctx, groups, perMessage) })
		stop()
		check(err)
		speeds[with] = append(speeds[with], round2(float64(c.jobs)/f.end.Sub(began).Seconds()))
	}
	return values{"throughput": values{
		"jobs": c.jobs, "viewers": c.few, "jobs_per_second_without": speeds[0], "jobs_per_second_with": speeds[1],
		"ratio": ratio(median(speeds[1]), median(speeds[0])),
	}}
}
