package httpcall

import (
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/net/idna"
)

// target is a host to which calls go, with or without a port. All spellings of one name and port
// are the same target, so that a payload can't avoid a host's guard by another spelling. Two names
// of one host are two targets.
type target struct {
	name string // lower case, without a dot at its end
	port string // "": that of the scheme; in the file of credentials: any port
}

var defaultPorts = map[string]string{"http": "80", "https": "443"}

// targetOf returns the target of a URL.
func targetOf(u *url.URL) target {
	t := target{name: strings.ToLower(u.Hostname()), port: u.Port()}
	if ascii, err := idna.Lookup.ToASCII(t.name); err == nil { // as package http does
		t.name = ascii
	}
	t.name = strings.TrimSuffix(t.name, ".")
	if ip, err := netip.ParseAddr(t.name); err == nil {
		t.name = ip.Unmap().String()
	}
	if n, err := strconv.ParseUint(t.port, 10, 16); err == nil {
		t.port = strconv.FormatUint(n, 10) // without zeros at the start
	}
	if t.port == defaultPorts[u.Scheme] {
		t.port = ""
	}
	return t
}

// String returns the name, with the port if there is one.
func (t target) String() string {
	if t.port == "" {
		return t.name
	}
	return net.JoinHostPort(t.name, t.port)
}

func (t target) isLoopback() bool {
	ip, err := netip.ParseAddr(t.name)
	return t.name == "localhost" || err == nil && ip.IsLoopback()
}

// overlaps says whether there are calls to which both targets of the credentials file apply.
func (t target) overlaps(other target) bool {
	return t.name == other.name && (t.port == other.port || t.port == "" || other.port == "")
}

var hostName = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$`)

const maxHostName = 253 // bytes

// parseTarget reads a host of the credentials file, with or without a port.
func parseTarget(s string) (t target, ok bool) {
	u, err := url.Parse("//" + s)
	if err != nil || u.Host != s || strings.HasSuffix(s, ":") {
		return target{}, false
	}
	t = targetOf(u)
	if _, err := netip.ParseAddr(t.name); err != nil && (len(t.name) > maxHostName || !hostName.MatchString(t.name)) {
		return target{}, false
	}
	n, err := strconv.ParseUint(t.port, 10, 16)
	return t, t.port == "" || err == nil && n > 0
}
