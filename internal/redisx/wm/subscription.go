package wm

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

const (
	readBatch   = 200             // entries of one read
	readBytes   = 4 << 20         // target bytes of one read, estimated from recent entries
	firstSize   = 16 << 10        // assumed bytes of an entry before the first one is read
	lastFlush   = 3 * time.Second // time limit for the last acks when the subscription closes
	minRetry    = 50 * time.Millisecond
	maxRetry    = 2 * time.Second
	deadAfter   = time.Hour            // consumers idle for so long, with nothing pending, are deleted
	ackTogether = 5 * time.Millisecond // how long one goroutine waits for all messages of a read
	redeliverBy = 32                   // longest wait of a nacked message, in units of RedeliverAfter
)

// subscription reads one stream. It has these goroutines: run, which reads, claims and delivers;
// one that renews the entries in flight; one that sends acknowledgements; for each read, one that
// waits until its messages are acknowledged; and one for each message that is not acknowledged
// soon.
type subscription struct {
	cfg    SubscriberConfig
	conn   *redisx.Conn
	reader *stream.Reader
	stream string
	log    *slog.Logger

	out      chan *message.Message
	sending  sync.RWMutex // held for reading while a message is sent to out, so that out can be closed safely
	flight   *inFlight
	acks     *stream.Acker
	watchers sync.WaitGroup
	outage   outage

	stop context.CancelFunc
	done chan struct{}
	err  error // the error of closing; valid after done is closed
}

func newSubscription(s *Subscriber, name string, stop context.CancelFunc) *subscription {
	log := s.cfg.Logger.With("stream", name, "group", s.cfg.Group, "consumer", s.cfg.Consumer)
	sub := &subscription{
		cfg: s.cfg, conn: s.conn, reader: s.reader, stream: name, log: log,
		out:    make(chan *message.Message),
		flight: newInFlight(s.cfg.MaxInFlight, s.cfg.MaxBytes),
		outage: outage{log: log},
		stop:   stop,
		done:   make(chan struct{}),
	}
	sub.acks = stream.NewAcker(s.conn, name, s.cfg.Group, s.cfg.DeleteOnAck, sub.flight.remove)
	return sub
}

func (s *subscription) ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// run reads until ctx ends. Then it closes the channel, waits up to CloseTimeout for the handlers,
// and acknowledges the messages that they finished. It hands back the entries that no handler has,
// so that another consumer can claim them at once.
func (s *subscription) run(ctx context.Context) {
	defer close(s.done)
	defer s.stop()
	work, interrupt := context.WithCancel(context.WithoutCancel(ctx))
	defer interrupt()
	var loops sync.WaitGroup
	loops.Go(func() { s.keepLoop(work) })
	loops.Go(func() { s.ackLoop(work) })

	s.readLoop(ctx, work)
	s.sending.Lock()
	close(s.out)
	s.sending.Unlock()

	drained := make(chan struct{})
	go func() { s.watchers.Wait(); close(drained) }()
	select {
	case <-drained:
	case <-time.After(s.cfg.CloseTimeout):
	}
	interrupt()
	<-drained
	loops.Wait()

	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastFlush)
	defer cancel()
	if err := s.acks.Flush(last); err != nil {
		s.err = err
		return
	}
	all, waiting := s.flight.held()
	if n := len(all) - len(waiting); n > 0 {
		s.err = fmt.Errorf(
			"close subscription to %s: handlers of %d messages did not end in time; they are delivered again",
			s.stream, n,
		)
	}
	// Messages that no handler has get the idle time of abandoned ones, so that another consumer
	// claims them at once.
	if _, err := s.reader.Renew(last, s.stream, waiting, s.cfg.MinIdle); err != nil {
		s.log.Debug("entries were not handed back, they are taken over later", "error", err)
	}
}

// readLoop claims or reads one batch at a time and delivers it, while there is space.
func (s *subscription) readLoop(ctx, work context.Context) {
	var (
		retry  = redisx.Backoff{Min: minRetry, Max: maxRetry}
		size   = firstSize
		claims = claimCycle{next: "0-0"}
	)
	for {
		room := s.flight.awaitRoom(ctx, size)
		if ctx.Err() != nil {
			return
		}
		count := max(1, min(room, readBatch, readBytes/size))
		entries, err := s.nextEntries(ctx, &claims, count)
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			// The idle time of entries grows while Redis is away. Nothing may be claimed before its
			// owner had time to renew it.
			claims = claimCycle{next: "0-0", due: time.Now().Add(s.cfg.MinIdle)}
			s.outage.failed("read", err)
			_ = redisx.Sleep(ctx, retry.Next())
			continue
		}
		s.outage.worked("read")
		retry.Reset()

		size -= size / 4
		for _, e := range entries {
			size = max(size, e.Size())
		}
		s.deliver(ctx, work, entries)
	}
}

// claimCycle is the progress of the search for abandoned entries.
type claimCycle struct {
	due  time.Time // time of the next search
	next string    // id at which the search continues
}

