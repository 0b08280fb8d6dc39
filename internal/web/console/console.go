// Package console serves the web console: pages of HTML below /ui/ that show what runs, and forms
// that control it. Every page works without JavaScript. The package hides how pages are rendered,
// how they follow live data, and how people log in.
//
// It stores nothing itself: pages read and change the data through the Backend of the API, with the
// principal of the session in the context, so that the store decides what exists for whom.
package console

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const (
	root = "/ui"
	// readTimeout limits the time of a page: to check the session and to read the data, together.
	readTimeout = 5 * time.Second
	// actionTimeout limits an action; if it has a file, only the steps after the file.
	actionTimeout = 30 * time.Second
	maxForm       = 256 << 10 // most bytes of a form without a file
)

// Options has what a console needs beside what the API shares with it.
type Options struct {
	Sessions Sessions // needed if callers need keys
	Secure   bool     // browsers reach the console over https alone
	// TraceURL is the URL of a job's trace, with the placeholders {trace_id}, {group} and
	// {ordinal}. "": pages have no links to traces.
	TraceURL string
}

// Console is the web console. It is an http.Handler for the paths below /ui/. It expects the checks
// of package httpapi before it, above all those of the headers Host and Origin.
type Console struct {
	httpapi.Shared
	Options
	mux      *http.ServeMux
	pages    []page
	views    func() *templates // parses them at the first call: many processes never show a page
	rooms    roomPages
	live     *live
	last     *redisx.Cache[string, view] // shown while Redis is away
	overview *overviewPage
}

const (
	maxLast = 200              // pages whose data is kept
	lastTTL = 15 * time.Minute // for so long
)

// New returns a console of the API's data.
func New(shared httpapi.Shared, o Options) *Console {
	c := &Console{
		Shared: shared, Options: o, mux: http.NewServeMux(), last: redisx.NewCache[string, view](lastTTL, maxLast),
		overview: newOverviewPage(shared.Backend),
	}
	c.rooms = roomPages{
		c.Rooms, c.Backend, newCache[[]api.StageStatus](brokersInterval), &paces{all: map[string][]reading{}},
		c.Keys == nil,
	}
	c.pages = c.allPages()
	c.views = sync.OnceValue(func() *templates { return parseTemplates(functions(c.hasPage, o.TraceURL)) })
	c.live = newLive(c)
	for _, p := range c.pages {
		if p.view != nil {
			c.mux.HandleFunc(http.MethodGet+" "+root+p.path, inTime(c.authorized(p.scope, c.servePage(p))))
		}
	}
	for _, a := range c.allActions() {
		c.mux.HandleFunc(http.MethodPost+" "+root+a.path, c.authorized(a.scope, c.serveAction(a)))
	}
	for _, file := range downloads {
		c.mux.HandleFunc("GET "+root+"/groups/{id}/"+file, c.authorized(auth.Read, c.serveDownload(file)))
	}
	c.mux.HandleFunc("GET "+root+"/events", c.live.serve)
	c.mux.HandleFunc("GET "+root+assetsPath, serveAsset)
	login := loginPage{c}
	c.mux.HandleFunc("GET "+root+"/login", inTime(login.show))
	c.mux.HandleFunc("POST "+root+"/login", login.begin)
	c.mux.HandleFunc("POST "+root+"/logout", login.end)
	c.mux.HandleFunc("POST "+root+"/theme", login.choose)
	c.mux.HandleFunc(root+"/", inTime(c.notFound))
	return c
}

// redirect sends the browser to a path of the console.
func (c *Console) redirect(w http.ResponseWriter, r *http.Request, to string) {
	http.Redirect(w, r, c.Prefix+to, http.StatusSeeOther)
}

// withPrefix returns a rendered page or region with the links and forms that browsers use behind a
// proxy. Texts of users can't imitate an attribute, because quotes are escaped in them.
func (c *Console) withPrefix(html []byte) []byte {
	if c.Prefix == "" {
		return html
	}
	for _, attribute := range []string{"href", "action", "src"} {
		at := " " + attribute + `="`
		html = bytes.ReplaceAll(html, []byte(at+"/"), []byte(at+c.Prefix+"/"))
	}
	return html
}

