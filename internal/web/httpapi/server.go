// Package httpapi serves the HTTP API: routes, limits, streaming and problem answers, on net/http.
// It checks requests, and stores nothing: its Backend stores the data, and may refuse a call, too.
package httpapi

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/web"
)

// Limits for the time for which a request may use its connection, and for its memory.
const (
	headerTimeout    = 10 * time.Second // longest time to read a request's headers
	slowStart        = 5 * time.Second  // a body may keep the server waiting for so long, whatever it brings
	minRate          = 1 << 10          // bytes a second that a body must then bring
	bodyTimeout      = 60 * time.Second // longest wait for a body that is not streamed
	idleTimeout      = 30 * time.Second // longest wait for a line of a streamed body, or for a client to read an answer
	lingerTimeout    = 3 * time.Second  // longest time to read the rest of a refused body
	keepAliveTimeout = 2 * time.Minute  // longest time that a connection stays open between requests
	storeTimeout     = 30 * time.Second // longest time for the backend to store one request or batch
	abortTimeout     = time.Second      // longest time for aborted requests to end
	maxHTTP2Streams  = 100              // most requests at once on one HTTP/2 connection
	maxHeader        = 64 << 10         // largest size of a request's headers, in bytes
	firstBuffer      = 4 << 10          // size of the first buffer for a body; it doubles while data arrives
	smallBody        = 64 << 10         // up to this size in bytes, no memory is reserved for a body
	maxBodyMemory    = 128 << 20        // largest number of bytes of all bodies in memory together
	bodyMemoryWait   = 10 * time.Second // longest wait for memory for a body; then the answer is 429
)

