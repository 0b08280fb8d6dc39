package auth

import (
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestClientOf(t *testing.T) {
	t.Parallel()
	proxies := Proxies{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}
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
			require.Equal(t, x.want, proxies.ClientOf(r).String())
			require.Equal(t, x.peer[0] == '1' && x.peer[1] == '0' || x.peer == "[fd00::1]:5", proxies.Sent(r))
		})
	}
}

func address(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{192, byte(i >> 16), byte(i >> 8), byte(i)})
}

func TestTake(t *testing.T) {
	t.Parallel()
	l, now := NewLimiters(0.5, 3, 10), time.Unix(1000, 0)
	for range 3 {
		require.Zero(t, l.Take(address(1), now))
	}
	for range 5 { // a refusal takes nothing
		require.Equal(t, 2*time.Second, l.Take(address(1), now))
	}
	require.Zero(t, l.Take(address(2), now), "another address")
	require.Zero(t, l.Take(address(1), now.Add(2*time.Second)))
	require.Equal(t, time.Second, l.Take(address(1), now.Add(3*time.Second)))
	for range 100 {
		require.Zero(t, l.Take(netip.Addr{}, now), "clients of a proxy that names none are not limited")
	}
	require.Len(t, l.buckets, 2)
}

func TestLimitersAreBounded(t *testing.T) {
	t.Parallel()
	const most = 1000
	l, now := NewLimiters(1, 1, most), time.Unix(1000, 0)
	first := l.of(address(0))
	for i := range most {
		l.Take(address(i), now)
		l.Take(address(0), now) // is used all the time
	}
	for i := range 10 {
		l.Take(address(most+i), now)
	}
	require.Len(t, l.buckets, most)
	require.Equal(t, most, l.recent.Len())
	require.Same(t, first, l.of(address(0)))
	require.NotContains(t, l.buckets, address(1))
}
