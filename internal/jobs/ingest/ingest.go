// Package ingest is the part of the role ingest that accepts submissions from the ingest streams. It
// validates them, stores their jobs, and puts groups into their tenants' fair queues. The package
// hides that small messages are stored together, and how messages that can't be accepted are
// retried or quarantined.
package ingest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/backpressure"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/stage"
)

// Config configures the stream consumer.
type Config struct {
	Lease   time.Duration // after a silence of this length, other processes take over the messages of an ingest process
	Grace   time.Duration // how long begun messages go on after Run's ctx
	Streams []Stream      // further ingest streams, each of one tenant
	// MaxInFlight is how many messages of the ingest stream this process holds at most while they
	// wait for the backlog or for their group. At this number it reads no more messages. 0 means
	// 10,000. Each further stream may have as many.
	MaxInFlight int
	// Gateway runs beside the consumer, until its context ends: the process counts as a live ingest
	// until both have ended. nil: there is none.
	Gateway func(context.Context) error
}

// Ingest is the stream consumer of one process.
type Ingest struct {
	stage.Process
	cfg     Config
	store   *groups.Store
	decoder messages.Decoder

	sources     []*source // the ingest stream, and the further ones
	created     time.Time
	lastRefusal atomic.Int64 // when a message was last refused because the backlog was full, in Unix nanoseconds
}

// defaultInFlight and inFlightBytes bound the messages that one process holds. The number is higher
// than the 1,000 of other consumers, because appends may arrive long before their group's
// submission. The bytes keep a process without further streams below 150 MB, including decoded
// messages and the garbage collector's reserve.
const (
	defaultInFlight = 10_000
	inFlightBytes   = 32 << 20
)

// retryAfter is the wait before a message that was put off is handled for the second time; later
// waits are longer.
const retryAfter = 250 * time.Millisecond

// New returns the stream consumer of a process.
func New(p stage.Process, cfg Config, store *groups.Store, decoder messages.Decoder) *Ingest {
	in := &Ingest{Process: p, cfg: cfg, store: store, decoder: decoder, created: time.Now()}
	inFlight := cmp.Or(cfg.MaxInFlight, defaultInFlight)
	in.sources = append(in.sources, newSource(in, Stream{}, inFlight, inFlightBytes))
	for _, further := range cfg.Streams {
		// The further streams together may hold as many bytes as the ingest stream. The number of
		// entries is not divided: appends may stand before their group's submission, which must be
		// read, too.
		in.sources = append(in.sources, newSource(in, further, inFlight, inFlightBytes/len(cfg.Streams)))
	}
	return in
}

// Run handles messages until ctx ends, and finishes those that it has begun, for at most
// Config.Grace. If an ingest stream or the gateway fails for good, Run stops and returns the error.
func (in *Ingest) Run(ctx context.Context) error {
	r := in.Runner()
	if in.cfg.Gateway != nil {
		r.Add(in.cfg.Gateway)
	}
	for _, src := range in.sources {
		r.Add(src.consumer.Run)
		r.Every("apply cancellations early", earlyCancelInterval, new(earlyCancel).runOnce(src))
	}
	r.ReportAlive("ingest", nil)
	return r.Run(ctx)
}

// Stream is a further ingest stream, beside the one that all tenants share. All its messages belong
// to one tenant.
type Stream struct {
	Name   string // as in keyspace.IngestOf
	Tenant string
}

// source is an ingest stream that this process reads.
type source struct {
	*Ingest
	name      string         // "" for the ingest stream
	principal auth.Principal // of its messages
	consumer  *stream.Consumer
	oldest    oldestPending
}

// newSource returns the source for the ingest stream or, if s is not zero, for a further stream. It
// holds at most maxInFlight messages and maxBytes bytes (see stream.ConsumerConfig).
func newSource(in *Ingest, s Stream, maxInFlight, maxBytes int) *source {
	src := &source{Ingest: in, name: s.Name, principal: auth.Principal{Role: auth.Producer, Tenant: s.Tenant}}
	src.consumer = stream.NewConsumer(in.Conn, stream.ConsumerConfig{
		Stream:       src.key(),
		Group:        keyspace.GroupIngest,
		Name:         in.ID,
		Rejected:     stream.Quarantine{Key: in.Space.Rejected()},
		Handle:       src.handle,
		MaxInFlight:  maxInFlight,
		MaxBytes:     maxBytes,
		Block:        redisx.MaxBlock,
		Lease:        in.cfg.Lease,
		RetryAfter:   retryAfter,
		CloseTimeout: in.cfg.Grace,
		Log:          in.Tel.Log,
	})
	return src
}

