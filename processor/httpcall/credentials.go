package httpcall

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// content is what the credentials file has.
type content struct {
	pools       []*pool
	credentials byHost[*pool]
	signing     byHost[[][]byte]   // the secrets with which calls are signed
	types       map[string]payload // further job types: what all of their calls have in common
}

// byHost maps hosts of the credentials file, a name or NAME:PORT.
type byHost[T any] map[string]T

// pool has the credentials for one list of hosts. Any of them can be used for a call.
type pool struct {
	name    string
	source  credential.Source
	members []*member
}

// member is one credential.
type member struct {
	account credential.Account
	header  string // its canonical name
	value   string // the secret
	hidden  [][]byte
}

// of returns what is for a call to this URL; the zero value if the host has none.
func (b byHost[T]) of(u *url.URL) T {
	t := targetOf(u)
	if v, ok := b[net.JoinHostPort(t.name, cmp.Or(t.port, defaultPorts[u.Scheme]))]; ok {
		return v
	}
	return b[t.name]
}

// member returns the credential with an id, or nil.
func (p *pool) member(id string) *member {
	if p != nil {
		for _, m := range p.members {
			if m.account.ID == id {
				return m
			}
		}
	}
	return nil
}

// file is the credentials file.
type file struct {
	Credentials []entry            `yaml:"credentials"`
	Signing     []signer           `yaml:"signing"`
	Types       map[string]payload `yaml:"types"`
}

type entry struct {
	accountsfile.Entry `yaml:",inline"`
	Hosts              []string `yaml:"hosts"`      // exact names, or names with ports
	Header             string   `yaml:"header"`     // gets the secret
	ValueFile          string   `yaml:"value_file"` // has the secret
}

// loader makes pools from the credentials file and the files with secrets that it names.
type loader struct {
	*accountsfile.Reader
	pools  []*pool
	byList map[string]*pool
	byName map[string]*pool
	byHost map[string][]hostEntry // by the host's name without a port
}

// hostEntry is one host of a pool.
type hostEntry struct {
	target
	pool *pool
}

// load reads the credentials file. The pools are in the order of the file, and have no source yet.
func load(r *accountsfile.Reader) content {
	l := &loader{Reader: r, byList: map[string]*pool{}, byName: map[string]*pool{}, byHost: map[string][]hostEntry{}}
	var f file
	if !l.Decode(&f) {
		return content{}
	}
	if len(f.Credentials)+len(f.Signing)+len(f.Types) == 0 {
		l.Mistake("the file lists no account under credentials, and has neither signing nor types")
	}
	for i, e := range f.Credentials {
		l.add(i, e)
	}
	c := content{pools: l.pools, credentials: byHost[*pool]{}, signing: byHost[[][]byte]{}, types: f.Types}
	for _, entries := range l.byHost {
		for _, e := range entries {
			c.credentials[e.String()] = e.pool
		}
	}
	for i, s := range f.Signing {
		s.add(l.Entry("signing", i), c.signing)
	}
	for name := range f.Types {
		_, err := newRequest(processor.Job{Type: name}, f.Types)
		if name == Type {
			err = errors.New("the name is taken")
		}
		if err != nil {
			l.Mistake("types: %s: %w", name, err)
		}
	}
	return c
}

// maxValueBytes is the largest size of a secret. Servers refuse headers that are much longer.
const maxValueBytes = 8 << 10

// add checks the i-th entry and, if it has no mistake, adds it to the pool of its hosts.
func (l *loader) add(i int, e entry) {
	c, account := l.Account("", i, e.Entry)
	p := l.pool(c, e.Hosts)
	c.Check(isHeaderName(e.Header), "header is missing or not the name of a header")
	header := http.CanonicalHeaderKey(e.Header)
	c.Check(!slices.Contains(connectionHeaders, header) && !slices.Contains(ownHeaders, header) &&
		!strings.HasPrefix(header, jobHeaders) && !strings.HasPrefix(header, webhookHeaders),
		"header: %s can't have a secret", header)
	content := c.Secret("value_file", e.ValueFile)
	value := string(bytes.TrimRight(content, "\r\n"))
	if content != nil {
		c.Check(value != "", "value_file: is empty")
		c.Check(len(value) <= maxValueBytes, "value_file: has more than %d bytes", maxValueBytes)
		c.Check(!strings.ContainsFunc(value, notPrintable) && strings.TrimSpace(value) == value,
			"value_file: is not one line of printable ASCII without spaces around it")
	}
	if c.OK() {
		p.members = append(p.members, &member{
			account: account, header: header, value: value, hidden: hiddenTexts(value),
		})
	}
}

// ownHeaders are headers that the processor or net/http sets. A credential can't use them.
var ownHeaders = []string{
	"Accept-Encoding", "Content-Type", "Host", "Idempotency-Key", "Traceparent", "Tracestate", "User-Agent",
}

func notPrintable(r rune) bool { return r < ' ' || r > '~' }

