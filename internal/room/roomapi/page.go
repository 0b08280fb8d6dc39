package roomapi

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"html/template"
	"maps"
	"math"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web"
)

//go:embed page
var pageFiles embed.FS

// policy is the Content-Security-Policy of the waiting page; %s is the origin of its logo, if that is
// another. The page may only load files and make calls of its own origin. No other page may show it
// in a frame, so that nobody is tricked into clicks on it.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'%s; connect-src 'self'; " +
	"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// startRefresh is the time after which the start page, which has not entered the user, reloads
// itself in a browser without JavaScript. The reload comes from the page itself, so it may enter
// the user.
const startRefresh = 2 * time.Second

// page renders the waiting page.
type page struct {
	base   string // path of the public URL
	look   *Look
	logo   string // address, "": none
	policy string
	html   *template.Template
	assets map[string]asset // by path, with the hash of the content in the name
	names  map[string]string
}

// asset is a file that the waiting page loads. Its name changes with its content, so browsers may
// cache it for ever.
type asset struct {
	contentType string
	body        []byte
}

func (f asset) serve(w http.ResponseWriter, _ *http.Request) error {
	h := w.Header()
	h.Set("Cache-Control", "public, max-age=31536000, immutable")
	h.Set("Content-Type", f.contentType)
	// A logo in SVG must not run scripts when it is opened by itself
	h.Set("Content-Security-Policy", "sandbox; default-src 'none'; style-src 'unsafe-inline'")
	_, _ = w.Write(f.body) // an error means that the client has left
	return nil
}

// newPage reads the embedded files. base is the path of the public URL.
func newPage(base string, look *Look) *page {
	p := &page{base: base, look: look, assets: map[string]asset{}, names: map[string]string{}}
	add := func(name string, f asset) {
		sum := sha256.Sum256(f.body)
		ext := path.Ext(name)
		to := "/assets/" + strings.TrimSuffix(name, ext) + "-" + hex.EncodeToString(sum[:8]) + ext
		p.assets[to] = f
		p.names[name] = base + to
	}
	add("wait.css", asset{"text/css; charset=utf-8", append(mustRead("wait.css"), look.css...)})
	add("wait.js", asset{"text/javascript; charset=utf-8", mustRead("wait.js")})
	add("wait.svg", asset{"image/svg+xml", mustRead("wait.svg")})
	p.logo, p.policy = look.logoURL, fmt.Sprintf(policy, look.logoOrigin)
	if look.logo.body != nil {
		add("logo"+look.logoExt, look.logo)
		p.logo = p.names["logo"+look.logoExt]
	}
	p.html = template.Must(template.New("wait").Parse(string(mustRead("wait.html"))))
	return p
}

// mustRead returns an embedded file. It panics if the file is missing, a bug that every test would
// find.
func mustRead(name string) []byte {
	body, err := pageFiles.ReadFile("page/" + name)
	if err != nil {
		panic(err)
	}
	return body
}

// view is what the page shows.
type view struct {
	Lang    string
	Text    texts
	Event   string
	Key     string // of the message; JavaScript decides by it what to do
	Message message
	Paused  bool

	Position, Total, ETA string // "": unknown
	Refresh              int    // seconds after which a browser without JavaScript loads the page again; 0: never
	RefreshTo            string // ";url=" and the address to load then; "": this one
	ReturnURL            string // to go on by a link
	Leave, Again         bool   // shows the buttons

	Page, Form, Stream, Ticket, Token string // addresses
	Others                            []otherPage
	CSS, JS, Icon, Logo               string
}

// otherPage is the link to the page in another language.
type otherPage struct{ Lang, Name, Page string }

// path returns the path of an event's waiting page. what is "left" for the page that says that the
// user has left, and "" for the page that enters the user.
func (p *page) path(event, what, lang string) string {
	query := url.Values{}
	if what != "" {
		query.Set(what, "")
	}
	if _, ok := p.look.languages[lang]; ok {
		query.Set("lang", lang)
	}
	to := p.base + "/events/" + event + "/wait"
	if len(query) > 0 {
		to += "?" + query.Encode()
	}
	return to
}

func (p *page) view(r *http.Request, event string) *view {
	languages := p.look.languages
	lang := languages.of(r)
	chosen := "" // keeps the choice of ?lang= in further addresses
	if r.URL.Query().Get("lang") == lang {
		chosen = lang
	}
	form := p.base + "/events/" + event + "/ticket/leave?page"
	if chosen != "" {
		form += "&lang=" + lang
	}
	v := &view{
		Lang: lang, Text: languages[lang], Event: event,
		Page: p.path(event, "", chosen), Form: form,
		Stream: p.base + "/events/" + event + "/tickets/waiting",
		Ticket: p.base + "/events/" + event + "/ticket",
		Token:  p.base + "/events/" + event + "/ticket/token",
		CSS:    p.names["wait.css"], JS: p.names["wait.js"], Icon: p.names["wait.svg"], Logo: p.logo,
	}
	for _, other := range slices.Sorted(maps.Keys(languages)) {
		if other != lang {
			v.Others = append(v.Others, otherPage{other, languages[other]["language"], p.path(event, "", other)})
		}
	}
	return v
}

