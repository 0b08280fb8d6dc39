package app

import (
	"math"
	"net"
	"net/netip"
	"reflect"
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
		"a comma list of names of 1 to 128 letters, digits, dots, underscores or dashes, without spaces",
		func(v reflect.Value) bool {
			return all(v, func(e reflect.Value) bool { return api.ValidID(e.String()) })
		},
	},
	"timeouts": {
		"a comma list of type=duration, without spaces, with durations from 1ms to 24h",
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

	"ingest streams": {
		"a comma list of tenant=stream, without spaces, of at most 64 different streams; a stream is the key prefix, " +
			"ingest: and 1 to 64 letters, digits, dots, underscores or dashes, but not ingest:rejected",
		func(v reflect.Value) bool {
			_, ok := ParseIngestStreams(v.Interface().([]string))
			return ok
		},
	},

	// Most of these are of the waiting room.
	"file": {
		"the name of a file, at most 4096 bytes",
		func(v reflect.Value) bool { return len(v.String()) <= 4096 && !strings.ContainsRune(v.String(), 0) },
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
