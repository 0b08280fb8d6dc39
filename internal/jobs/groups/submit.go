package groups

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Origin says where a submission comes from.
type Origin struct {
	IdempotencyKey string    // of the HTTP request; "": the client has sent no key
	GeneratedID    bool      // the client gave no id; the API has generated one
	TraceParent    string    // traceparent of the producer; "": the producer has sent none
	At             time.Time // when the submission arrived
	// Published says that the submission arrived as a message on a stream, not over HTTP. Then the
	// producer has recorded the span of sending itself.
	Published bool
}

// Submission is a group to store, and where it comes from.
type Submission struct {
	Group  *messages.SubmitGroup
	Origin Origin
}

// Submit stores a group with its jobs. It may be repeated: the same content under the same group id
// or the same idempotency key is stored once, as long as the group or the key is kept. It sets g.ID
// to the group of the first request with the key, and an empty g.Tenant to g.ID. Errors are those
// of package api, or a *messages.ValidationError. If the principal is of one tenant, the group
// belongs to this tenant.
func (s *Store) Submit(ctx context.Context, g *messages.SubmitGroup, o Origin) (_ api.Accepted, err error) {
	defer func() { s.countRejected(err, len(g.Jobs), o) }()
	sub, err := s.prepare(ctx, g, o)
	if err != nil {
		return api.Accepted{}, err
	}
	if err := s.storeSubmission(ctx, sub); err != nil {
		return api.Accepted{}, apiError(err)
	}
	a := api.Accepted{
		ID: g.ID, Status: api.StatusCreated, Counts: newCounts(g, sub.skipped, sub.accepted), Tenant: g.Tenant,
	}
	if !o.Published { // nobody reads the answer to a message
		a.Warnings = s.warnings(ctx, g, sub.now)
		if sub.ownTenant && !sub.now.Ended() {
			a.Warnings = append(a.Warnings, "The group names no tenant, so it is its own tenant: no customer's limit applies to it.")
		}
		if len(sub.skipped) > 0 { // another request has added them since the group was created
			a.Warnings = append(a.Warnings, (&api.KeysTakenError{Jobs: sub.skipped}).Error())
		}
	}
	return a, nil
}

// SubmitAll is Submit for messages of a stream that were read together, in few script calls. It
// returns the error of each, nil for success.
func (s *Store) SubmitAll(ctx context.Context, all []Submission) []error {
	errs, subs := make([]error, len(all)), make([]*submission, len(all))
	small := map[int][]*submission{} // by partition
	var calls sync.WaitGroup
	for i, one := range all {
		sub, err := s.prepare(ctx, one.Group, one.Origin)
		switch errs[i] = err; {
		case err != nil:
		case len(sub.pieces) == 1 && s.cfg.WaitReplicas == 0:
			subs[i], small[sub.p.Index()] = sub, append(small[sub.p.Index()], sub)
		default:
			calls.Go(func() { errs[i] = apiError(s.storeSubmission(ctx, sub)) })
		}
	}
	for p, some := range small {
		calls.Go(func() { s.storeBatch(ctx, s.space.Partition(p), some) })
	}
	calls.Wait()
	for i, sub := range subs {
		if sub != nil {
			errs[i] = apiError(sub.err)
		}
	}
	return errs
}

// submission is a group on its way to Redis.
type submission struct {
	*messages.SubmitGroup
	p         keyspace.Partition  // of its tenant
	ownTenant bool                // it names no tenant
	accepted  time.Time           // when its first request arrived
	pieces    []ledger.AppendArgs // its jobs; the first piece creates the group

	now     api.Status // of the group, before this call has added jobs
	skipped []int      // jobs that were left out because their keys are taken
	err     error
}

func (sub *submission) fail(err error) { sub.err = err }

