// Package callbacks tells tenants' endpoints of the events of groups. The watcher that relays an event
// adds a callback to a queue in Redis, before the event leaves the outbox; any watcher that has the
// master key sends it. A callback that is given to a watcher is due again when its lease has ended, so
// one that a killed process had is sent again; the number of the attempt lets only the last one be
// settled.
package callbacks

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/calls/egress"
	"github.com/bulkaction/bulkaction/internal/calls/webhook"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

const (
	maxBody     = 20 << 10
	callTimeout = 15 * time.Second
	lease       = 30 * time.Second // longer than callTimeout
	slowCall    = time.Second
	maxSlow     = 1000 // slow endpoints that a process knows
	eachQueue   = 2    // calls to one endpoint at once
	maxAnswer   = 1 << 10
	// disableAfter is how long an endpoint only fails before it is disabled.
	disableAfter = 5 * 24 * time.Hour
	// patience is how long after an event a receiver may ask for later tries, which are not counted.
	patience = 48 * time.Hour
	// poll is the longest wait when nothing is due: a wake token may be lost.
	poll = time.Second
)

// waits are the times between the tries of a callback, to which up to 20% are added.
var waits = []time.Duration{
	5 * time.Second, 5 * time.Minute, 30 * time.Minute, 2 * time.Hour, 5 * time.Hour, 10 * time.Hour, 10 * time.Hour,
}

// Of returns the callback of an event of a group, if anybody wants it. view is the group as the event
// shows it.
func Of(e *ledger.OutboxEntry, m *ledger.Move, id string, view *api.Group) (ledger.NewCallback, bool, error) {
	n := ledger.NewCallback{
		ID: id, Tenant: m.After.Tenant, Group: e.Group, Type: api.EventOf(m.Status), At: m.At, URL: m.After.CallbackURL,
	}
	switch {
	case n.URL != "" && m.Status.Ended():
		n.Queue = ledger.QueueOf(n.Tenant, webhook.Origin(n.URL))
	case n.URL == "" && e.Endpoint.Wants(n.Type):
		n.Queue = ledger.QueueOf(n.Tenant, "")
	default:
		return n, false, nil
	}
	var err error
	n.Body, err = body(n.Type, n.At, view)
	return n, true, err
}

// body returns what is sent. A group that is too large is shown without its aggregate.
func body(event string, at time.Time, view *api.Group) ([]byte, error) {
	e := api.WebhookEvent{Type: event, Timestamp: at, Data: *view}
	text, err := json.Marshal(e)
	if err == nil && len(text) > maxBody {
		e.Truncated, e.Data.Aggregate, e.Data.AggregateErrors = true, nil, nil
		text, err = json.Marshal(e)
	}
	if err == nil && len(text) > maxBody {
		e.Data.FailuresByCode = nil
		text, err = json.Marshal(e)
	}
	if err != nil {
		return nil, fmt.Errorf("encode callback: %w", err)
	}
	return text, nil
}

// Config configures a [Sender].
type Config struct {
	groups.Callbacks
	Concurrency int // calls at once
	Metrics     *telemetry.CallbackMetrics
	Activity    *activity.Log
}

// Sender sends callbacks, in a process of the watcher.
type Sender struct {
	stage.Process
	cfg    Config
	store  *groups.Store
	client *http.Client
	slots  chan struct{} // a token for each call that runs
	// slow has how many calls to slow endpoints run. These share half of the slots, so that many
	// endpoints that hang do not hold up the others.
	slow  atomic.Int64
	calls sync.WaitGroup
	stop  context.CancelFunc
	until context.Context //nolint:containedctx // of the calls, which outlive the step that begins them
}

// NewSender returns a sender. Its client connects only to addresses that the policy allows.
func NewSender(p stage.Process, cfg Config, store *groups.Store) *Sender {
	s := &Sender{
		Process: p, cfg: cfg, store: store, slots: make(chan struct{}, cfg.Concurrency),
		client: egress.NewClient(egress.Options{Policy: cfg.Policy.Policy, MaxIdleConnsPerHost: eachQueue}),
	}
	s.until, s.stop = context.WithCancel(context.Background())
	return s
}

// Add adds the loops of the sender to a runner. When it stops, calls that run are given back after a
// moment.
func (s *Sender) Add(r *stage.Runner) {
	for _, p := range s.Space.All() {
		r.Loop("callbacks", p.Wake("callbacks"), (&queueSender{Sender: s, p: p, busy: map[string]int{}, slowly: map[string]bool{}}).step)
	}
	r.OnStop(func(ctx context.Context) {
		ended := make(chan struct{})
		go func() { s.calls.Wait(); close(ended) }()
		select {
		case <-ended:
		case <-ctx.Done():
		}
		s.stop()
		<-ended
		s.client.CloseIdleConnections()
	})
}

// queueSender sends the callbacks of one partition.
type queueSender struct {
	*Sender
	p      keyspace.Partition
	mu     sync.Mutex
	busy   map[string]int  // queue → calls that run
	slowly map[string]bool // queues whose last call was slow, at most maxSlow
}