// Backend is the store behind the API. Its errors wrap those of package api. It must not keep
// references to the values that it returns.
type Backend interface {
	// Submit stores a group, which has an id, with its jobs; readers may see a part of them first.
	// If its idempotency key was used with the same content, it adds only what is missing.
	Submit(ctx context.Context, g *messages.SubmitGroup, opt SubmitOptions) (api.Accepted, error)
	// Append adds up to 500 jobs with up to 512 KiB of lines. With a request id that the group has
	// seen before it adds nothing and answers as before, even if the group is sealed by now. If it
	// returns an *api.KeysTakenError, it has added all jobs that the error does not list.
	Append(ctx context.Context, group string, jobs []messages.Job, opt AppendOptions) error
	// Seal seals a group: it gets no more jobs. With total, the group may still get jobs until it
	// has this many in all.
	Seal(ctx context.Context, group string, total *int64) (api.Accepted, error)
	// Cancel ends a group at once. Its unfinished jobs, also those in flight, become cancelled.
	Cancel(ctx context.Context, group string) (api.Accepted, error)
	// Retry opens the next round of a completed or failed group, with all or chosen failed jobs.
	Retry(ctx context.Context, group string, choice api.RetryChoice) (api.Accepted, error)
	// Pause keeps the jobs of a group from starting; jobs in flight go on. Resume lets jobs start
	// again. A repeated call changes nothing.
	Pause(ctx context.Context, group string) (api.Accepted, error)
	Resume(ctx context.Context, group string) (api.Accepted, error)
	// PauseTenant and PauseType keep the jobs of a tenant or a type from starting; jobs in flight
	// go on. The tenant or type need not exist.
	PauseTenant(ctx context.Context, tenant string) error
	ResumeTenant(ctx context.Context, tenant string) error
	PauseType(ctx context.Context, typ string) error
	ResumeType(ctx context.Context, typ string) error
	// Tenants returns a page of tenants, ordered by id. It includes implicit tenants only if all is
	// true.
	Tenants(ctx context.Context, cursor string, limit int, all bool) (api.TenantList, error)
	// BusiestTenants returns the active tenants with the most unfinished jobs, at most limit.
	BusiestTenants(ctx context.Context, limit int) (api.TenantList, error)
	// TenantHistory returns the figures of the last minutes of a tenant, as far as it was among the busiest.
	TenantHistory(ctx context.Context, id string, minutes int) (api.TenantHistory, error)
	// Tenant returns a tenant that has groups or settings or is paused.
	Tenant(ctx context.Context, id string) (api.Tenant, error)
	// SetTenant replaces a tenant's settings. A pause is no setting, and does not change.
	SetTenant(ctx context.Context, id string, set api.TenantSettings) (api.Tenant, error)
	// PatchTenant changes the settings that the patch has, and no others. Concurrent patches of
	// different settings all take effect.
	PatchTenant(ctx context.Context, id string, patch api.TenantPatch) (api.Tenant, error)
	// PreviewTenant returns a known tenant as PatchTenant would return it, and changes nothing.
	PreviewTenant(ctx context.Context, id string, patch api.TenantPatch) (api.Tenant, error)
	// Limits returns the limits of all jobs together and of types.
	Limits(ctx context.Context) (api.Limits, error)
	// PatchLimits and PatchType change limits, and wait for at most 2 s until the change is in effect
	// in all partitions. If the answer has PendingPartitions, it is stored, and takes effect there
	// when a fetcher runs and reaches them; without a live fetcher there is no wait.
	PatchLimits(ctx context.Context, patch api.LimitsPatch) (api.Limits, error)
	PatchType(ctx context.Context, typ string, patch api.TypePatch) (api.Limits, error)
	// Why returns the reason why the group's next job is waiting.
	Why(ctx context.Context, group string) (api.Why, error)
	// Group returns one group.
	Group(ctx context.Context, id string) (api.Group, error)
	// GroupSummary returns one group. An aggregate that takes more than maxAggregate bytes in the
	// store may be left out; then complete is false.
	GroupSummary(ctx context.Context, id string, maxAggregate int64) (g api.Group, complete bool, err error)
	// Groups returns a page of groups, newest first.
	Groups(ctx context.Context, q messages.ListQuery) (api.GroupList, error)
	// Results calls yield with the result of each reduced job, a JSON object without line breaks,
	// in the order of reduction. It stops at an error of yield and returns it. For an unknown group
	// it returns an error without calling yield.
	Results(ctx context.Context, id string, yield func(line []byte) error) error
	// Failures calls yield with each failed job that q selects: all, in no order, or with a limit a
	// page; next is the cursor of the next page. Its errors are like those of Results.
	Failures(ctx context.Context, id string, q messages.FailureQuery, yield func(api.Failure) error) (next string, err error)
	// FailureSummary counts the failed jobs of a group by code and fingerprint.
	FailureSummary(ctx context.Context, id string) (api.FailureSummary, error)
	// JobMap returns the states of a group's jobs by ordinal, in 1 to 1,000 buckets.
	JobMap(ctx context.Context, id string, buckets int) (api.JobMap, error)
	// Job returns one job, with the reason why it is waiting.
	Job(ctx context.Context, group string, ordinal int64) (api.Job, error)
	// CancelJob ends a job that has not started, as cancelled.
	CancelJob(ctx context.Context, group string, ordinal int64) (api.Job, error)
	// Delete deletes a group and all that is kept of its jobs.
	Delete(ctx context.Context, group string) (api.Deletion, error)
	// Erase deletes what is kept of a tenant's jobs with a key, in some of its groups.
	Erase(ctx context.Context, tenant, key, cursor string) (api.Erasure, error)
	// Jobs returns a page of a group's jobs.
	Jobs(ctx context.Context, group string, q messages.JobQuery) (api.JobList, error)
	// DeadLetters returns a page of dead letters, newest first.
	DeadLetters(ctx context.Context, q messages.DeadLetterQuery) (api.DeadLetterList, error)
	// Rejected returns a page of rejected messages, newest first, with their data if data is true.
	Rejected(ctx context.Context, cursor string, limit int, data bool) (api.RejectedList, error)
	// StartOperation stores an operation with a new id, which a watcher then carries out.
	StartOperation(ctx context.Context, id string, r api.OperationRequest) (api.Operation, error)
	// Operations returns a page of operations, newest first.
	Operations(ctx context.Context, cursor string, limit int) (api.OperationList, error)
	Operation(ctx context.Context, id string) (api.Operation, error)
	// ControlOperation pauses, resumes or cancels an operation.
	ControlOperation(ctx context.Context, id string, do api.OperationCommand) (api.Operation, error)
	// SetCallback stores the callback endpoint of a tenant, and enables it.
	SetCallback(ctx context.Context, tenant string, set api.CallbackSettings) (api.TenantCallback, error)
	Callback(ctx context.Context, tenant string) (api.TenantCallback, error)
	// DeleteCallback deletes the callback endpoint of a tenant. What is pending for it dies.
	DeleteCallback(ctx context.Context, tenant string) error
	CallbackSecret(ctx context.Context, tenant string) (api.CallbackSecret, error)
	RotateCallbackSecret(ctx context.Context, tenant string) (api.CallbackSecret, error)
	// Callbacks returns a page of callbacks: dead ones newest first, pending ones by endpoint, then by their next try.
	Callbacks(ctx context.Context, q api.CallbackQuery) (api.CallbackList, error)
	// FindCallback returns a callback that is pending or dead.
	FindCallback(ctx context.Context, id string) (api.Callback, error)
	// Redeliver makes a dead callback pending again, and lets a pending one be tried at once.
	Redeliver(ctx context.Context, id string) (api.Callback, error)
	// RedeliverDead makes dead callbacks of a tenant ("": all that the caller owns) pending again, up to
	// 1,000 in a call.
	RedeliverDead(ctx context.Context, tenant string) (api.Redelivered, error)
	// ResizeWorker asks a live worker process to have n slots.
	ResizeWorker(ctx context.Context, id string, n int) error
	// Guards returns a page of guards. All guard names in Backend have the form KIND/NAME.
	Guards(ctx context.Context, q guard.Query) (api.GuardList, error)
	// Guard returns a guard with all its members.
	Guard(ctx context.Context, name string) (api.Guard, error)
	// GuardKeys returns keys of a limiter, and whether there may be others.
	GuardKeys(ctx context.Context, name string) (keys []string, more bool, err error)
	GuardHealth(ctx context.Context) api.GuardHealth
	// ControlGuard carries out an operator's action on a member of a guard.
	ControlGuard(ctx context.Context, name, member string, do guard.Action) error
	// Stats returns queue sizes, rates and live processes.
	Stats(ctx context.Context) (api.Stats, error)
	Scale(ctx context.Context, types []string, drain time.Duration) (api.Scale, error)
	// History returns the figures of the last minutes.
	History(ctx context.Context, minutes int) (api.History, error)
	// Audit returns what the watchers found when they last audited their partitions.
	Audit(ctx context.Context) (api.AuditState, error)
}

