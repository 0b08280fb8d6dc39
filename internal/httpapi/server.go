// Package httpapi is the HTTP API: routes, limits, streaming and problem answers on net/http. It
// keeps nothing itself; what is stored and why something is refused is its Backend's.
package httpapi

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// Limits of what one connection or process spends on a request.
const (
	headerTimeout    = 10 * time.Second // to read a request's headers
	bodyTimeout      = 60 * time.Second // to read a body that is not streamed, or to give it up
	idleTimeout      = 30 * time.Second // of silence in a streamed body, or of a client that does not read
	lingerTimeout    = 3 * time.Second  // for what a client still sends of a body that was refused
	keepAliveTimeout = 2 * time.Minute  // of a connection between requests
	storeTimeout     = 30 * time.Second // for the backend to store one request or batch
	maxHeader        = 64 << 10         // bytes
	smallBody        = 64 << 10         // bytes; smaller bodies are not counted into bodyMemory
	maxBodyMemory    = 128 << 20        // bytes of bodies that are read whole, held at once
	bodyMemoryWait   = 10 * time.Second // for a share of bodyMemory, before a 429
)

// Backend is what the API needs from the store. It returns the sentinels of package api, wrapped,
// and keeps no part of what else it returns.
type Backend interface {
	// Submit stores a group with its jobs, all or nothing as seen by the caller. A repeated
	// idempotency key answers as it did the first time. The group always has an id.
	Submit(ctx context.Context, g *messages.SubmitGroup, opt SubmitOptions) (api.Accepted, error)
	// Append adds at most 500 jobs, their lines at most 512 KiB together. A request id that the
	// group has seen before adds nothing and succeeds, even when the group has been sealed since.
	Append(ctx context.Context, group string, jobs []messages.Job, opt AppendOptions) error
	// Seal says that no more jobs come, or none after total.
	Seal(ctx context.Context, group string, total *int64) (api.Accepted, error)
	// Cancel ends a group at once.
	Cancel(ctx context.Context, group string) (api.Accepted, error)
	// Retry opens the next round of an ended group.
	Retry(ctx context.Context, group string) (api.Accepted, error)
	// Pause lets nothing of a group start any more; Resume undoes it. Both may be repeated.
	Pause(ctx context.Context, group string) (api.Accepted, error)
	Resume(ctx context.Context, group string) (api.Accepted, error)
	// PauseTenant and PauseType do the same with all groups of a tenant and all jobs of a type,
	// known or not.
	PauseTenant(ctx context.Context, tenant string) error
	ResumeTenant(ctx context.Context, tenant string) error
	PauseType(ctx context.Context, typ string) error
	ResumeType(ctx context.Context, typ string) error
	// Tenants lists tenants by id, a page at a time.
	Tenants(ctx context.Context, cursor string, limit int) (api.TenantList, error)
	// Tenant shows a tenant that has groups or settings.
	Tenant(ctx context.Context, id string) (api.Tenant, error)
	// SetTenant replaces a tenant's settings.
	SetTenant(ctx context.Context, id string, set api.TenantSettings) (api.Tenant, error)
	// Why says what the next job of a group waits for.
	Why(ctx context.Context, group string) (api.Why, error)
	// Group shows one group.
	Group(ctx context.Context, id string) (api.Group, error)
	// Groups lists groups, newest first, a page at a time.
	Groups(ctx context.Context, q ListQuery) (api.GroupList, error)
	// Results calls yield with each result, a JSON object without newlines. It stops at yield's
	// error and returns it; an unknown group is refused before the first call.
	Results(ctx context.Context, id string, yield func(line []byte) error) error
	// Failures calls yield with each failed job, on the terms of Results.
	Failures(ctx context.Context, id string, yield func(api.Failure) error) error
	// Job shows one job, and why it is waiting.
	Job(ctx context.Context, group string, ordinal int64) (api.Job, error)
	// DeadLetters lists dead letters, newest first, a page at a time.
	DeadLetters(ctx context.Context, cursor string, limit int) (api.DeadLetterList, error)
	// Stats sums up what waits and runs.
	Stats(ctx context.Context) (api.Stats, error)
}

// SubmitOptions is what a submission carries beside its body.
type SubmitOptions struct {
	GeneratedID    bool   // the client did not name the group
	IdempotencyKey string // "" when none; else 1 to 255 bytes of visible ASCII: hash it before it enters a Redis key
	TraceParent    string // W3C traceparent of the request, "" when none or malformed
}

// AppendOptions is what a batch of appended jobs carries beside them.
type AppendOptions struct {
	RequestID   string // an id, unique per group: the same one brings the same jobs
	TraceParent string // W3C traceparent of the request, "" when none or malformed
}

// ListQuery selects a page of groups; zero values select everything.
type ListQuery struct {
	Tenant string
	Status api.Status
	Cursor string
	Limit  int // 1 to 1,000
}

// Options is what the API is built from.
type Options struct {
	Backend Backend
	Log     *slog.Logger // nothing is logged when nil
	Decoder messages.Decoder
	Version string // shown at /
}

