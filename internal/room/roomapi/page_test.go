package roomapi

import (
	"encoding/json"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/html"

	"github.com/bulkaction/bulkaction/api"
)

const pagePath = "/events/sale/wait"

func element(t *testing.T, page, id string) *html.Node {
	t.Helper()
	root, err := html.Parse(strings.NewReader(page))
	require.NoError(t, err)
	for n := range root.Descendants() {
		if n.Type == html.ElementNode && attribute(n, "id") == id {
			return n
		}
	}
	require.Fail(t, "no element "+id, page)
	return nil
}

func attribute(n *html.Node, name string) string {
	for _, a := range n.Attr {
		if a.Key == name {
			return a.Val
		}
	}
	return ""
}

func hidden(n *html.Node) bool {
	for _, a := range n.Attr {
		if a.Key == "hidden" {
			return true
		}
	}
	return false
}

func textOf(n *html.Node) string {
	var b strings.Builder
	for d := range n.Descendants() {
		if d.Type == html.TextNode {
			b.WriteString(d.Data)
		}
	}
	return b.String()
}

func TestPageInBothLanguages(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		path, accept, lang, headline, eta string
	}{
		"default":            {pagePath, "", "en", "You are in the queue", "about 2 min"},
		"Korean":             {pagePath, "ko-KR,ko;q=0.9,en;q=0.8", "ko", "대기 중입니다", "약 2분"},
		"English first":      {pagePath, "en-US,en;q=0.9,ko;q=0.8", "en", "You are in the queue", "about 2 min"},
		"other languages":    {pagePath, "de,ko;q=0.2,en;q=0.1", "ko", "대기 중입니다", "약 2분"},
		"none of them":       {pagePath, "de,*;q=0.5", "en", "You are in the queue", "about 2 min"},
		"not at all":         {pagePath, "ko;q=0", "en", "You are in the queue", "about 2 min"},
		"nonsense":           {pagePath, ";q=;,ko;q=x", "en", "You are in the queue", "about 2 min"},
		"chosen":             {pagePath + "?lang=ko", "en", "ko", "대기 중입니다", "약 2분"},
		"an unknown choice":  {pagePath + "?lang=de", "ko", "ko", "대기 중입니다", "약 2분"},
		"with foreign query": {pagePath + "?utm_source=mail", "", "en", "You are in the queue", "about 2 min"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			room := newFakeRoom()
			rec := call(t, New(options(room)), "GET", c.path, "Accept-Language: "+c.accept)
			require.Equal(t, http.StatusOK, rec.Code)
			require.Equal(t, 1, room.number())
			page := rec.Body.String()
			require.Contains(t, page, `<html lang="`+c.lang+`">`)
			require.Equal(t, c.lang, rec.Header().Get("Content-Language"))
			require.Equal(t, c.headline, textOf(element(t, page, "headline")))
			require.Equal(t, "1", textOf(element(t, page, "position")))
			require.Equal(t, "1", textOf(element(t, page, "total")))
			require.Equal(t, c.eta, textOf(element(t, page, "eta")))
			require.False(t, hidden(element(t, page, "leave")))
			require.True(t, hidden(element(t, page, "paused")))
			require.Contains(t, page, `<noscript><meta http-equiv="refresh" content="2"></noscript>`)
			require.Equal(t, strings.Contains(c.path, "lang=ko"), strings.Contains(attribute(element(t, page, "leave"), "action"), "&lang=ko"))
		})
	}
}

var (
	inlineHandler = regexp.MustCompile(`(?i)\son[a-z]+=`)
	assetLink     = regexp.MustCompile(`(?:src|href)="(/room/assets/[^"]+)"`)
)

