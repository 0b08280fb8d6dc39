package entry

import (
	"context"
	"encoding/json"
	"errors"
	"html/template"
	"log/slog"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// maxTokens is the largest number of tokens of one request that are checked. A browser sends
// several cookies of one name if they were set for several paths or domains.
const maxTokens = 4

type contextKey struct{}

type admitted struct {
	claims Claims
	token  string
}

// FromContext returns the claims of the token with which a request passed the middleware.
func FromContext(ctx context.Context) (Claims, bool) {
	a, ok := ctx.Value(contextKey{}).(admitted)
	return a.claims, ok
}

// Token returns the token with which a request passed the middleware, for Client.Complete and
// Client.Renew; "" without one. It is a secret: do not log it.
func Token(ctx context.Context) string {
	a, _ := ctx.Value(contextKey{}).(admitted)
	return a.token
}

// Middleware calls next for requests with a valid token: in the cookie entry.EVENT, or in the
// header Authorization as a bearer token. next finds the claims by FromContext.
//
// Without a valid token, a browser that asks for a page is sent to the waiting page (302). Any other
// request, such as a form that was sent too late, gets what Config.Refused answers; without it 403,
// with a page that links to the waiting page if the client accepts HTML, else with a problem
// document that names the waiting page in its field wait. If the token can't be checked at the
// moment, the answer is 503, again as a page or a problem document: the waiting page would send the
// user back.
func (v *Verifier) Middleware(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a, err := v.admit(r)
		switch {
		case err == nil:
			next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), contextKey{}, a)))
		case errors.Is(err, ErrInvalid):
			v.logRefusal(r.Context(), err)
			v.refuse(w, r)
		default:
			v.logRefusal(r.Context(), err)
			unavailable(w, r)
		}
	})
}

// admit returns the first valid token of a request, with its claims. If no token is valid, admit
// returns ErrUnavailable if Verify returned it for one of the tokens, otherwise the error of Verify
// for the last token; ErrInvalid without a token.
func (v *Verifier) admit(r *http.Request) (admitted, error) {
	var tokens []string
	for _, cookie := range r.CookiesNamed(CookieName(v.config.Event)) {
		tokens = append(tokens, cookie.Value)
	}
	if len(tokens) >= maxTokens {
		tokens = tokens[:maxTokens-1]
	}
	if scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
		tokens = append(tokens, strings.TrimSpace(token))
	}
	result := ErrInvalid
	for _, token := range tokens {
		claims, err := v.Verify(r.Context(), token)
		if err == nil {
			return admitted{claims, token}, nil
		}
		if !errors.Is(result, ErrUnavailable) {
			result = err
		}
	}
	return admitted{}, result
}

// logRefusal logs why a request was refused. It logs as a warning, at most once a minute, what an
// operator can correct: tokens can't be checked, or the configuration does not match the brokers'.
// With such a mismatch, service and waiting page send users back and forth.
func (v *Verifier) logRefusal(ctx context.Context, err error) {
	level := slog.LevelDebug
	if errors.Is(err, errMismatch) || !errors.Is(err, ErrInvalid) {
		now, next := time.Now().Unix(), v.nextWarning.Load()
		if now >= next && v.nextWarning.CompareAndSwap(next, now+60) {
			level = slog.LevelWarn
		}
	}
	v.log.Log(ctx, level, "request without entry was refused", "event", v.config.Event, "error", err)
}

func (v *Verifier) refuse(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	page := acceptsHTML(r)
	if page && r.Method == http.MethodGet {
		http.Redirect(w, r, v.WaitURL(), http.StatusFound)
		return
	}
	if v.config.Refused != nil {
		v.config.Refused.ServeHTTP(w, r)
		return
	}
	if page {
		writePage(w, r, http.StatusForbidden, "late", v.WaitURL())
		return
	}
	writeProblem(w, problem{
		Status: http.StatusForbidden, Wait: v.WaitURL(),
		Detail: "this needs a valid entry token of the event " + v.config.Event + ": enter its waiting room",
	})
}

const notAvailable = "entry tokens can't be checked at the moment: try again in a few seconds"