// show answers with the page and one of its messages.
func (p *page) show(w http.ResponseWriter, r *http.Request, status int, v *view, key string) error {
	v.Key, v.Message = key, v.Text.message(key)
	if key == "admitted" && v.ReturnURL == "" {
		v.Message = v.Text.message("no_link")
	}
	var b bytes.Buffer
	if err := p.html.Execute(&b, v); err != nil {
		return fmt.Errorf("render the waiting page: %w", err)
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Language", v.Lang)
	h.Set("Content-Security-Policy", p.policy)
	h.Set("Referrer-Policy", "same-origin")
	h.Set("Vary", "Accept-Language")
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(b.Bytes()) // an error means that the client has left
	}
	return nil
}

// wait serves the waiting page. It enters the user as one who polls. With ?left it enters nobody,
// and shows that the user has left. A HEAD, a prefetch, or a request that another site causes, does
// not enter: it gets a start page. A user whose turn it is gets the token as a cookie and is
// redirected to return_url (see goOn).
func (a *API) wait(w http.ResponseWriter, r *http.Request) error {
	event, err := eventOf(r)
	if err != nil {
		return err
	}
	v := a.page.view(r, event)
	if r.URL.Query().Has("left") {
		v.Again = true
		return a.page.show(w, r, http.StatusOK, v, "left")
	}
	user, err := a.enter(w, r)
	if errors.Is(err, errCrossSite) || errors.Is(err, errPrefetch) {
		v.Refresh = int(startRefresh / time.Second)
		return a.page.show(w, r, http.StatusOK, v, "start")
	}
	if err != nil {
		return a.showProblem(w, r, v, err)
	}
	t, _, err := a.room.Poll(r.Context(), event, user, true)
	if err != nil {
		return a.showProblem(w, r, v, err)
	}
	if t.State != api.TicketInEntry {
		return a.goOn(w, r, v, user)
	}
	t = a.complete(event, t)
	v.setTicket(t)
	v.Paused = a.statuses.of(r.Context(), event).status.Mode == api.ModePaused
	return a.page.show(w, r, http.StatusOK, v, "waiting")
}

// goOn gives a user whose turn it is the token as a cookie, and redirects the user to return_url.
// If the request has the same token already, the protected service has sent the user back: then
// goOn shows a page with a link instead, because redirects would form an endless loop. Without a
// return_url it shows a page, too.
func (a *API) goOn(w http.ResponseWriter, r *http.Request, v *view, user string) error {
	t, returnURL, err := a.room.Token(r.Context(), v.Event, user)
	if err != nil {
		return a.showProblem(w, r, v, err)
	}
	cookie := a.identity.entryCookie(v.Event, t)
	had, err := r.Cookie(cookie.Name)
	returned := err == nil && had.Value == t.Token
	http.SetCookie(w, cookie)
	if returnURL == "" || returned {
		v.ReturnURL, v.Leave = returnURL, true
		return a.page.show(w, r, http.StatusOK, v, "admitted")
	}
	http.Redirect(w, r, returnURL, http.StatusSeeOther)
	return nil
}

// showProblem shows the waiting page with an error and the error's status. If the problem is
// temporary, the page reloads itself in a browser without JavaScript. A problem of the user's
// identity has no page: it is returned. ErrNotReady and ErrNoTicket get the start page, with 200.
func (a *API) showProblem(w http.ResponseWriter, r *http.Request, v *view, err error) error {
	if errors.Is(err, ErrNotReady) || errors.Is(err, ErrNoTicket) { // the state has changed since Poll
		v.Refresh = int(startRefresh / time.Second)
		return a.page.show(w, r, http.StatusOK, v, "start")
	}
	p := a.refuse(r, err)
	web.SetRetryAfter(w.Header(), p.RetryAfter)
	switch key := p.reason; {
	case key == "identity":
		return p
	case v.Text.message(key) != message{}:
		return a.page.show(w, r, p.Status, v, key)
	}
	v.Refresh = max(int(math.Ceil(p.RetryAfter.Seconds())), 5)
	v.RefreshTo = ";url=" + v.Page // the request may have been that of the form
	return a.page.show(w, r, p.Status, v, "later")
}

func (v *view) setTicket(t api.Ticket) {
	v.Leave = true
	v.Refresh = int(math.Ceil(float64(t.PollAfterMS) / 1000))
	if t.Position != nil {
		v.Position = grouped(*t.Position)
	}
	if t.Total != nil {
		v.Total = grouped(*t.Total)
	}
	if t.ETASeconds != nil {
		v.ETA = v.Text.eta(*t.ETASeconds)
	}
}