// parseHosts returns the targets of a list of hosts, in order and each once. If the list is empty or a host in it can't be
// read, it reports that to c and returns nil.
func parseHosts(c *accountsfile.Checker, hosts []string) []target {
	c.Check(len(hosts) > 0, "hosts is missing")
	targets := make([]target, 0, len(hosts))
	for _, host := range hosts {
		t, ok := parseTarget(host)
		c.Check(ok, "hosts: %q is neither the exact name of a host nor name:port", host)
		if ok {
			targets = append(targets, t)
		}
	}
	if len(targets) < max(1, len(hosts)) {
		return nil
	}
	slices.SortFunc(targets, func(a, b target) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(targets)
}

// pool returns the pool for a list of hosts, and makes it if it is new. It reports mistakes to c.
// If the list is empty or a host in it can't be read, it returns nil.
func (l *loader) pool(c *accountsfile.Checker, hosts []string) *pool {
	targets := parseHosts(c, hosts)
	if targets == nil {
		return nil
	}
	list := fmt.Sprint(targets)
	if p := l.byList[list]; p != nil {
		return p
	}
	p := &pool{name: poolName(targets[0])}
	l.byList[list] = p
	l.pools = append(l.pools, p)
	other := l.byName[p.name]
	for _, t := range targets {
		if l.addHost(t, p) {
			c.Check(false, "hosts: %s is also in another list; lists are the same or have no host in common", t)
			other = nil // one mistake is enough
		}
	}
	c.Check(other == nil, "hosts: the pools of two lists would have the name %s", p.name)
	l.byName[p.name] = p
	return p
}

// addHost adds a host of a pool. It returns true if the host belongs to another pool, too.
func (l *loader) addHost(t target, p *pool) (taken bool) {
	entries := l.byHost[t.name]
	l.byHost[t.name] = append(entries, hostEntry{t, p})
	return slices.ContainsFunc(entries, func(e hostEntry) bool { return e.pool != p && e.overlaps(t) })
}

// maxPoolName is the longest name of a guard.
const maxPoolName = 128

var notInNames = regexp.MustCompile(`[^A-Za-z0-9._-]`)

// poolName returns the name of the pool whose first host is t.
func poolName(t target) string {
	name := "http." + notInNames.ReplaceAllString(t.String(), "_")
	return name[:min(len(name), maxPoolName)]
}

// leastHidden is the length, in bytes, of the shortest token that results and errors hide even
// without the scheme before it, such as Bearer. Shorter tokens occur in many texts by chance.
const leastHidden = 4

// hiddenTexts returns the texts of a secret that results and errors must not show: the secret
// itself, and its part after a scheme such as Bearer.
func hiddenTexts(value string) [][]byte {
	texts := [][]byte{[]byte(value)}
	if _, token, _ := strings.Cut(value, " "); len(token) >= leastHidden {
		texts = append(texts, []byte(token))
	}
	return texts
}

// hide overwrites the secret with asterisks wherever it occurs in text, also with escapes of JSON
// or URLs. The text keeps its length, so that the part of a body that is kept does not depend on
// what is hidden in it.
func (m *member) hide(text []byte) []byte {
	if m == nil {
		return text
	}
	for i := range text {
		for _, hidden := range m.hidden {
			for j := range prefixLength(text[i:], hidden) {
				text[i+j] = '*'
			}
		}
	}
	return text
}

// longestForm returns the length, in bytes, of the secret with all characters escaped.
func (m *member) longestForm() int {
	if m == nil {
		return 0
	}
	return longestEscape * len(m.value)
}

// prefixLength returns how many bytes at the start of text are the secret, which may be escaped; 0
// if text does not begin with it.
func prefixLength(text, secret []byte) int {
	if bytes.HasPrefix(text, secret) {
		return len(secret)
	}
	n := 0
	for _, c := range secret {
		got, size := unescape(text[n:])
		if size == 0 || got != c {
			return 0
		}
		n += size
	}
	return n
}

// longestEscape is the length, in bytes, of the longest escape of one character.
const longestEscape = len(`\u0020`)

// unescape returns the first character of text, and how many bytes of text stand for it; 0 if text
// is empty.
func unescape(text []byte) (c byte, size int) {
	hex := ""
	switch {
	case len(text) == 0:
		return 0, 0
	case len(text) >= longestEscape && string(text[:4]) == `\u00`:
		size, hex = longestEscape, string(text[4:6])
	case len(text) >= 3 && text[0] == '%':
		size, hex = 3, string(text[1:3])
	case len(text) >= 2 && text[0] == '\\':
		return text[1], 2
	default:
		return text[0], 1
	}
	if n, err := strconv.ParseUint(hex, 16, 8); err == nil {
		return byte(n), size
	}
	return text[0], 1
}

// signer says which secrets sign the calls to which hosts.
type signer struct {
	Hosts      []string `yaml:"hosts"`       // exact names, or names with ports
	SecretFile string   `yaml:"secret_file"` // has the secrets, one a line
}

// add checks s and adds its secrets for each of its hosts to all.
func (s signer) add(c *accountsfile.Checker, all byHost[[][]byte]) {
	var secrets [][]byte
	for line := range strings.FieldsSeq(string(c.Secret("secret_file", s.SecretFile))) {
		encoded, ok := strings.CutPrefix(line, "whsec_")
		secret, err := base64.StdEncoding.DecodeString(encoded)
		c.Check(ok && err == nil && len(secret) >= 24 && len(secret) <= 64,
			"secret_file: has a line that is not whsec_ and the base64 of 24 to 64 bytes")
		secrets = append(secrets, secret)
	}
	c.Check(len(secrets) > 0 || !c.OK(), "secret_file: is empty")
	for _, t := range parseHosts(c, s.Hosts) {
		c.Check(all[t.String()] == nil, "hosts: %s is also in another entry of signing", t)
		all[t.String()] = secrets
	}
}
