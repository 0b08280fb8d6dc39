package roomapi

import (
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestClientAddress(t *testing.T) {
	t.Parallel()
	c := newClients([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}, 1, 1, 1)
	for name, x := range map[string]struct {
		peer      string
		forwarded []string
		want      string
	}{
		"a client":                  {"192.0.2.1:5", nil, "192.0.2.1"},
		"a client that lies":        {"192.0.2.1:5", []string{"198.51.100.7"}, "192.0.2.1"},
		"by a proxy":                {"10.0.0.1:5", []string{"198.51.100.7"}, "198.51.100.7"},
		"by two proxies":            {"10.0.0.1:5", []string{"198.51.100.7, 10.2.2.2"}, "198.51.100.7"},
		"a lie before the proxy":    {"10.0.0.1:5", []string{"203.0.113.9, 198.51.100.7"}, "198.51.100.7"},
		"nonsense before the proxy": {"10.0.0.1:5", []string{"nonsense, 198.51.100.7"}, "198.51.100.7"},
		"two headers":               {"10.0.0.1:5", []string{"203.0.113.9", "198.51.100.7"}, "198.51.100.7"},
		"with a port":               {"10.0.0.1:5", []string{"198.51.100.7:443"}, "198.51.100.7"},
		"IPv6 with a port":          {"10.0.0.1:5", []string{"[2001:db8::7]:443"}, "2001:db8::"},
		"IPv6":                      {"[2001:db8:0:1:2::3]:5", nil, "2001:db8:0:1::"},
		"IPv4 in IPv6":              {"[::ffff:192.0.2.1]:5", nil, "192.0.2.1"},
		"proxy of IPv6":             {"[fd00::1]:5", []string{"198.51.100.7"}, "198.51.100.7"},
		"a proxy names nobody":      {"10.0.0.1:5", nil, "invalid IP"},
		"only proxies":              {"10.0.0.1:5", []string{"10.0.0.2"}, "invalid IP"},
		"nonsense of the proxy":     {"10.0.0.1:5", []string{"unknown"}, "invalid IP"},
		"no address":                {"@", nil, "invalid IP"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			r.RemoteAddr = x.peer
			r.Header["X-Forwarded-For"] = x.forwarded
			require.Equal(t, x.want, c.ip(r).String())
		})
	}
}

// 1,000 entries from one address: those beyond the rate are refused, visitors with a cookie are
// not, and neither are other addresses.
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

	a.clients.newVisitorUntilRefused(t, netip.MustParseAddr("192.0.2.1"))
	require.Equal(t, http.StatusOK, call(t, a, "POST", ticketPath, cookieOf(t, first, "broker")).Code)
	require.Equal(t, http.StatusTooManyRequests, call(t, a, "GET", "/events/sale/wait").Code)
	require.Contains(t, call(t, a, "GET", "/events/sale/tickets/waiting").Body.String(), "busy")
	require.NoError(t, a.clients.newVisitor(netip.MustParseAddr("192.0.2.2")))
	require.NoError(t, a.clients.newVisitor(netip.Addr{}), "clients of a proxy that names none are not limited")
}

func (c *clients) newVisitorUntilRefused(t *testing.T, ip netip.Addr) {
	t.Helper()
	for c.newVisitor(ip) == nil {
	}
	c.bucket(ip).SetLimit(0) // the next requests come at the same instant
}

func TestBucketsAreBounded(t *testing.T) {
	t.Parallel()
	c := newClients(nil, 1, 1, 1)
	address := func(i int) netip.Addr {
		return netip.AddrFrom4([4]byte{192, byte(i >> 16), byte(i >> 8), byte(i)})
	}
	first := c.bucket(address(0))
	for i := range maxBuckets {
		c.bucket(address(i))
		c.bucket(address(0)) // is used all the time
	}
	for i := range 10 {
		c.bucket(address(maxBuckets + i))
	}
	require.Len(t, c.buckets, maxBuckets)
	require.Equal(t, maxBuckets, c.recent.Len())
	require.Same(t, first, c.bucket(address(0)))
	require.NotContains(t, c.buckets, address(1))
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
