package roomapi

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCrossSite(t *testing.T) {
	t.Parallel()
	const stream, wait = "/events/sale/tickets/waiting", "/events/sale/wait"
	const entered = -1 // the stream begins, or the page enters
	for name, c := range map[string]struct {
		method, path string
		headers      []string
		want         int
	}{
		"stream of our page":              {"GET", stream, []string{"Sec-Fetch-Site: same-origin"}, entered},
		"stream of the shop":              {"GET", stream, []string{"Sec-Fetch-Site: same-site"}, entered},
		"stream of another site":          {"GET", stream, []string{"Sec-Fetch-Site: cross-site"}, 403},
		"stream of nonsense":              {"GET", stream, []string{"Sec-Fetch-Site: here"}, 403},
		"stream, no browser":              {"GET", stream, nil, entered},
		"stream, old browser":             {"GET", stream, []string{"Origin: http://127.0.0.1:8090"}, entered},
		"stream, old browser, other site": {"GET", stream, []string{"Origin: http://evil.example"}, 403},
		"stream, origin null":             {"GET", stream, []string{"Origin: null"}, 403},
		"stream, HEAD":                    {"HEAD", stream, nil, 405},
		"stream, prefetch":                {"GET", stream, []string{"Sec-Purpose: prefetch", "Sec-Fetch-Site: same-origin"}, 403},
		"page, typed":                     {"GET", wait, []string{"Sec-Fetch-Site: none"}, entered},
		"page by a foreign link":          {"GET", wait, []string{"Sec-Fetch-Site: cross-site"}, 200},
		"page, HEAD":                      {"HEAD", wait, nil, 200},
		"page, prerendered":               {"GET", wait, []string{"Sec-Purpose: prefetch;prerender", "Sec-Fetch-Site: none"}, 200},
		"page, old prefetch":              {"GET", wait, []string{"Purpose: prefetch"}, 200},
		"poll of our page":                {"POST", ticketPath, []string{"Sec-Fetch-Site: same-origin", "Origin: http://127.0.0.1:8090"}, entered},
		"poll of another site":            {"POST", ticketPath, []string{"Sec-Fetch-Site: cross-site", "Origin: http://evil.example"}, 403},
		"poll of an old browser":          {"POST", ticketPath, []string{"Origin: http://evil.example"}, 403},
		"poll, no browser":                {"POST", ticketPath, nil, entered},
		"leave, another site":             {"DELETE", ticketPath, []string{"Sec-Fetch-Site: cross-site"}, 403},
		"beacon of another site":          {"POST", ticketPath + "/leave", []string{"Sec-Fetch-Site: cross-site"}, 403},
		"beacon of our page":              {"POST", ticketPath + "/leave", []string{"Sec-Fetch-Site: same-origin"}, 204},
		"token, another site":             {"POST", ticketPath + "/token", []string{"Origin: http://evil.example"}, 403},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			room := newFakeRoom()
			a := New(options(room))
			if c.path == stream && c.want == entered {
				open(t, serve(t, a, nil), c.headers...)
				<-room.connected
				return
			}
			rec := call(t, a, c.method, c.path, c.headers...)
			if c.want == entered {
				require.Less(t, rec.Code, 300)
				require.Equal(t, 1, room.number())
				return
			}
			require.Equal(t, c.want, rec.Code)
			require.Zero(t, room.number())
			require.NotContains(t, rec.Header().Get("Set-Cookie"), "broker=")
		})
	}
}

// TestForeignLinkOfAKnownVisitor: a visitor whose turn it is follows a link on another site to the
// waiting page. That request gets the page (200), not the token. A request of our own site, such as
// the page's reload without JavaScript, is sent on with the token (303).
func TestForeignLinkOfAKnownVisitor(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	a := New(options(room))
	cookie := cookieOf(t, call(t, a, "POST", ticketPath), "broker")
	room.state = "READY"
	require.Equal(t, http.StatusOK, call(t, a, "GET", "/events/sale/wait", cookie, "Sec-Fetch-Site: cross-site").Code)
	require.Equal(t, http.StatusSeeOther, call(t, a, "GET", "/events/sale/wait", cookie, "Sec-Fetch-Site: same-origin").Code)
}
