package groups

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/calls/webhook"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Callbacks say how callbacks are signed, and which URLs they may have.
type Callbacks struct {
	Keys   *webhook.Keys // nil: there are no callbacks
	Policy webhook.Policy
}

// secretOverlap is how long callbacks have a signature of the previous secret after a rotation.
const secretOverlap = 24 * time.Hour

// checkCallback returns an error that names the field if callbacks can't be sent to a URL.
func (s *Store) checkCallback(field, url string) error {
	if s.cfg.Callbacks.Keys == nil {
		return badField(field, "is not possible without BULKACTION_CALLBACK_MASTER_KEY_FILE, by which callbacks are signed: "+
			"make the file with bulkaction callback new-key, and set it for ingest and the watcher")
	}
	if s.space.Layout() < layoutOfLimits { // an earlier watcher would lose them
		return badField(field, "is possible when all processes have this version: run bulkaction migrate")
	}
	if err := s.cfg.Callbacks.Policy.Check(url); err != nil {
		return badField(field, err.Error())
	}
	return nil
}

// SetCallback stores the callback endpoint of a tenant, and enables it.
func (s *Store) SetCallback(ctx context.Context, tenant string, set api.CallbackSettings) (api.TenantCallback, error) {
	if err := checkTenant(ctx, tenant); err != nil {
		return api.TenantCallback{}, err
	}
	if err := s.checkCallback("url", set.URL); err != nil {
		return api.TenantCallback{}, err
	}
	if set.Events != nil && len(set.Events) == 0 {
		return api.TenantCallback{}, badField("events", "must have at least one; leave it out for "+strings.Join(api.DefaultCallbackEvents, ", "))
	}
	for i, event := range set.Events {
		switch {
		case !slices.ContainsFunc(api.Statuses, func(s api.Status) bool { return event == api.EventOf(s) }):
			return api.TenantCallback{}, badField("events", fmt.Sprintf("%.40q is no event: there are group.created, group.dispatched, "+
				"group.running, group.aggregating, group.completed, group.failed and group.cancelled", event))
		case slices.Contains(set.Events[:i], event):
			return api.TenantCallback{}, badField("events", event+" is there twice")
		}
	}
	e, err := s.changeEndpoint(ctx, tenant, func(e *ledger.Endpoint) error {
		e.URL, e.Events = set.URL, set.Events
		e.FailingSince, e.DisabledAt, e.DisabledBecause = nil, nil, ""
		return nil
	})
	if err != nil {
		return api.TenantCallback{}, err
	}
	return s.callbackView(ctx, tenant, e)
}

func (s *Store) changeEndpoint(
	ctx context.Context, tenant string, change func(*ledger.Endpoint) error,
) (e ledger.Endpoint, err error) {
	err = retryUnavailable(ctx, func(ctx context.Context) (err error) {
		e, err = ledger.ChangeEndpoint(ctx, s.conn.Cmd, s.space.OfTenant(tenant), tenant, change)
		return err
	})
	return e, apiError(err)
}

func (s *Store) callbackView(ctx context.Context, tenant string, e ledger.Endpoint) (api.TenantCallback, error) {
	if e.URL == "" {
		return api.TenantCallback{}, noEndpoint(tenant)
	}
	pending, err := ledger.PendingCallbacks(ctx, s.conn.Cmd, s.space.OfTenant(tenant), tenant)
	events := e.Events
	if events == nil {
		events = api.DefaultCallbackEvents
	}
	url := e.URL
	if !auth.SeesPayloads(ctx) {
		url = webhook.WithoutQuery(url)
	}
	return api.TenantCallback{
		Tenant: tenant, URL: url, Events: events, SecretVersion: e.SecretVersion(), FailingSince: e.FailingSince,
		DisabledAt: e.DisabledAt, DisabledBecause: e.DisabledBecause, Pending: pending,
	}, apiError(err)
}

func noEndpoint(tenant string) error {
	return &api.NotFoundError{Text: "tenant " + tenant + ": has no callback endpoint"}
}

func (s *Store) endpoint(ctx context.Context, tenant string) (ledger.Endpoint, error) {
	if err := checkTenant(ctx, tenant); err != nil {
		return ledger.Endpoint{}, err
	}
	e, err := ledger.ReadEndpoint(ctx, s.conn.Cmd, s.space.OfTenant(tenant), tenant)
	return e, apiError(err)
}

// Callback returns the callback endpoint of a tenant. Without one it returns api.ErrNotFound.
func (s *Store) Callback(ctx context.Context, tenant string) (api.TenantCallback, error) {
	e, err := s.endpoint(ctx, tenant)
	if err != nil {
		return api.TenantCallback{}, err
	}
	return s.callbackView(ctx, tenant, e)
}

