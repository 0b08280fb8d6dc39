package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/access/session"
	"github.com/bulkaction/bulkaction/internal/web"
)

// Sessions stores the sessions of people who have logged in. Package session implements it.
type Sessions interface {
	Create(ctx context.Context, p auth.Principal) (token string, err error)
	// Find returns the principal of a session. request: the call counts as a use, which keeps the
	// session alive. The errors are those of package session.
	Find(ctx context.Context, token string, request bool) (auth.Principal, error)
	End(ctx context.Context, token string) error
	// FirstUse reports whether a form with this id is sent for the first time. Afterwards the id
	// counts as used, for an hour.
	FirstUse(ctx context.Context, form string) (first bool, err error)
}

// errNoSession says that a request has no valid session.
var errNoSession = errors.New("log in to see this")

// cookieName returns the name of the session's cookie. Over https it has the prefix __Host-, with
// which browsers accept the cookie only over https and only for this host.
func (c *Console) cookieName() string {
	if c.Secure {
		return "__Host-bulkaction"
	}
	return "bulkaction"
}

// pollHeader is the header of requests that an open page's script makes by itself, without an
// action of the user.
const pollHeader = "X-Bulkaction-Poll"

// principal returns the context of a request with the principal of its session. With request, the
// request counts as a use of the session, which keeps the session alive, unless the script of an
// open page sent it by itself. Without API keys, the principal may do everything.
func (c *Console) principal(r *http.Request, request bool) (context.Context, error) {
	if c.Keys == nil {
		return auth.Trust(r.Context()), nil
	}
	cookie, err := r.Cookie(c.cookieName())
	if err != nil {
		return nil, errNoSession
	}
	p, err := c.Sessions.Find(r.Context(), cookie.Value, request && r.Header.Get(pollHeader) == "")
	switch {
	case errors.Is(err, session.ErrNone):
		return nil, errNoSession
	case errors.Is(err, session.ErrUnavailable):
		return nil, fmt.Errorf("%w: %w", api.ErrUnavailable, err)
	case err != nil:
		return nil, err
	case !c.Keys.Still(p):
		return nil, errNoSession
	}
	return auth.With(r.Context(), p), nil
}

// askForLogin redirects a browser without a session to the login page. After a GET, the login later
// leads back to the page that the browser asked for; otherwise to the overview.
func (c *Console) askForLogin(w http.ResponseWriter, r *http.Request) {
	to := root + "/login"
	if r.Method == http.MethodGet && r.URL.Path != root+"/" {
		to += "?next=" + url.QueryEscape(r.URL.RequestURI())
	}
	c.redirect(w, r, to)
}

// loginPage serves the login and the logout, and stores the theme in a cookie.
type loginPage struct{ *Console }

// loginForm is the data of the page of the login.
type loginForm struct{ Next, Problem string }

func (c loginPage) show(w http.ResponseWriter, r *http.Request) {
	if _, err := c.principal(r, true); err == nil {
		c.redirect(w, r, safeNext(r.URL.Query().Get("next")))
		return
	}
	c.showForm(w, r, http.StatusOK, loginForm{Next: safeNext(r.URL.Query().Get("next"))})
}

func (c loginPage) showForm(w http.ResponseWriter, r *http.Request, status int, form loginForm) {
	c.render(w, r, status, view{name: "login", title: "Log in", data: form}, time.Time{})
}

// begin starts a session for the API key that was typed into the form. If the browser already has a
// session, that one ends.
func (c loginPage) begin(w http.ResponseWriter, r *http.Request) {
	if c.Keys == nil {
		c.redirect(w, r, root+"/")
		return
	}
	if err := parseForm(w, r); err != nil {
		c.fail(w, r, err)
		return
	}
	form := loginForm{Next: safeNext(r.PostForm.Get("next"))}
	p, err := c.Authenticate(r, strings.TrimSpace(r.PostForm.Get("key")))
	var many *apikey.TooManyFailuresError
	status := http.StatusOK
	switch {
	case errors.As(err, &many):
		web.SetRetryAfter(w.Header(), many.RetryAfter)
		status, form.Problem = http.StatusTooManyRequests, err.Error()
	case errors.Is(err, apikey.ErrInvalid):
		status, form.Problem = http.StatusUnauthorized, err.Error()
	case errors.Is(err, apikey.ErrUnavailable):
		status, form.Problem = http.StatusServiceUnavailable, err.Error()
	case err != nil:
		c.fail(w, r, err)
		return
	case !p.May(auth.Read) && !p.May(auth.ReadMetrics):
		status, form.Problem = http.StatusForbidden, "the console has no page for a key of role "+string(p.Role)
	}
	if form.Problem != "" {
		c.showForm(w, r, status, form)
		return
	}
	if err := c.CountRequest(r, p); err != nil {
		c.fail(w, r, err)
		return
	}
	token, err := c.Sessions.Create(r.Context(), p)
	if err != nil {
		form.Problem = "the login can't be stored now, because Redis is not available: try again"
		if !errors.Is(err, session.ErrUnavailable) {
			c.Log.ErrorContext(r.Context(), "could not begin a session of the console", "error", err)
			form.Problem = "the login can't be stored; the server's log says why"
		}
		c.showForm(w, r, http.StatusServiceUnavailable, form)
		return
	}
	if old, err := r.Cookie(c.cookieName()); err == nil {
		_ = c.Sessions.End(r.Context(), old.Value) // it ends by itself, too
	}
	c.Log.InfoContext(r.Context(), "login to the console", "key", p.KeyID, "role", string(p.Role))
	c.setCookie(w, c.cookieName(), token, session.Lifetime)
	c.redirect(w, r, form.Next)
}