// prepare does what precedes the storing: it checks whether the group may be stored now, uses its
// idempotency key, and starts the jobs' traces.
func (s *Store) prepare(ctx context.Context, g *messages.SubmitGroup, o Origin) (*submission, error) {
	who, tenant, err := callFor(ctx, g.Tenant)
	if err != nil {
		return nil, err
	}
	if g.Tenant = tenant; tenant == "" && s.cfg.RequireTenant {
		return nil, badField("tenant",
			"is missing: name the customer, because this installation has BULKACTION_REQUIRE_TENANT")
	}
	if err := s.backpressure.Check(ctx, len(g.Jobs)); err != nil {
		return nil, apiError(err)
	}
	fields, err := s.groupFields(g, who.KeyID) // before the idempotency key is used: an invalid group must not use it up
	if err != nil {
		return nil, err
	}
	hash, accepted := messages.ContentHash(g), o.At
	if o.IdempotencyKey != "" {
		content := hash
		if !o.GeneratedID {
			content += " " + g.ID
		}
		first, err := s.resolveIdempotencyKey(ctx, idempotencyScope(who, tenant)+o.IdempotencyKey,
			idempotencyRecord{Hash: content, Group: g.ID, AtMS: o.At.UnixMilli()})
		if err != nil {
			return nil, apiError(err)
		}
		g.ID, accepted = first.Group, time.UnixMilli(first.AtMS)
	}
	if g.Tenant == "" {
		g.Tenant = g.ID
	}
	sub := &submission{SubmitGroup: g, p: s.space.OfTenant(g.Tenant), ownTenant: tenant == "", accepted: accepted}
	sub.pieces = s.splitPieces(ctx, g.Tenant, g.ID, g.Jobs, ledger.SubmissionPrefix, o)
	if len(sub.pieces) == 0 {
		sub.pieces = []ledger.AppendArgs{{Group: g.ID}}
	}
	sub.pieces[0].Create = &ledger.CreateArgs{
		Group: g.ID, Tenant: g.Tenant, Type: g.Type, Hash: hash, Fields: fields,
		Own: s.space.OfGroup(g.ID).Index() == sub.p.Index(),
	}
	last := &sub.pieces[len(sub.pieces)-1]
	// Otherwise the group is sealed when it has total jobs.
	if endsWithoutJobs(g) || g.Seal && (g.Total == nil || int64(len(g.Jobs)) >= *g.Total) {
		last.Mode = ledger.AppendSeal
	} else if len(g.Jobs) > 0 {
		last.Mode = ledger.AppendLast
	}
	return sub, nil
}

// newCounts computes the counts that a submission's jobs had when they were accepted, without the
// skipped ones. It does not read the present counts, so that a repeated request gets the same
// answer.
func newCounts(g *messages.SubmitGroup, skipped []int, at time.Time) (c api.Counts) {
	left := make(map[int]bool, len(skipped))
	for _, i := range skipped {
		left[i] = true
	}
	for i := range g.Jobs {
		runAt := g.Jobs[i].RunAt
		switch {
		case left[i]:
			continue
		case runAt != nil && runAt.After(at) && (g.RunAt == nil || runAt.After(*g.RunAt)):
			c.NonReady++
		default: // also the jobs of a scheduled group
			c.Waiting++
		}
		c.Accepted++
	}
	return c
}

// maxWarnedTypes is the most types without a worker that the warnings of a submission name.
const maxWarnedTypes = 10

