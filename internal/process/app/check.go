package app

import (
	"math"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// rule says which values of a variable are valid.
type rule struct {
	text  string // in words, after "must be"
	holds func(reflect.Value) bool
}

// ruleOf returns the rule that the tags of a field demand: a named check, a list of allowed values,
// or a minimum and maximum. Without such a tag, each value of the field's type is valid.
func ruleOf(f reflect.StructField) rule {
	tag := f.Tag
	if check := tag.Get("check"); check != "" {
		return checks[check]
	}
	if options := tag.Get("oneof"); options != "" {
		names := strings.Split(options, ",")
		last := len(names) - 1
		return rule{
			strings.Join(names[:last], ", ") + " or " + names[last],
			func(v reflect.Value) bool { return slices.Contains(names, v.String()) },
		}
	}
	text := map[reflect.Kind]string{
		reflect.Bool:    "true or false",
		reflect.Int:     "a whole number",
		reflect.Int64:   "a whole number",
		reflect.Float64: "a number",
		reflect.String:  "text",
		reflect.Slice:   "a comma list",
	}[f.Type.Kind()]
	if f.Type == durationType {
		text = "a duration"
	}
	if unit := tag.Get("unit"); unit != "" {
		text += " of " + unit
	}
	if tag.Get("min") != "" {
		low, high := number(f.Type, tag.Get("min")), number(f.Type, tag.Get("max"))
		return rule{text + " from " + tag.Get("min") + " to " + tag.Get("max"), func(v reflect.Value) bool {
			is := v.Convert(reflect.TypeFor[float64]()).Float()
			return is >= low && is <= high // false for NaN
		}}
	}
	if f.Type == durationType {
		text += " such as 1m30s"
	}
	return rule{text, func(reflect.Value) bool { return true }}
}

var durationType = reflect.TypeFor[time.Duration]()

// number parses a limit in a tag; a duration becomes nanoseconds. An invalid limit becomes NaN:
// then no value of the variable is valid.
func number(t reflect.Type, s string) float64 {
	if t == durationType {
		d, err := time.ParseDuration(s)
		if err == nil {
			return float64(d)
		}
	} else if n, err := strconv.ParseFloat(s, 64); err == nil {
		return n
	}
	return math.NaN()
}

// checks are the rules beyond a minimum and a maximum, by the name that a field's tag check has.
var checks = map[string]rule{
	"redis": {
		"redis://[user:password@]host:port/db, a comma list of hosts, or " +
			"redis-sentinel://host:port,…/master; with TLS rediss:// and rediss-sentinel://",
		func(v reflect.Value) bool {
			_, err := redisx.ParseURL(v.String())
			return err == nil
		},
	},
	"user": {
		"at most 256 bytes without spaces",
		func(v reflect.Value) bool {
			return len(v.String()) <= 256 && !strings.ContainsAny(v.String(), " \t\r\n\x00")
		},
	},
	"password": {
		"one line of at most 4096 bytes",
		func(v reflect.Value) bool {
			return len(v.String()) <= 4096 && !strings.ContainsAny(v.String(), "\r\n\x00")
		},
	},
	"host": {
		"a host name or an IP address, without a port",
		func(v reflect.Value) bool {
			s := v.String()
			return s == "" || net.ParseIP(s) != nil || isHost(s) && !strings.ContainsAny(s, "[:")
		},
	},
	"prefix": {
		keyspace.PrefixRule,
		func(v reflect.Value) bool { return keyspace.ValidPrefix(v.String()) },
	},
	"addr": {
		"host:port with a port from 0 to 65535",
		func(v reflect.Value) bool { return isAddr(v.String()) },
	},
	"ids": {
		"a comma list of different names of 1 to 128 letters, digits, dots, underscores or dashes, without spaces",
		func(v reflect.Value) bool {
			return all(v, func(e reflect.Value) bool { return api.ValidID(e.String()) })
		},
	},
	"timeouts": {
		"a comma list of type=duration, each type once, without spaces, with durations from 1ms to 24h",
		func(v reflect.Value) bool {
			for typ, d := range v.Interface().(map[string]time.Duration) {
				if !api.ValidID(typ) || d < time.Millisecond || d > 24*time.Hour {
					return false
				}
			}
			return true
		},
	},
	// Types that parse themselves have checked their values.
	"rate":        {"a number above 0 and a time of at most 24h, such as 80/10m, or none", always},
	"breaker":     {"failures/time/successes, each above 0, such as 3/10m/3, or none", always},
	"concurrency": {"a number above 0, or unbounded", always},
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

	"serve": {
		"api, ui, or api,ui",
		func(v reflect.Value) bool {
			isPart := func(e reflect.Value) bool { return e.String() == "api" || e.String() == "ui" }
			return v.Len() > 0 && all(v, isPart)
		},
	},
	"auth": {
		"off or keys",
		func(v reflect.Value) bool { return slices.Contains([]string{"", AuthOff, AuthKeys}, v.String()) },
	},

	"trace url": {
		"http:// or https:// with a host, and behind it at least one of {trace_id}, {group} and {ordinal}; " +
			"other braces are written %7B and %7D",
		func(v reflect.Value) bool { return v.String() == "" || isTraceURL(v.String()) },
	},

	"path prefix": {
		"a path such as /bulk, of letters, digits, dots, underscores, dashes and tildes, without a slash at its end",
		func(v reflect.Value) bool { return v.String() == "" || pathPrefix.MatchString(v.String()) },
	},

	"ingest streams": {
		"a comma list of tenant=stream, without spaces, of at most 64 different streams; a stream is the key prefix, " +
			"ingest: and 1 to 64 letters, digits, dots, underscores or dashes, but not ingest:rejected",
		func(v reflect.Value) bool {
			_, ok := ParseIngestStreams(v.Interface().([]string))
			return ok
		},
	},

	// Most of these are of the waiting room.
	"file": {"the name of a file, at most 4096 bytes", isFileName},
	"logo": {"the name of a file, or an address with https://; at most 4096 bytes", isFileName},
	"color": {
		"a colour such as #1c54c4",
		func(v reflect.Value) bool { return v.String() == "" || hexColor.MatchString(v.String()) },
	},
	"public url": {
		"https://host:port/path, or http:// with a loopback address, without a query",
		func(v reflect.Value) bool { return v.String() == "" || isPublicURL(v.String()) },
	},
	"token": {
		"16 to 512 characters of visible ASCII",
		func(v reflect.Value) bool { return v.String() == "" || isToken(v.String()) },
	},
	"audience": {
		"1 to 128 letters, digits, dots, underscores, dashes, colons or slashes",
		func(v reflect.Value) bool { return v.String() == "" || audience.MatchString(v.String()) },
	},
	"header": {
		"the name of a header, such as X-User, but none that HTTP itself uses",
		func(v reflect.Value) bool { return v.String() == "" || isIdentityHeader(v.String()) },
	},
	"networks": {
		"a comma list of networks such as 10.0.0.0/8 or addresses, without spaces",
		func(v reflect.Value) bool {
			return all(v, func(e reflect.Value) bool {
				_, ok := network(e.String())
				return ok
			})
		},
	},
	"hosts": {
		"a comma list of host names, or host:port, without spaces",
		func(v reflect.Value) bool {
			return all(v, func(e reflect.Value) bool { return isHost(e.String()) })
		},
	},
	"seats url": {
		"http:// or https:// with {event} in its path or query",
		func(v reflect.Value) bool { return v.String() == "" || isSeatsURL(v.String()) },
	},
}

func always(reflect.Value) bool { return true }

// isToken reports whether s has the length and the characters of a token.
func isToken(s string) bool {
	invisible := func(c rune) bool { return c < '!' || c > '~' }
	return len(s) >= 16 && len(s) <= 512 && !strings.ContainsFunc(s, invisible)
}

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

const maxIngestStreams = 64

// IngestStream is an ingest stream in addition to the common one. All its messages belong to one
// tenant.
type IngestStream struct {
	Tenant string
	Prefix string // of the installation's keys
	Name   string // what follows the prefix and "ingest:" in the name of the stream
}

// ParseIngestStreams parses the value of INGEST_STREAMS. ok is false if an entry is invalid, a
// stream is named twice, or there are more than 64.
func ParseIngestStreams(list []string) (streams []IngestStream, ok bool) {
	for _, text := range list {
		tenant, key, _ := strings.Cut(text, "=")
		at := strings.LastIndex(key, "ingest:")
		if at < 0 || !api.ValidID(tenant) {
			return nil, false
		}
		s := IngestStream{Tenant: tenant, Prefix: key[:at], Name: key[at+len("ingest:"):]}
		same := func(other IngestStream) bool { return other.Prefix == s.Prefix && other.Name == s.Name }
		if !api.ValidID(s.Name) || !keyspace.FitsIngestOf(s.Name) || slices.ContainsFunc(streams, same) {
			return nil, false
		}
		streams = append(streams, s)
	}
	return streams, len(streams) <= maxIngestStreams
}

// IngestStreams returns the further ingest streams.
func (c IngestConfig) IngestStreams() []IngestStream {
	streams, _ := ParseIngestStreams(c.Streams) // the rule of the variable has accepted them
	return streams
}

func (c Config) streamsHavePrefix() bool {
	return !slices.ContainsFunc(c.Ingest.IngestStreams(), func(s IngestStream) bool {
		return s.Prefix != c.Redis.KeyPrefix
	})
}

// placeholder matches every {…} in a trace URL, including unknown names, which isTraceURL refuses.
var placeholder = regexp.MustCompile(`\{[^{}]*\}`)

// isTraceURL reports whether s can be the trace URL of the console: an http or https URL of at most
// 2,048 bytes that has at least one known placeholder, no unknown ones, and none in its host.
func isTraceURL(s string) bool {
	known := []string{"{trace_id}", "{group}", "{ordinal}"}
	found := placeholder.FindAllString(s, -1)
	isUnknown := func(p string) bool { return !slices.Contains(known, p) }
	if len(found) == 0 || slices.ContainsFunc(found, isUnknown) || len(s) > 2048 {
		return false
	}
	parse := func(replacement string) (*url.URL, bool) {
		text := placeholder.ReplaceAllLiteralString(s, replacement)
		u, err := url.Parse(text)
		return u, err == nil && !strings.ContainsAny(text, "{} \"<>\\`")
	}
	a, ok := parse("a")
	b, alsoOK := parse("b")
	return ok && alsoOK && (a.Scheme == "http" || a.Scheme == "https") && a.Scheme == b.Scheme && a.Host == b.Host &&
		a.Hostname() != "" && a.User == nil && (a.Port() == "" || isAddr("host:"+a.Port())) &&
		!strings.HasSuffix(a.Host, ":")
}

var (
	hexColor   = regexp.MustCompile(`^#[0-9A-Fa-f]{6}$`)
	pathPrefix = regexp.MustCompile(`^(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+$`)
	audience   = regexp.MustCompile(`^[A-Za-z0-9._:/-]{1,128}$`)
	headerName = regexp.MustCompile(`^[A-Za-z0-9-]{1,64}$`)
	hostName   = regexp.MustCompile(`^([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$`)
)

func isFileName(v reflect.Value) bool {
	return len(v.String()) <= 4096 && !strings.ContainsRune(v.String(), 0)
}

// isHost reports whether s can be a host, with or without a port. The length is no part of the
// pattern, because the compiled pattern would then have hundreds of parts.
func isHost(s string) bool {
	const longest = 253 // of a name in DNS
	parts := hostName.FindStringSubmatch(s)
	return parts != nil && len(parts[1]) <= longest
}

// isPublicURL reports whether s can be the base of the URLs that visitors get. http is allowed only
// for loopback: cookies and tokens must not cross a network unencrypted.
func isPublicURL(s string) bool {
	u, err := url.Parse(s)
	if err != nil || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.ForceQuery ||
		strings.Contains(s, "#") || strings.ContainsAny(u.Path, "\"'<>;, ") {
		return false
	}
	port := u.Port()
	if strings.HasSuffix(u.Host, ":") || port != "" && !isAddr("host:"+port) {
		return false
	}
	return u.Scheme == "https" || u.Scheme == "http" && isLoopback(net.JoinHostPort(u.Hostname(), "0"))
}

// isIdentityHeader reports whether s can be the name of the header in which a proxy puts the user's
// id. Headers with another purpose, such as Cookie, can't.
func isIdentityHeader(s string) bool {
	switch http.CanonicalHeaderKey(s) {
	case "Authorization", "Cookie", "Host", "Origin", "Connection", "Last-Event-Id", "X-Forwarded-For":
		return false
	}
	return headerName.MatchString(s)
}

// networks parses a list of networks. It skips invalid ones, which the check of the variable
// refuses.
func networks(list []string) []netip.Prefix {
	all := make([]netip.Prefix, 0, len(list))
	for _, s := range list {
		if p, ok := network(s); ok {
			all = append(all, p)
		}
	}
	return all
}

// network parses a network, or an address as the network of this address alone.
func network(s string) (netip.Prefix, bool) {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p.Masked(), true
	}
	ip, err := netip.ParseAddr(s)
	if err != nil || ip.Zone() != "" {
		return netip.Prefix{}, false
	}
	ip = ip.Unmap()
	return netip.PrefixFrom(ip, ip.BitLen()), true
}

// isSeatsURL reports whether s can be the URL of the seat service: it has {event} in its path or
// query, and not in its host.
func isSeatsURL(s string) bool {
	authority, rest, ok := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(s, "https://"), "http://"), "/")
	if !ok || strings.Contains(authority, "{") || !strings.Contains(rest, "{event}") {
		return false
	}
	u, err := url.Parse(strings.ReplaceAll(s, "{event}", "event"))
	return err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" && u.Fragment == ""
}
