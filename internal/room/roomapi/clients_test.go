package roomapi

import (
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
)

// TestRateOfNewVisitors: 1,000 visitors enter from one address. Those without a cookie are refused
// above the rate limit; visitors with a cookie, and visitors from another address, are not.
func TestRateOfNewVisitors(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	o := options(room)
	o.EnterRatePerIP = 10
	reasons := map[string]int{}
	o.Metrics.Refused = func(event, reason string) { reasons[event+"/"+reason]++ }
	a := New(o)
	first := call(t, a, "POST", ticketPath)
	refused := 0
	for range 1000 {
		rec := call(t, a, "POST", ticketPath)
		if rec.Code == http.StatusTooManyRequests {
			refused++
			require.Empty(t, rec.Header().Values("Set-Cookie"))
			seconds, err := strconv.Atoi(rec.Header().Get("Retry-After"))
			require.NoError(t, err)
			require.Positive(t, seconds)
		}
	}
	require.Positive(t, refused)
	require.Equal(t, 1001-refused, room.number())
	require.Equal(t, map[string]int{"/rate": refused}, reasons)

	a.clients.newVisitors = auth.NewLimiters(0, 1, 10) // a permit that is taken does not come back
	require.NoError(t, a.clients.newVisitor(netip.MustParseAddr("192.0.2.1")))
	require.Equal(t, http.StatusOK, call(t, a, "POST", ticketPath, cookieOf(t, first, "broker")).Code)
	require.Equal(t, http.StatusTooManyRequests, call(t, a, "GET", "/events/sale/wait").Code)
	require.Contains(t, call(t, a, "GET", "/events/sale/tickets/waiting").Body.String(), "busy")
	require.NoError(t, a.clients.newVisitor(netip.MustParseAddr("192.0.2.2")))
	require.NoError(t, a.clients.newVisitor(netip.Addr{}), "clients of a proxy that names none are not limited")
}

func TestOpenStreamsAreForgotten(t *testing.T) {
	t.Parallel()
	c := newClients(nil, 3, 2, 1)
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	require.NoError(t, c.connect(a))
	require.NoError(t, c.connect(a))
	require.Error(t, c.connect(a))
	require.NoError(t, c.connect(b))
	require.Error(t, c.connect(netip.Addr{}))
	c.disconnect(a)
	require.NoError(t, c.connect(netip.Addr{}))
	c.disconnect(netip.Addr{})
	c.disconnect(a)
	c.disconnect(b)
	require.Empty(t, c.byIP)
	require.Zero(t, c.connections())
}

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

const ticketPath = "/events/sale/ticket"

func TestCookieKeepsThePlace(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	a := New(options(room))
	rec := call(t, a, "POST", ticketPath)
	require.Equal(t, http.StatusCreated, rec.Code)
	cookie := rec.Result().Cookies()[0]
	require.Equal(t, &http.Cookie{
		Name: "broker", Value: cookie.Value, Path: "/", MaxAge: 86400, HttpOnly: true, SameSite: http.SameSiteLaxMode, Raw: cookie.Raw,
	}, cookie)
	require.Regexp(t, `^[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}$`, cookie.Value)
	id, _, _ := strings.Cut(cookie.Value, ".")
	require.Contains(t, room.users, id)

	again := call(t, a, "POST", ticketPath, "Cookie: other=1; broker="+cookie.Value)
	require.Equal(t, http.StatusOK, again.Code)
	require.Equal(t, cookieOf(t, rec, "broker"), cookieOf(t, again, "broker"), "renewed")
	poll := call(t, a, "GET", ticketPath, "Cookie: broker="+cookie.Value)
	require.Equal(t, http.StatusOK, poll.Code)
	require.Empty(t, poll.Header().Values("Set-Cookie"))
	require.Equal(t, 1, room.number())
}

func TestCookieOfHTTPS(t *testing.T) {
	t.Parallel()
	o := options(newFakeRoom())
	o.PublicURL = "https://shop.example/room"
	a := New(o)
	rec := call(t, a, "POST", ticketPath)
	set := rec.Header().Get("Set-Cookie")
	require.True(t, strings.HasPrefix(set, "__Host-broker="), set)
	require.Contains(t, set, "; Secure")
	require.Contains(t, set, "; Path=/;")
	require.NotContains(t, set, "Domain")
	require.Contains(t, rec.Body.String(), `"stream":"https://shop.example/room/events/sale/tickets/waiting"`)
	require.Equal(t, http.StatusCreated, call(t, a, "POST", ticketPath, strings.Replace(cookieOf(t, rec, "__Host-broker"), "__Host-", "", 1)).Code, "a cookie of another name counts as none")
}

