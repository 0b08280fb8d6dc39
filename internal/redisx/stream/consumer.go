package stream

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

const (
	readBatch  = 200       // entries of one read
	readBytes  = 4 << 20   // target bytes of one read, estimated from recent entries
	firstSize  = 16 << 10  // assumed bytes of an entry before the first one is read
	largeEntry = 16 << 10  // a larger entry is handled alone, so that it delays no other
	deadAfter  = time.Hour // consumers idle for so long, with nothing pending, are deleted
	maxWait    = 32        // longest wait before an entry is delivered again, in units of RetryAfter
	lastFlush  = 3 * time.Second
)

// Verdict is what a handler decides about an entry.
type Verdict struct {
	Action Action
	Reason error // why the entry is rejected
}

// Action is what happens to an entry.
type Action int

// The actions of a Verdict.
const (
	RetryAfter Action = iota // The entry is delivered again after a wait, which doubles each time.
	Ack                      // The entry is acknowledged and deleted from the stream.
	Reject                   // The entry is quarantined with the reason, and deleted from the stream.
)

// ConsumerConfig configures a Consumer. All fields must be set.
type ConsumerConfig struct {
	Stream, Group string
	Name          string     // of the consumer, unique for each start of a process
	Rejected      Quarantine // where rejected entries go

	// Handle handles entries that were read together and returns a verdict for each. Several calls
	// run at the same time. An entry may come more than once. If Handle panics, it is called for
	// each of the entries alone, and an entry with which it panics alone is rejected. ctx ends only
	// when Handle must stop.
	Handle func(ctx context.Context, entries []Entry) []Verdict

	MaxInFlight int // most entries that were read and are not acknowledged yet
	// MaxBytes bounds the bytes of these entries, as far as sizes are known before a read. Handlers
	// have at most a quarter of these bytes at once.
	MaxBytes     int
	Block        time.Duration // longest wait of one read
	Lease        time.Duration // an entry idle for this time is claimed; its owner renews it after a third of it
	RetryAfter   time.Duration // shortest wait before an entry is delivered again
	CloseTimeout time.Duration // how long handlers may run after Run's ctx has ended; then their ctx ends
	Log          *slog.Logger
}

// Consumer reads a stream in batches and gives them to a handler. It acknowledges entries in
// batches, delivers an entry again if the handler asks for it, claims the entries of dead
// consumers, and continues after an outage of Redis. An entry that the handler delays does not
// delay others. Delivery is at least once.
//
// Its goroutines: Run, which reads and claims; one that renews the idle time of the entries in
// flight; one that sends acknowledgements; and one for each batch, until the batch is done.
type Consumer struct {
	cfg     ConsumerConfig
	conn    *redisx.Conn
	reader  *Reader
	flight  *inFlight
	acks    *acker
	loops   redisx.Loops
	batches sync.WaitGroup

	// Only the goroutine that reads uses these.
	entrySize int       // expected bytes of an entry
	claimAt   time.Time // time of the next search for abandoned entries
	claimFrom string    // id at which the search continues
	answered  time.Time // when Redis answered last
}

// FirstID is the id of a stream at which a search for the entries of dead consumers begins (see
// Reader.Claim).
const FirstID = "0-0"

// NewConsumer returns a Consumer. Only one call of its Run may run at a time.
func NewConsumer(conn *redisx.Conn, cfg ConsumerConfig) *Consumer {
	log := cfg.Log.With("stream", cfg.Stream, "group", cfg.Group, "consumer", cfg.Name)
	cfg.Log = log
	c := &Consumer{
		cfg:       cfg,
		conn:      conn,
		reader:    NewReader(conn, cfg.Group, cfg.Name),
		flight:    newInFlight(cfg.MaxInFlight, cfg.MaxBytes),
		loops:     redisx.Loops{Log: log},
		entrySize: firstSize,
		claimFrom: FirstID,
	}
	c.acks = &acker{
		reader: c.reader, stream: cfg.Stream, confirmed: c.flight.remove,
		some: make(chan struct{}, 1), full: make(chan struct{}, 1),
	}
	return c
}