// warnings returns texts about what would keep an accepted group from ending, such as a type
// without workers, and about settings that have no effect. There is no warning that a group without
// jobs is not sealed: it gets its jobs later. now is the status that the group had before this
// call: of one that has ended, only that is said.
func (s *Store) warnings(ctx context.Context, g *messages.SubmitGroup, now api.Status) []string {
	var out []string
	if now.Ended() {
		return []string{fmt.Sprintf("The group was submitted before and is %s now: no job of it starts because of "+
			"this request, and the answer repeats the first one. To run the jobs again, submit them with another "+
			"group id and Idempotency-Key.", now)}
	}
	if g.BasePriority != 0 && s.cfg.FairPolicy {
		out = append(out, "base_priority has no effect with BULKACTION_FAIR_QUEUE_POLICY=fair: use priority (high, normal, low).")
	}
	if !g.Seal && g.Total == nil && len(g.Jobs) > 0 {
		out = append(out, fmt.Sprintf("The group is not sealed, so it does not end: "+
			"when it has all its jobs, seal it with POST /v1/groups/%[1]s/seal or `bulkaction seal %[1]s`.", g.ID))
	}
	if n := int64(len(g.Jobs)); g.Seal && g.Total != nil && *g.Total > n {
		out = append(out, fmt.Sprintf("The group has %d of %d jobs (total): it does not end before it has all of them.",
			n, *g.Total))
	}
	if len(g.Aggregate) > 0 {
		ops := make([]string, len(g.Aggregate))
		for i, a := range g.Aggregate {
			ops[i] = a.Op
		}
		// Aggregators of an earlier version report no reducers.
		if have, known := s.served.Reducers(ctx); known && len(have) > 0 {
			if missing := lacking(ops, have); len(missing) > 0 {
				out = append(out, fmt.Sprintf("No live aggregator has the reducer %s: the group does not end until one has.",
					strings.Join(missing, ", ")))
			}
		}
	}
	served, known := s.served.Types(ctx)
	if !known {
		return out
	}
	warned := map[string]bool{}
	warn := func(typ string) {
		if typ == "" || served[typ] || warned[typ] || len(warned) == maxWarnedTypes {
			return
		}
		warned[typ] = true
		warning := "No live worker serves the type " + typ + ": its jobs wait until one does."
		switch upper := strings.ToUpper(typ); {
		case served[upper]:
			warning += " Did you mean " + upper + "?"
		case typ == "NOOP":
			warning += " Name it in BULKACTION_WORKER_TYPES."
		case typ == "PUSH_NOTIFICATION":
			warning += " Workers serve it with BULKACTION_PUSH_ACCOUNTS_FILE."
		}
		out = append(out, warning)
	}
	if len(g.Jobs) == 0 {
		warn(g.Type)
	}
	for i := range g.Jobs {
		warn(cmp.Or(g.Jobs[i].Type, g.Type))
	}
	return out
}

// lacking returns those ops that are not in have, sorted, each once.
func lacking(ops []string, have map[string]bool) []string {
	missing := slices.DeleteFunc(slices.Sorted(slices.Values(ops)), func(op string) bool { return have[op] })
	return slices.Compact(missing)
}

// endsWithoutJobs reports whether a submission has no jobs and its group gets none later: it is
// sealed without a total, or its total is 0.
func endsWithoutJobs(g *messages.SubmitGroup) bool {
	return len(g.Jobs) == 0 && (g.Seal && g.Total == nil || g.Total != nil && *g.Total == 0)
}

// storeSubmission stores a group with its jobs, and with WaitReplicas waits until the replicas have
// it.
func (s *Store) storeSubmission(ctx context.Context, sub *submission) error {
	if len(sub.pieces) == 1 && s.cfg.WaitReplicas == 0 {
		return s.storePiece(ctx, sub) // without retryLost, because thousands of goroutines may wait here: their stacks stay small
	}
	return retryLost(ctx, func(ctx context.Context) (err error) {
		if len(sub.pieces) == 1 {
			err = s.storePiece(ctx, sub)
		} else if s.registerOwners(ctx, []*submission{sub}); sub.err == nil {
			sub.now, sub.skipped, err = s.storePieces(ctx, sub.p, sub.pieces)
		} else {
			err = sub.err
		}
		switch {
		case errors.Is(err, ledger.ErrGap), errors.Is(err, api.ErrNotFound):
			return writeLost(sub.p) // the group was created just now, so a failover has lost it
		case err != nil:
			return err
		}
		return s.awaitSubmission(ctx, sub.p, sub.SubmitGroup)
	})
}

// storePiece stores a submission of one piece, in one batch with those of concurrent calls.
func (s *Store) storePiece(ctx context.Context, sub *submission) error {
	err := s.submitters[sub.p.Index()].Do(ctx, func(ctx context.Context, all []*submission) {
		s.storeBatch(ctx, sub.p, all)
	}, sub)
	if err != nil { // the batch may still run
		return err
	}
	return sub.err
}

// storeBatch stores submissions of one piece each, and sets the error of each.
func (s *Store) storeBatch(ctx context.Context, p keyspace.Partition, all []*submission) {
	s.registerOwners(ctx, all)
	owned := slices.DeleteFunc(slices.Clone(all), func(sub *submission) bool { return sub.err != nil })
	storeCalls(splitSubmissions(owned), func(some []*submission) error { return s.storeSmall(ctx, p, some) })
}