func TestForgedCookies(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	a := New(options(room))
	good := strings.TrimPrefix(cookieOf(t, call(t, a, "POST", ticketPath), "broker"), "Cookie: broker=")
	id, signature, _ := strings.Cut(good, ".")
	other := identity{keys: func() [][]byte { return [][]byte{[]byte("third")} }}
	last := map[bool]string{true: "A", false: "B"}[!strings.HasSuffix(signature, "A")]
	for name, value := range map[string]string{
		"another id":            newID() + "." + signature,
		"another key":           other.cookie(id).Value,
		"no signature":          id,
		"empty signature":       id + ".",
		"cut signature":         id + "." + signature[:42],
		"padded":                good + "=",
		"other last bits":       id + "." + signature[:42] + last,
		"a short id":            other.cookie("a").Value,
		"a long value":          strings.Repeat("x", 10_000),
		"the id of another key": id + "." + id,
	} {
		rec := call(t, a, "POST", ticketPath, "Cookie: broker="+value)
		require.Equal(t, http.StatusCreated, rec.Code, "%s: a forged cookie is none", name)
		require.NotContains(t, cookieOf(t, rec, "broker"), id, name)
		require.Equal(t, http.StatusNotFound, call(t, a, "GET", ticketPath, "Cookie: broker="+value).Code, name)
		require.Equal(t, http.StatusUnauthorized, call(t, a, "POST", ticketPath, "Authorization: Bearer "+value).Code, name)
	}
	require.Equal(t, http.StatusOK, call(t, a, "GET", ticketPath, "Cookie: broker=forged; broker="+good).Code, "another site's cookie does not hide the valid one")
}

func TestRotationOfKeys(t *testing.T) {
	t.Parallel()
	keys := []string{"first"}
	o := options(newFakeRoom())
	o.CookieKeys = func() (all [][]byte) {
		for _, k := range keys {
			all = append(all, []byte(k))
		}
		return all
	}
	a := New(o)
	old := cookieOf(t, call(t, a, "POST", ticketPath), "broker")
	keys = []string{"first", "second"}
	require.Equal(t, old, cookieOf(t, call(t, a, "POST", ticketPath, old), "broker"))
	keys = []string{"second", "first"}
	rec := call(t, a, "POST", ticketPath, old)
	require.Equal(t, http.StatusOK, rec.Code)
	renewed := cookieOf(t, rec, "broker")
	require.NotEqual(t, old, renewed)
	keys = []string{"second"}
	require.Equal(t, http.StatusOK, call(t, a, "GET", ticketPath, renewed).Code)
	require.Equal(t, http.StatusNotFound, call(t, a, "GET", ticketPath, old).Code)
}

func TestNativeApps(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	a := New(options(room))
	value := strings.TrimPrefix(cookieOf(t, call(t, a, "POST", ticketPath), "broker"), "Cookie: broker=")
	rec := call(t, a, "POST", ticketPath, "Authorization: bearer "+value)
	require.Equal(t, http.StatusOK, rec.Code)
	require.Empty(t, rec.Header().Values("Set-Cookie"))
	require.Equal(t, http.StatusCreated, call(t, a, "POST", ticketPath, "Authorization: Basic dTpw").Code, "another scheme is for a proxy")
	require.Equal(t, http.StatusCreated, call(t, a, "POST", ticketPath+"?token="+value).Code, "nothing is taken from the query")
}

func TestIdentityByHeader(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	o := options(room)
	o.IdentityHeader = "X-User"
	o.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	o.EnterRatePerIP = 1
	a := New(o)
	for i, c := range []struct {
		headers []string
		want    int
	}{
		{[]string{"X-User: anna"}, http.StatusCreated},
		{[]string{"X-User: anna"}, http.StatusOK},
		{[]string{"X-User: ben"}, http.StatusCreated},
		{[]string{"X-User: carl"}, http.StatusCreated}, // users who are known don't count as new visitors
		{nil, http.StatusUnauthorized},
		{[]string{"X-User: "}, http.StatusUnauthorized},
		{[]string{"X-User: a b"}, http.StatusBadRequest},
		{[]string{"X-User: " + strings.Repeat("x", 129)}, http.StatusBadRequest},
		{[]string{"X-User: .."}, http.StatusBadRequest},
		{[]string{"X-User: dora", "X-User: anna"}, http.StatusBadRequest},
	} {
		rec := call(t, a, "POST", ticketPath, c.headers...)
		require.Equal(t, c.want, rec.Code, i)
		require.Empty(t, rec.Header().Values("Set-Cookie"))
	}
	require.Equal(t, map[string]int64{"anna": 1, "ben": 2, "carl": 3}, room.users)

	o.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	require.Equal(t, http.StatusForbidden, call(t, New(o), "POST", ticketPath, "X-User: anna").Code, "only a trusted proxy names users")
}

func TestEntryCookie(t *testing.T) {
	t.Parallel()
	expires := time.Now().Add(time.Hour)
	c := (&identity{secure: true}).entryCookie("sale.1", api.EntryToken{Token: "a.b.c", ExpiresAt: expires})
	require.NoError(t, c.Valid())
	require.InDelta(t, 3600, c.MaxAge, 60)
	c.MaxAge = 0
	require.Equal(t, &http.Cookie{
		Name: "entry.sale.1", Value: "a.b.c", Path: "/", Expires: expires.UTC(), HttpOnly: true, Secure: true, SameSite: http.SameSiteLaxMode,
	}, c)
	require.Positive(t, (&identity{}).entryCookie("sale", api.EntryToken{Token: "a"}).MaxAge, "an expired token does not become a cookie without an end")
}