// New returns the API as a handler that trusts every Host header: for a server that listens on
// loopback use NewServer.
func New(opt Options) http.Handler { return newServer(opt) }

// NewServer returns the API with the limits that it needs against slow and hostile clients; the
// caller listens and serves. addr is where it will listen: on a loopback address only loopback Host
// headers are served, so that no web page reaches it by DNS rebinding. Shutdown ends event streams
// and tells streamed appends to come again.
func NewServer(addr string, opt Options) *http.Server {
	s := newServer(opt)
	s.loopbackOnly = isLoopback(addr)
	closing := make(chan struct{})
	s.closing = closing
	srv := &http.Server{
		Addr:              addr,
		Handler:           s,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       keepAliveTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	srv.RegisterOnShutdown(sync.OnceFunc(func() { close(closing) }))
	return srv
}

type server struct {
	backend      Backend
	log          *slog.Logger
	decoder      messages.Decoder
	version      string
	mux          *http.ServeMux
	csrf         http.CrossOriginProtection
	loopbackOnly bool
	closing      <-chan struct{} // closed when the server shuts down; nil when it is not ours
	bodyMemory   *semaphore.Weighted
}

func newServer(opt Options) *server {
	s := &server{
		backend:    opt.Backend,
		log:        opt.Log,
		decoder:    opt.Decoder,
		version:    opt.Version,
		mux:        http.NewServeMux(),
		bodyMemory: semaphore.NewWeighted(maxBodyMemory),
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	paths := map[string]handlersByMethod{"/": {}}
	for _, rt := range s.routes() {
		if paths[rt.path] == nil {
			paths[rt.path] = handlersByMethod{}
		}
		paths[rt.path][rt.method] = rt.serve
		if rt.method == http.MethodGet && !rt.stream {
			paths[rt.path][http.MethodHead] = rt.serve
		}
	}
	for path, m := range paths {
		s.mux.Handle(path, s.byMethod(m))
	}
	return s
}

// handler serves a request, or returns an error and has then written nothing, or broke off.
type handler func(w http.ResponseWriter, r *http.Request) error

type handlersByMethod map[string]handler

type route struct {
	method, path string
	serve        handler
	stream       bool // answers without end: no HEAD
}

func (s *server) routes() []route {
	const get, post, put = http.MethodGet, http.MethodPost, http.MethodPut
	return []route{
		{method: get, path: "/{$}", serve: s.getIndex},
		{method: get, path: "/openapi.yaml", serve: s.getOpenAPI},
		{method: post, path: "/v1/groups", serve: s.submitGroup},
		{method: get, path: "/v1/groups", serve: s.listGroups},
		{method: get, path: "/v1/groups/{id}", serve: s.getGroup},
		{method: post, path: "/v1/groups/{id}/jobs", serve: s.appendJobs},
		{method: get, path: "/v1/groups/{id}/jobs/{ordinal}", serve: s.getJob},
		{method: post, path: "/v1/groups/{id}/seal", serve: s.sealGroup},
		{method: post, path: "/v1/groups/{id}/cancel", serve: s.commandHandler(s.backend.Cancel)},
		{method: post, path: "/v1/groups/{id}/retry", serve: s.commandHandler(s.backend.Retry)},
		{method: post, path: "/v1/groups/{id}/pause", serve: s.commandHandler(s.backend.Pause)},
		{method: post, path: "/v1/groups/{id}/resume", serve: s.commandHandler(s.backend.Resume)},
		{method: get, path: "/v1/groups/{id}/why", serve: s.whyGroup},
		{method: get, path: "/v1/groups/{id}/results", serve: s.streamResults, stream: true},
		{method: get, path: "/v1/groups/{id}/failures", serve: s.streamFailures, stream: true},
		{method: get, path: "/v1/groups/{id}/events", serve: s.watchGroup, stream: true},
		{method: get, path: "/v1/tenants", serve: s.listTenants},
		{method: get, path: "/v1/tenants/{id}", serve: s.getTenant},
		{method: put, path: "/v1/tenants/{id}", serve: s.setTenant},
		{
			method: post,
			path:   "/v1/tenants/{id}/pause",
			serve:  s.pauseHandler("/v1/tenants/", "id", true, s.backend.PauseTenant),
		},
		{
			method: post,
			path:   "/v1/tenants/{id}/resume",
			serve:  s.pauseHandler("/v1/tenants/", "id", false, s.backend.ResumeTenant),
		},
		{
			method: post,
			path:   "/v1/types/{type}/pause",
			serve:  s.pauseHandler("/v1/types/", "type", true, s.backend.PauseType),
		},
		{
			method: post,
			path:   "/v1/types/{type}/resume",
			serve:  s.pauseHandler("/v1/types/", "type", false, s.backend.ResumeType),
		},
		{method: get, path: "/v1/dead-letters", serve: s.listDeadLetters},
		{method: get, path: "/v1/stats", serve: s.getStats},
	}
}

// isLoopback says whether a server that listens on addr is reached only from its own machine.
func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		host = addr
	}
	return isLoopbackHost(host)
}