// DeleteCallback deletes the callback endpoint of a tenant. What is pending for it dies when it is due.
func (s *Store) DeleteCallback(ctx context.Context, tenant string) error {
	if err := checkTenant(ctx, tenant); err != nil {
		return err
	}
	_, err := s.changeEndpoint(ctx, tenant, func(e *ledger.Endpoint) error {
		if e.URL == "" {
			return noEndpoint(tenant)
		}
		// The secret's version stays: a secret that was rotated away does not come back.
		*e = e.WithoutURL()
		return nil
	})
	return err
}

// CallbackSecret returns the secret by which the callbacks of a tenant's groups are signed.
func (s *Store) CallbackSecret(ctx context.Context, tenant string) (api.CallbackSecret, error) {
	e, err := s.endpoint(ctx, tenant)
	if err != nil {
		return api.CallbackSecret{}, err
	}
	return s.secretView(tenant, e)
}

func (s *Store) secretView(tenant string, e ledger.Endpoint) (api.CallbackSecret, error) {
	keys := s.cfg.Callbacks.Keys
	if keys == nil {
		return api.CallbackSecret{}, s.checkCallback("secret", "")
	}
	secret := api.CallbackSecret{Tenant: tenant, Version: e.SecretVersion(), Secret: keys.Secret(tenant, e.SecretVersion())}
	if e.PreviousValid(time.Now()) {
		secret.Previous, secret.PreviousUntil = keys.Secret(tenant, e.SecretVersion()-1), e.PreviousUntil
	}
	return secret, nil
}

// RotateCallbackSecret gives a tenant a new secret. For 24 hours callbacks have a signature of the
// previous one, too.
func (s *Store) RotateCallbackSecret(ctx context.Context, tenant string) (api.CallbackSecret, error) {
	if err := checkTenant(ctx, tenant); err != nil {
		return api.CallbackSecret{}, err
	}
	if s.cfg.Callbacks.Keys == nil {
		return api.CallbackSecret{}, s.checkCallback("secret", "")
	}
	before := -1 // so that a repetition after an outage does not rotate twice
	e, err := s.changeEndpoint(ctx, tenant, func(e *ledger.Endpoint) error {
		if before < 0 {
			before = e.SecretVersion()
		}
		if e.SecretVersion() == before {
			until := time.Now().UTC().Add(secretOverlap).Truncate(time.Millisecond)
			e.Version, e.PreviousUntil = before+1, &until
		}
		return nil
	})
	if err != nil {
		return api.CallbackSecret{}, err
	}
	return s.secretView(tenant, e)
}

// callbackChunk is how many callbacks are read at once, maxScannedCallbacks how many one call of
// Callbacks looks at.
const (
	callbackChunk       = 500
	maxScannedCallbacks = 10_000
)

// Callbacks returns a page of callbacks. A principal of one tenant gets those of this tenant. One call
// looks at a bounded number of callbacks, so a page with a cursor may be short, or empty. Callbacks that
// change their state meanwhile may be left out, or be there twice.
func (s *Store) Callbacks(ctx context.Context, q api.CallbackQuery) (api.CallbackList, error) {
	list := api.CallbackList{Callbacks: []api.Callback{}}
	if !slices.Contains(api.CallbackStates, q.State) {
		return list, badField("state", "must be one of "+strings.Join(api.CallbackStates, ", "))
	}
	if _, err := ownTenant(ctx); err != nil {
		return list, err
	}
	_, tenant, err := callFor(ctx, q.Tenant)
	if err != nil {
		return list, err
	}
	parts, at, skip, queue := s.space.All(), 0, int64(0), ""
	if tenant != "" {
		parts = []keyspace.Partition{s.space.OfTenant(tenant)}
	}
	if q.Cursor != "" {
		fields := strings.SplitN(q.Cursor, ",", 3)
		ok := len(fields) == 3
		if ok {
			var errAt, errSkip error
			at, errAt = strconv.Atoi(fields[0])
			skip, errSkip = strconv.ParseInt(fields[1], 10, 64)
			queue = fields[2]
			ok = errAt == nil && errSkip == nil && at >= 0 && at < len(parts) && skip >= 0
		}
		if !ok {
			return list, badCursor()
		}
	}
	scanned := int64(0)
	for ; at < len(parts); at, skip, queue = at+1, 0, "" {
		queues := []string{""}
		if q.State == api.CallbackPending {
			if queues, err = ledger.CallbackQueues(ctx, s.conn.Cmd, parts[at]); err != nil {
				return list, apiError(err)
			}
			slices.Sort(queues)
		}
		for _, of := range queues {
			owner, _, _ := strings.Cut(of, "|")
			if of < queue || of != "" && tenant != "" && owner != tenant {
				continue
			}
			if of != queue {
				skip = 0
			}
			for more := true; more; {
				ids, err := ledger.CallbackIDs(ctx, s.conn.Cmd, parts[at], of, skip, callbackChunk)
				if err != nil {
					return list, apiError(err)
				}
				more = len(ids) == callbackChunk
				read, err := s.readCallbacks(ctx, parts[at], ids)
				if err != nil {
					return list, err
				}
				for _, id := range ids {
					one, ok := read[id]
					if ok && (tenant == "" || one.Tenant == tenant) && one.State == q.State {
						if len(list.Callbacks) == q.Limit {
							list.Cursor = fmt.Sprintf("%d,%d,%s", at, skip, of)
							return list, nil
						}
						list.Callbacks = append(list.Callbacks, one)
					}
					skip++
				}
				if scanned += int64(len(ids)); more && scanned >= maxScannedCallbacks {
					list.Cursor = fmt.Sprintf("%d,%d,%s", at, skip, of)
					return list, nil
				}
			}
		}
	}
	return list, nil
}

