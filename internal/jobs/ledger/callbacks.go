package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var (
	addCallbacks    = script("callbacks/add_callbacks", "signals", "callbacks")
	claimCallbacks  = script("callbacks/claim_callbacks", "signals", "callbacks")
	settleCallback  = script("callbacks/settle_callback", "signals", "callbacks")
	redeliver       = script("callbacks/redeliver", "signals", "callbacks")
	setEndpoint     = script("callbacks/set_endpoint")
	forgetCallbacks = script("callbacks/forget_callbacks", "signals", "callbacks")
)

// callbackBounds are the most callbacks of one endpoint that are pending, and the most bytes of their
// bodies.
type callbackBounds struct{ callbacks, bytes int }

var ofEndpoint = callbackBounds{10_000, 50 << 20}

// Endpoint is what Redis knows of a tenant's callbacks. With URL "" the tenant has no endpoint, but
// maybe had one, or a secret that was rotated.
type Endpoint struct {
	URL    string   `json:"url,omitempty"`
	Events []string `json:"events,omitempty"` // nil: api.DefaultCallbackEvents
	// Version is the number of the tenant's secret, 0 stands for 1; the one before is valid until
	// PreviousUntil.
	Version         int        `json:"version,omitempty"`
	PreviousUntil   *time.Time `json:"previous_until,omitempty"`
	FailingSince    *time.Time `json:"failing_since,omitempty"`
	DisabledAt      *time.Time `json:"disabled_at,omitempty"`
	DisabledBecause string     `json:"disabled_because,omitempty"`

	text string // as it was read
}

// Wants says whether the endpoint is told of events of a type.
func (e *Endpoint) Wants(event string) bool {
	of := e.Events
	if of == nil {
		of = api.DefaultCallbackEvents
	}
	return e.URL != "" && e.DisabledAt == nil && slices.Contains(of, event)
}

// SecretVersion returns the number of the tenant's secret.
func (e *Endpoint) SecretVersion() int { return max(e.Version, 1) }

// PreviousValid says whether callbacks have a signature of the secret before, too.
func (e *Endpoint) PreviousValid(now time.Time) bool {
	return e.PreviousUntil != nil && now.Before(*e.PreviousUntil)
}

// WithoutURL returns what stays of an endpoint that is deleted: what is known of the secret.
func (e *Endpoint) WithoutURL() Endpoint {
	return Endpoint{Version: e.Version, PreviousUntil: e.PreviousUntil, text: e.text}
}

func parseEndpoint(text string) (Endpoint, error) {
	e := Endpoint{text: text}
	if text == "" {
		return e, nil
	}
	if err := json.Unmarshal([]byte(text), &e); err != nil {
		return e, fmt.Errorf("callback endpoint: %w", err)
	}
	return e, nil
}

// ReadEndpoint returns the callback endpoint of a tenant.
func ReadEndpoint(ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string) (Endpoint, error) {
	text, err := c.HGet(ctx, p.Endpoints(), tenant).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return Endpoint{}, fmt.Errorf("read callback endpoint: %w", err)
	}
	return parseEndpoint(text)
}

// ChangeEndpoint calls change with the callback endpoint of a tenant, and stores what it makes of it; it
// may do so several times. Twice: as change.
func ChangeEndpoint(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, change func(*Endpoint) error,
) (Endpoint, error) {
	for {
		e, err := ReadEndpoint(ctx, c, p, tenant)
		if err == nil {
			err = change(&e)
		}
		if err != nil {
			return e, err
		}
		text, err := json.Marshal(e)
		if err != nil {
			return e, fmt.Errorf("encode callback endpoint: %w", err)
		}
		if string(text) == "{}" {
			text = nil // nothing is known of the tenant
		}
		if e.text == string(text) {
			return e, nil
		}
		r := run(ctx, c, setEndpoint, p, tenant, e.text, text)
		if r.Code("OK", "CHANGED") == "OK" || r.Err() != nil {
			e.text = string(text)
			return e, r.Err()
		}
	}
}

// NewCallback is a callback to be added: an event that an endpoint is told of.
type NewCallback struct {
	ID, Queue, Tenant, Group, Type string
	At                             time.Time
	URL                            string // "": that of the tenant's endpoint
	Body                           []byte
}

// QueueOf returns the queue of callbacks to a group's URL at a server; to the tenant's endpoint if origin
// is "".
func QueueOf(tenant, origin string) string {
	if origin == "" {
		return tenant
	}
	return tenant + "|" + origin
}

