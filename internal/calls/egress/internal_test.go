package egress

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestWhichAddressesArePublic(t *testing.T) {
	for address, want := range map[string]bool{
		"8.8.8.8":                true,
		"100.63.255.255":         true,
		"172.32.0.1":             true,
		"192.0.1.1":              true,
		"2606:4700:4700::1111":   true,
		"2a00:1450:4001:82b::1":  true,
		"::ffff:8.8.8.8":         true, // dialled as IPv4
		"0.0.0.0":                false,
		"0.1.2.3":                false,
		"10.0.0.1":               false,
		"100.64.0.1":             false,
		"100.100.100.200":        false,
		"127.0.0.1":              false,
		"127.255.255.254":        false,
		"168.63.129.16":          false,
		"169.254.169.254":        false,
		"172.16.0.1":             false,
		"172.31.255.255":         false,
		"192.0.0.170":            false,
		"192.0.2.1":              false,
		"192.88.99.1":            false,
		"192.168.1.1":            false,
		"198.18.0.1":             false,
		"198.51.100.1":           false,
		"203.0.113.1":            false,
		"224.0.0.1":              false,
		"239.255.255.255":        false,
		"240.0.0.1":              false,
		"255.255.255.255":        false,
		"::":                     false,
		"::1":                    false,
		"::127.0.0.1":            false, // IPv4-compatible
		"::ffff:127.0.0.1":       false, // IPv4-mapped
		"::ffff:169.254.169.254": false,
		"::ffff:0:10.0.0.1":      false, // IPv4-translated
		"64:ff9b::a00:1":         false, // NAT64
		"64:ff9b::808:808":       false,
		"64:ff9b:1::a00:1":       false, // local NAT64
		"100::1":                 false, // discard
		"2001::1":                false, // Teredo
		"2001:10::1":             false, // ORCHID
		"2001:db8::1":            false,
		"2002:a00:1::":           false, // 6to4
		"3fff::1":                false,
		"4000::1":                false, // not assigned
		"5f00::1":                false, // segment routing
		"fc00::1":                false,
		"fd00:ec2::254":          false,
		"fe80::1":                false,
		"fe80::1%eth0":           false,
		"fec0::1":                false, // site-local
		"ff02::1":                false,
	} {
		t.Run(address, func(t *testing.T) {
			ip := netip.MustParseAddr(address)
			require.Equal(t, want, Policy{}.MayCall(ip))
			require.True(t, Policy{AllowPrivate: true}.MayCall(ip))
		})
	}
}

func TestAllowedNetworks(t *testing.T) {
	c := Policy{AllowedCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd00::/8")}}
	for address, want := range map[string]bool{
		"10.1.2.3:80": true, "[::ffff:10.1.2.3]:80": true, "[fd00::1]:80": true, "8.8.8.8:80": true,
		"10.2.0.1:80": false, "[fe80::1%eth0]:80": false, "not an address": false,
	} {
		err := c.checkAddress("tcp", address, nil)
		require.Equal(t, want, err == nil, address)
	}
}

func TestPublicAddressesAreRefused(t *testing.T) {
	for name, p := range map[string]Policy{
		"private":  {AllowPrivate: true, RefusePublic: true},
		"networks": {AllowedCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}, RefusePublic: true},
	} {
		require.NoError(t, p.checkAddress("tcp", "10.1.2.3:80", nil), name)
		require.ErrorIs(t, p.checkAddress("tcp", "8.8.8.8:80", nil), ErrPublicAddress, name)
		require.ErrorIs(t, p.checkAddress("tcp", "[::ffff:8.8.8.8]:80", nil), ErrPublicAddress, name)
		p.AllowedCIDRs = append(p.AllowedCIDRs, netip.MustParsePrefix("8.8.8.0/24"))
		require.NoError(t, p.checkAddress("tcp", "8.8.8.8:80", nil), name)
	}
	nothing := Policy{RefusePublic: true}
	require.ErrorIs(t, nothing.checkAddress("tcp", "127.0.0.1:80", nil), ErrAddressRefused)
	require.ErrorIs(t, nothing.checkAddress("tcp", "8.8.8.8:80", nil), ErrPublicAddress)
}

func TestNetworksThatAreNotValid(t *testing.T) {
	good := netip.MustParsePrefix("10.1.0.0/16")
	require.Empty(t, Policy{AllowedCIDRs: []netip.Prefix{good}}.Validate())
	require.Len(t, Policy{AllowedCIDRs: []netip.Prefix{good, {}, netip.MustParsePrefix("::ffff:10.0.0.0/104")}}.Validate(), 2)
}

func FuzzRetryAfter(f *testing.F) {
	for _, seed := range []string{"", "0", "120", "-1", " 5", "18446744073709551615", "Fri, 31 Dec 9999 23:59:59 GMT", "Mon, 01 Jan 0001 00:00:00 GMT", "soon"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, header string) {
		after, given := RetryAfter(header, time.Now())
		require.True(t, after >= 0 && after <= maxRetryAfter, "%s", after)
		require.False(t, !given && after != 0)
	})
}