// readCallbacks returns callbacks of a partition by their ids, with the URLs of their tenants' endpoints.
func (s *Store) readCallbacks(ctx context.Context, p keyspace.Partition, ids []string) (map[string]api.Callback, error) {
	all, err := ledger.ReadCallbacks(ctx, s.conn.Cmd, p, ids...)
	if err != nil {
		return nil, apiError(err)
	}
	read, of, sees := make(map[string]api.Callback, len(all)), endpoints{s: s, p: p}, auth.SeesPayloads(ctx)
	for _, one := range all {
		if one.URL == "" {
			e, err := of.get(ctx, one.Tenant)
			if err != nil {
				return nil, err
			}
			one.URL = e.URL
		}
		if !sees {
			one.Answer, one.URL = "", webhook.WithoutQuery(one.URL)
		}
		read[one.ID] = one
	}
	return read, nil
}

// findCallback returns a callback, and its partition. Its group, which would tell the partition, may
// have been deleted.
func (s *Store) findCallback(ctx context.Context, id string) (api.Callback, keyspace.Partition, error) {
	if len(id) > 2*api.MaxIDLength || strings.ContainsAny(id, "{}:") {
		return api.Callback{}, keyspace.Partition{}, noCallback("")
	}
	parts := s.space.All()
	found := make([]map[string]api.Callback, len(parts))
	err := concurrently(ctx, len(parts), func(ctx context.Context, i int) (err error) {
		found[i], err = s.readCallbacks(ctx, parts[i], []string{id})
		return err
	})
	if err != nil {
		return api.Callback{}, keyspace.Partition{}, err
	}
	for i, of := range found {
		if one, ok := of[id]; ok && checkTenant(ctx, one.Tenant) == nil {
			return one, parts[i], nil
		}
	}
	return api.Callback{}, keyspace.Partition{}, noCallback(id)
}

func noCallback(id string) error {
	return &api.NotFoundError{Text: strings.TrimSpace("callback "+id) + ": is neither pending nor dead"}
}

// FindCallback returns a callback that is pending or dead. For one of another tenant it returns the same
// error as for an unknown one.
func (s *Store) FindCallback(ctx context.Context, id string) (api.Callback, error) {
	if _, err := caller(ctx); err != nil {
		return api.Callback{}, err
	}
	one, _, err := s.findCallback(ctx, id)
	return one, err
}

// Redeliver makes a dead callback pending again, and lets a pending one be tried at once.
func (s *Store) Redeliver(ctx context.Context, id string) (api.Callback, error) {
	if _, err := caller(ctx); err != nil {
		return api.Callback{}, err
	}
	one, p, err := s.findCallback(ctx, id)
	if err != nil {
		return api.Callback{}, err
	}
	stored, err := ledger.ReadCallbacks(ctx, s.conn.Cmd, p, id)
	if err == nil && len(stored) > 0 && stored[0].State == api.CallbackDead {
		able := endpoints{s: s, p: p}
		var why string
		if why, err = able.refused(ctx, &stored[0]); why != "" {
			return api.Callback{}, fmt.Errorf("callback %s: %s: %w", id, why, api.ErrConflict)
		}
	}
	if err != nil {
		return api.Callback{}, apiError(err)
	}
	_, missing, full, err := ledger.RedeliverCallbacks(ctx, s.conn.Cmd, p, id)
	switch {
	case err != nil:
		return api.Callback{}, apiError(err)
	case full:
		return api.Callback{}, &api.BackpressureError{RetryAfter: 10 * time.Second, Reason: "the endpoint has as many pending callbacks as it may have"}
	case len(missing) > 0:
		return api.Callback{}, noCallback(id)
	}
	switch after, _, err := s.findCallback(ctx, id); {
	case err == nil:
		return after, nil
	case !errors.Is(err, api.ErrNotFound):
		return api.Callback{}, err
	}
	one.State, one.DiedAt = api.CallbackPending, nil // it has been delivered already
	return one, nil
}