// nextEntries returns the next page of abandoned entries if a search is due, otherwise new entries,
// for which it waits up to Block. At the beginning of a search it also deletes dead consumers.
func (s *subscription) nextEntries(ctx context.Context, c *claimCycle, count int) ([]stream.Entry, error) {
	if time.Now().Before(c.due) {
		batches, err := s.reader.Read(ctx, []string{s.stream}, count, s.cfg.Block)
		if err != nil || len(batches) == 0 {
			return nil, err
		}
		return batches[0].Entries, nil
	}
	if c.next == "0-0" {
		n, err := s.reader.ForgetDead(ctx, s.stream, deadAfter)
		if err != nil {
			return nil, err
		}
		if n > 0 {
			s.log.InfoContext(ctx, "forgot dead consumers", "count", n)
		}
	}
	entries, next, deleted, err := s.reader.Claim(ctx, s.stream, s.cfg.MinIdle, c.next, count)
	if err != nil && !call.IsNoGroup(err) {
		return nil, err
	}
	if deleted > 0 {
		s.log.WarnContext(ctx, "pending entries had been deleted from the stream", "count", deleted)
	}
	if c.next = next; err != nil || next == "0-0" {
		*c = claimCycle{due: time.Now().Add(redisx.Jitter(s.cfg.MinIdle)), next: "0-0"}
	}
	return entries, nil
}

// deliver sends entries to handlers for the first time, until ctx ends. It skips entries that are
// in flight already. It does not wait for acknowledgements: watchAll does.
func (s *subscription) deliver(ctx, work context.Context, entries []stream.Entry) {
	out := make([]handedOut, 0, len(entries))
	for _, e := range entries {
		d := s.flight.add(e)
		if d == nil {
			continue
		}
		msg := newMessage(work, e)
		if !s.emit(ctx, d, msg) {
			break
		}
		out = append(out, handedOut{d, msg})
	}
	if len(out) > 0 {
		s.watchers.Go(func() { s.watchAll(ctx, work, out) })
	}
}

// handedOut is a delivery that a handler has, with its message.
type handedOut struct {
	*delivery
	msg *message.Message
}

// watchAll waits until the messages of one read are acknowledged or nacked. Most of them are
// acknowledged quickly; for each of the others it starts a goroutine that waits. Then it passes on
// the acknowledgements that it saw itself.
func (s *subscription) watchAll(ctx, work context.Context, all []handedOut) {
	patience := time.NewTimer(ackTogether)
	defer patience.Stop()
	acked := make([]string, 0, len(all))
	late := false
	for _, o := range all {
		if !late {
			select {
			case <-o.msg.Acked():
			case <-o.msg.Nacked():
			case <-patience.C:
				late = true
			case <-work.Done():
				late = true
			}
		}
		select {
		case <-o.msg.Acked():
			acked = append(acked, o.entry.ID)
		default:
			s.watchers.Go(func() { s.watch(ctx, work, o.delivery, o.msg) })
		}
	}
	s.acks.Add(acked...)
}

// emit sends a message to the subscriber's channel. It returns false if ctx ends first.
func (s *subscription) emit(ctx context.Context, d *delivery, msg *message.Message) bool {
	s.sending.RLock()
	defer s.sending.RUnlock()
	if ctx.Err() != nil { // the channel may be closed
		return false
	}
	s.flight.setWorking(d, true)
	select {
	case s.out <- msg:
		return true
	case <-ctx.Done():
		s.flight.setWorking(d, false)
		return false
	}
}

// watch waits until a message is acknowledged, and passes the acknowledgement on. It delivers a
// nacked message again, after a wait that grows each time, unless another consumer has claimed the
// entry or ctx has ended.
func (s *subscription) watch(ctx, work context.Context, d *delivery, msg *message.Message) {
	retry := redisx.Backoff{Min: s.cfg.RedeliverAfter, Max: redeliverBy * s.cfg.RedeliverAfter}
	for {
		select {
		case <-msg.Acked():
			s.acks.Add(d.entry.ID)
			return
		case <-msg.Nacked():
		case <-work.Done():
			select {
			case <-msg.Acked():
				s.acks.Add(d.entry.ID)
			default:
			}
			return
		}
		s.flight.setWorking(d, false)
		if redisx.Sleep(ctx, retry.Next()) != nil {
			return
		}
		if s.flight.dropLost(d) {
			return
		}
		msg = newMessage(work, d.entry)
		if !s.emit(ctx, d, msg) {
			return
		}
	}
}

// keepLoop renews the idle time of the entries in flight, so that no other consumer claims them. It
// marks those that another consumer has claimed nevertheless.
func (s *subscription) keepLoop(work context.Context) {
	every := s.cfg.MinIdle / 3
	retry := redisx.Backoff{Min: min(minRetry, every), Max: min(maxRetry, every)}
	for wait := every; redisx.Sleep(work, wait) == nil; {
		ids, _ := s.flight.held()
		lost, err := s.reader.Renew(work, s.stream, ids, 0)
		if work.Err() != nil {
			return
		}
		if n := s.flight.setLost(lost); n > 0 {
			s.log.WarnContext(work, "messages in work were taken over by another consumer", "count", n)
		}
		if err != nil {
			s.outage.failed("renew", err)
			wait = retry.Next()
			continue
		}
		s.outage.worked("renew")
		retry.Reset()
		wait = every
	}
}

func (s *subscription) ackLoop(work context.Context) {
	retry := redisx.Backoff{Min: minRetry, Max: maxRetry}
	for s.acks.AwaitBatch(work) {
		err := s.acks.Flush(work)
		if work.Err() != nil {
			return // run sends the remaining acknowledgements
		}
		if err != nil {
			s.outage.failed("ack", err)
			_ = redisx.Sleep(work, retry.Next())
			continue
		}
		s.outage.worked("ack")
		retry.Reset()
	}
}