// step claims as many callbacks as there are free slots, and begins to send them.
func (q *queueSender) step(ctx context.Context) (time.Duration, error) {
	select {
	case q.slots <- struct{}{}:
	case <-ctx.Done():
		return 0, nil
	}
	free := 1
	for more := true; more; {
		select {
		case q.slots <- struct{}{}:
			free++
		default:
			more = false
		}
	}
	used, wait, err := q.claim(ctx, free)
	for range free - used {
		<-q.slots
	}
	switch {
	case err != nil || used > 0:
		return 0, err
	case wait < 0 || wait > poll:
		wait = poll
	}
	return max(wait, time.Millisecond), nil
}

// claim lets up to most callbacks be sent, first those to endpoints that are not slow.
func (q *queueSender) claim(ctx context.Context, most int) (used int, wait time.Duration, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	busy := maps.Clone(q.busy)
	for queue := range q.slowly {
		busy[queue] = eachQueue
	}
	used, wait, err = q.begin(ctx, most, busy, false)
	rest := min(most-used, max(1, cap(q.slots)/2)-int(q.slow.Load()))
	if err == nil && len(q.slowly) > 0 && rest > 0 {
		var more int
		more, wait, err = q.begin(ctx, rest, q.busy, true)
		used += more
	}
	return used, wait, err
}

// begin claims up to most callbacks and begins to send them.
func (q *queueSender) begin(ctx context.Context, most int, busy map[string]int, slow bool) (int, time.Duration, error) {
	claimed, now, wait, err := ledger.ClaimCallbacks(ctx, q.Conn.Cmd, q.p, ledger.Claim{Most: most, Each: eachQueue, Lease: lease, Busy: busy})
	for i := range claimed {
		q.busy[claimed[i].Queue]++
		if slow {
			q.slow.Add(1)
		}
		q.calls.Go(func() {
			defer func() { <-q.slots }()
			q.send(&claimed[i], now, slow)
		})
	}
	return len(claimed), wait, err
}

// outcome is how a try has ended.
type outcome struct {
	how     ledger.Settlement
	delay   time.Duration
	reason  string
	answer  string
	disable string // why the tenant's endpoint is disabled; "": it is not
}

// send makes one try, and stores how it has ended. now is Redis's time; slow says whether the call uses
// a slot for slow endpoints.
func (q *queueSender) send(c *ledger.ClaimedCallback, now time.Time, slow bool) {
	began := time.Now()
	out := q.try(c, now)
	took := time.Since(began)
	// The slot of the endpoint is free before the next callback of its queue is given.
	q.mu.Lock()
	if q.busy[c.Queue]--; q.busy[c.Queue] == 0 {
		delete(q.busy, c.Queue)
	}
	if took < slowCall {
		delete(q.slowly, c.Queue)
	} else {
		for other := range q.slowly {
			if len(q.slowly) < maxSlow {
				break
			}
			delete(q.slowly, other)
		}
		q.slowly[c.Queue] = true
	}
	q.mu.Unlock()
	if slow {
		q.slow.Add(-1)
	}
	ctx, cancel := context.WithTimeout(context.Background(), lease-callTimeout)
	defer cancel()
	stored, err := ledger.SettleCallback(ctx, q.Conn.Cmd, q.p, c, out.how, out.delay, out.reason, out.answer)
	if err != nil { // it is sent again when its lease has ended
		q.Tel.Log.Warn("the end of a callback was not stored, it is sent again", "callback", c.ID, "error", err)
	}
	if out.how == ledger.Released {
		return
	}
	if stored {
		q.cfg.Metrics.Tried(string(out.how), took)
	}
	if out.how == ledger.Dead {
		q.Tel.Log.Warn("a callback is dead", "callback", c.ID, "tenant", c.Tenant, "error", out.reason)
	}
	if c.URL == "" && c.Endpoint.URL != "" {
		q.noteHealth(ctx, c, out, now)
	}
}

