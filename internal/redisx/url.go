package redisx

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Options is a parsed Redis URL. No printed form of it contains a password.
type Options struct {
	Addrs    []string // host:port of the server, of the cluster's seeds, or of the Sentinels
	Cluster  bool
	Master   string // the master's name at the Sentinels; "" without Sentinel
	DB       int
	TLS      bool
	Username string

	password         string
	sentinelUsername string
	sentinelPassword string
}

// String describes the options without passwords, for logs.
func (o Options) String() string {
	kind := "single"
	switch {
	case o.Cluster:
		kind = "cluster"
	case o.Master != "":
		kind = "sentinel master " + o.Master
	}
	text := fmt.Sprintf("%s at %s db %d", kind, strings.Join(o.Addrs, ","), o.DB)
	if o.TLS {
		text += " over TLS"
	}
	return text
}

// GoString returns String, so that %#v shows no password.
func (o Options) GoString() string { return o.String() }

const urlForms = "write redis://[user:password@]host:port/db, redis://host1:port1,host2:port2 for a cluster, " +
	"or redis-sentinel://[user:password@]host1:port1,host2:port2/master; with TLS rediss:// and rediss-sentinel://"

// ParseURL parses the URL of a single server (redis://), of a Cluster (a comma list of hosts, with
// or without a repeated scheme, or ?cluster=true for a single endpoint), or of a master behind
// Sentinel (redis-sentinel://: user and password are the master's; the parameters sentinel_username
// and sentinel_password are the Sentinels'). With rediss:// and rediss-sentinel:// all connections
// use TLS. An error names the wrong part of the URL and never quotes it, because it may contain a
// password.
func ParseURL(raw string) (Options, error) {
	o, err := parseURL(raw)
	if err != nil {
		return Options{}, fmt.Errorf("parse redis url: %w; %s", err, urlForms)
	}
	return o, nil
}

// URLMistake returns a text that says what is wrong with a URL, without quoting the URL; "" if
// nothing is.
func URLMistake(raw string) string {
	if _, err := parseURL(raw); err != nil {
		return err.Error()
	}
	return ""
}

// parseURL splits the URL by hand, because the errors of package url quote their input.
func parseURL(raw string) (Options, error) {
	var o Options
	blank := func(r rune) bool { return unicode.IsControl(r) || unicode.IsSpace(r) }
	if i := strings.IndexFunc(raw, blank); i >= 0 {
		r, _ := utf8.DecodeRuneInString(raw[i:])
		name, named := map[rune]string{'\n': "a line break", '\r': "a carriage return", '\t': "a tab", ' ': "a space"}[r]
		if !named {
			name = fmt.Sprintf("the character %U", r)
		}
		return o, fmt.Errorf("it contains %s: remove it, or write it as %s in a user or password",
			name, url.PathEscape(string(r)))
	}
	scheme, rest, ok := strings.Cut(raw, "://")
	if !ok {
		return o, errors.New("no scheme")
	}
	port, sentinel := "6379", false
	switch scheme {
	case "redis":
	case "rediss":
		o.TLS = true
	case "redis-sentinel", "rediss-sentinel":
		port, sentinel, o.TLS = "26379", true, scheme == "rediss-sentinel"
	default:
		return o, errors.New("unknown scheme")
	}

	rest, query, _ := strings.Cut(rest, "?")
	if err := o.setQuery(query, sentinel); err != nil {
		if strings.Contains(query, "@") {
			return o, errors.New("a ? comes before the host: write it as %3F in a user or password")
		}
		return o, err
	}
	// After the first slash comes the path, so a slash in the password must be escaped, as in every
	// URL.
	hosts, path, _ := strings.Cut(rest, "/")
	if strings.Contains(rest, "://") {
		hosts, path = joinRepeated(rest, scheme)
	}
	if strings.Contains(path, "@") {
		return o, errors.New("a / comes before the host: write it as %2F in a user or password")
	}
	if err := o.setHosts(hosts, port); err != nil {
		return o, err
	}
	o.Cluster = o.Cluster || len(o.Addrs) > 1 && !sentinel
	return o, o.setPath(path, sentinel)
}

