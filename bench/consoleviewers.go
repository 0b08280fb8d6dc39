package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

const (
	viewTime    = 10 * time.Second // for which a number of viewers is measured
	frameMemory = 4 << 20          // bytes of the largest frame
)

// watch reads the console's event stream of a topic and calls frame with the data of each frame,
// until frame returns false, the server ends the stream, or ctx ends; none of these is an error.
func (v *consoleRun) watch(ctx context.Context, topic string, frame func(data string) bool) error {
	address := v.url + "/ui/events?topics=" + url.QueryEscape(topic)
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return err
	}
	answer, err := viewerClient.Do(q)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("stream %s: status %d", topic, answer.StatusCode)
	}
	lines := bufio.NewScanner(answer.Body)
	lines.Buffer(make([]byte, 0, 64<<10), frameMemory)
	for lines.Scan() {
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok && !frame(data) {
			return nil
		}
	}
	return unlessEnded(ctx, lines.Err())
}

// viewerClient is the HTTP client of simulated viewers. Each stream gets a connection of its own,
// as each browser has one.
var viewerClient = &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}

// unlessEnded returns err, or nil if ctx has ended: the end of ctx makes each open stream fail,
// which is no error.
func unlessEnded(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// view opens n event streams of a topic, and returns after each of them has got its first frame.
// frames counts the frames of all streams. stop ends the streams and returns their errors.
func (v *consoleRun) view(
	ctx context.Context, topic string, n int,
) (frames *atomic.Int64, stop func() error, err error) {
	ctx, cancel := context.WithCancel(ctx)
	frames = new(atomic.Int64)
	var all sync.WaitGroup
	begun, failed := make(chan struct{}, n), make(chan error, n)
	for range n {
		all.Go(func() {
			first := true
			failed <- v.watch(ctx, topic, func(string) bool {
				if first {
					first = false
					begun <- struct{}{}
				}
				frames.Add(1)
				return true
			})
		})
	}
	stop = func() error {
		cancel()
		all.Wait()
		close(failed)
		var errs []error
		for err := range failed {
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
	for range n {
		select {
		case <-begun:
		case err := <-failed:
			cancel()
			all.Wait()
			return nil, nil, fmt.Errorf("open %d streams: %w", n, errors.Join(err, errStreamEnded))
		}
	}
	return frames, stop, nil
}

var errStreamEnded = errors.New("a stream has ended")

func measureViewers(ctx context.Context, o ConsoleOptions, out *Console) (*ConsoleViewers, error) {
	v, err := startConsoleRun(ctx, o.Options, out)
	if err != nil {
		return nil, err
	}
	defer v.close()
	// The group makes steady progress until it is paused.
	slow := group{id: v.name + "-slow", tenant: "slow", jobs: 100_000, job: sleeping(slowJobMS)}
	if err := v.create(ctx, []group{slow}, 0); err != nil {
		return nil, err
	}
	if err := v.fill(ctx, []group{slow}, perMessage); err != nil {
		return nil, err
	}
	if _, err := v.awaitAccepted(ctx, slow); err != nil {
		return nil, err
	}
	topic := "group:" + slow.id
	running, err := v.costs(ctx, topic, "running", 0, 1, o.Viewers, 0)
	if err != nil {
		return nil, err
	}
	// The group is paused here: the Redis commands that its jobs cause would hide those of the
	// viewers.
	if _, err := v.api.Pause(ctx, slow.id); err != nil {
		return nil, err
	}
	if err := redisx.Sleep(ctx, time.Second); err != nil { // the jobs in flight end
		return nil, err
	}
	paused, err := v.costs(ctx, topic, "paused", 0, 1, o.Viewers)
	if err != nil {
		return nil, err
	}
	return &ConsoleViewers{
		Viewers:       o.Viewers,
		CommandsOfOne: measure.Round2(paused[1].commands - paused[0].commands),
		CommandsOfAll: measure.Round2(paused[2].commands - paused[0].commands),
		CommandsRatio: measure.Ratio(
			paused[2].commands-paused[0].commands, paused[1].commands-paused[0].commands),
		CoreOfOne:       measure.Round4(running[1].core - running[0].core),
		CoreOfAll:       measure.Round4(running[2].core - running[0].core),
		CoreAfter:       measure.Round4(running[3].core - running[0].core),
		KBEach:          measure.Round2((running[2].kb - running[1].kb) / float64(max(1, o.Viewers-1))),
		FramesPerSecond: measure.Round2(running[2].frames / float64(o.Viewers)),
	}, nil
}

// costs measures each number of viewers of a topic.
func (v *consoleRun) costs(ctx context.Context, topic, state string, viewers ...int) (all []viewCost, err error) {
	for i, n := range viewers {
		v.options.progress("viewers of the "+state+" group", i, len(viewers))
		c, err := v.cost(ctx, topic, n)
		if err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, nil
}

// viewCost is what the whole system uses while viewers look at a console page: Redis commands and
// frames a second, ingest's CPU time (s) a second, and its resident memory in KiB. What the viewers
// cost is the difference to no viewers.
type viewCost struct{ commands, frames, core, kb float64 }

// cost measures n viewers of a topic for viewTime.
func (v *consoleRun) cost(ctx context.Context, topic string, n int) (c viewCost, err error) {
	frames, stop, err := v.view(ctx, topic, n)
	if err != nil {
		return c, err
	}
	before, began := frames.Load(), time.Now()
	used, err := v.measure(ctx, func() error { return redisx.Sleep(ctx, viewTime) })
	seconds := time.Since(began).Seconds()
	c.frames = float64(frames.Load()-before) / seconds
	var memory error
	for _, pid := range v.pids()["ingest"] {
		c.kb, memory = measure.ResidentKB(pid)
	}
	if err := errors.Join(err, memory, stop()); err != nil {
		return c, err
	}
	c.commands = float64(used.redisTotal().Commands) / seconds
	c.core = used.roles["ingest"].Seconds() / seconds
	return c, nil
}

func measureViewedThroughput(ctx context.Context, o ConsoleOptions, out *Console) (*ConsoleThroughput, error) {
	v, err := startConsoleRun(ctx, o.Options, out)
	if err != nil {
		return nil, err
	}
	defer v.close()
	t := &ConsoleThroughput{Jobs: o.Jobs, Viewers: o.Few}
	for round := range o.Rounds {
		for i := range 2 {
			viewers := 0
			if i == round%2 {
				viewers = o.Few
			}
			speed, err := v.speed(ctx, fmt.Sprintf("%s-%d-%d", v.name, round, i), o.Jobs, viewers)
			if err != nil {
				return nil, err
			}
			if viewers > 0 {
				t.With = append(t.With, speed)
			} else {
				t.Without = append(t.Without, speed)
			}
		}
	}
	t.Ratio = measure.Ratio(measure.Median(t.With), measure.Median(t.Without))
	return t, nil
}

// speed runs a group while simulated viewers look at its page, and returns its jobs a second.
func (v *consoleRun) speed(ctx context.Context, id string, jobs, viewers int) (float64, error) {
	groups := []group{{id: id, tenant: "one", jobs: jobs}}
	if err := v.create(ctx, groups, 0); err != nil {
		return 0, err
	}
	if _, err := v.awaitFirst(ctx, groups[0]); err != nil {
		return 0, err
	}
	_, stop, err := v.view(ctx, "group:"+id, viewers)
	if err != nil {
		return 0, err
	}
	began, err := v.now(ctx)
	if err != nil {
		return 0, errors.Join(err, stop())
	}
	f := v.follow(fmt.Sprintf("throughput, %d viewers", viewers), groups)
	err = f.waitBeside(ctx, func(ctx context.Context) error { return v.fill(ctx, groups, perMessage) })
	if err := errors.Join(err, stop()); err != nil {
		return 0, err
	}
	return measure.Round2(float64(jobs) / f.end.Sub(began).Seconds()), nil
}