// policy is the Content-Security-Policy header of all answers: a page may load and call only what
// this server itself serves; images may also be data: URLs.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; " +
	"connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// ServeHTTP serves a request.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Permissions-Policy", "camera=(), geolocation=(), microphone=()")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	if c.TLS != nil {
		h.Set("Strict-Transport-Security", "max-age=31536000")
	}
	c.mux.ServeHTTP(w, r)
}

// open is the scope of pages for everyone who has logged in.
const open auth.Scope = "open"

// page is an entry of the table of pages. Its data is read again for each request.
type page struct {
	path  string                              // below /ui, a pattern of http.ServeMux
	area  string                              // of the navigation; "": that of the page before it
	nav   string                              // its name in the navigation; "": it is not there
	scope auth.Scope                          // what its readers must be allowed to do
	view  func(r *http.Request) (view, error) // reads the data; nil: path is one of the API, not below /ui
}

// view is what a page shows.
type view struct {
	name  string // of its template, templates/NAME.gohtml
	title string
	data  any
	topic string // what the page follows live, see topics; "": nothing
	// refused says why a form of this page was refused, and what was typed. nil: none was refused.
	refused *refusal
}

// action is a form of the console.
type action struct {
	path  string     // below /ui, a pattern of http.ServeMux
	scope auth.Scope // what its users must be allowed to do
	file  bool       // the form may have a file, which do reads as it arrives
	do    func(ctx context.Context, r *http.Request) (to string, err error)
	// show is called in place of do if the answer is a page that can't be loaded again, such as the
	// secret of a new key.
	show func(ctx context.Context, r *http.Request) (view, error)
	// page reads the page on which the form is. If the form is refused, this page is the answer,
	// with the text that was typed. nil: the form has no fields to type into.
	page func(r *http.Request) (view, error)
}

// allPages returns the table of pages. The navigation shows them in this order.
func (c *Console) allPages() []page {
	groups, submit := groupPages{c.Backend}, submitPage{c.Submissions, c.Decoder}
	letters, tenants, guards := letterPages{c.Backend}, tenantPages{c.Backend}, guardPages{c.Backend}
	operations, callbacks := operationPages{c.Backend}, callbackPages{c.Backend}
	all := []page{
		{path: "/{$}", area: "Jobs", nav: "Overview", scope: open, view: c.overview.view},
		{path: "/find", scope: auth.Read, view: findPage{c.Backend}.view},
		{path: "/groups", nav: "Groups", scope: auth.Read, view: groups.list},
		{path: "/groups/{id}", scope: auth.Read, view: groups.group},
		{path: "/groups/{id}/failures", scope: auth.Read, view: failuresPage{c}.view},
		{path: "/groups/{id}/jobs", scope: auth.Read, view: groups.jobs},
		{path: "/groups/{id}/jobs/{ordinal}", scope: auth.Read, view: groups.job},
		{path: "/dead-letters", nav: "Dead letters", scope: auth.Read, view: letters.list},
		{
			path: "/operations", nav: "Operations", scope: auth.Read,
			view: listOf(operations.readList).page("operations", "Operations", "operations"),
		},
		{path: "/operations/{id}", scope: auth.Read, view: operations.operation},
		{path: "/callbacks", nav: "Callbacks", scope: auth.Read, view: callbacks.list},
		{path: "/submit", nav: "Submit", scope: auth.Submit, view: submit.form},
		{path: "/tenants", area: "Flow", nav: "Tenants", scope: auth.Read, view: tenants.list},
		{path: "/tenants/{id}", scope: auth.Read, view: tenants.tenant},
		{path: "/limits", nav: "Limits", scope: auth.ReadSystem, view: limitsPage{c.Backend}.view},
		{
			path: "/guards", nav: "Guards", scope: auth.ReadSystem,
			view: listOf(guards.readList).page("guards", "Guards", "guards"),
		},
		{path: "/guards/{name}", scope: auth.ReadSystem, view: guards.guard},
		{path: "/rooms", area: "Waiting rooms", nav: "Rooms", scope: auth.ReadSystem, view: c.rooms.list},
		{path: "/rooms/{event}", scope: auth.ReadSystem, view: c.rooms.room},
		{path: "/workers", area: "System", nav: "Workers", scope: auth.ReadMetrics, view: workersPage{c.Backend}.view},
		{
			path: "/rejected", nav: "Rejected", scope: auth.ReadSystem,
			view: listOf(letters.readRejected).page("rejected", "Rejected messages", "rejected"),
		},
		{path: "/audit", nav: "Audit", scope: auth.ReadSystem, view: auditPage{c.Backend}.view},
		{path: "/activity", nav: "Activity", scope: auth.System, view: activityPage{c.Activity}.view},
		{path: "/keys", nav: "Keys", scope: auth.System, view: keysPage{c}.list},
		{path: "/openapi.yaml", nav: "API", scope: open},
	}
	for i := range all {
		if i > 0 && all[i].area == "" {
			all[i].area = all[i-1].area
		}
	}
	if c.Rooms == nil {
		all = slices.DeleteFunc(all, func(p page) bool { return strings.HasPrefix(p.path, "/rooms") })
	}
	if c.OnlyUI {
		all = slices.DeleteFunc(all, func(p page) bool { return p.view == nil })
	}
	return all
}

