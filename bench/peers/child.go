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

// childCommand makes this program a peer's producer or consumer, each a process of its own.
const childCommand = "child"

// order is what a child is to do.
type order struct {
	Peer     string
	Addr     string
	Settings settings
	Serve    bool  // consume until killed, or else produce
	Marks    []int // consumer: the numbers of jobs at which it reports
	Jobs     int   // producer: how many
	Payload  int   // producer: bytes
	Paced    bool  // one each pace, and times are kept
}

// report is what a child says on its standard output: first that it is ready, then what
// it has come to.
type report struct {
	Jobs  int
	At    time.Time
	CPU   time.Duration // of the process so far
	Times []time.Time   // of the paced jobs by number: sent, or started
}

// pace is that of the jobs whose latency is measured: 100 a second.
const pace = 10 * time.Millisecond

// numberBytes is the room for a job's number at the start of its payload.
const numberBytes = 10

func runChild(arg string) error {
	var o order
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

func tell(jobs int, times []time.Time) error {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return fmt.Errorf("read this process's CPU time: %w", err)
	}
	r := report{Jobs: jobs, At: time.Now(), CPU: time.Duration(u.Utime.Nano() + u.Stime.Nano()), Times: times}
	return json.NewEncoder(os.Stdout).Encode(r)
}

func produce(p peer, o order) error {
	send, err := p.sender(o.Addr)
	if err != nil {
		return err
	}
	if err := tell(0, nil); err != nil {
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
	return tell(o.Jobs, nil)
}

func producePaced(send func(context.Context, []byte) error, o order) error {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	sent := make([]time.Time, o.Jobs)
	for n := range sent {
		<-tick.C
		sent[n] = time.Now()
		if err := send(context.Background(), payload(n, o.Payload)); err != nil {
			return err
		}
	}
	return tell(o.Jobs, sent)
}

func serve(p peer, o order) error {
	var done atomic.Int64
	var mu sync.Mutex
	var started []time.Time
	if o.Paced {
		started = make([]time.Time, o.Marks[len(o.Marks)-1])
	}
	failed := make(chan error, 1)
	handle := func(body []byte) {
		now := time.Now()
		if o.Paced {
			mu.Lock()
			defer mu.Unlock()
			n := number(body)
			if !started[n].IsZero() { // a peer may run a job again
				return
			}
			started[n] = now
		}
		if k := int(done.Add(1)); slices.Contains(o.Marks, k) {
			if err := tell(k, started); err != nil {
				failed <- err
			}
		}
	}
	if err := p.serve(o.Addr, o.Settings, handle); err != nil {
		return err
	}
	if err := tell(0, nil); err != nil {
		return err
	}
	return <-failed
}

// payload is a job's number and as many bytes more as it takes.
func payload(n, size int) []byte {
	b := bytes.Repeat([]byte("x"), size)
	copy(b, fmt.Sprintf("%0*d", numberBytes, n))
	return b
}

func number(payload []byte) int {
	n, err := strconv.Atoi(string(payload[:numberBytes]))
	if err != nil {
		panic(err) // nobody else produces here
	}
	return n
}
