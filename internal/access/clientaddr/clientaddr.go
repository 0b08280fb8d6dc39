// Package clientaddr finds the address of the client that sent an HTTP request, also behind
// proxies, and limits rates by address. It hides the rules of X-Forwarded-For and of IPv6, and
// keeps a bounded number of rate limiters.
package clientaddr

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// Proxies are the networks of trusted proxies. X-Forwarded-For counts only in requests from them.
type Proxies []netip.Prefix

// Sent reports whether a request comes from a trusted proxy.
func (p Proxies) Sent(r *http.Request) bool { return p.contains(peer(r)) }

// ClientOf returns the address by which a request is rate-limited: an IPv4 address, or the /64
// network of an IPv6 address, because one host can use all addresses of such a network.
//
// Each proxy appends the address of its peer to X-Forwarded-For. So for a request from a trusted
// proxy, ClientOf reads this header from its end, passes over the addresses of trusted proxies, and
// returns the next one. If the header has no other address, or the next entry is not an address,
// ClientOf returns the zero Addr. It does not return the proxy's own address, because all clients
// of the proxy would share it.
func (p Proxies) ClientOf(r *http.Request) netip.Addr {
	ip := peer(r)
	if !p.contains(ip) {
		return networkOf(ip)
	}
	named := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for i := len(named) - 1; i >= 0; i-- {
		ip, ok := parseForwarded(strings.TrimSpace(named[i]))
		if !ok {
			break
		}
		if !p.contains(ip) {
			return networkOf(ip)
		}
	}
	return netip.Addr{}
}

func (p Proxies) contains(ip netip.Addr) bool {
	for _, network := range p {
		if network.Contains(ip) {
			return true
		}
	}
	return false
}

func peer(r *http.Request) netip.Addr {
	p, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	return p.Addr().Unmap().WithZone("")
}

// parseForwarded parses an address from X-Forwarded-For, to which some proxies add a port.
func parseForwarded(s string) (netip.Addr, bool) {
	if host, _, err := net.SplitHostPort(s); err == nil {
		s = host
	}
	ip, err := netip.ParseAddr(strings.Trim(s, "[]"))
	return ip.Unmap().WithZone(""), err == nil
}

func networkOf(ip netip.Addr) netip.Addr {
	if !ip.Is6() {
		return ip
	}
	p, _ := ip.Prefix(64) // an address of IPv6 without a zone has one
	return p.Addr()
}