// Options configures the API.
type Options struct {
	Backend Backend
	Rooms   Rooms // nil: the API has no calls on the waiting room
	Keys    Keys  // nil: callers need no key, and may do everything
	// KeyStore is the store of the keys that admins manage. nil: the calls on keys answer 409.
	KeyStore KeyStore
	KeyRPS   int // most requests that a key may make in a second; 0: any number
	Proxies  auth.Proxies
	// Activity is the activity log, which records changes before they are carried out, except
	// submissions and appends. nil: nothing is recorded, and the API has no call that reads the log.
	Activity Activity
	Log      *slog.Logger             // nil: nothing is logged
	Metrics  *telemetry.ServerMetrics // nil: nothing is measured
	Decoder  messages.Decoder
	Version  string      // shown by GET /
	TLS      *tls.Config // a server made by NewServer speaks https; nil: http
	// UI makes the handler of the paths below /ui/. Requests pass the same checks as those of the
	// API, except for the one of API keys. nil: these paths do not exist.
	UI     func(Shared) http.Handler
	OnlyUI bool // the server has no API, only UI
	// Prefix is the path under which browsers reach the server behind a proxy, such as /bulk; "":
	// they need none. Requests may come with it or without it.
	Prefix string
}

// New returns the API as a handler that accepts every Host header. Use NewServer for a server that
// listens on a loopback address.
func New(opt Options) http.Handler { return newServer(opt) }

