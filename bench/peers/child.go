package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// childCommand is the first argument with which this program runs as a child process: the producer
// or the consumer of a peer, which is another job queue.
const childCommand = "child"

// childTask says what a child process does. The parent passes it as JSON in an argument.
type childTask struct {
	Peer     string
	Addr     string
	Settings settings
	Serve    bool  // consume until killed; otherwise produce
	ReportAt []int // consumer: numbers of jobs after which it reports
	Jobs     int   // producer: number of jobs
	Payload  int   // producer: bytes of each job
	Paced    bool  // producer: one job each pacedInterval; both report the jobs' times
}

// childReport is a line of JSON that a child process writes to its standard output: first when it
// is ready, then with what it has done so far. A producer reports at its end, a consumer at each
// number of jobs in ReportAt.
type childReport struct {
	Jobs  int
	At    time.Time
	CPU   time.Duration // CPU time of the process so far
	Times []time.Time   // of paced jobs by number: producer: when send was called; consumer: the start
}

// pacedInterval is the time between two jobs while latency is measured: 100 jobs a second.
const pacedInterval = 10 * time.Millisecond

// numberDigits is the number of digits of the job's number, with which each payload begins.
const numberDigits = 10

func runChild(arg string) error {
	var o childTask
	if err := json.Unmarshal([]byte(arg), &o); err != nil {
		return err
	}
	p, ok := peers[o.Peer]
	if !ok {
		return fmt.Errorf("there is no peer %q", o.Peer)
	}
	if o.Serve {
		return serve(p, o)
	}
	return produce(p, o)
}

func writeReport(jobs int, times []time.Time) error {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return fmt.Errorf("read this process's CPU time: %w", err)
	}
	r := childReport{Jobs: jobs, At: time.Now(), CPU: time.Duration(u.Utime.Nano() + u.Stime.Nano()), Times: times}
	return json.NewEncoder(os.Stdout).Encode(r)
}

func produce(p peer, o childTask) error {
	send, err := p.sender(o.Addr)
	if err != nil {
		return err
	}
	if err := writeReport(0, nil); err != nil {
		return err
	}
	if o.Paced {
		return producePaced(send, o)
	}
	var sent atomic.Int64
	g, ctx := errgroup.WithContext(context.Background())
	for range cmp.Or(o.Settings.Senders, p.senders) {
		g.Go(func() error {
			for n := sent.Add(1); n <= int64(o.Jobs); n = sent.Add(1) {
				if err := send(ctx, payload(int(n), o.Payload)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return writeReport(o.Jobs, nil)
}

func producePaced(send func(context.Context, []byte) error, o childTask) error {
	tick := time.NewTicker(pacedInterval)
	defer tick.Stop()
	sent := make([]time.Time, o.Jobs)
	for n := range sent {
		<-tick.C
		sent[n] = time.Now()
		if err := send(context.Background(), payload(n, o.Payload)); err != nil {
			return err
		}
	}
	return writeReport(o.Jobs, sent)
}

func serve(p peer, o childTask) error {
	var done atomic.Int64
	var mu sync.Mutex
	var started []time.Time
	if o.Paced {
		started = make([]time.Time, o.ReportAt[len(o.ReportAt)-1])
	}
	failed := make(chan error, 1)
	handle := func(body []byte) {
		now := time.Now()
		if o.Paced {
			mu.Lock()
			defer mu.Unlock()
			n := jobNumber(body)
			if !started[n].IsZero() { // a peer may run a job twice
				return
			}
			started[n] = now
		}
		if k := int(done.Add(1)); slices.Contains(o.ReportAt, k) {
			if err := writeReport(k, started); err != nil {
				failed <- err
			}
		}
	}
	if err := p.serve(o.Addr, o.Settings, handle); err != nil {
		return err
	}
	if err := writeReport(0, nil); err != nil {
		return err
	}
	return <-failed
}

// payload returns a job's number, filled up to size bytes.
func payload(n, size int) []byte {
	b := bytes.Repeat([]byte("x"), size)
	copy(b, fmt.Sprintf("%0*d", numberDigits, n))
	return b
}

func jobNumber(payload []byte) int {
	n, err := strconv.Atoi(string(payload[:numberDigits]))
	if err != nil {
		panic(err) // only this program produces jobs here
	}
	return n
}