// Run reads until ctx ends. It then waits for the handlers, and ends their contexts after
// CloseTimeout. It acknowledges what they have finished, and gives up the other entries, so that
// another consumer can claim them at once. It returns an error if entries of interrupted handlers
// are left, or if Redis did not accept the last acknowledgements: then it gives up no entry.
func (c *Consumer) Run(ctx context.Context) error {
	work, interrupt := context.WithCancel(context.WithoutCancel(ctx))
	defer interrupt()
	retry := redisx.Backoff{Min: 50 * time.Millisecond, Max: 2 * time.Second}
	renewal := c.cfg.Lease / 3
	var keepers sync.WaitGroup
	keepers.Go(func() {
		retry := redisx.Backoff{Min: min(retry.Min, renewal), Max: min(retry.Max, renewal)}
		c.loops.Run(work, "renew", retry, func(ctx context.Context) (time.Duration, error) {
			return renewal, c.renew(ctx)
		}, redisx.Sleep)
	})
	keepers.Go(func() {
		c.loops.Run(work, "acknowledge", retry, func(ctx context.Context) (time.Duration, error) {
			c.acks.awaitBatch(ctx)
			return 0, c.acks.flush(ctx)
		}, redisx.Sleep)
	})
	c.loops.Run(ctx, "read", retry, func(ctx context.Context) (time.Duration, error) {
		return 0, c.read(ctx, work)
	}, redisx.Sleep)

	timeout := time.AfterFunc(c.cfg.CloseTimeout, interrupt)
	c.batches.Wait()
	timeout.Stop()
	interrupted := work.Err() != nil
	interrupt()
	keepers.Wait()
	return c.handBack(context.WithoutCancel(ctx), interrupted)
}

// handBack sends the last acknowledgements; it returns at once if that fails. Then it sets the idle
// time of all other entries to a full lease, so that other consumers may claim them at once.
// interrupted: CloseTimeout has ended handlers, which is an error if they left entries.
func (c *Consumer) handBack(ctx context.Context, interrupted bool) error {
	ctx, cancel := context.WithTimeout(ctx, lastFlush)
	defer cancel()
	if err := c.acks.flush(ctx); err != nil {
		return err
	}
	all, working := c.flight.held()
	if _, err := c.reader.Renew(ctx, c.cfg.Stream, all, c.cfg.Lease); err != nil {
		c.cfg.Log.Debug("entries were not handed back, they are taken over later", "error", err)
	}
	if interrupted && working > 0 {
		return fmt.Errorf("stop reading %s: handlers of %d entries did not end in time; they are delivered again",
			c.cfg.Stream, working)
	}
	return nil
}

// OldestPending returns the id of the oldest pending entry of the stream's group, of any consumer,
// or of an older one that was delivered and that no consumer owns; ok is false if no entry is
// pending. It first sends the acknowledgements that this process holds back, so that no entry seems
// pending after its verdict. A handler's own entries are pending while it runs: if OldestPending
// returns the id of one, no older entry is left in the stream.
func (c *Consumer) OldestPending(ctx context.Context) (entryID string, ok bool, err error) {
	if err := c.acks.flush(ctx); err != nil {
		return "", false, err
	}
	pending, err := c.conn.Cmd.XPendingExt(ctx, &redis.XPendingExtArgs{
		Stream: c.cfg.Stream, Group: c.cfg.Group, Start: "-", End: "+", Count: 1,
	}).Result()
	if err != nil {
		return "", false, fmt.Errorf("find oldest pending entry of stream %s: %w", c.cfg.Stream, err)
	}
	if len(pending) == 0 {
		return "", false, nil
	}
	older, err := c.conn.Cmd.XRangeN(ctx, c.cfg.Stream, "-", "("+pending[0].ID, 1).Result()
	if err != nil {
		return "", false, fmt.Errorf("find oldest entry of stream %s: %w", c.cfg.Stream, err)
	}
	if len(older) > 0 {
		return older[0].ID, true, nil
	}
	return pending[0].ID, true, nil
}