func (c *Console) allActions() []action {
	groups, tenants, submit := groupPages{c.Backend}, tenantPages{c.Backend}, submitPage{c.Submissions, c.Decoder}
	limits, callbacks := limitsPage{c.Backend}, callbackPages{c.Backend}
	all := []action{
		{path: "/limits", scope: auth.System, do: limits.changeGlobal, page: limits.view},
		{path: "/limits/{type}", scope: auth.System, do: limits.changeType, page: limits.view},
		{path: "/submit", scope: auth.Submit, file: true, do: submit.submit, page: submit.form},
		{path: "/groups/{id}/again", scope: auth.Submit, file: true, do: submit.again},
		{path: "/groups", scope: auth.Control, do: groups.controlSome},
		{path: "/groups/{id}/jobs/{ordinal}/retry", scope: auth.Control, do: groups.retryJob},
		{path: "/groups/{id}/jobs/{ordinal}/cancel", scope: auth.Control, do: groups.cancelJob},
		{path: "/operations", scope: auth.Control, do: operationPages{c.Backend}.start},
		{path: "/tenants/{id}", scope: auth.Tenants, do: tenants.change, page: tenants.tenant},
		{path: "/tenants/{id}/pause", scope: auth.Tenants, do: pauseTenant(c.Backend.PauseTenant, "tenant-paused")},
		{path: "/tenants/{id}/resume", scope: auth.Tenants, do: pauseTenant(c.Backend.ResumeTenant, "tenant-resumed")},
		{path: "/callbacks", scope: auth.Control, do: callbacks.redeliver},
		{path: "/tenants/{id}/callback/{do}", scope: auth.Control, do: callbacks.change, page: tenants.tenant},
		{path: "/tenants/{id}/callback/secret", scope: auth.Control, show: callbacks.secret},
		{path: "/guards/{name}/members/{id}", scope: auth.System, do: guardPages{c.Backend}.control},
		{path: "/types/{type}/pause", scope: auth.System, do: pauseType(c.Backend.PauseType, "type-paused")},
		{path: "/keys", scope: auth.System, show: keysPage{c}.create, page: keysPage{c}.list},
		{path: "/keys/{id}/revoke", scope: auth.System, do: keysPage{c}.revoke},
		{path: "/types/{type}/resume", scope: auth.System, do: pauseType(c.Backend.ResumeType, "type-resumed")},
	}
	if c.Rooms != nil {
		for name, do := range c.rooms.actions() {
			all = append(all, action{path: "/rooms/{event}/" + name, scope: auth.System, do: do, page: c.rooms.room})
		}
	}
	for _, do := range api.OperationCommands {
		all = append(all, action{
			path: "/operations/{id}/" + string(do), scope: auth.Control, do: operationPages{c.Backend}.control(do),
		})
	}
	for name := range groups.commands() {
		all = append(all, action{path: "/groups/{id}/" + name, scope: auth.Control, do: groups.control(name)})
	}
	return all
}