// try sends a callback once.
func (q *queueSender) try(c *ledger.ClaimedCallback, now time.Time) outcome {
	target := cmp.Or(c.URL, c.Endpoint.URL)
	switch {
	case c.Err != nil:
		return q.failed(c, c.Err, "")
	case target == "":
		return outcome{how: ledger.Dead, reason: "the tenant has no callback endpoint any more"}
	case c.URL == "" && c.Endpoint.DisabledAt != nil:
		return outcome{how: ledger.Dead, reason: "the endpoint is disabled: " + c.Endpoint.DisabledBecause}
	}
	ctx, cancel := context.WithTimeout(q.until, callTimeout)
	defer cancel()
	if len(c.Body) == 0 { // a dead one that is sent again
		view, err := q.store.Group(auth.Trust(ctx), c.Group)
		switch {
		case errors.Is(err, api.ErrNotFound), err == nil && view.Tenant != c.Tenant: // its id may be another tenant's now
			return outcome{how: ledger.Dead, reason: "the group was deleted, and with it what was to be sent"}
		case err == nil:
			c.Body, err = body(c.Type, c.At, &view)
		}
		if err != nil {
			return q.failed(c, err, "")
		}
	}
	if err := q.cfg.Policy.Check(target); err != nil {
		return q.failed(c, fmt.Errorf("the url %w", err), "")
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, target, bytes.NewReader(c.Body))
	if err != nil {
		return q.failed(c, err, "")
	}
	secrets := []string{q.cfg.Keys.Secret(c.Tenant, c.Endpoint.SecretVersion())}
	if c.Endpoint.PreviousValid(now) {
		secrets = append(secrets, q.cfg.Keys.Secret(c.Tenant, c.Endpoint.SecretVersion()-1))
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("User-Agent", "bulkaction")
	if err := webhook.Sign(request.Header, c.ID, now, c.Body, secrets...); err != nil {
		return q.failed(c, err, "")
	}
	response, err := q.client.Do(request)
	if err != nil {
		if q.until.Err() != nil { // the process stops
			return outcome{how: ledger.Released}
		}
		return q.failed(c, plain(err), "")
	}
	defer func() { _ = response.Body.Close() }()
	read, _ := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	answer := short(string(read))
	status := fmt.Errorf("answered %d %s", response.StatusCode, http.StatusText(response.StatusCode))
	switch code := response.StatusCode; {
	case code >= 200 && code < 300:
		return outcome{how: ledger.Delivered}
	case code == http.StatusGone:
		const gone = "it has answered 410 Gone"
		return outcome{how: ledger.Dead, reason: gone, answer: answer, disable: gone}
	case code == http.StatusTooManyRequests || code == http.StatusServiceUnavailable:
		out := q.failed(c, status, answer)
		if after, given := egress.RetryAfter(response.Header.Get("Retry-After"), time.Now()); given && now.Sub(c.At) < patience {
			out.how, out.delay = ledger.Deferred, max(after, time.Second)
		}
		return out
	default:
		return q.failed(c, status, answer)
	}
}

// short returns the beginning of a text that an endpoint may have chosen, as valid UTF-8.
func short(text string) string {
	text = strings.ToValidUTF8(text, string(utf8.RuneError))
	for len(text) > maxAnswer {
		_, size := utf8.DecodeLastRuneInString(text)
		text = text[:len(text)-size]
	}
	return text
}

// plain returns the error of a call without its URL, which may have a secret, and without what the
// network here knows of an address that the tenant may not reach.
func plain(err error) error {
	in, ok := errors.AsType[*url.Error](err)
	_, name := errors.AsType[*net.DNSError](err)
	switch {
	case errors.Is(err, egress.ErrAddressRefused):
		return fmt.Errorf("%w; BULKACTION_CALLBACK_ALLOWED_CIDRS would allow it", egress.ErrAddressRefused)
	case name:
		return errors.New("the name of the host has no address")
	case ok && in.Timeout():
		return fmt.Errorf("no answer after %s", callTimeout)
	case ok:
		return in.Err
	}
	return err
}

// failed returns the outcome of a try that has failed: another try after a while, unless it was the last
// one.
func (q *queueSender) failed(c *ledger.ClaimedCallback, err error, answer string) outcome {
	out := outcome{how: ledger.Retry, reason: short(err.Error()), answer: answer}
	if c.Tries >= len(waits) {
		out.how = ledger.Dead
		return out
	}
	out.delay = waits[c.Tries] + time.Duration(rand.Int64N(int64(waits[c.Tries])/5))
	return out
}

// noteHealth stores since when a tenant's endpoint only fails, and disables it after too long a time.
func (q *queueSender) noteHealth(ctx context.Context, c *ledger.ClaimedCallback, out outcome, now time.Time) {
	since := c.Endpoint.FailingSince
	disable := out.disable
	switch {
	case out.how == ledger.Delivered && since == nil, c.Endpoint.DisabledAt != nil:
		return
	case out.how != ledger.Delivered && since != nil && now.Sub(*since) > disableAfter:
		disable = cmp.Or(disable, "it has only failed for 5 days: "+out.reason)
	case out.how != ledger.Delivered && since != nil && disable == "":
		return
	}
	disabled := false
	_, err := ledger.ChangeEndpoint(ctx, q.Conn.Cmd, q.p, c.Tenant, func(e *ledger.Endpoint) error {
		disabled = false
		switch {
		case e.URL != c.Endpoint.URL || e.DisabledAt != nil: // it was set anew, or is disabled
		case out.how == ledger.Delivered:
			e.FailingSince = nil
		default:
			if e.FailingSince == nil {
				e.FailingSince = &now
			}
			if disable != "" {
				e.DisabledAt, e.DisabledBecause, disabled = &now, disable, true
			}
		}
		return nil
	})
	if err == nil && disabled { // by this call alone
		q.cfg.Metrics.Disabled()
		ctx := activity.WithActor(ctx, api.Activity{Actor: "watcher", Tenant: c.Tenant})
		err = q.cfg.Activity.Do(ctx, api.Activity{
			Action: "callback.disable", Object: c.Tenant, After: activity.JSON(map[string]any{"reason": disable}),
		}, func(context.Context) error { return nil })
	}
	if err != nil && !call.IsUnavailable(err) {
		q.Tel.Log.Warn("the health of a callback endpoint was not stored", "tenant", c.Tenant, "error", err)
	}
}