func (in *source) key() string {
	if in.name == "" {
		return in.Space.Ingest()
	}
	return keyspace.IngestOf(in.Space.Prefix(), in.name)
}

// withPrincipal returns a context with the rights by which the store carries out messages. A
// message of the ingest stream may name any tenant. A message of a further stream may do what a
// producer of its tenant may: groups of other tenants do not exist for it.
func (in *source) withPrincipal(ctx context.Context) context.Context {
	if in.name == "" {
		return auth.Trust(ctx)
	}
	return auth.With(ctx, in.principal)
}

// groupWait is the shortest time for which a message about an unknown group is retried before it is
// rejected: the group's submission may come later in the stream (see waitForGroup).
const groupWait = 30 * time.Second

// redisErrorRetryTime is how long a message is retried while Redis answers it with an error,
// counted from the message's arrival or the start of this process, whichever is later. The message
// was accepted and must be stored, and an operator may be able to repair the cause. After that time
// the message is rejected, so that it does not block others for ever.
const redisErrorRetryTime = 10 * time.Minute

// errRetryLater is the error of a message whose group may still come, or that waits until older
// messages are handled: the consumer delivers the message again later.
var errRetryLater = errors.New("not yet")

// largeSubmit is the size in bytes of a submission from which on it has a goroutine of its own, as it
// takes long to decode.
const largeSubmit = 32 << 10

// handle carries out messages that were read together. It stores small submissions together, and the
// appends to one group; every other message has a goroutine of its own. If one of the goroutines
// panics, handle panics at the end, in the caller's goroutine.
func (in *source) handle(ctx context.Context, entries []stream.Entry) []stream.Verdict {
	ctx = in.withPrincipal(ctx)
	errs := make([]error, len(entries))
	appends := map[string]*groupAppends{}
	var submits []groups.Submission
	var submitted []int // the index of each of them in entries
	var running sync.WaitGroup
	panics := make(chan string, len(entries))
	start := func(task func()) {
		running.Go(func() {
			defer func() {
				if p := recover(); p != nil {
					panics <- fmt.Sprintf("%v\n%s", p, debug.Stack())
				}
			}()
			task()
		})
	}
	for i, e := range entries {
		env, err := messages.ParseFields(e.ID, e.Fields)
		switch {
		case err != nil:
			errs[i] = err
		case env.Type == messages.TypeJobsAppend:
			errs[i] = in.collectAppend(appends, i, e.ID, env)
		case env.Type == messages.TypeGroupSubmit && len(env.Data) < largeSubmit:
			var g *messages.SubmitGroup
			if g, errs[i] = in.decodeSubmit(env, e.ID); errs[i] == nil {
				submits, submitted = append(submits, groups.Submission{Group: g, Origin: origin(env)}), append(submitted, i)
			}
		default:
			start(func() { errs[i] = in.handleMessage(ctx, env, e.ID) })
		}
	}
	if len(submits) > 0 {
		start(func() {
			for n, err := range in.submit(ctx, submits...) {
				errs[submitted[n]] = err
			}
		})
	}
	for group, a := range appends {
		start(func() { in.handleAppends(ctx, group, a, errs) })
	}
	running.Wait()
	select {
	case p := <-panics:
		panic(p) // the consumer finds the message that is to blame
	default:
	}
	verdicts := make([]stream.Verdict, len(entries))
	for i, err := range errs {
		verdicts[i] = in.verdict(ctx, entries[i], err)
	}
	return verdicts
}

// verdict returns what happens to a message that was handled with the error err: nil acknowledges
// it; other errors reject it with the reason, or have it delivered again later. verdict also
// records when the full backlog has refused a message, for earlyCancel.
func (in *source) verdict(ctx context.Context, e stream.Entry, err error) stream.Verdict {
	if err == nil {
		return stream.Verdict{Action: stream.Ack}
	}
	var full *api.BackpressureError
	if errors.As(err, &full) {
		in.lastRefusal.Store(time.Now().UnixNano())
	}
	if errors.Is(err, errRetryLater) || errors.Is(err, api.ErrUnavailable) || full != nil || ctx.Err() != nil {
		in.Tel.Log.Debug("message postponed", "entry", e.ID, "reason", err)
		return stream.Verdict{Action: stream.RetryAfter}
	}
	var refused redis.Error
	if errors.As(err, &refused) && min(entryAge(e.ID), time.Since(in.created)) < redisErrorRetryTime {
		in.Tel.Log.Warn("redis answered a message with an error, trying again", "entry", e.ID, "error", err)
		return stream.Verdict{Action: stream.RetryAfter}
	}
	typ := fmt.Sprintf("%.64s", e.Get(messages.FieldType))
	in.Tel.Log.Info("message rejected", "stream", in.key(), "entry", e.ID, "type", typ)
	if in.name != "" {
		err = fmt.Errorf("stream %s: %w", in.key(), err)
	}
	return stream.Verdict{Action: stream.Reject, Reason: err}
}

