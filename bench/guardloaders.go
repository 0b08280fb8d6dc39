package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

// GuardLoadCommand is the first argument with which the program bulkaction runs as a process that
// generates load on guards; see [ServeGuardLoad].
const GuardLoadCommand = "guard-load"

// loader is a child process that generates load: it calls guards, or acts as users of the waiting
// room.
type loader struct {
	*childproc.Child
	log     *childproc.Tail
	in      io.Closer
	out     *os.File
	send    *json.Encoder
	reports *json.Decoder
}

// guardLoaders are a Redis and the child processes that call guards on it.
type guardLoaders struct {
	*fleet
	program string
	loaders []*loader
	prefix  string // of all keys of the run
	parts   int    // number of prefixes that were given out
}

// startLoaders starts processes. They end when ctx ends.
func (b *guardLoaders) startLoaders(ctx context.Context, n int) error {
	for range n {
		l, err := startLoader(b.program, GuardLoadCommand)
		if err != nil {
			return err
		}
		b.loaders = append(b.loaders, l)
		context.AfterFunc(ctx, l.Kill) // so that no read of a report blocks any more
	}
	return nil
}

// startLoader starts the program bulkaction, whose path is program, as a child process. command is
// its argument: one with which it reads tasks and writes reports.
func startLoader(program, command string) (*loader, error) {
	out, stdout, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start a process that makes calls: %w", err)
	}
	defer stdout.Close() //nolint:errcheck // the process has its own
	l := &loader{out: out, log: &childproc.Tail{}, reports: json.NewDecoder(out)}
	cmd := exec.Command(program, command) // #nosec G204: the command comes from our own options
	cmd.Stdout, cmd.Stderr = stdout, l.log
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, errors.Join(err, out.Close())
	}
	l.in, l.send = in, json.NewEncoder(in)
	if l.Child, err = childproc.Start(cmd); err != nil {
		return nil, errors.Join(err, out.Close())
	}
	return l, nil
}

// report reads the next report of the process.
func (l *loader) report() (r guardReport, err error) {
	if err = l.reports.Decode(&r); err != nil {
		return r, fmt.Errorf("a process that makes calls has ended: %w: %s", err, l.log)
	}
	if r.Error != "" {
		err = fmt.Errorf("a process that makes calls: %s", r.Error)
	}
	return r, err
}

// prepare sends a task to each of the first n processes, and waits until all are ready. begin
// starts the tasks.
func (b *guardLoaders) prepare(n int, t guardTask) error {
	t.URL, t.Processes = cmp.Or(t.URL, b.url), n
	var all errgroup.Group
	for i, l := range b.loaders[:n] {
		t.Index = i
		if err := l.send.Encode(t); err != nil {
			return fmt.Errorf("give a task: %w", err)
		}
		all.Go(func() error {
			_, err := l.report()
			return err
		})
	}
	return all.Wait()
}

// begin starts the task of n processes.
func (b *guardLoaders) begin(n int) error {
	for _, l := range b.loaders[:n] {
		if err := l.send.Encode(guardStep{}); err != nil {
			return fmt.Errorf("begin a task: %w", err)
		}
	}
	return nil
}

// end waits until the first n processes have ended their tasks, and returns the sum of their
// reports.
func (b *guardLoaders) end(n int) (sum guardReport, err error) {
	for _, l := range b.loaders[:n] {
		r, err := l.report()
		if err != nil {
			return sum, err
		}
		sum.Calls, sum.CPU = sum.Calls+r.Calls, sum.CPU+r.CPU
		sum.Waits, sum.Events = append(sum.Waits, r.Waits...), append(sum.Events, r.Events...)
	}
	return sum, nil
}

// run carries out a task in n processes and returns the sum of their reports. Unless the task has a
// key prefix, it gets a new one.
func (b *guardLoaders) run(n int, t guardTask) (guardReport, error) {
	t.Prefix = cmp.Or(t.Prefix, b.newPrefix())
	if err := b.prepare(n, t); err != nil {
		return guardReport{}, err
	}
	if err := b.begin(n); err != nil {
		return guardReport{}, err
	}
	return b.end(n)
}

// perSecond runs a task in n processes at full speed, after a short run to warm up, and returns the
// calls a second of all.
func (b *guardBench) perSecond(n int, t guardTask) (float64, error) {
	t.Seconds = b.Seconds / 4
	t.Prefix = b.newPrefix()
	if _, err := b.run(n, t); err != nil { // to warm up
		return 0, err
	}
	t.Seconds = b.Seconds
	if err := b.prepare(n, t); err != nil {
		return 0, err
	}
	began := time.Now()
	if err := b.begin(n); err != nil {
		return 0, err
	}
	r, err := b.end(n)
	return float64(r.Calls) / max(t.Seconds, time.Since(began).Seconds()), err
}