// joinRepeated turns a list with repeated schemes, "h1/0,redis://h2/0", into the hosts "h1,h2" and
// the last path.
func joinRepeated(rest, scheme string) (hosts, path string) {
	parts := strings.Split(rest, ","+scheme+"://")
	for i, part := range parts {
		parts[i], path, _ = strings.Cut(part, "/")
	}
	return strings.Join(parts, ","), path
}

func (o *Options) setQuery(query string, sentinel bool) error {
	values, err := url.ParseQuery(query)
	if err != nil {
		return errors.New("malformed parameters")
	}
	for name, value := range values {
		switch {
		case name == "cluster" && !sentinel:
			if o.Cluster, err = strconv.ParseBool(value[0]); err != nil {
				return errors.New("parameter cluster is neither true nor false")
			}
		case name == "sentinel_username" && sentinel:
			o.sentinelUsername = value[0]
		case name == "sentinel_password" && sentinel:
			o.sentinelPassword = value[0]
		case name == "skip_verify":
			return errors.New("skip_verify is refused: name the authority of the certificate with REDIS_TLS_CA_FILE")
		default:
			return errors.New(
				"unknown parameter, or one of another scheme (cluster; sentinel_username, sentinel_password)",
			)
		}
	}
	return nil
}

func (o *Options) setHosts(list, defaultPort string) error {
	for i, host := range strings.Split(list, ",") {
		if at := strings.LastIndexByte(host, '@'); at >= 0 {
			if err := o.setUser(host[:at], i == 0); err != nil {
				return err
			}
			host = host[at+1:]
		}
		addr, err := address(host, defaultPort)
		if err != nil && i == 0 && strings.LastIndexByte(list, '@') > strings.IndexByte(list, ',') {
			return fmt.Errorf("address 1: %w; write a comma in a user or password as %%2C", err)
		}
		if err != nil {
			return fmt.Errorf("address %d: %w", i+1, err)
		}
		o.Addrs = append(o.Addrs, addr)
	}
	return nil
}

func (o *Options) setUser(info string, first bool) error {
	user, password, _ := strings.Cut(info, ":")
	user, errUser := url.PathUnescape(user)
	password, errPassword := url.PathUnescape(password)
	if errUser != nil || errPassword != nil {
		return errors.New("user or password has a malformed % escape")
	}
	if !first && (user != o.Username || password != o.password) {
		return errors.New(
			"hosts of one cluster have different users or passwords (escape a comma in a password as %2C)",
		)
	}
	o.Username, o.password = user, password
	return nil
}

func address(host, defaultPort string) (string, error) {
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		name, port = strings.Trim(host, "[]"), defaultPort
		if strings.HasPrefix(host, "[") != strings.HasSuffix(host, "]") ||
			!strings.HasPrefix(host, "[") && strings.Contains(host, ":") {
			return "", errors.New("not host:port (escape special characters in a password)")
		}
	}
	if name == "" || strings.ContainsAny(name, "[]") {
		return "", errors.New("no host")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", errors.New("port is not between 1 and 65535 (escape special characters in a password)")
	}
	return net.JoinHostPort(name, port), nil
}

func (o *Options) setPath(path string, sentinel bool) error {
	if sentinel {
		var master string
		master, path, _ = strings.Cut(path, "/")
		if master == "" {
			return errors.New("no name of a master")
		}
		o.Master = master
	}
	if path == "" {
		return nil
	}
	db, err := strconv.ParseUint(path, 10, 16)
	if err != nil {
		return errors.New("database is not a number (escape a slash in a password as %2F)")
	}
	if db != 0 && o.Cluster {
		return errors.New("a cluster has only database 0")
	}
	o.DB = int(db)
	return nil
}