// hasPage reports whether the console has a page with this path pattern. Templates call it, so that
// they link only to pages that exist.
func (c *Console) hasPage(path string) bool {
	return slices.ContainsFunc(c.pages, func(p page) bool { return p.path == path })
}

// inTime wraps a handler: the context of each request ends after readTimeout.
func inTime(serve http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), readTimeout)
		defer cancel()
		serve(w, r.WithContext(ctx))
	}
}

// authorized wraps the handler of a page or an action. It calls serve only for callers with the
// right scope, with the principal in the context. Others are sent to the login or get an error.
// Requests of callers who have logged in count towards the rate limit of their API keys.
func (c *Console) authorized(scope auth.Scope, serve http.HandlerFunc) http.HandlerFunc {
	if scope == "" {
		panic("a page or an action has no scope")
	}
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, err := c.principal(r, true)
		switch {
		case errors.Is(err, errNoSession):
			c.askForLogin(w, r)
			return
		case err != nil:
			c.fail(w, r, err)
			return
		}
		p, _ := auth.From(ctx)
		if err := c.CountRequest(r, p); err != nil {
			c.fail(w, r, err)
			return
		}
		r = r.WithContext(ctx)
		if scope != open && !p.May(scope) {
			c.Metrics.AuthFailed(telemetry.AuthRole)
			c.fail(w, r, errForbidden)
			return
		}
		serve(w, r)
	}
}

var errForbidden = fmt.Errorf("this page or action: %w", api.ErrNotAllowed)

// servePage returns the handler of a page. While Redis is away or does not answer in time, it shows
// the last data of this page that a reader with the same rights has seen within lastTTL.
func (c *Console) servePage(p page) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		v, err := p.view(r)
		var to redirectError
		switch {
		case errors.As(err, &to):
			c.redirect(w, r, string(to))
		case errors.Is(err, api.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
			if last, at, ok := c.last.Get(keyOf(r)); ok {
				c.render(w, r, http.StatusServiceUnavailable, last, at)
				return
			}
			c.fail(w, r, err)
		case err != nil:
			c.fail(w, r, err)
		case v.refused != nil:
			c.renderRefused(w, r, v, nil, v.refused.cause)
		default:
			c.last.Put(keyOf(r), v)
			c.render(w, r, http.StatusOK, v, time.Time{})
		}
	}
}

// redirectError is an error by which the view of a page makes the browser go to another path of the
// console.
type redirectError string

func (e redirectError) Error() string { return "redirect to " + string(e) }

// serveAction returns the handler of an action. It carries out the action and redirects the browser
// to the page that shows the effect, or answers with the page of show. An action that has begun
// continues when the browser disconnects, unless its form may have a file.
func (c *Console) serveAction(a action) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		p, _ := auth.From(r.Context())
		actor := api.Activity{
			Actor: p.KeyID, Role: string(p.Role), Via: api.ViaUI, RequestID: w.Header().Get("X-Request-Id"),
			Tenant: p.Tenant,
		}
		if p.KeyID == "" {
			actor.Role = ""
		}
		if ip := c.Proxies.ClientOf(r); ip.IsValid() {
			actor.IP = ip.String()
		}
		ctx := activity.WithActor(r.Context(), actor)
		if a.file {
			end, err := c.BeginAppend(r, p)
			if err != nil {
				c.fail(w, r, err)
				return
			}
			defer end()
		} else {
			if err := parseForm(w, r); err != nil {
				c.fail(w, r, err)
				return
			}
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), actionTimeout)
			defer cancel()
		}
		var to string
		var shown view
		var err error
		if a.show != nil {
			shown, err = a.show(ctx, r.WithContext(ctx))
		} else {
			to, err = a.do(ctx, r.WithContext(ctx))
		}
		switch {
		case err != nil:
			c.refuse(w, r, a, err)
		case a.show != nil:
			c.render(w, r, http.StatusOK, shown, time.Time{})
		default:
			c.redirect(w, r, to)
		}
	}
}