// end serves the logout. If Redis is away, the session can't be ended there, but the browser's
// cookie is deleted all the same.
func (c loginPage) end(w http.ResponseWriter, r *http.Request) {
	if cookie, err := r.Cookie(c.cookieName()); err == nil && c.Sessions != nil {
		if err := c.Sessions.End(r.Context(), cookie.Value); err != nil {
			c.Log.WarnContext(r.Context(), "could not end a session of the console: it ends by itself", "error", err)
		}
	}
	c.setCookie(w, c.cookieName(), "", 0)
	c.redirect(w, r, root+"/login")
}

// setCookie sets a cookie that scripts can't read and that browsers don't send with requests of
// other sites. Lifetime 0 deletes the cookie.
func (c loginPage) setCookie(w http.ResponseWriter, name, value string, lifetime time.Duration) {
	age := int(lifetime.Seconds())
	if age == 0 {
		age = -1
	}
	path := c.Prefix + "/"
	if strings.HasPrefix(name, "__Host-") { // browsers demand it
		path = "/"
	}
	http.SetCookie(w, &http.Cookie{
		Name: name, Value: value, Path: path, MaxAge: age, HttpOnly: true, Secure: c.Secure,
		SameSite: http.SameSiteStrictMode,
	})
}

// safeNext returns the path to which a browser goes after the login or another form: next, if that
// is a path of the console other than /login, /logout, /theme and /events below /ui, otherwise the
// overview. So a link to the login can't send people to another site.
func safeNext(next string) string {
	home := root + "/"
	u, err := url.Parse(next)
	if err != nil || u.Scheme != "" || u.Host != "" || u.User != nil || !strings.HasPrefix(next, home) ||
		strings.ContainsAny(next, "\\\x00\r\n\t") || !strings.HasPrefix(path.Clean(u.Path)+"/", home) {
		return home
	}
	for _, p := range []string{"/login", "/logout", "/theme", "/events"} {
		if path.Clean(u.Path) == root+p {
			return home
		}
	}
	return next
}

// The cookies that keep what a browser has chosen: the theme, and the zone of times.
const (
	themeCookie = "bulkaction-theme"
	zoneCookie  = "bulkaction-zone"
)

var (
	themes = []string{"system", "light", "dark"}
	zones  = []string{"local", "UTC"}
)

// themeOf and zoneOf return what the browser has chosen; the first choice if it has chosen nothing.
func themeOf(r *http.Request) string { return cookieOf(r, themeCookie, themes) }
func zoneOf(r *http.Request) string  { return cookieOf(r, zoneCookie, zones) }

func cookieOf(r *http.Request, cookie string, among []string) string {
	if c, err := r.Cookie(cookie); err == nil && slices.Contains(among, c.Value) {
		return c.Value
	}
	return among[0]
}

// choose stores the chosen theme or zone in a cookie. It needs no session.
func (c loginPage) choose(w http.ResponseWriter, r *http.Request) {
	if err := parseForm(w, r); err != nil {
		c.fail(w, r, err)
		return
	}
	for cookie, among := range map[string][]string{themeCookie: themes, zoneCookie: zones} {
		if name := strings.TrimPrefix(cookie, "bulkaction-"); r.PostForm.Has(name) {
			r.Header.Set("Cookie", cookie+"="+r.PostForm.Get(name))
			c.setCookie(w, cookie, cookieOf(r, cookie, among), 365*24*time.Hour)
		}
	}
	c.redirect(w, r, safeNext(r.PostForm.Get("next")))
}
