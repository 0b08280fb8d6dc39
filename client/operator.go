package client

import (
	"context"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// PauseTenant stops a tenant: no more of its jobs start, and running jobs finish. The
// tenant need not exist yet.
func (a *API) PauseTenant(ctx context.Context, tenant string) (api.Paused, error) {
	return doJSON[api.Paused](ctx, a, callOn("pause", http.MethodPost, "tenant", tenant, "/pause"))
}

// ResumeTenant undoes PauseTenant.
func (a *API) ResumeTenant(ctx context.Context, tenant string) (api.Paused, error) {
	return doJSON[api.Paused](ctx, a, callOn("resume", http.MethodPost, "tenant", tenant, "/resume"))
}

// PauseType stops a job type: no more of its jobs start, and running jobs finish. The
// type need not be known yet.
func (a *API) PauseType(ctx context.Context, typ string) (api.Paused, error) {
	return doJSON[api.Paused](ctx, a, callOn("pause", http.MethodPost, "type", typ, "/pause"))
}

// ResumeType undoes PauseType.
func (a *API) ResumeType(ctx context.Context, typ string) (api.Paused, error) {
	return doJSON[api.Paused](ctx, a, callOn("resume", http.MethodPost, "type", typ, "/resume"))
}

// TenantFilter says which tenants [API.Tenants] leaves out.
type TenantFilter struct {
	// Groups also lists the implicit tenants: a group that was submitted without a tenant is its
	// own tenant.
	Groups bool
}

// Tenants iterates over the tenants that have groups or settings or are paused, ordered by id, and
// fetches one page after the other. An error ends the iteration.
func (a *API) Tenants(ctx context.Context, f TenantFilter) iter.Seq2[api.Tenant, error] {
	query := url.Values{"limit": {"200"}}
	if f.Groups {
		query.Set("groups", "true")
	}
	return pages(ctx, a, "tenants", query,
		func(l api.TenantList) ([]api.Tenant, string) { return l.Tenants, l.Cursor })
}

// BusiestTenants returns the active tenants with the most unfinished jobs, at most 100, as they
// were at AsOf or later, at most about 30 s ago. AsOf is nil if no watcher has looked yet. With an
// API key of one tenant, the list has only this tenant, as it is now, if it exists.
func (a *API) BusiestTenants(ctx context.Context) (api.TenantList, error) {
	return doJSON[api.TenantList](ctx, a, apiCall{
		action: "list busiest tenants", method: http.MethodGet, path: "/v1/tenants",
		query: url.Values{"sort": {"backlog"}},
	})
}

// History returns throughput and queues of the last minutes. minutes is 15 to 1,440.
func (a *API) History(ctx context.Context, minutes int) (api.History, error) {
	return doJSON[api.History](ctx, a, apiCall{
		action: "get history", method: http.MethodGet, path: "/v1/history",
		query: url.Values{"minutes": {strconv.Itoa(minutes)}},
	})
}

// Audit returns what the watchers have found when they last audited their partitions.
func (a *API) Audit(ctx context.Context) (api.AuditState, error) {
	return doJSON[api.AuditState](ctx, a,
		apiCall{action: "get audit", method: http.MethodGet, path: "/v1/audit"})
}

// Tenant returns a tenant's settings, and its queue and limits as they are now.
func (a *API) Tenant(ctx context.Context, tenant string) (api.Tenant, error) {
	return doJSON[api.Tenant](ctx, a, callOn("get", http.MethodGet, "tenant", tenant, ""))
}

// TenantHistory returns a tenant's load in the last minutes, 15 to 60, as far as it was one of the
// busiest tenants.
func (a *API) TenantHistory(ctx context.Context, tenant string, minutes int) (api.TenantHistory, error) {
	c := callOn("get history of", http.MethodGet, "tenant", tenant, "/history")
	c.query = url.Values{"minutes": {strconv.Itoa(minutes)}}
	return doJSON[api.TenantHistory](ctx, a, c)
}

// SetTenant replaces all settings of a tenant: a nil field of set means the default. A pause is no
// setting, so a paused tenant stays paused. The next admission uses the new settings.
func (a *API) SetTenant(ctx context.Context, tenant string, set api.TenantSettings) (api.Tenant, error) {
	return doJSON[api.Tenant](ctx, a, putOn("set", "tenant", tenant, set))
}

// PatchTenant changes the settings of a tenant that the patch has; the others stay as they are.
// Patches of different settings at the same time all have their effect.
func (a *API) PatchTenant(ctx context.Context, tenant string, patch api.TenantPatch) (api.Tenant, error) {
	return doJSON[api.Tenant](ctx, a, callOn("change", http.MethodPatch, "tenant", tenant, "").withPatch(patch))
}

// Limits returns what limits the start of jobs: the limits of all jobs together, and those of types.
func (a *API) Limits(ctx context.Context) (api.Limits, error) {
	return doJSON[api.Limits](ctx, a, apiCall{action: "get limits", method: http.MethodGet, path: "/v1/limits"})
}

// PatchLimits changes the global limits that the patch has; the others stay as they are. If the
// answer has PendingPartitions, the change is stored, and takes effect there when a fetcher runs and
// reaches them. The same call may be repeated. If the API asks for keys, it must be that of an
// admin.
func (a *API) PatchLimits(ctx context.Context, patch api.LimitsPatch) (api.Limits, error) {
	c := apiCall{action: "change limits", method: http.MethodPatch, path: "/v1/limits"}
	return doJSON[api.Limits](ctx, a, c.withPatch(patch))
}

// PatchType changes the limits of a job type over all processes, like PatchLimits. The type need not
// be known yet; at most api.MaxLimitedTypes may have limits.
func (a *API) PatchType(ctx context.Context, typ string, patch api.TypePatch) (api.Limits, error) {
	return doJSON[api.Limits](ctx, a, callOn("change", http.MethodPatch, "type", typ, "").withPatch(patch))
}

// ResizeWorker asks a worker process to have n slots from now on, 0 to api.MaxWorkers; without
// slots it starts no job. Stats names the processes, and shows the new number within a second. A
// process that starts again begins with its configured number.
func (a *API) ResizeWorker(ctx context.Context, worker string, n int) (api.PoolSize, error) {
	return doJSON[api.PoolSize](ctx, a, putOn("resize", "worker", worker, map[string]int{"workers": n}))
}

// putOn returns a PUT call with a JSON body on one object, such as a tenant. The body replaces the
// object.
func putOn(verb, kind, id string, body any) apiCall {
	return callOn(verb, http.MethodPut, kind, id, "").withBody(body)
}

// Stats returns queue sizes, rates, and the live processes.
func (a *API) Stats(ctx context.Context) (api.Stats, error) {
	return doJSON[api.Stats](ctx, a,
		apiCall{action: "get stats", method: http.MethodGet, path: "/v1/stats"})
}

// Scale says how many slots the jobs of a type, or of several together, could use, so that those which
// wait end within the time drain; 0: api.DefaultDrain.
func (a *API) Scale(ctx context.Context, drain time.Duration, types ...string) (api.Scale, error) {
	query := url.Values{"type": {strings.Join(types, ",")}}
	if drain > 0 {
		query.Set("drain", drain.String())
	}
	return doJSON[api.Scale](ctx, a,
		apiCall{action: "get scale", method: http.MethodGet, path: "/v1/scale", query: query})
}

// DeadLetterFilter selects the dead letters that match all fields. An empty field matches every
// dead letter.
type DeadLetterFilter struct {
	Tenant, Group, Type, Code string
	Since                     time.Time // the oldest time; zero: none
}

// DeadLetters iterates over dead letters, newest first, and fetches one page after the other. An
// error ends the iteration.
func (a *API) DeadLetters(ctx context.Context, f DeadLetterFilter) iter.Seq2[api.DeadLetter, error] {
	query := url.Values{"limit": {"200"}}
	for name, value := range map[string]string{"tenant": f.Tenant, "group": f.Group, "type": f.Type, "code": f.Code} {
		if value != "" {
			query.Set(name, value)
		}
	}
	if !f.Since.IsZero() {
		query.Set("since", f.Since.UTC().Format(time.RFC3339Nano))
	}
	return pages(ctx, a, "dead letters", query,
		func(l api.DeadLetterList) ([]api.DeadLetter, string) { return l.DeadLetters, l.Cursor })
}

// ActivityQuery selects a page of the activity log. An empty Actor or Tenant matches every entry.
type ActivityQuery struct {
	Actor  string    // the id of a key, or cli:USER
	Tenant string    // of the key
	Since  time.Time // the oldest time; zero: none
	Cursor string    // ActivityPage.Cursor of the page before; "" for the first page
	Limit  int       // 1 to 1,000; 0 for the server's default
}

// ActivityPage is a page of the activity log, newest first. Its Cursor is "" on the last page.
type ActivityPage = api.ActivityList

// Activity returns a page of the log of who changed what. If the API asks for keys, it must be that
// of an admin. A page may have fewer entries than q.Limit, even none, although more pages follow.
func (a *API) Activity(ctx context.Context, q ActivityQuery) (ActivityPage, error) {
	c := apiCall{action: "list the activity log", method: http.MethodGet, path: "/v1/activity", query: url.Values{}}
	for name, value := range map[string]string{"actor": q.Actor, "tenant": q.Tenant, "cursor": q.Cursor} {
		if value != "" {
			c.query.Set(name, value)
		}
	}
	if !q.Since.IsZero() {
		c.query.Set("since", q.Since.UTC().Format(time.RFC3339Nano))
	}
	if q.Limit != 0 {
		c.query.Set("limit", strconv.Itoa(q.Limit))
	}
	return doJSON[ActivityPage](ctx, a, c)
}

// Keys iterates over the API keys in Redis, the oldest first. It needs the key of an admin. An
// error ends the iteration.
func (a *API) Keys(ctx context.Context) iter.Seq2[api.Key, error] {
	return pages(ctx, a, "keys", url.Values{"limit": {"200"}},
		func(l api.KeyList) ([]api.Key, string) { return l.Keys, l.Cursor })
}

// CreateKey creates an API key. Only its answer ever shows the secret. The client repeats the call
// only after status 429. When it is unknown whether an attempt had its effect, CreateKey returns
// the error; Keys may then show a new key whose secret nobody knows.
func (a *API) CreateKey(ctx context.Context, r api.KeyRequest) (api.NewKey, error) {
	c := apiCall{action: "create key", method: http.MethodPost, path: "/v1/keys", onlyIfRefused: true}.withBody(r)
	return doJSON[api.NewKey](ctx, a, c)
}

// RevokeKey deletes an API key. All processes refuse it within ten seconds.
func (a *API) RevokeKey(ctx context.Context, id string) (api.KeyRevoked, error) {
	return doJSON[api.KeyRevoked](ctx, a, callOn("revoke", http.MethodDelete, "key", id, ""))
}

// RejectedQuery selects a page of rejected messages.
type RejectedQuery struct {
	Cursor string // RejectedPage.Cursor of the page before; "" for the first page
	Limit  int    // 1 to 1,000; 0 for the server's default
	Data   bool   // the messages have their data
}

// RejectedPage is a page of rejected messages, newest first. Its Cursor is "" on the last page.
type RejectedPage = api.RejectedList

// Rejected returns a page of the messages that ingest could not accept, with the reasons. A page
// may have fewer messages than q.Limit although more pages follow.
func (a *API) Rejected(ctx context.Context, q RejectedQuery) (RejectedPage, error) {
	c := apiCall{action: "list rejected messages", method: http.MethodGet, path: "/v1/rejected", query: url.Values{}}
	if q.Cursor != "" {
		c.query.Set("cursor", q.Cursor)
	}
	if q.Limit != 0 {
		c.query.Set("limit", strconv.Itoa(q.Limit))
	}
	if q.Data {
		c.query.Set("data", "true")
	}
	return doJSON[RejectedPage](ctx, a, c)
}

// Guards iterates over the guards of a kind, or with "" over the guards of all kinds except key, in
// no order. A guard may come twice, and one made meanwhile not at all. An error ends the iteration.
func (a *API) Guards(ctx context.Context, kind string) iter.Seq2[api.GuardSummary, error] {
	query := url.Values{"limit": {"1000"}}
	if kind != "" {
		query.Set("kind", kind)
	}
	return pages(ctx, a, "guards", query,
		func(l api.GuardList) ([]api.GuardSummary, string) { return l.Guards, l.Cursor })
}

// Guard returns a guard with all its members. It is named KIND/NAME; a NAME alone is that of a pool.
func (a *API) Guard(ctx context.Context, name string) (api.Guard, error) {
	return doJSON[api.Guard](ctx, a, guardCall("get", http.MethodGet, name, ""))
}

// LimiterKeys returns a limiter, named limiter/NAME, with at most 100 of its keys.
func (a *API) LimiterKeys(ctx context.Context, name string) (api.Guard, error) {
	return doJSON[api.Guard](ctx, a, guardCall("get", http.MethodGet, name, "?keys=true"))
}

// GuardHealth returns how the process that serves the API reaches the guards.
func (a *API) GuardHealth(ctx context.Context) (api.GuardHealth, error) {
	return doJSON[api.GuardHealth](ctx, a,
		apiCall{action: "get the health of guards", method: http.MethodGet, path: "/v1/guards/health"})
}

// ControlGuard carries out an action on one member of a guard. action is disable (no new lease),
// enable, open or close (its circuit breaker), or take-back (its leases). A guard that is not a
// pool has one member, "1". The call may be repeated, as the client does itself; then open begins
// the breaker's time again, and take-back also ends leases that were granted since.
func (a *API) ControlGuard(ctx context.Context, name, member, action string) (api.GuardAction, error) {
	c := guardCall(action+" member "+member+" of", http.MethodPost, name, "/members/"+member+"/"+action)
	switch {
	case c.invalid != nil:
	case !api.ValidID(member):
		c.invalid = fmt.Errorf("member id %q: must "+api.IDRule, member)
	case !api.ValidID(action):
		c.invalid = fmt.Errorf("action %q: must be disable, enable, open, close or take-back", action)
	}
	return doJSON[api.GuardAction](ctx, a, c)
}

// guardCall returns a call on one guard. name is NAME, KIND/NAME or key/NAME/KEY, and is one
// segment of the path; rest follows it. A name with a part that is no valid id makes the call
// invalid; whether there is such a KIND is for the server to say.
func guardCall(verb, method, name, rest string) apiCall {
	c := apiCall{
		action: verb + " guard " + name, method: method, path: "/v1/guards/" + url.PathEscape(name) + rest,
	}
	for part := range strings.SplitSeq(name, "/") {
		if !api.ValidID(part) {
			c.invalid = fmt.Errorf("guard %q: must be NAME or KIND/NAME, where KIND is pool, breaker, lock, semaphore, "+
				"limiter or key (key/NAME/KEY)", name)
		}
	}
	return c
}

// RoomEvents iterates over the events of the waiting room, in no particular order. An event that changes
// meanwhile may come twice or not at all. An error ends the iteration. A server without API keys
// answers calls on the waiting room on loopback only.
func (a *API) RoomEvents(ctx context.Context) iter.Seq2[api.RoomEvent, error] {
	return pages(ctx, a, "events", url.Values{"limit": {"200"}},
		func(l api.RoomEventList) ([]api.RoomEvent, string) { return l.Events, l.Cursor })
}

// RoomEvent returns an event: its settings, its queue and its slots.
func (a *API) RoomEvent(ctx context.Context, event string) (api.RoomEvent, error) {
	return doJSON[api.RoomEvent](ctx, a, callOn("get", http.MethodGet, "event", event, ""))
}

// SetRoomEvent creates an event, or replaces its settings: a missing one gets its default, only a
// missing mode stays as it is. With a rev, the call fails with status 412 if the event has another
// rev; 0 means any.
func (a *API) SetRoomEvent(
	ctx context.Context, event string, set api.EventSettings, rev int64,
) (api.RoomEvent, error) {
	c := putOn("set", "event", event, set)
	if rev != 0 {
		c.header = http.Header{"If-Match": {`"` + strconv.FormatInt(rev, 10) + `"`}}
	}
	return doJSON[api.RoomEvent](ctx, a, c)
}

// PauseRoomEvent stops promotions; users still enter the queue. It fails with status 409 if the
// event is closed or sold out.
func (a *API) PauseRoomEvent(ctx context.Context, event string) (api.RoomEvent, error) {
	return doJSON[api.RoomEvent](ctx, a, callOn("pause", http.MethodPost, "event", event, "/pause"))
}

// ResumeRoomEvent undoes PauseRoomEvent and CloseRoomEvent. Users whose queue was dissolved have to
// enter again.
func (a *API) ResumeRoomEvent(ctx context.Context, event string) (api.RoomEvent, error) {
	return doJSON[api.RoomEvent](ctx, a, callOn("resume", http.MethodPost, "event", event, "/resume"))
}

// CloseRoomEvent ends an event: nobody can enter, and the queue is dissolved. Users inside
// keep their slots. The event is deleted after its retention.
func (a *API) CloseRoomEvent(ctx context.Context, event string) (api.RoomEvent, error) {
	return doJSON[api.RoomEvent](ctx, a, callOn("close", http.MethodPost, "event", event, "/close"))
}

// Recalibrate sets the capacity of an event, the seats that are left, or both, while users wait.
// Nobody loses a slot.
func (a *API) Recalibrate(ctx context.Context, event string, to api.Recalibration) (api.RoomEvent, error) {
	c := callOn("recalibrate", http.MethodPost, "event", event, "/recalibrate")
	return doJSON[api.RoomEvent](ctx, a, c.withBody(to))
}

// DeleteRoomEvent closes an event and deletes it without its retention. Users inside keep their
// slots; the event is deleted when the last one has gone.
func (a *API) DeleteRoomEvent(ctx context.Context, event string) (api.EventRemoval, error) {
	return doJSON[api.EventRemoval](ctx, a, callOn("delete", http.MethodDelete, "event", event, ""))
}

// RemoveUser removes a user from an event, in any state, and ends the user's stream. Removed is
// false in the answer if the event does not have the user, also because an attempt whose answer was
// lost has removed the user.
func (a *API) RemoveUser(ctx context.Context, event, user string) (api.UserRemoval, error) {
	c := callOn("remove a user of", http.MethodDelete, "event", event, "/users/"+user)
	if !api.ValidID(user) && c.invalid == nil {
		c.invalid = fmt.Errorf("user id %q: must "+api.IDRule, user)
	}
	return doJSON[api.UserRemoval](ctx, a, c)
}

// VerifyEntryToken says whether the bearer of an entry token may be inside now. It knows what an
// offline check does not: whether the user has left, completed or was removed. A token that the
// brokers have not signed is an *Error with status 422.
func (a *API) VerifyEntryToken(ctx context.Context, token string) (api.EntryTokenState, error) {
	return doJSON[api.EntryTokenState](ctx, a, onToken("verify", api.EntryTokenCall{Token: token}))
}

// RenewEntryToken returns a token of the same session with a later expiry. It fails with status 409
// if the user is gone, or the session has reached the event's max_session.
func (a *API) RenewEntryToken(ctx context.Context, token string) (api.EntryToken, error) {
	return doJSON[api.EntryToken](ctx, a, onToken("renew", api.EntryTokenCall{Token: token}))
}

// CompleteEntryToken ends the entry of a token's user and gives the slot back. With sold, it also
// takes a seat from the stock. Done is false in the answer if the entry had ended before. The
// client repeats the call only if the server has certainly not carried it out, because a second
// attempt would answer false. So after an error the entry may have ended.
func (a *API) CompleteEntryToken(ctx context.Context, token string, sold bool) (api.EntryTokenDone, error) {
	c := onToken("complete", api.EntryTokenCall{Token: token, Sold: sold})
	c.onlyIfRefused = true
	return doJSON[api.EntryTokenDone](ctx, a, c)
}

// onToken returns a call on an entry token. The token is not part of its error messages.
func onToken(verb string, body api.EntryTokenCall) apiCall {
	c := apiCall{action: verb + " entry token", method: http.MethodPost, path: "/v1/entry-tokens/" + verb}
	return c.withBody(body)
}

// StartOperation changes all groups, or dead letters, that a filter matches; Operation shows how far
// it is. The client repeats the call only after status 429: an operation that was started twice
// changes nothing the second time, but counts what it skips.
func (a *API) StartOperation(ctx context.Context, r api.OperationRequest) (api.Operation, error) {
	c := apiCall{action: "start operation", method: http.MethodPost, path: "/v1/operations", onlyIfRefused: true}
	return doJSON[api.Operation](ctx, a, c.withBody(r))
}

// Operations iterates over operations, newest first. An error ends the iteration.
func (a *API) Operations(ctx context.Context) iter.Seq2[api.Operation, error] {
	return pages(ctx, a, "operations", url.Values{"limit": {"200"}},
		func(l api.OperationList) ([]api.Operation, string) { return l.Operations, l.Cursor })
}

// Operation returns an operation.
func (a *API) Operation(ctx context.Context, id string) (api.Operation, error) {
	return doJSON[api.Operation](ctx, a, callOn("get", http.MethodGet, "operation", id, ""))
}

// ControlOperation pauses, resumes or cancels an operation.
func (a *API) ControlOperation(ctx context.Context, id string, do api.OperationCommand) (api.Operation, error) {
	return doJSON[api.Operation](ctx, a, callOn(string(do), http.MethodPost, "operation", id, "/"+string(do)))
}