func unavailable(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Retry-After", strconv.Itoa(int(2*firstInterval/time.Second)))
	if acceptsHTML(r) {
		writePage(w, r, http.StatusServiceUnavailable, "unavailable", "")
		return
	}
	writeProblem(w, problem{Status: http.StatusServiceUnavailable, Detail: notAvailable})
}

// pageTexts are the texts of writePage, by language and situation: headline, detail and link.
var pageTexts = map[string]map[string][3]string{
	"en": {
		"late": {
			"You are not inside any more", "What you sent was not accepted, because your time is over or you have not been " +
				"let in. Queue again: you get in when it is your turn.", "Go to the waiting room",
		},
		"unavailable": {"One moment, please", "Your entry can't be checked at the moment, and nothing was done. Wait a few " +
			"seconds and reload this page. If you have sent a form, send it again.", ""},
	},
	"ko": {
		"late": {
			"입장 시간이 끝났습니다", "시간이 만료되었거나 아직 입장하지 않아 요청이 처리되지 않았습니다. 다시 대기하면 차례가 되었을 때 " +
				"입장합니다.", "대기실로 가기",
		},
		"unavailable": {"잠시만 기다려 주세요", "지금은 입장을 확인할 수 없어 요청이 처리되지 않았습니다. 몇 초 뒤에 페이지를 " +
			"새로고침하거나 양식을 다시 보내 주세요.", ""},
	},
}

var pageTemplate = template.Must(template.New("page").Parse(`<!DOCTYPE html>
<html lang="{{.Lang}}">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{{index .Text 0}}</title></head>
<body><main><h1>{{index .Text 0}}</h1>
<p>{{index .Text 1}}</p>
{{if .Link}}<p><a href="{{.Link}}">{{index .Text 2}}</a></p>
{{end}}</main></body>
</html>
`))

// writePage answers with a page for people: in Korean if their browser asks for it first, otherwise
// in English.
func writePage(w http.ResponseWriter, r *http.Request, status int, situation, link string) {
	lang := "en"
	if strings.HasPrefix(strings.ToLower(r.Header.Get("Accept-Language")), "ko") {
		lang = "ko"
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Language", lang)
	h.Set("Content-Security-Policy", "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_ = pageTemplate.Execute(w, struct { // an error means that the client has left
		Lang, Link string
		Text       [3]string
	}{lang, link, pageTexts[lang][situation]})
}

// acceptsHTML says whether the client is a browser that shows the answer: it names HTML among what
// it accepts. HEAD has no answer to show.
func acceptsHTML(r *http.Request) bool {
	if r.Method == http.MethodHead {
		return false
	}
	for _, header := range r.Header.Values("Accept") {
		for accepted := range strings.SplitSeq(header, ",") {
			kind, parameters, err := mime.ParseMediaType(accepted)
			if err != nil || kind != "text/html" {
				continue
			}
			if q, err := strconv.ParseFloat(parameters["q"], 64); err == nil && q == 0 {
				continue
			}
			return true
		}
	}
	return false
}

// problem is an error document by RFC 9457.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`
	Wait   string `json:"wait,omitempty"` // the address of the waiting page
}

func writeProblem(w http.ResponseWriter, p problem) {
	p.Type, p.Title = "about:blank", http.StatusText(p.Status)
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(p.Status)
	_ = json.NewEncoder(w).Encode(p) // an error means that the client has left
}

// CookieName returns the name of the cookie with the token of an event.
func CookieName(event string) string { return "entry." + event }

// Cookie returns a cookie with a renewed token. It replaces the one that a broker has set. secure
// says that the service is reached by https.
func Cookie(event string, r Renewal, secure bool) *http.Cookie {
	return &http.Cookie{
		Name: CookieName(event), Value: r.Token, Path: "/", Expires: r.ExpiresAt,
		HttpOnly: true, SameSite: http.SameSiteLaxMode, Secure: secure,
	}
}

// RemovedCookie returns the cookie that removes the token of an event from the browser. Set it
// after Client.Complete, because an offline Verifier accepts the token until it expires.
func RemovedCookie(event string, secure bool) *http.Cookie {
	c := Cookie(event, Renewal{}, secure)
	c.MaxAge = -1
	return c
}