// Server is a server of the API. The caller must call Serve, and then Stop.
type Server struct {
	*http.Server
	abort context.CancelFunc
}

// NewServer returns a server of the API with timeouts against slow and hostile clients. addr is the
// address on which it will listen: on a loopback address it serves only requests with a loopback
// Host header, so that no web page can reach it by DNS rebinding.
func NewServer(addr string, opt Options) *Server {
	closed, closing := context.WithCancel(context.Background())
	aborted, abort := context.WithCancel(context.Background())
	s := newServerUntil(closed, aborted, opt)
	s.loopbackOnly = isLoopback(addr)
	srv := &http.Server{
		Addr:              addr,
		Handler:           s,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       keepAliveTimeout,
		MaxHeaderBytes:    maxHeader,
		TLSConfig:         opt.TLS,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxHTTP2Streams},
		ErrorLog:          slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
	}
	srv.RegisterOnShutdown(closing)
	return &Server{srv, abort}
}

// Serve serves the connections of a listener until Stop, over TLS if Options.TLS is set. It then
// returns http.ErrServerClosed.
func (s *Server) Serve(l net.Listener) error {
	if s.TLSConfig != nil {
		return s.ServeTLS(l, "", "")
	}
	return s.Server.Serve(l)
}

// Stop ends the server. It ends event streams at once, and answers streamed appends with a request
// to continue later. Other requests may go on for grace; what they then still write to the backend
// is aborted, and they are answered with 503. When Stop returns, no request is being served, except
// those that do not end within abortTimeout.
func (s *Server) Stop(grace time.Duration) {
	shutdown := func(wait time.Duration) error {
		ctx, cancel := context.WithTimeout(context.Background(), wait)
		defer cancel()
		return s.Shutdown(ctx)
	}
	err := shutdown(grace)
	s.abort()
	if err != nil && shutdown(abortTimeout) != nil {
		_ = s.Close() // nothing can be done about an error
	}
}

// server serves the API.
type server struct {
	Shared
	mux          *http.ServeMux
	csrf         http.CrossOriginProtection
	loopbackOnly bool
	bodyMemory   *bodyMemory
	streams      *web.Streams
	groups       *web.Feed[*groupEvents]
	aborted      context.Context //nolint:containedctx // ends when the grace period is over; it is not a call's
}

func newServer(opt Options) *server {
	return newServerUntil(context.Background(), context.Background(), opt)
}

func newServerUntil(closing, aborted context.Context, opt Options) *server {
	s := &server{
		Shared:     Share(opt),
		mux:        http.NewServeMux(),
		bodyMemory: newBodyMemory(),
		streams:    web.NewStreams(maxStreams),
		groups:     web.NewFeed[*groupEvents](200*time.Millisecond, time.Second),
		aborted:    aborted,
	}
	s.Closing, s.callers = closing, newCallers(opt.KeyRPS)
	routes := web.Routes{}
	for _, rt := range s.routes() {
		if !opt.OnlyUI || rt.path == indexPath {
			routes.Add(rt.method, rt.path, rt.stream, s.authorized(rt, onlyQuery(rt.query, rt.serve)))
		}
	}
	routes.Register(s.mux, s.fail)
	if opt.UI != nil {
		s.mux.Handle(uiRoot, withAnswer(opt.UI(s.Shared)))
	}
	return s
}

// write calls do, which writes to the backend. do continues when the client disconnects, so that no
// write is left half done. Its context ends after storeTimeout, or when the grace period of a
// stopping server is over.
func (s *server) write(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
	defer cancel()
	defer context.AfterFunc(s.aborted, cancel)()
	err := do(ctx)
	if err != nil && s.aborted.Err() != nil {
		return errShutdown
	}
	return err
}

