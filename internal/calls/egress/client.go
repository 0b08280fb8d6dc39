// Package egress makes the HTTP client for calls to a URL that comes from a user's input, such as
// the URL of an HTTP job or the endpoint of a Web Push subscription. The package hides which
// addresses are public: by default, its client refuses to connect to any other address, so that a
// job can't reach services inside of the worker's own network.
package egress

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	maxHeaderBytes     = 64 << 10
	idleTimeout        = 90 * time.Second
	handshakeTimeout   = 10 * time.Second
	maxIdleConnections = 1024
)

// Options are the settings of a client.
type Options struct {
	Policy
	MaxIdleConnsPerHost int            // connections to one host that are kept open for reuse
	RootCAs             *x509.CertPool // the certificate authorities to trust; nil: those of the operating system
}

// NewClient returns a client that connects only to addresses that the policy allows. It follows no
// redirects, because the caller decides what a redirect means. It uses no proxy: a proxy would
// connect for this process, without a check of the address.
func NewClient(o Options) *http.Client {
	dialer := &net.Dialer{Control: o.checkAddress}
	transport := &http.Transport{
		Proxy:                  nil,
		DialContext:            dialer.DialContext,
		ForceAttemptHTTP2:      true,
		TLSHandshakeTimeout:    handshakeTimeout,
		IdleConnTimeout:        idleTimeout,
		MaxIdleConns:           maxIdleConnections,
		MaxIdleConnsPerHost:    o.MaxIdleConnsPerHost,
		MaxResponseHeaderBytes: maxHeaderBytes,
	}
	if o.RootCAs != nil {
		transport.TLSClientConfig = &tls.Config{RootCAs: o.RootCAs, MinVersion: tls.VersionTLS12}
	}
	return &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// ErrAddressRefused is wrapped by the error of a call to an address that is neither public nor
// allowed by the policy. No byte was sent to it.
var ErrAddressRefused = errors.New("not a public address")

// ErrPublicAddress is wrapped by the error of a call to a public address when the policy does not
// allow public addresses. No byte was sent to it.
var ErrPublicAddress = errors.New("a public address")

// Policy says which addresses a client may call. The zero value allows all public addresses and no
// others.
type Policy struct {
	AllowPrivate bool           // every address may be called
	AllowedCIDRs []netip.Prefix // networks that may be called although they are not public
	RefusePublic bool           // a public address may be called only if it is in AllowedCIDRs
}

// Validate returns an error for each entry of AllowedCIDRs that is not a valid network, or that is
// an IPv4 network in the notation of IPv6, such as ::ffff:10.1.0.0/112.
func (p Policy) Validate() []error {
	var errs []error
	for _, prefix := range p.AllowedCIDRs {
		if !prefix.IsValid() || prefix.Addr().Is4In6() {
			errs = append(errs, fmt.Errorf("%s is not a network; write IPv4 as 10.1.0.0/16", prefix))
		}
	}
	return errs
}

// notPublic are the IPv4 networks that are not part of the public Internet: those of IANA's
// special-purpose registry, and one of Azure.
var notPublic = prefixes(
	"0.0.0.0/8",        // this network
	"10.0.0.0/8",       // private
	"100.64.0.0/10",    // carrier-grade NAT
	"127.0.0.0/8",      // loopback
	"168.63.129.16/32", // Azure's platform, reachable only from inside of Azure
	"169.254.0.0/16",   // link-local, cloud metadata
	"172.16.0.0/12",    // private
	"192.0.0.0/24",     // protocol assignments
	"192.0.2.0/24",     // documentation
	"192.88.99.0/24",   // 6to4 relay
	"192.168.0.0/16",   // private
	"198.18.0.0/15",    // benchmarks
	"198.51.100.0/24",  // documentation
	"203.0.113.0/24",   // documentation
	"224.0.0.0/4",      // multicast
	"240.0.0.0/4",      // reserved, broadcast
)

// global6 is the part of IPv6 that is assigned to the public Internet. Loopback, link-local, unique
// local, multicast, IPv4-compatible and NAT64 addresses are outside of it. notPublic6 are networks
// inside of it that are not public, or that contain an IPv4 address.
var (
	global6    = netip.MustParsePrefix("2000::/3")
	notPublic6 = prefixes(
		"2001::/23",     // protocol assignments, Teredo among them
		"2001:db8::/32", // documentation
		"2002::/16",     // 6to4
		"3fff::/20",     // documentation
	)
)

func prefixes(networks ...string) []netip.Prefix {
	parsed := make([]netip.Prefix, len(networks))
	for i, network := range networks {
		parsed[i] = netip.MustParsePrefix(network)
	}
	return parsed
}

// checkAddress is the Control function of a [net.Dialer]. The dialer calls it with the address that
// it really dials, after name resolution. Therefore a name can't resolve to another address between
// the check and the connection.
func (p Policy) checkAddress(_, address string, _ syscall.RawConn) error {
	target, err := netip.ParseAddrPort(address)
	if err != nil || !p.MayCall(target.Addr()) {
		return ErrAddressRefused
	}
	ip := target.Addr().WithZone("").Unmap()
	if p.RefusePublic && isPublic(ip) && !contains(p.AllowedCIDRs, ip) {
		return ErrPublicAddress
	}
	return nil
}

// MayCall says whether the policy allows calls to an address.
func (p Policy) MayCall(ip netip.Addr) bool {
	ip = ip.WithZone("").Unmap()
	return p.AllowPrivate || isPublic(ip) || contains(p.AllowedCIDRs, ip)
}

func isPublic(ip netip.Addr) bool {
	if ip.Is4() {
		return !contains(notPublic, ip)
	}
	return global6.Contains(ip) && !contains(notPublic6, ip)
}

func contains(networks []netip.Prefix, ip netip.Addr) bool {
	return slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// maxRetryAfter bounds the wait that a downstream API can demand. It also prevents an overflow of
// time.Duration.
const maxRetryAfter = 24 * time.Hour

var seconds = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?$`)

// RetryAfter parses a Retry-After header: seconds, or a date (RFC 9110, 10.2.3). Fractions of a
// second, which some APIs send, are rounded up to milliseconds. after is at most 24 hours. given is
// false if the header is absent or malformed.
func RetryAfter(header string, now time.Time) (after time.Duration, given bool) {
	header = strings.TrimSpace(header)
	if seconds.MatchString(header) {
		n, _ := strconv.ParseFloat(header, 64) // +Inf if it is too large
		return time.Duration(math.Ceil(min(n, maxRetryAfter.Seconds())*1000)) * time.Millisecond, true
	}
	if date, err := http.ParseTime(header); err == nil {
		return min(max(date.Sub(now), 0), maxRetryAfter), true
	}
	return 0, false
}