// read waits until there is space in flight, reads new entries or claims abandoned ones, and starts
// to handle them. It does not wait for their verdicts.
func (c *Consumer) read(ctx, work context.Context) error {
	room := c.flight.awaitRoom(ctx, c.entrySize)
	if ctx.Err() != nil {
		return nil
	}
	entries, err := c.nextEntries(ctx, max(1, min(room, readBatch, readBytes/c.entrySize)))
	if err != nil {
		// After an outage of Redis, entries look abandoned, because their owners could not renew
		// them: claim nothing for a whole lease. Owners renew after a third of a lease, so an
		// outage of up to a quarter does no harm, and a consumer whose reads fail now and then must
		// still claim.
		if time.Since(c.answered) > c.cfg.Lease/4 {
			c.claimFrom, c.claimAt = FirstID, time.Now().Add(c.cfg.Lease)
		}
		return err
	}
	c.answered = time.Now()
	c.entrySize -= c.entrySize / 4
	for _, e := range entries {
		c.entrySize = max(c.entrySize, e.Size())
	}
	small := make([]Entry, 0, len(entries))
	for _, e := range c.flight.begin(entries) {
		if e.Size() > largeEntry {
			c.start(ctx, work, []Entry{e})
		} else {
			small = append(small, e)
		}
	}
	if len(small) > 0 {
		c.start(ctx, work, small)
	}
	return nil
}

// nextEntries returns the next page of dead consumers' entries if a search for them is due,
// otherwise new entries, for which it waits up to Block. At the beginning of a search it also
// deletes consumers that are long dead, and recovers entries that Redis does not deliver by itself.
func (c *Consumer) nextEntries(ctx context.Context, count int) ([]Entry, error) {
	if time.Now().Before(c.claimAt) {
		batches, err := c.reader.Read(ctx, []string{c.cfg.Stream}, count, c.cfg.Block)
		if err != nil || len(batches) == 0 {
			return nil, err
		}
		return c.reader.withoutFuture(ctx, c.cfg.Stream, batches[0].Entries, c.cfg.Log)
	}
	if c.claimFrom == FirstID {
		n, err := c.reader.ForgetDead(ctx, c.cfg.Stream, deadAfter)
		if err != nil {
			return nil, err
		}
		if n > 0 {
			c.cfg.Log.InfoContext(ctx, "forgot dead consumers", "count", n)
		}
	}
	entries, err := c.reader.ClaimNext(ctx, c.cfg.Stream, c.cfg.Lease, &c.claimFrom, count, c.cfg.Log)
	if err == nil && c.claimFrom == FirstID {
		c.claimAt = time.Now().Add(redisx.Jitter(c.cfg.Lease))
	}
	return entries, err
}

// start handles a batch in a goroutine of its own, again and again, until each of its entries is
// acknowledged, rejected, or claimed by another consumer. The end of ctx stops the waits between
// two deliveries, the end of work stops the handler; entries without a final verdict then stay
// pending for handBack.
func (c *Consumer) start(ctx, work context.Context, batch []Entry) {
	c.batches.Go(func() {
		retry := redisx.Backoff{Min: c.cfg.RetryAfter, Max: maxWait * c.cfg.RetryAfter}
		for {
			batch = c.handle(work, batch)
			if len(batch) == 0 || work.Err() != nil {
				return
			}
			c.flight.pause(batch)
			if redisx.Sleep(ctx, retry.Next()) != nil {
				return
			}
			batch = c.flight.resume(batch)
		}
	})
}

// handle calls the handler with a batch, and acknowledges or rejects entries by its verdicts. It
// returns the entries that must be delivered again, also those whose quarantine failed.
func (c *Consumer) handle(ctx context.Context, batch []Entry) (again []Entry) {
	if len(batch) == 0 {
		return nil
	}
	var done []string
	for i, v := range c.verdicts(ctx, batch) {
		e := batch[i]
		switch v.Action {
		case Ack:
			done = append(done, e.ID)
		case Reject:
			if err := c.reader.store(ctx, c.cfg.Rejected, e, v.Reason); err != nil {
				c.cfg.Log.DebugContext(ctx, "entry is not rejected yet, trying again", "entry", e.ID, "error", err)
				again = append(again, e)
				continue
			}
			done = append(done, e.ID)
		default:
			again = append(again, e)
		}
	}
	c.acks.add(done)
	return again
}

