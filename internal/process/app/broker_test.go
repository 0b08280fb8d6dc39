package app

import (
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPublicURL(t *testing.T) {
	t.Parallel()
	addr := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 8090}
	require.Equal(t, "http://127.0.0.1:8090", BrokerConfig{}.PublicURLOf(addr))
	require.Equal(t, "https://127.0.0.1:8090", BrokerConfig{TLSCertFile: "c.pem"}.PublicURLOf(addr))
	require.Equal(t, "https://shop.example/room", BrokerConfig{PublicURL: "https://shop.example/room/"}.PublicURLOf(addr))
}

func TestProxies(t *testing.T) {
	t.Parallel()
	c := BrokerConfig{TrustedProxies: []string{"10.1.2.3/8", "127.0.0.1", "::1"}}
	require.Equal(t, []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("127.0.0.1/32"), netip.MustParsePrefix("::1/128"),
	}, c.Proxies())
}