// splitSubmissions divides submissions of one piece each among script calls, each with as many groups,
// jobs and bytes as the script can store.
func splitSubmissions(all []*submission) (calls [][]*submission) {
	first, jobs, bytes := 0, 0, 0
	for i, sub := range all {
		n := payloadBytes(sub.Jobs)
		if jobs, bytes = jobs+len(sub.Jobs), bytes+n; i > first &&
			(i-first == ledger.MaxSubmit || jobs > ledger.MaxAppend || bytes > ledger.MaxAppendBytes) {
			calls = append(calls, all[first:i])
			first, jobs, bytes = i, len(sub.Jobs), n
		}
	}
	if len(all) > first {
		calls = append(calls, all[first:])
	}
	return calls
}

// storeSmall stores submissions of one piece each in one script call. It sets the error of each, or returns an
// error when the call failed as a whole.
func (s *Store) storeSmall(ctx context.Context, p keyspace.Partition, all []*submission) error {
	args := make([]ledger.AppendArgs, len(all))
	for i, sub := range all {
		args[i] = sub.pieces[0]
	}
	return retryUnavailable(ctx, func(ctx context.Context) error {
		results, err := ledger.Submit(ctx, s.appender, p, args)
		for i := range results {
			all[i].now, all[i].skipped, all[i].err = results[i].Status, results[i].Skipped, results[i].Err
		}
		return err
	})
}

// registerOwners stores that the ids of the groups belong to their tenants, where the script can't do
// so, because the partitions differ. It sets the error of each submission.
func (s *Store) registerOwners(ctx context.Context, all []*submission) {
	var claims []ledger.OwnerClaim
	var claiming []*submission
	for _, sub := range all {
		if sub.err = nil; !sub.pieces[0].Create.Own {
			claims = append(claims, ledger.OwnerClaim{Partition: s.space.OfGroup(sub.ID), Group: sub.ID, Tenant: sub.Tenant})
			claiming = append(claiming, sub)
		}
	}
	_ = retryUnavailable(ctx, func(ctx context.Context) error { return ledger.RegisterOwners(ctx, s.appender, claims) })
	for i, sub := range claiming {
		sub.err = claims[i].Err
	}
}

// idempotencyRecord is what Redis stores under an idempotency key: the first request that used the
// key.
type idempotencyRecord struct {
	Hash  string `json:"hash"`
	Group string `json:"group"`
	AtMS  int64  `json:"at_ms"` // when it arrived
}

// resolveIdempotencyKey returns the first request that used an idempotency key, in any process. If
// there was none, it stores this request as the first. So two equal requests at the same time store
// one group. It returns api.ErrConflict when the first request had other content. key begins with
// the scope of the client's key.
func (s *Store) resolveIdempotencyKey(
	ctx context.Context, key string, this idempotencyRecord,
) (first idempotencyRecord, err error) {
	sum := sha256.Sum256([]byte(key))
	at := s.space.Idempotency(hex.EncodeToString(sum[:16]))
	mine, err := json.Marshal(this)
	if err != nil {
		return first, err
	}
	err = retryUnavailable(ctx, func(ctx context.Context) error {
		stored, err := s.storeIfNone(ctx, at, mine)
		if err != nil {
			return err
		}
		return json.Unmarshal(stored, &first)
	})
	if err != nil {
		return first, fmt.Errorf("reserve idempotency key: %w", err)
	}
	if first.Hash != this.Hash {
		return first, fmt.Errorf("Idempotency-Key was used before with other content: use a new key: %w",
			api.ErrConflict)
	}
	if first.AtMS == 0 { // an earlier version has stored no time
		first.AtMS = this.AtMS
	}
	return first, nil
}

// storeIfNone stores the record of an idempotency key unless the key has one. It returns the record
// that the key has afterwards.
func (s *Store) storeIfNone(ctx context.Context, key string, record []byte) ([]byte, error) {
	for {
		ok, err := s.appender.SetNX(ctx, key, record, s.cfg.KeepIdempotencyKeys).Result()
		if err != nil || ok {
			return record, err
		}
		stored, err := s.appender.Get(ctx, key).Bytes()
		if !errors.Is(err, redis.Nil) { // Nil: an earlier record has expired between the two commands
			return stored, err
		}
	}
}