func TestPageKeepsItsPolicy(t *testing.T) {
	t.Parallel()
	o := options(newFakeRoom())
	o.PublicURL = "https://shop.example/room"
	a := New(o)
	rec := call(t, a, "GET", pagePath)
	policy := rec.Header().Get("Content-Security-Policy")
	require.Equal(t, "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'", policy)
	require.Equal(t, "no-store", rec.Header().Get("Cache-Control"))
	page := rec.Body.String()
	require.NotContains(t, page, "style=")
	require.NotContains(t, page, "<style")
	require.NotContains(t, page, "javascript:")
	require.NotRegexp(t, inlineHandler, page)
	require.Regexp(t, `<script src="[^"]+" defer></script>`, page)
	require.Equal(t, 1, strings.Count(page, "<script"))

	found := assetLink.FindAllStringSubmatch(page, -1)
	require.Len(t, found, 3)
	for _, f := range found {
		path := strings.TrimPrefix(f[1], "/room") // the proxy in front removes it
		require.Regexp(t, `^/assets/wait-[0-9a-f]{16}\.(css|js|svg)$`, path)
		rec := call(t, a, "GET", path)
		require.Equal(t, http.StatusOK, rec.Code)
		require.Equal(t, "public, max-age=31536000, immutable", rec.Header().Get("Cache-Control"))
		require.NotEmpty(t, rec.Body.String())
	}
	room := element(t, page, "room")
	require.Equal(t, "/room/events/sale/tickets/waiting", attribute(room, "data-stream"))
	require.Equal(t, "/room/events/sale/ticket/leave?page", attribute(element(t, page, "leave"), "action"))
	require.Equal(t, http.StatusNotFound, call(t, a, "GET", "/assets/wait-0000000000000000.js").Code)
}

// TestPageWithoutJavaScript: the answers to GET of the page, as its reload without JavaScript sends
// it, in the states paused, READY (303 with the token) and IN_PROGRESS; and the form that leaves,
// while Redis is away and afterwards.
func TestPageWithoutJavaScript(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	a := New(options(room))
	first := call(t, a, "GET", pagePath, "Sec-Fetch-Site: cross-site")
	require.Zero(t, room.number(), "a foreign link does not enter")
	require.Contains(t, first.Body.String(), `content="2"`)

	rec := call(t, a, "GET", pagePath, "Sec-Fetch-Site: same-origin")
	cookie := cookieOf(t, rec, "broker")
	room.mode = api.ModePaused
	a.statuses = newStatuses(room.Status)
	rec = call(t, a, "GET", pagePath, cookie)
	require.False(t, hidden(element(t, rec.Body.String(), "paused")))

	room.state = api.TicketReady
	rec = call(t, a, "GET", pagePath, cookie)
	require.Equal(t, http.StatusSeeOther, rec.Code)
	require.Equal(t, "http://127.0.0.1:8081/buy", rec.Header().Get("Location"))
	entry := cookieOf(t, rec, "entry.sale")
	require.Equal(t, "Cookie: entry.sale=a.b.c", entry)

	// The service behind the room has sent the user back.
	room.state = api.TicketInProgress
	rec = call(t, a, "GET", pagePath, cookie, entry)
	require.Equal(t, http.StatusOK, rec.Code)
	goon := element(t, rec.Body.String(), "goon")
	require.False(t, hidden(goon))
	require.Equal(t, "http://127.0.0.1:8081/buy", attribute(goon, "href"))
	require.Equal(t, http.StatusSeeOther, call(t, a, "GET", pagePath, cookie, "Cookie: entry.sale=old").Code, "an old token is replaced")

	room.err = api.ErrUnavailable
	rec = call(t, a, "POST", "/events/sale/ticket/leave?page&lang=ko", cookie, "Sec-Fetch-Site: same-origin")
	require.Equal(t, http.StatusServiceUnavailable, rec.Code)
	require.Regexp(t, `content="\d+;url=/events/sale/wait\?lang=ko"`, rec.Body.String(), "the form is not sent again")
	require.Equal(t, "later", attribute(element(t, rec.Body.String(), "room"), "data-view"))
	require.Equal(t, http.StatusServiceUnavailable, call(t, a, "DELETE", ticketPath, cookie).Code)
	room.err = nil
	rec = call(t, a, "POST", "/events/sale/ticket/leave?page&lang=ko", cookie, "Sec-Fetch-Site: same-origin")
	require.Equal(t, http.StatusSeeOther, rec.Code)
	to := rec.Header().Get("Location")
	require.Equal(t, "/events/sale/wait?lang=ko&left=", to)
	rec = call(t, a, "GET", to, cookie)
	require.Equal(t, http.StatusOK, rec.Code)
	require.Zero(t, room.number(), "the page does not enter again by itself")
	require.NotContains(t, rec.Body.String(), "http-equiv")
	again := element(t, rec.Body.String(), "again")
	require.False(t, hidden(again))
	require.Equal(t, "/events/sale/wait?lang=ko", attribute(again, "href"))
}