func (s *server) routes() []route {
	const get, post, put, patch = http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch
	const group, tenant = "/v1/groups/{id}", "/v1/tenants/{id}"
	page := []string{"cursor", "limit"}
	all := []route{
		{method: get, path: indexPath, scope: open, serve: s.getIndex},
		{method: get, path: "/openapi.yaml", scope: open, serve: getOpenAPI},
		{method: post, path: "/v1/groups", scope: auth.Submit, object: tenantInBody, serve: s.submitGroup},
		{method: get, path: "/v1/groups", scope: auth.Read, object: ownInList, serve: show(s.listGroups),
			query: append(groupFilters, page...)},
		{method: get, path: group, scope: auth.Read, object: groupInPath, serve: showByID(s.getGroup)},
		{method: http.MethodDelete, path: group, scope: auth.Control, object: groupInPath, serve: showByID(s.deleteGroup)},
		{method: post, path: group + "/jobs", scope: auth.Submit, object: groupInPath, serve: s.appendJobs,
			query: tableQuery, stream: true},
		{method: get, path: group + "/jobs", scope: auth.Read, object: groupInPath, serve: show(listJobs(s.Backend)),
			query: append([]string{"state", "key", "code"}, page...)},
		{method: get, path: group + "/jobs/{ordinal}", scope: auth.Read, object: groupInPath, serve: show(s.getJob)},
		{method: post, path: group + "/jobs/{ordinal}/cancel", scope: auth.Control, object: groupInPath, serve: s.cancelJob},
		{method: get, path: group + "/why", scope: auth.Read, object: groupInPath, serve: showByID(s.Backend.Why)},
		{method: get, path: group + "/results", scope: auth.Read, object: groupInPath, serve: s.streamResults,
			stream: true},
		{method: get, path: group + "/failures", scope: auth.Read, object: groupInPath, serve: s.streamFailures,
			stream: true, query: append([]string{"payload", "code"}, page...)},
		{method: get, path: group + "/failures/summary", scope: auth.Read, object: groupInPath,
			serve: showByID(s.Backend.FailureSummary)},
		{method: get, path: group + "/map", scope: auth.Read, object: groupInPath, serve: show(getMap(s.Backend)),
			query: []string{"buckets"}},
		{method: get, path: group + "/events", scope: auth.Read, object: groupInPath, serve: s.watchGroup,
			stream: true},
		{method: get, path: "/v1/tenants", scope: auth.Read, object: ownInList, serve: show(s.listTenants),
			query: append([]string{"groups", "sort"}, page...)},
		{method: get, path: tenant, scope: auth.Read, object: tenantInPath, serve: showByID(s.Backend.Tenant)},
		{method: get, path: tenant + "/history", scope: auth.Read, object: tenantInPath,
			serve: show(getTenantHistory(s.Backend)), query: []string{"minutes"}},
		{method: post, path: tenant + "/erase", scope: auth.Control, object: tenantInPath, serve: show(s.erase)},
		{method: put, path: tenant, scope: auth.Tenants, object: tenantInPath,
			serve: show(changed(s, "id", decodeSettings, setTenant(s.Backend), jsonType))},
		{method: patch, path: tenant, scope: auth.Tenants, object: tenantInPath,
			serve: show(changed(s, "id", decodeSettings, s.Backend.PatchTenant, patchTypes...))},
		{method: get, path: "/v1/limits", scope: auth.ReadSystem, object: noTenant, serve: show(getLimits(s.Backend))},
		{method: patch, path: "/v1/limits", scope: auth.System, object: noTenant,
			serve: limitsHandler(changed(s, "", decodeLimits, patchLimits(s.Backend), patchTypes...))},
		{method: patch, path: "/v1/types/{type}", scope: auth.System, object: noTenant,
			serve: limitsHandler(changed(s, "type", decodeType, s.Backend.PatchType, patchTypes...))},
		{method: get, path: "/v1/dead-letters", scope: auth.Read, object: ownInList,
			serve: show(s.listDeadLetters),
			query: append([]string{"tenant", "group", "type", "code", "since"}, page...)},
		{method: get, path: "/v1/rejected", scope: auth.ReadSystem, object: noTenant,
			serve: show(listRejected(s.Backend)), query: append([]string{"data"}, page...)},
		{method: put, path: "/v1/workers/{id}", scope: auth.System, object: noTenant,
			serve: commandOn(s, "id", readWorkers, resizeWorker(s.Backend))},
		{method: get, path: "/v1/guards", scope: auth.ReadSystem, object: noTenant, serve: show(listGuards(s.Backend)),
			query: append([]string{"kind"}, page...)},
		{method: get, path: "/v1/guards/{name}", scope: auth.ReadSystem, object: noTenant,
			serve: show(getGuard(s.Backend)), query: []string{"keys"}},
		{method: get, path: "/v1/guards/health", scope: auth.ReadSystem, object: noTenant,
			serve: show(func(r *http.Request) (api.GuardHealth, error) { return s.Backend.GuardHealth(r.Context()), nil })},
		{method: get, path: "/v1/stats", scope: auth.ReadMetrics, object: noTenant, serve: show(s.getStats)},
		{method: get, path: "/v1/scale", scope: auth.ReadMetrics, object: noTenant, serve: show(getScale(s.Backend)),
			query: []string{"type", "drain"}},
		{method: get, path: "/v1/history", scope: auth.ReadMetrics, object: noTenant,
			serve: show(getHistory(s.Backend)), query: []string{"minutes"}},
		{method: get, path: "/v1/audit", scope: auth.ReadSystem, object: noTenant, serve: show(getAudit(s.Backend))},
	}
	for name, serve := range map[string]web.Handler{
		"seal":   commandOn(s, "id", readTotal, s.sealGroup),
		"cancel": s.groupCommand(s.Backend.Cancel),
		"retry":  commandOn(s, "id", readRetryChoice, retryGroup(s.Backend)),
		"pause":  s.groupCommand(s.Backend.Pause),
		"resume": s.groupCommand(s.Backend.Resume),
	} {
		all = append(all, route{
			method: post, path: group + "/" + name, scope: auth.Control, object: groupInPath, serve: serve,
		})
	}
	for _, do := range guard.Actions {
		all = append(all, route{
			method: post, path: "/v1/guards/{name}/members/{id}/" + string(do), scope: auth.System, object: noTenant,
			serve: controlGuard(s, do),
		})
	}
	for _, kind := range []struct {
		root, param   string
		scope         auth.Scope
		object        object
		pause, resume func(context.Context, string) error
	}{
		{"/v1/tenants/", "id", auth.Tenants, tenantInPath, s.Backend.PauseTenant, s.Backend.ResumeTenant},
		{"/v1/types/", "type", auth.System, noTenant, s.Backend.PauseType, s.Backend.ResumeType},
	} {
		path := kind.root + "{" + kind.param + "}"
		for name, serve := range map[string]web.Handler{
			"/pause":  s.pauseTenantOrType(kind.root, kind.param, true, kind.pause),
			"/resume": s.pauseTenantOrType(kind.root, kind.param, false, kind.resume),
		} {
			all = append(all, route{
				method: post, path: path + name, scope: kind.scope, object: kind.object, serve: serve,
			})
		}
	}
	all = append(all, s.operationRoutes()...)
	all = append(all, s.callbackRoutes()...)
	all = append(all, keyCalls{s}.routes()...)
	if s.Activity != nil {
		all = append(all, route{
			method: get, path: "/v1/activity", scope: auth.System, object: noTenant,
			serve: show(listActivity(s.Activity)), query: append([]string{"actor", "tenant", "since"}, page...),
		})
	}
	if s.Rooms != nil {
		all = append(all, roomCalls{s}.routes()...)
	}
	return all
}