// handleMessage carries out a message that is no append.
func (in *source) handleMessage(ctx context.Context, env messages.Envelope, entry string) error {
	switch env.Type {
	case messages.TypeGroupSubmit:
		return in.handleSubmit(ctx, env, entry)
	case messages.TypeGroupSeal:
		return in.handleSeal(ctx, env, entry)
	default:
		return in.handleCancel(ctx, env, entry)
	}
}

func origin(env messages.Envelope) groups.Origin {
	return groups.Origin{TraceParent: env.TraceParent, At: time.Now(), Published: true}
}

func (in *source) handleSubmit(ctx context.Context, env messages.Envelope, entry string) error {
	g, err := in.decodeSubmit(env, entry)
	if err != nil {
		return err
	}
	return in.submit(ctx, groups.Submission{Group: g, Origin: origin(env)})[0]
}

func (in *source) decodeSubmit(env messages.Envelope, entry string) (*messages.SubmitGroup, error) {
	g, err := in.decoder.DecodeSubmit(env.Data)
	if err == nil && g.ID == "" {
		g.ID = env.ID
		if env.ID == entry && in.name != "" { // another stream may have an entry with this id
			g.ID = in.name + "-" + entry
		}
	}
	return g, err
}

// submit stores submissions and returns the error of each.
func (in *source) submit(ctx context.Context, all ...groups.Submission) []error {
	// Without a reservation: a message that the full backlog refuses stays in the stream, and is
	// delivered again until there is space.
	ctx, request := backpressure.WithoutReservation(ctx)
	defer request.End()
	return in.store.SubmitAll(ctx, all)
}

// groupAppends holds the appends to one group that were read together.
type groupAppends struct {
	entries []groups.EntryJobs
	index   []int // of each entry in its batch
}

// collectAppend decodes an append, the message i of its batch, and adds it to the appends of its
// group.
func (in *source) collectAppend(appends map[string]*groupAppends, i int, entry string, env messages.Envelope) error {
	body, err := in.decoder.DecodeAppendEntry(env)
	if err != nil {
		return err
	}
	a := appends[body.Group]
	if a == nil {
		a = &groupAppends{}
		appends[body.Group] = a
	}
	jobs := groups.EntryJobs{Stream: in.name, Entry: entry, Jobs: body.Jobs, Origin: origin(env)}
	if env.ID != entry {
		jobs.Message = env.ID
	}
	a.entries, a.index = append(a.entries, jobs), append(a.index, i)
	return nil
}

// handleAppends stores the appends to one group, and puts the error of each into errs, which has
// one for each message of the batch.
func (in *source) handleAppends(ctx context.Context, group string, a *groupAppends, errs []error) {
	ctx, request := backpressure.WithoutReservation(ctx) // see submit
	defer request.End()
	for n, err := range in.store.AppendEntries(ctx, group, a.entries) {
		errs[a.index[n]] = in.waitForGroup(ctx, a.entries[n].Entry, err)
	}
}

// handleSeal seals a group. If the message has a total, the seal takes effect when the group has
// total jobs. Without a total, handleSeal returns errRetryLater until no older message of the
// stream is pending: an older one may be an append to this group that another process is handling.
func (in *source) handleSeal(ctx context.Context, env messages.Envelope, entry string) error {
	s, err := in.decoder.DecodeSeal(env.Data)
	if err != nil {
		return err
	}
	if s.Total == nil {
		older, err := in.hasOlderPending(ctx, entry)
		if err != nil {
			return err
		}
		if older {
			return errRetryLater
		}
	}
	_, err = in.store.Seal(ctx, s.Group, s.Total)
	return in.waitForGroup(ctx, entry, err)
}

func (in *source) handleCancel(ctx context.Context, env messages.Envelope, entry string) error {
	c, err := in.decoder.DecodeCancel(env.Data)
	if err != nil {
		return err
	}
	_, err = in.store.Cancel(ctx, c.Group)
	return in.waitForGroup(ctx, entry, err)
}