func TestPageWithoutReturnURL(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	room.state, room.url = api.TicketReady, ""
	rec := call(t, New(options(room)), "GET", pagePath)
	require.Equal(t, http.StatusOK, rec.Code)
	require.Equal(t, "It is your turn", textOf(element(t, rec.Body.String(), "headline")))
	require.Equal(t, "Go back to the shop.", textOf(element(t, rec.Body.String(), "detail")))
	require.Equal(t, "admitted", attribute(element(t, rec.Body.String(), "room"), "data-view"))
	require.True(t, hidden(element(t, rec.Body.String(), "goon")))
	cookieOf(t, rec, "entry.sale")
}

func TestPageOfProblems(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]struct {
		status   int
		headline string
		again    bool
	}{
		ErrUnknownEvent:    {404, "Not found", false},
		ErrClosed:          {409, "Closed", false},
		ErrSoldOut:         {410, "Sold out", false},
		ErrFull:            {429, "The waiting room is busy", true},
		ErrDraining:        {503, "The waiting room is busy", true},
		api.ErrUnavailable: {503, "The waiting room is busy", true},
		ErrNotReady:        {200, "One moment, please", true},
	} {
		room := newFakeRoom()
		room.err = err
		rec := call(t, New(options(room)), "GET", pagePath)
		require.Equal(t, want.status, rec.Code, err)
		require.Equal(t, want.headline, textOf(element(t, rec.Body.String(), "headline")))
		require.Equal(t, want.again, strings.Contains(rec.Body.String(), "http-equiv"))
		require.True(t, hidden(element(t, rec.Body.String(), "place")))
	}
}

// TestPageEscapes: text of a request is not in the page as HTML, and a return_url with an unsafe
// scheme, such as javascript:, is not in the page at all.
func TestPageEscapes(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	room.state, room.url = api.TicketInProgress, "javascript:alert(1)"
	a := New(options(room))
	rec := call(t, a, "GET", pagePath, "Cookie: entry.sale=a.b.c")
	require.NotContains(t, rec.Body.String(), "javascript:")
	require.NotContains(t, call(t, a, "GET", pagePath+"?lang=%22%3E%3Cscript%3E").Body.String(), "><script>")
}

func TestLanguagesHaveTheSameTexts(t *testing.T) {
	t.Parallel()
	languages := standardLook().languages
	require.Len(t, languages, 2)
	en := languages["en"]
	for lang, texts := range languages {
		file, err := pageFiles.ReadFile("page/texts/" + lang + ".json")
		require.NoError(t, err)
		var own map[string]string
		require.NoError(t, json.Unmarshal(file, &own))
		require.ElementsMatch(t, slices.Collect(maps.Keys(en)), slices.Collect(maps.Keys(own)), lang)
		for key, text := range own {
			require.Empty(t, textProblem(en, key, text), "%s: %s", lang, key)
		}
		require.Contains(t, texts, "waiting.detail")
	}
	for _, reason := range []string{EndedLeft, EndedReplaced, EndedClosed, EndedSoldOut, EndedRemoved, EndedGone} {
		require.NotZero(t, en.message(reason))
	}
}

func TestNumbersInText(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -1000: "-1,000", -100: "-100"} {
		require.Equal(t, want, grouped(n))
	}
	en := standardLook().languages["en"]
	require.Equal(t, "less than a minute", en.eta(59.9))
	require.Equal(t, "about 1,667 min", en.eta(100_000))
}