// endpoints reads the endpoints of a partition's tenants, each once.
type endpoints struct {
	s    *Store
	p    keyspace.Partition
	read map[string]ledger.Endpoint // by tenant
}

func (a *endpoints) get(ctx context.Context, tenant string) (ledger.Endpoint, error) {
	e, known := a.read[tenant]
	if known {
		return e, nil
	}
	e, err := ledger.ReadEndpoint(ctx, a.s.conn.Cmd, a.p, tenant)
	if err != nil {
		return e, apiError(err)
	}
	if a.read == nil {
		a.read = map[string]ledger.Endpoint{}
	}
	a.read[tenant] = e
	return e, nil
}

// refused says why a callback can't be sent again, "": it can. Not to an endpoint that was deleted or is
// disabled: it would die at once.
func (a *endpoints) refused(ctx context.Context, one *api.Callback) (string, error) {
	if one.URL != "" {
		return "", nil
	}
	e, err := a.get(ctx, one.Tenant)
	switch {
	case err != nil:
		return "", err
	case e.URL == "":
		return "the tenant has no callback endpoint any more", nil
	case e.DisabledAt != nil:
		return "the endpoint is disabled (" + e.DisabledBecause + "): set it again first", nil
	}
	return "", nil
}

// Bounds of one call of RedeliverDead: how many callbacks it makes pending, and how long it looks.
const (
	maxRedelivered = 1000
	redeliverTime  = 5 * time.Second
)

// RedeliverDead makes dead callbacks pending again, of one tenant or ("") of all: up to 1,000 in a call.
// It leaves out those to endpoints that are disabled or deleted.
func (s *Store) RedeliverDead(ctx context.Context, tenant string) (api.Redelivered, error) {
	var sum api.Redelivered
	if _, err := ownTenant(ctx); err != nil {
		return sum, err
	}
	_, tenant, err := callFor(ctx, tenant)
	if err != nil {
		return sum, err
	}
	parts := s.space.All()
	if tenant != "" {
		parts = []keyspace.Partition{s.space.OfTenant(tenant)}
	}
	began := time.Now()
	for i, p := range parts {
		able := endpoints{s: s, p: p}
		for skip, more := int64(0), true; more; {
			ids, err := ledger.CallbackIDs(ctx, s.conn.Cmd, p, "", skip, callbackChunk)
			if err != nil {
				return sum, apiError(err)
			}
			more = len(ids) == callbackChunk
			done, refused, full, err := able.send(ctx, ids, tenant)
			if err != nil {
				return sum, err
			}
			sum.Redelivered, sum.Refused, sum.Full = sum.Redelivered+done, sum.Refused+refused, sum.Full || full
			skip += int64(len(ids)) - done // those are dead no more
			if sum.Redelivered >= maxRedelivered || full && tenant != "" || time.Since(began) > redeliverTime {
				sum.More = more || i < len(parts)-1
				return sum, nil
			}
		}
	}
	return sum, nil
}

// send makes those of some dead callbacks pending that are of a tenant ("": any) and may be sent.
func (a *endpoints) send(ctx context.Context, ids []string, tenant string) (done, refused int64, full bool, err error) {
	found, err := ledger.ReadCallbacks(ctx, a.s.conn.Cmd, a.p, ids...)
	if err != nil {
		return 0, 0, false, apiError(err)
	}
	var send []string
	for i := range found {
		one := &found[i]
		if one.State != api.CallbackDead || tenant != "" && one.Tenant != tenant {
			continue
		}
		why, err := a.refused(ctx, one)
		if err != nil {
			return 0, 0, false, err
		}
		if why == "" {
			send = append(send, one.ID)
		} else {
			refused++
		}
	}
	if len(send) == 0 {
		return 0, refused, false, nil
	}
	done, _, full, err = ledger.RedeliverCallbacks(ctx, a.s.conn.Cmd, a.p, send...)
	return done, refused, full, apiError(err)
}

// CountCallbacks counts the callbacks of all tenants.
func (s *Store) CountCallbacks(ctx context.Context) (all ledger.CallbackCounts, err error) {
	for _, p := range s.space.All() {
		n, err := ledger.CountCallbacks(ctx, s.conn.Cmd, p)
		if err != nil {
			return all, err
		}
		all.Add(n)
	}
	return all, nil
}
