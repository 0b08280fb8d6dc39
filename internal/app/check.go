package app

import (
	"net"
	"net/netip"
	"reflect"
	"regexp"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

// checks are the rules that are more than a minimum and a maximum, by the name in a field's tag.
var checks = map[string]struct {
	rule  string
	holds func(reflect.Value) bool
}{
	"redis": {
		"redis://[user:password@]host:port/db, rediss:// for TLS, a comma list of hosts, or " +
			"redis-sentinel://host:port,…/master",
		func(v reflect.Value) bool {
			_, err := redisx.ParseURL(v.String())
			return err == nil
		},
	},
	"prefix": {
		"1 to 64 letters, digits, dots, underscores, dashes or colons",
		func(v reflect.Value) bool { return keyPrefix.MatchString(v.String()) },
	},
	"addr": {
		"host:port with a port from 0 to 65535",
		func(v reflect.Value) bool { return isAddr(v.String()) },
	},
	"ids": {
		"a comma list of names of 1 to 128 letters, digits, dots, underscores or dashes, without spaces",
		func(v reflect.Value) bool {
			return all(v, func(e reflect.Value) bool { return id.MatchString(e.String()) })
		},
	},
	"seldom": {
		"0 or a duration from 1s to 24h",
		func(v reflect.Value) bool {
			d := time.Duration(v.Int())
			return d == 0 || d >= time.Second && d <= 24*time.Hour
		},
	},
	"weights": {
		"three whole numbers from 1 to 1000 with commas between them, without spaces",
		func(v reflect.Value) bool {
			return v.Len() == 3 && all(v, func(e reflect.Value) bool { return e.Int() >= 1 && e.Int() <= 1000 })
		},
	},
}

var (
	id        = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)
	keyPrefix = regexp.MustCompile(`^[A-Za-z0-9._:-]{1,64}$`)
)

func all(list reflect.Value, holds func(reflect.Value) bool) bool {
	for i := range list.Len() {
		if !holds(list.Index(i)) {
			return false
		}
	}
	return true
}

func isAddr(s string) bool {
	_, port, err := net.SplitHostPort(s)
	if err != nil {
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n <= 65535
}

// isLoopback reports whether only this host can reach addr. An address without a host listens on
// all interfaces; a host name other than localhost may be any address. Both are not loopback.
func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}