// AddCallbacks adds callbacks that are due at once, and returns how many older ones had to die for them.
// Twice: one that is there stays as it is; one that was delivered since is sent again. The errors are
// those of single callbacks.
func AddCallbacks(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, all []NewCallback,
) (died int64, errs []error, err error) {
	return ofEndpoint.add(ctx, c, p, all)
}

func (b callbackBounds) add(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, all []NewCallback,
) (died int64, errs []error, err error) {
	args := []any{b.callbacks, b.bytes}
	for i := range all {
		n := &all[i]
		args = append(args, n.ID, n.Queue, n.Tenant, n.Group, n.Type, n.At.UnixMilli(), n.URL, n.Body)
	}
	r := run(ctx, c, addCallbacks, p, args...)
	died = r.Number()
	for i := range all {
		if code, ok := r.Peek().(string); ok && code == "OK" {
			_ = r.Text()
		} else if bad := refused(r.List(), addCallbacks); bad != nil {
			errs = append(errs, fmt.Errorf("callback %s: %w", all[i].ID, bad))
		}
	}
	return died, errs, r.Err()
}

// ClaimedCallback is a callback that this process is to send.
type ClaimedCallback struct {
	NewCallback
	Attempt  int64
	Tries    int // that have failed
	Endpoint Endpoint
	Err      error // the tenant's endpoint can't be read
}

// Claim says which callbacks to give: at most Most, and at most Each of a queue, with those of Busy,
// which has how many of each queue the process sends now. They are due again after Lease.
type Claim struct {
	Most, Each int
	Lease      time.Duration
	Busy       map[string]int
}

// ClaimCallbacks gives callbacks that are due to this process. It returns Redis's time, and how long to
// wait until others are due; negative: there are none. Twice: the second call gives others.
func ClaimCallbacks(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, want Claim,
) (all []ClaimedCallback, now time.Time, wait time.Duration, err error) {
	args := []any{want.Most, want.Each, want.Lease.Milliseconds()}
	for queue, n := range want.Busy {
		args = append(args, queue, n)
	}
	r := run(ctx, c, claimCallbacks, p, args...)
	now, wait = r.Time(), r.Duration()
	for r.More() {
		one := r.List()
		claimed := ClaimedCallback{}
		claimed.ID, claimed.Attempt = one.Text(), one.Number()
		claimed.Queue, claimed.Tenant, claimed.Group, claimed.Type = one.Text(), one.Text(), one.Text(), one.Text()
		claimed.At, claimed.URL, claimed.Tries, claimed.Body = one.Time().UTC(), one.Text(), int(one.Number()), []byte(one.Text())
		claimed.Endpoint, claimed.Err = parseEndpoint(one.Text())
		all = append(all, claimed)
	}
	return all, now, wait, r.Err()
}

// Settlement says how an attempt to send a callback has ended.
type Settlement string

// The settlements.
const (
	Delivered Settlement = "ok"
	Retry     Settlement = "retry"   // after the delay
	Dead      Settlement = "dead"    // it is not tried again
	Deferred  Settlement = "defer"   // after the delay; this try is not counted
	Released  Settlement = "release" // it was not tried; it is due after the delay
)

// SettleCallback stores how an attempt has ended. Error says why it has failed, answer is the beginning
// of the answer. It reports whether that was stored: not if another attempt has begun meanwhile. Twice:
// the second call stores nothing.
func SettleCallback(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, of *ClaimedCallback,
	how Settlement, delay time.Duration, reason, answer string,
) (bool, error) {
	r := run(ctx, c, settleCallback, p, of.ID, of.Attempt, string(how), delay.Milliseconds(), reason, answer)
	return r.Code("OK", "STALE") == "OK", r.Err()
}

// RedeliverCallbacks makes dead callbacks pending again, and lets pending ones be tried at once. It
// returns the ids that don't exist, and whether an endpoint had no room for more. Twice: the second call
// lets them be tried at once again.
func RedeliverCallbacks(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, ids ...string,
) (done int64, missing []string, full bool, err error) {
	return ofEndpoint.redeliver(ctx, c, p, ids...)
}

func (b callbackBounds) redeliver(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, ids ...string,
) (done int64, missing []string, full bool, err error) {
	args := []any{b.callbacks}
	for _, id := range ids {
		args = append(args, id)
	}
	r := run(ctx, c, redeliver, p, args...)
	for _, id := range ids {
		switch r.Code("OK", "FULL", "NONE") {
		case "OK":
			done++
		case "FULL":
			full = true
		case "NONE":
			missing = append(missing, id)
		}
	}
	return done, missing, full, r.Err()
}

// ForgetCallbacks deletes up to most dead callbacks that died before a time, and returns how many. Twice:
// the second call deletes further ones.
func ForgetCallbacks(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, before time.Time, most int,
) (int64, error) {
	r := run(ctx, c, forgetCallbacks, p, before.UnixMilli(), most)
	return call.Done(r, r.Number())
}