// parseForm reads a form without a file.
func parseForm(w http.ResponseWriter, r *http.Request) error {
	body := r.Body // package httpapi needs it again
	r.Body = http.MaxBytesReader(w, body, maxForm)
	err := r.ParseForm()
	r.Body = body
	if err != nil {
		return invalid("the form", "can't be read: it is malformed, or longer than %d bytes", maxForm)
	}
	return nil
}

// inputError is the error for a form field or query parameter with a wrong value.
type inputError struct{ field, problem string }

func (e *inputError) Error() string { return e.field + " " + e.problem }

func invalid(field, problem string, args ...any) error {
	return &inputError{field, fmt.Sprintf(problem, args...)}
}

// pathID returns the id in the path. If the text can't be an id, the error is api.ErrNotFound.
func pathID(r *http.Request, name string) (string, error) {
	id := r.PathValue(name)
	if !api.ValidID(id) {
		return "", fmt.Errorf("%s %.128s: %w", name, strings.ToValidUTF8(id, "?"), api.ErrNotFound)
	}
	return id, nil
}

// refusal says why a form was refused, and what was typed into it.
type refusal struct {
	failure
	values url.Values
	cause  error // why the view of a page refused its query; servePage then makes the failure of it
}

// formError is an error with the values of the form's fields. Forms with a file need it, because
// http.Request has not parsed their fields.
type formError struct {
	fields map[string]string
	err    error
}

func (e *formError) Error() string { return e.err.Error() }
func (e *formError) Unwrap() error { return e.err }

// refuse answers a form that was not accepted. It shows the page of the form again, with the
// problem and with what was typed. If the page can't be read now, it shows the page's last data,
// which it finds only for a form that is sent to the path of its page. refuse answers with an error
// page if it finds no last data, if the form has no page, or if err is api.ErrNotFound. A chosen
// file must be chosen again, because browsers do not keep it.
func (c *Console) refuse(w http.ResponseWriter, r *http.Request, a action, err error) {
	if a.page == nil || errors.Is(err, api.ErrNotFound) {
		c.fail(w, r, err)
		return
	}
	values := r.PostForm
	if form, ok := errors.AsType[*formError](err); ok {
		values = url.Values{}
		for name, value := range form.fields {
			values.Set(name, value)
		}
	}
	if errors.Is(err, api.ErrConflict) {
		values.Del("form_id") // it was used: the form that is shown now is another one
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), readTimeout)
	defer cancel()
	v, readErr := a.page(r.WithContext(ctx))
	if readErr != nil {
		last, _, ok := c.last.Get(keyOf(r))
		if !ok {
			c.fail(w, r, err)
			return
		}
		v = last
	}
	c.renderRefused(w, r, v, values, err)
}

// renderRefused answers with the page of the form that was refused. It makes the page static: an
// update would replace what was typed.
func (c *Console) renderRefused(w http.ResponseWriter, r *http.Request, v view, values url.Values, err error) {
	f, status := c.failureOf(w, r, err)
	if status < http.StatusInternalServerError && status != http.StatusTooManyRequests {
		f.Heading = notUsable
	}
	v.topic, v.refused = "", &refusal{failure: f, values: values}
	c.render(w, r, status, v, time.Time{})
}

// Refused returns why the form that was sent to this page was refused; nil: no form was refused.
// The layout shows it as an error.
func (f frame) Refused() *failure {
	if f.refused == nil {
		return nil
	}
	return &f.refused.failure
}

// Ticked reports whether a checkbox begins ticked: as it was sent if the form was refused, otherwise
// if values has its value. with is a field that the form always has.
func (f frame) Ticked(with, name, value string, values []string) bool {
	if f.refused != nil && f.refused.values.Has(with) {
		values = f.refused.values[name]
	}
	return slices.Contains(values, value)
}

// Value returns the initial value of a form's field: what was typed if the form was refused,
// otherwise value.
func (f frame) Value(name, value string) string {
	if f.refused == nil || !f.refused.values.Has(name) {
		return value
	}
	return f.refused.values.Get(name)
}