// waitForGroup turns api.ErrNotFound into errRetryLater while the group may still come, because the
// messages of a group may arrive in any order: for groupWait after the message's arrival, and then
// while older messages are pending or Redis does not say. Any other err is returned as it is.
func (in *source) waitForGroup(ctx context.Context, entry string, err error) error {
	if !errors.Is(err, api.ErrNotFound) {
		return err
	}
	if entryAge(entry) < groupWait {
		return errRetryLater
	}
	older, pendingErr := in.hasOlderPending(ctx, entry)
	if pendingErr != nil || older {
		return errRetryLater
	}
	return err
}

func entryAge(entry string) time.Duration {
	return time.Since(time.UnixMilli(int64(entryID(entry).MS)))
}

// oldestPending holds the id of the oldest pending entry, as it was last read. For 5 ms it shows,
// without a call of Redis, that an entry with this id or a smaller one has no older one.
type oldestPending struct {
	mu     sync.Mutex
	id     stream.ID
	readAt time.Time
}

func (in *source) hasOlderPending(ctx context.Context, entry string) (bool, error) {
	o := &in.oldest
	o.mu.Lock()
	defer o.mu.Unlock()
	if time.Since(o.readAt) < 5*time.Millisecond && !entryID(entry).After(o.id) {
		return false, nil // entry was the oldest at the last read, and no older one can become pending
	}
	id, ok, err := in.consumer.OldestPending(ctx)
	if err != nil {
		return false, fmt.Errorf("%w: %w", api.ErrUnavailable, err)
	}
	if !ok {
		// No entry is pending, not even this one: the consumer group was lost and created again,
		// and delivers all entries again.
		return true, nil
	}
	o.id, o.readAt = entryID(id), time.Now()
	return entryID(entry).After(o.id), nil
}

// entryID returns the id of an entry that Redis has delivered.
func entryID(entry string) stream.ID {
	id, _ := stream.ParseID(entry) // Redis returns no other text
	return id
}

const (
	earlyCancelInterval = time.Second // time between two runs
	earlyCancelBatch    = 50          // entries of one read
	earlyCancelMaxBytes = 4 << 20     // bytes of one run; the run may exceed this by one batch
)

// earlyCancel reads ahead in an ingest stream and applies cancellations, while the messages before
// them wait because the backlog is full. A cancellation makes the backlog smaller, so it must not
// wait behind those messages. It looks for them only if the backlog has refused a message of this
// process within the last groupWait. The consumer applies the cancellation again when it reads it,
// which changes nothing. If Redis is away, the next run tries the cancellation again; any other
// error is left to the consumer.
type earlyCancel struct{ lastRead string } // id of the last entry that was read

func (a *earlyCancel) runOnce(in *source) func(context.Context) error {
	return func(ctx context.Context) error {
		if time.Since(time.Unix(0, in.lastRefusal.Load())) > groupWait {
			return nil // no message waits for the backlog: the consumer reads the cancellation soon
		}
		for bytes := 0; bytes < earlyCancelMaxBytes; {
			from := "-"
			if a.lastRead != "" {
				from = "(" + a.lastRead
			}
			entries, err := in.Conn.Cmd.XRangeN(ctx, in.key(), from, "+", earlyCancelBatch).Result()
			if err != nil {
				return fmt.Errorf("read the stream %s for cancellations: %w", in.key(), err)
			}
			for _, e := range entries {
				for _, v := range e.Values {
					if text, ok := v.(string); ok {
						bytes += len(text)
					}
				}
				if e.Values[messages.FieldType] == messages.TypeGroupCancel {
					if err := in.cancelEarly(ctx, e.ID, e.Values); err != nil {
						return err
					}
				}
				a.lastRead = e.ID
			}
			if len(entries) < earlyCancelBatch {
				return nil
			}
		}
		return nil
	}
}

func (in *source) cancelEarly(ctx context.Context, entry string, values map[string]any) error {
	env, err := messages.ParseEntry(entry, values)
	if err != nil {
		return nil //nolint:nilerr // the entry is rejected when the consumer reads it
	}
	c, err := in.decoder.DecodeCancel(env.Data)
	if err != nil {
		return nil //nolint:nilerr // the consumer rejects the entry, see above
	}
	_, err = in.store.Cancel(in.withPrincipal(ctx), c.Group)
	if errors.Is(err, api.ErrUnavailable) {
		return err // the next run reads the entry again
	}
	return nil
}