// groupFields returns those fields of the group's hash whose values come from the submission and its
// principal.
func (s *Store) groupFields(g *messages.SubmitGroup, submittedBy string) (map[string]string, error) {
	asked, err := ledger.EncodeAggregates(s.reducers, g.Aggregate)
	if err != nil {
		return nil, badField("aggregate", err.Error())
	}
	if g.CallbackURL != "" {
		if err := s.checkCallback("callback_url", g.CallbackURL); err != nil {
			return nil, err
		}
	}
	fields := ledger.GroupFields{
		Lane:             string(cmp.Or(g.Priority, messages.LaneNormal)),
		Name:             g.Name,
		Tags:             g.Tags,
		BasePriority:     g.BasePriority,
		MaxRetries:       g.MaxRetries,
		JobTimeout:       time.Duration(g.JobTimeout),
		RunAt:            g.RunAt,
		FailureThreshold: g.FailureThreshold,
		Total:            g.Total,
		Aggregate:        asked,
		UniqueKeys:       g.UniqueKeys,
		CallbackURL:      g.CallbackURL,
		SubmittedBy:      submittedBy,
		ReduceFailures:   slices.ContainsFunc(g.Aggregate, func(a messages.Aggregate) bool { return a.Over != "" }),
	}
	return fields.Encode(), nil
}

// newJobs returns the jobs of a request or message, each with a trace context of its own, and
// records spans. A job with its own traceparent, or alone in its request or message, continues the
// producer's trace. Every other job, and each job of a message without a traceparent, starts a
// trace; it is linked to the producer's if that is known.
func (s *Store) newJobs(ctx context.Context, tenant, group string, jobs []messages.Job, o Origin) []messages.Job {
	message := o.TraceParent
	if !o.Published {
		message = s.recordSendSpan(ctx, tenant, group, o.TraceParent, o.At, len(jobs))
	}
	link := telemetry.ParseTraceParent(message)
	fresh := slices.Clone(jobs)
	for i := range fresh {
		j := &fresh[i]
		attrs := func() []attribute.KeyValue {
			a := telemetry.MessagingAttributes(telemetry.OpReceive, "ingest", s.space.Ingest())
			return append(a, telemetry.JobAttributes(tenant, group, -1, 0)...)
		}
		switch {
		case j.TraceParent != "" && !o.Published:
			parent := s.recordSendSpan(ctx, tenant, group, j.TraceParent, o.At, 1)
			j.TraceParent = s.tel.ContinueJobTrace(parent, "ingest", o.At, attrs)
		case j.TraceParent != "":
			j.TraceParent = s.tel.ContinueJobTrace(j.TraceParent, "ingest", o.At, attrs)
		case len(jobs) == 1 && message != "":
			j.TraceParent = s.tel.ContinueJobTrace(message, "ingest", o.At, attrs)
		default:
			j.TraceParent = s.tel.NewJobTrace(link, "ingest", o.At, attrs)
		}
	}
	return fresh
}

// recordSendSpan records the span "send ingest" of a request over HTTP, or of one of its jobs that
// has a traceparent of its own. The span lasts from the time at until now. The producers of
// messages record this span themselves. It returns the traceparent that the jobs' traces continue
// or link to.
func (s *Store) recordSendSpan(ctx context.Context, tenant, group, parent string, at time.Time, jobs int) string {
	if sc := telemetry.ParseTraceParent(parent); sc.IsValid() {
		ctx = trace.ContextWithRemoteSpanContext(ctx, sc)
	}
	attributes := append(telemetry.MessagingAttributes(telemetry.OpSend, "send", s.space.Ingest()),
		telemetry.JobAttributes(tenant, group, -1, 0)...)
	_, span := s.tel.Tracer.Start(ctx, "send ingest", trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithTimestamp(at), trace.WithAttributes(attributes...))
	if jobs > 1 {
		span.SetAttributes(telemetry.MessageCount(jobs))
	}
	span.End()
	if next := telemetry.FormatTraceParent(span.SpanContext()); next != "" {
		return next
	}
	return parent
}