// PendingCallbacks returns how many callbacks of a tenant's endpoint are pending.
func PendingCallbacks(ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string) (int64, error) {
	n, err := c.ZCard(ctx, p.CallbackQueue(QueueOf(tenant, ""))).Result()
	if err != nil {
		return 0, fmt.Errorf("count callbacks: %w", err)
	}
	return n, nil
}

// CallbackCounts are the callbacks that are pending and dead. Oldest is when the oldest pending one was
// added; zero: there is none.
type CallbackCounts struct {
	Pending, Dead int64
	Oldest        time.Time
}

// Add adds the counts of another partition.
func (n *CallbackCounts) Add(o CallbackCounts) {
	n.Pending, n.Dead = n.Pending+o.Pending, n.Dead+o.Dead
	if n.Oldest.IsZero() || !o.Oldest.IsZero() && o.Oldest.Before(n.Oldest) {
		n.Oldest = o.Oldest
	}
}

// CountCallbacks counts the callbacks of a partition.
func CountCallbacks(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (n CallbackCounts, err error) {
	queues, err := CallbackQueues(ctx, c, p)
	if err != nil {
		return n, err
	}
	var died *redis.IntCmd
	cards, first := make([]*redis.IntCmd, len(queues)), make([]*redis.ZSliceCmd, len(queues))
	_, err = c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		died = pipe.ZCard(ctx, p.DeadCallbacks())
		for i, queue := range queues {
			cards[i] = pipe.ZCard(ctx, p.CallbackQueue(queue))
			first[i] = pipe.ZRangeWithScores(ctx, p.CallbackAges(queue), 0, 0)
		}
		return nil
	})
	if err != nil {
		return n, fmt.Errorf("count callbacks: %w", err)
	}
	n.Dead = died.Val()
	for i, card := range cards {
		queue := CallbackCounts{Pending: card.Val()}
		if z := first[i].Val(); len(z) > 0 {
			queue.Oldest = time.UnixMilli(int64(z[0].Score))
		}
		n.Add(queue)
	}
	return n, nil
}

// CallbackQueues returns the names of the queues that are not empty, by the time at which they are due.
func CallbackQueues(ctx context.Context, c redis.Cmdable, p keyspace.Partition) ([]string, error) {
	queues, err := c.ZRange(ctx, p.Callbacks(), 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("list queues of callbacks: %w", err)
	}
	return queues, nil
}

// CallbackIDs returns the ids of n callbacks behind the first skip: those of a queue by the time at which
// they are due, or ("") the dead ones with the newest first.
func CallbackIDs(ctx context.Context, c redis.Cmdable, p keyspace.Partition, queue string, skip, n int64) (ids []string, err error) {
	if queue == "" {
		ids, err = c.ZRevRange(ctx, p.DeadCallbacks(), skip, skip+n-1).Result()
	} else {
		ids, err = c.ZRange(ctx, p.CallbackQueue(queue), skip, skip+n-1).Result()
	}
	if err != nil {
		return nil, fmt.Errorf("list callbacks: %w", err)
	}
	return ids, nil
}

// ReadCallbacks returns callbacks in the order of ids, without their bodies. It leaves out those that
// don't exist or can't be read. The URL of one to its tenant's endpoint is "".
func ReadCallbacks(ctx context.Context, c redis.Cmdable, p keyspace.Partition, ids ...string) ([]api.Callback, error) {
	reads, err := pipelined(ctx, c, ids, func(pipe redis.Pipeliner, id string) *redis.SliceCmd {
		return pipe.HMGet(ctx, p.Callback(id), "tenant", "group", "type", "at", "url", "state", "tries", "next", "died", "error", "answer")
	})
	if call.IsUnavailable(err) || ctx.Err() != nil {
		return nil, fmt.Errorf("read callbacks: %w", err)
	}
	all := make([]api.Callback, 0, len(ids))
	for i, read := range reads {
		v := values(read.Val())
		if v.str(0) == "" {
			continue
		}
		one := api.Callback{
			ID: ids[i], Tenant: v.str(0), Group: v.str(1), Type: v.str(2), At: v.when(3).UTC(), URL: v.str(4), State: v.str(5),
			Tries: int(v.num(6)), Error: v.str(9), Answer: v.str(10),
		}
		if at := v.when(7).UTC(); !at.IsZero() {
			one.NextAt = &at
		}
		if at := v.when(8).UTC(); !at.IsZero() {
			one.DiedAt = &at
		}
		all = append(all, one)
	}
	return all, nil
}
