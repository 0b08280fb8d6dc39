// Package clientaddr finds the address of the client of an HTTP request behind proxies, and limits
// rates by address. It hides the rules of X-Forwarded-For and of IPv6, and keeps a bounded number
// of rate limiters.
package clientaddr

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// Proxies are the networks of trusted proxies: what they write into X-Forwarded-For is believed.
type Proxies []netip.Prefix

// Sent reports whether a request comes from a trusted proxy.
func (p Proxies) Sent(r *http.Request) bool { return p.contains(peer(r)) }

// ClientOf returns the address by which a request is limited: its address of IPv4, or the /64
// network of its address of IPv6, because one host can use all addresses of such a network. A
// trusted proxy names its client in X-Forwarded-For: each proxy appends the address of its peer, so
// the last address that is not of a trusted proxy is the client. ClientOf returns the zero Addr if
// no client is named, since all clients of the proxy would share its address.
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

// parseForwarded parses an address, which some proxies write with a port.
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