// verdicts calls the handler. If the handler panics with several entries, verdicts calls it for
// each entry alone. It rejects an entry with which the handler panics alone.
func (c *Consumer) verdicts(ctx context.Context, batch []Entry) (all []Verdict) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		if len(batch) == 1 {
			all = []Verdict{{Reject, fmt.Errorf("panic occurred: %v, stacktrace:\n%s", p, debug.Stack())}}
			c.cfg.Log.ErrorContext(ctx, "handler panicked", "entry", batch[0].ID, "error", all[0].Reason)
			return
		}
		all = nil
		for i := range batch {
			all = append(all, c.verdicts(ctx, batch[i:i+1])...)
		}
	}()
	return c.cfg.Handle(ctx, batch)
}

// renew resets the idle time of the entries in flight, so that no other consumer claims them. It
// marks entries that another consumer has claimed nevertheless as lost.
func (c *Consumer) renew(ctx context.Context) error {
	ids, _ := c.flight.held()
	lost, err := c.reader.Renew(ctx, c.cfg.Stream, ids, 0)
	if n := c.flight.setLost(lost); n > 0 {
		c.cfg.Log.WarnContext(ctx, "entries in work were taken over by another consumer", "count", n)
	}
	return err
}

// Quarantine names the Redis key where entries that can't be handled are stored apart, so that an
// operator can look at them.
type Quarantine struct {
	Key string
	// Source says where the entries come from. With Source "", Key is a stream of complete entries;
	// otherwise it is a list of texts that begin with Source.
	Source string
}

// Bounds of a quarantine. A list has at most maxListed texts, each with at most maxListedText
// characters of an entry. A stream has at most about maxStored entries, each value of a field cut
// to maxStoredText bytes.
const (
	maxListed     = 1000
	maxListedText = 1024
	maxStored     = 100_000
	maxStoredText = 256 << 10
)

// add adds to a pipeline the commands that store an entry in the quarantine. It cuts what is longer
// than the bounds.
func (q Quarantine) add(ctx context.Context, pipe redis.Pipeliner, e Entry, reason error) {
	if q.Source != "" {
		q.AddText(ctx, pipe, e.ID, reason, fmt.Sprint(e.Fields))
		return
	}
	values := []any{"reason", reason.Error(), "entry", e.ID, "at", time.Now().UTC().Format(time.RFC3339Nano)}
	for i := 0; i+1 < len(e.Fields); i += 2 {
		v := e.Fields[i+1]
		if len(v) > maxStoredText {
			v = v[:maxStoredText] + fmt.Sprintf("… (%d more bytes)", len(v)-maxStoredText)
		}
		values = append(values, e.Fields[i], v)
	}
	pipe.XAdd(ctx, &redis.XAddArgs{Stream: q.Key, MaxLen: maxStored, Approx: true, Values: values})
}

// AddText adds to a pipeline the commands that store content, with its id and the reason, in a
// quarantine that is a list.
func (q Quarantine) AddText(ctx context.Context, pipe redis.Pipeliner, id string, reason error, content string) {
	pipe.LPush(ctx, q.Key, fmt.Sprintf("%s %s: %v: %.*q", q.Source, id, reason, maxListedText, content))
	pipe.LTrim(ctx, q.Key, 0, maxListed-1)
}

// Quarantine stores an entry of a stream in q, and then acknowledges and deletes it in the stream.
// These are separate calls, because a transaction would acknowledge the entry even if storing
// failed. After an error the entry is still pending, or in q, or both.
func (r *Reader) Quarantine(ctx context.Context, stream string, q Quarantine, e Entry, reason error) error {
	if err := r.store(ctx, q, e, reason); err != nil {
		return err
	}
	return r.ack(ctx, stream, e.ID)
}

func (r *Reader) store(ctx context.Context, q Quarantine, e Entry, reason error) error {
	_, err := r.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		q.add(ctx, pipe, e, reason)
		return nil
	})
	if err != nil {
		return fmt.Errorf("quarantine entry %s: %w", e.ID, err)
	}
	return nil
}

// ack acknowledges entries and deletes them, in one transaction. An entry that was acknowledged but
// not deleted would stay in the stream forever.
func (r *Reader) ack(ctx context.Context, stream string, ids ...string) error {
	_, err := r.conn.Cmd.TxPipelined(ctx, func(tx redis.Pipeliner) error {
		tx.XAck(ctx, stream, r.group, ids...)
		tx.XDel(ctx, stream, ids...)
		return nil
	})
	if err != nil {
		return fmt.Errorf("acknowledge entries of stream %s: %w", stream, err)
	}
	return nil
}
