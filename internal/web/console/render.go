package console

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"html/template"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

//go:embed templates/*.gohtml
var templateFiles embed.FS

//go:embed assets
var assetFiles embed.FS

const (
	assetsPath = "/assets/{hash}/{name}"
	livePrefix = "live:"         // of the names of templates that are live regions
	layoutName = "layout.gohtml" // its template
)

// templates has the parsed templates of each page: the layout, the parts that pages share, and the
// page's own template.
type templates struct {
	pages map[string]*template.Template
	live  map[string][]string // by page: the ids of its live regions
}

// parseTemplates parses all templates. It panics on a mistake in a template, so each test that asks
// for a page finds it.
func parseTemplates(functions template.FuncMap) *templates {
	shared := template.Must(template.New(layoutName).Funcs(functions).
		ParseFS(templateFiles, "templates/"+layoutName, "templates/parts.gohtml"))
	t := &templates{pages: map[string]*template.Template{}, live: map[string][]string{}}
	files, err := fs.Glob(templateFiles, "templates/*.gohtml")
	if err != nil {
		panic(err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(path.Base(file), ".gohtml")
		if file == "templates/"+layoutName || name == "parts" {
			continue
		}
		page := template.Must(template.Must(shared.Clone()).ParseFS(templateFiles, file))
		t.pages[name] = page
		for _, region := range page.Templates() {
			if id, ok := strings.CutPrefix(region.Name(), livePrefix); ok {
				t.live[name] = append(t.live[name], id)
			}
		}
		slices.Sort(t.live[name])
	}
	return t
}

// frame is the data of the layout template. Live regions are rendered with a frame too, in which
// only Data, principal, login and api are set.
type frame struct {
	Title   string
	Path    string // of the page, with its query
	Version string
	Nav     []navArea
	Theme   string
	Zone    string    // in which scripts show times: one of zones
	Find    string    // what was looked for last
	In      string    // what a search for a job's key is bounded to, such as group:ID; "": nothing
	Topic   string    // that the page follows; "": none
	Notice  string    // what an action has done; "": nothing
	AsOf    time.Time // the time of Data, if Redis is away; zero otherwise
	Data    any

	principal auth.Principal
	login     bool // there is a login
	refused   *refusal
	api       string // the address of the API; "": it is the command line's default
}

// navArea is a part of the navigation.
type navArea struct {
	Name  string
	Items []navItem
}

// navItem is a link of the navigation.
type navItem struct {
	Name, Path string
	Current    bool
}

// May reports whether the reader of the page may make the calls of a scope.
func (f frame) May(scope string) bool { return f.principal.May(auth.Scope(scope)) }

// Payloads reports whether the reader may see payloads and error texts.
func (f frame) Payloads() bool { return f.principal.Payloads }

// Who returns the role of the reader's API key, and its tenant if it has one; "" if nobody has
// logged in.
func (f frame) Who() string {
	if f.principal.KeyID == "" || !f.login {
		return ""
	}
	who := string(f.principal.Role)
	if f.principal.Tenant != "" {
		who += " of " + f.principal.Tenant
	}
	return who
}

// KeyID returns the id of the reader's API key; "" if nobody has logged in.
func (f frame) KeyID() string { return f.principal.KeyID }

// Command returns a command line of bulkaction from its parts, with --api if the API's address is
// not the default.
func (f frame) Command(parts ...any) string {
	line := fmt.Sprint(parts...)
	if f.api != "" {
		line += " --api " + f.api
	}
	return line
}

// Themes and Zones are what can be chosen.
func (f frame) Themes() []string { return themes }
func (f frame) Zones() []string  { return zones }

// render answers with a page. asOf is when its data was read, if that was before this request;
// otherwise zero.
func (c *Console) render(w http.ResponseWriter, r *http.Request, status int, v view, asOf time.Time) {
	p, _ := auth.From(r.Context())
	f := frame{
		Title: v.title, Path: r.URL.RequestURI(), Version: c.Version, Theme: themeOf(r), Zone: zoneOf(r), Topic: v.topic,
		Find: r.URL.Query().Get("q"), In: scopeOf(r),
		Notice: noticeOf(r.URL.Query()), AsOf: asOf, Data: v.data, principal: p, login: c.Keys != nil,
		refused: v.refused, api: c.apiOption(r),
	}
	if r.Method != http.MethodGet {
		f.Path = c.pageOf(r)
	}
	for _, page := range c.pages {
		if page.nav == "" || page.scope != open && !p.May(page.scope) || p.Role == "" {
			continue
		}
		to := root + strings.TrimSuffix(page.path, "{$}")
		if page.view == nil {
			to = page.path
		}
		current := r.URL.Path == to || to != root+"/" && strings.HasPrefix(r.URL.Path, to+"/")
		if n := len(f.Nav); n == 0 || f.Nav[n-1].Name != page.area {
			f.Nav = append(f.Nav, navArea{Name: page.area})
		}
		area := &f.Nav[len(f.Nav)-1]
		area.Items = append(area.Items, navItem{page.nav, to, current})
	}
	var out bytes.Buffer
	if err := c.views().pages[v.name].ExecuteTemplate(&out, layoutName, f); err != nil {
		c.Log.ErrorContext(context.WithoutCancel(r.Context()), "a page of the console can't be rendered",
			"request_id", w.Header().Get("X-Request-Id"), "page", v.name, "error", err)
		http.Error(w, "This page can't be shown: the server's log has the reason under the request id "+
			w.Header().Get("X-Request-Id"), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write(c.withPrefix(out.Bytes())) // an error means that the client has left
}

// host matches a Host header that is safe to show in a command line.
var host = regexp.MustCompile(`^[A-Za-z0-9.\[\]:_-]+$`)

// address returns the URL by which the browser reaches the console, from the header Host; ADDRESS
// stands for a host that is not safe to show. The API has the same address if this process serves
// it.
func (c *Console) address(r *http.Request) string {
	scheme := "http://"
	if c.Secure || c.TLS != nil {
		scheme = "https://"
	}
	if !host.MatchString(r.Host) {
		return scheme + "ADDRESS"
	}
	return scheme + r.Host
}

// apiOption returns the value that command lines need for --api; "" if they need none, because the
// API's address is the default of the command line. It is the word URL if this process does not
// serve the API.
func (c *Console) apiOption(r *http.Request) string {
	if c.OnlyUI {
		return "URL"
	}
	at := c.address(r)
	if at == "http://127.0.0.1:8080" || at == "http://localhost:8080" {
		return ""
	}
	return at + c.Prefix
}

// failure is the template data of an error page.
type failure struct {
	Heading, Detail, RequestID string
	Fields                     []api.FieldError
	Again                      bool // the page may be there in a moment: the browser tries it again
	Back                       string
}

const notUsable = "That can't be used"

// fail answers with the page of an error.
func (c *Console) fail(w http.ResponseWriter, r *http.Request, err error) {
	f, status := c.failureOf(w, r, err)
	c.render(w, r, status, view{name: "failure", title: f.Heading, data: f}, time.Time{})
}

// failureOf returns the data of the error page and the status for an error, and sets the header
// Retry-After. It logs an unexpected error.
func (c *Console) failureOf(w http.ResponseWriter, r *http.Request, err error) (f failure, status int) {
	problem, retryAfter, known := httpapi.ProblemOf(err)
	f = failure{
		Heading: problem.Title, Detail: problem.Detail, Fields: problem.Fields,
		RequestID: w.Header().Get("X-Request-Id"), Back: c.pageOf(r),
	}
	status = problem.Status
	var input *inputError
	switch {
	case errors.As(err, &input):
		status, f.Heading, f.Detail = http.StatusUnprocessableEntity, notUsable, input.Error()
		if _, form := errors.AsType[*formError](err); form {
			f.Detail = labelOf(input.field) + " " + input.problem
		}
	case !known:
		c.Log.LogAttrs(context.WithoutCancel(r.Context()), slog.LevelError, "a page of the console failed",
			slog.String("request_id", f.RequestID), slog.String("method", r.Method), slog.String("path", r.URL.Path),
			slog.Any("error", err))
	case errors.Is(err, errForbidden):
		f.Heading, f.Detail = "Not for your key", "Your API key is valid, but its role or tenant may not do this."
	case problem.Code == api.NotFound:
		f.Heading = "Nothing here"
	case errors.Is(err, context.DeadlineExceeded):
		status, f.Again = http.StatusGatewayTimeout, r.Method == http.MethodGet
		f.Heading, f.Detail = "This takes too long", "Redis did not answer in time: it may be busy."
	case problem.Code == api.StoreUnavailable:
		f.Again = r.Method == http.MethodGet
		f.Heading, f.Detail = "Redis is away", "Redis can't be reached or does not answer."
	}
	if f.Again {
		f.Detail += " This page tries again every few seconds."
	} else if r.Method == http.MethodPost &&
		(problem.Code == api.StoreUnavailable || errors.Is(err, context.DeadlineExceeded)) {
		f.Detail += " The action may have been carried out: look before you repeat it."
	}
	web.SetRetryAfter(w.Header(), retryAfter)
	f.say(err)
	return f, status
}

// pageOf returns the path to which an error page links back: for a POST, the request's path, with
// the filter that the form's field next has for it, or its nearest parent that is a page; for other
// methods, the overview.
func (c *Console) pageOf(r *http.Request) string {
	if r.Method != http.MethodPost {
		return root + "/"
	}
	for at := r.URL.Path; len(at) > len(root); at = path.Dir(at) {
		if next, err := url.Parse(safeNext(r.PostForm.Get("next"))); err == nil && next.Path == at {
			return next.String()
		}
		_, pattern := c.mux.Handler(&http.Request{Method: http.MethodGet, URL: &url.URL{Path: at}})
		if pattern != "" && pattern != root+"/" {
			return (&url.URL{Path: at}).EscapedPath()
		}
	}
	return root + "/"
}

func (c *Console) notFound(w http.ResponseWriter, r *http.Request) {
	ctx, err := c.principal(r, true)
	if err != nil {
		ctx = r.Context()
	}
	c.fail(w, r.WithContext(ctx), &api.NotFoundError{Text: "the console has no such page"})
}

// assets are the files that pages load, by name.
var assets = readAssets()

type asset struct {
	hash, mediaType string
	text            []byte
}

func readAssets() map[string]asset {
	all := map[string]asset{}
	types := map[string]string{
		".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
	}
	entries, err := assetFiles.ReadDir("assets")
	if err != nil {
		panic(err)
	}
	for _, e := range entries {
		text, err := assetFiles.ReadFile("assets/" + e.Name())
		if err != nil {
			panic(err)
		}
		sum := sha256.Sum256(text)
		all[e.Name()] = asset{hex.EncodeToString(sum[:8]), types[path.Ext(e.Name())], text}
	}
	return all
}

// assetPath returns the path of an asset with a hash of its content, so browsers may cache it for
// ever.
func assetPath(name string) string { return root + "/assets/" + assets[name].hash + "/" + name }

func serveAsset(w http.ResponseWriter, r *http.Request) {
	a, ok := assets[r.PathValue("name")]
	if !ok || a.hash != r.PathValue("hash") {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", a.mediaType)
	w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
	_, _ = io.Copy(w, bytes.NewReader(a.text)) // an error means that the client has left
}

// keyOf returns the key of a request in Console.last: the page, and the rights of the reader.
func keyOf(r *http.Request) string {
	p, _ := auth.From(r.Context())
	return fmt.Sprintf("%s\x00%s", classOf(p), r.URL.RequestURI())
}

// classOf names the readers who see the same data as p.
func classOf(p auth.Principal) string {
	return fmt.Sprintf("%s\x00%s\x00%v", p.Role, p.Tenant, p.Payloads)
}
