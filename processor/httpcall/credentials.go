package httpcall

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
	"github.com/bulkaction/bulkaction/internal/calls/egress"
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

type hostEntry struct {
	target
	pool *pool
}

// load reads the credentials file. The pools are in the order of the file, and have no source yet.
func load(r *accountsfile.Reader, config Config) content {
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
	for name, p := range f.Types {
		request, err := newRequest(processor.Job{Type: name}, f.Types)
		switch {
		case name == Type || name == BatchType:
			err = errors.New("the name is taken")
		case err == nil && p.Batch != nil:
			err = p.Batch.check(config, request)
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

// Guarded runs HTTP jobs as [Processor] does, with credentials for some hosts, with guards of
// hosts, or with both. It puts the secret of a credential into a header of calls to the
// credential's hosts, and nowhere else: redirects are not followed, and a secret that a response
// repeats is hidden in results and errors.
//
// A secret goes over plain http only to addresses that are not public, or that AllowedCIDRs has;
// and jobs must be allowed to call them.
type Guarded struct {
	calls  *Processor
	plain  *http.Client // for calls without TLS that have a secret
	choose credential.Choice
	hosts  func(host string) credential.Source // nil: hosts are not guarded
	loaded atomic.Pointer[content]
	types  []string // the further job types of the file at the start (see typeNames), which they stay; nil before
	file   *accountsfile.File
}

// Option changes a [Guarded].
type Option func(*Guarded)

// WithChoice sets how the credential for each call is chosen. A pool's name is http. and the first
// of its hosts, in alphabetical order; _ stands for characters that no name of a pool has, and the
// name ends after 128. Without this option, each process uses credentials in turn.
func WithChoice(c credential.Choice) Option { return func(g *Guarded) { g.choose = c } }

// WithHosts makes each call need a permission from the guard of its host, which hosts returns. A
// host is a name in lower case, with a port if the URL has one that is not the scheme's own.
// Without this option, hosts are not guarded.
func WithHosts(hosts func(host string) credential.Source) Option {
	return func(g *Guarded) { g.hosts = hosts }
}

// NewGuarded returns a processor with the credentials in config.CredentialsFile, if there is one.
// It connects when the first job runs. The error names every invalid field, or every mistake in
// the file.
func NewGuarded(config Config, options ...Option) (*Guarded, error) {
	calls, err := New(config)
	if err != nil {
		return nil, err
	}
	policy := config.policy()
	policy.RefusePublic = true
	g := &Guarded{
		calls: calls, choose: credential.TakeTurns,
		plain: egress.NewClient(egress.Options{Policy: policy, MaxIdleConnsPerHost: config.MaxIdleConnsPerHost}),
	}
	g.loaded.Store(&content{})
	for _, option := range options {
		option(g)
	}
	load := func(r *accountsfile.Reader) (use func() error) {
		c := load(r, config)
		if types := c.typeNames(); g.types != nil && !slices.Equal(types, g.types) {
			r.Mistake("types: %v instead of %v: restart the worker to add or remove types", types, g.types)
		}
		return func() error { return g.use(c) }
	}
	g.file = accountsfile.NewFile(config.CredentialsFile, "HTTP credentials", load)
	if _, err := g.Reload(); err != nil {
		return nil, err
	}
	g.types = g.loaded.Load().typeNames()
	return g, nil
}

// Reload reads the credentials file and the secrets again, and uses them if they have no mistake.
// If the files have not changed since the last call, it does nothing, so a mistake is returned
// once; but after an error of the Choice it tries again.
func (g *Guarded) Reload() (changed bool, err error) { return g.file.Reload() }

// use makes the source of each pool, and then lets new calls use the content.
func (g *Guarded) use(c content) error {
	for _, p := range c.pools {
		if err := p.choose(g.choose); err != nil {
			return err
		}
	}
	g.loaded.Store(&c)
	return nil
}

// typeNames returns the names of the further job types, and which of them have batches.
func (c *content) typeNames() []string {
	names := []string{}
	for _, name := range slices.Sorted(maps.Keys(c.types)) {
		if c.types[name].Batch != nil {
			name += " (batch)"
		}
		names = append(names, name)
	}
	return names
}

// Types returns a processor for each further job type of the file, and that of HTTP_BATCH: g under
// another name. Close and Reload are for g alone.
func (g *Guarded) Types() []processor.Runner {
	var list []processor.Runner
	types := g.loaded.Load().types
	for _, typ := range slices.Sorted(maps.Keys(types)) {
		if settings := types[typ].Batch; settings != nil {
			list = append(list, gatedBatch{newBatch(g, typ, settings)})
		} else {
			list = append(list, named{g, typ})
		}
	}
	return append(list, gatedBatch{newBatch(g, BatchType, &batchSettings{})})
}

// named is a Guarded that serves a further type.
type named struct {
	*Guarded
	typ string
}

func (n named) Type() string { return n.typ }

// choose makes the pool's source.
func (p *pool) choose(choose credential.Choice) (err error) {
	accounts := make([]credential.Account, len(p.members))
	for i, m := range p.members {
		accounts[i] = m.account
	}
	if p.source, err = choose(p.name, accounts); err != nil {
		return fmt.Errorf("choose among the HTTP credentials of %s: %w", p.name, err)
	}
	return nil
}

// Type is HTTP.
func (g *Guarded) Type() string { return Type }

// Close closes the idle connections. Calls that run go on.
func (g *Guarded) Close() error {
	g.plain.CloseIdleConnections()
	return g.calls.Close()
}

// Availability says that the number of permissions is not bounded. A job may call a host that has
// neither a credential nor a guard, and a bound of the whole type would hold back those calls.
func (g *Guarded) Availability() processor.Availability {
	return processor.Availability{Free: -1, PerSecond: math.Inf(1)}
}

// Admit borrows a credential for the host that the job calls, if the host has any, gets the
// permission of the host's guard, if hosts are guarded, and returns both as the pass. It returns no
// pass if the call needs neither, and for a wrong payload: Process then fails the job.
func (g *Guarded) Admit(ctx context.Context, job processor.Job) (processor.Pass, error) {
	request, credentials, err := g.read(job)
	if err != nil || credentials == nil && g.hosts == nil {
		return nil, nil
	}
	var p pass
	if credentials != nil {
		p.account, err = credential.Admit(ctx, credentials.source, func(id string) bool {
			return g.file.Knows(func() bool { return g.loaded.Load().credentials.of(request.URL).member(id) != nil })
		})
		if err != nil {
			return nil, err
		}
	}
	if g.hosts != nil {
		source := g.hosts(targetOf(request.URL).String())
		p.host, err = credential.Admit(ctx, source, func(string) bool { return true })
		if err != nil {
			p.Return(&outcomes{err, unused, unused})
			return nil, err
		}
	}
	return &p, nil
}

// errNotEncrypted is why a call is refused that would send a secret without encryption.
var errNotEncrypted = errors.New("url is not https: the secret of the host's credential is sent without encryption " +
	"only to addresses that are not public and that BULKACTION_HTTP_PROCESSOR_ALLOW_PRIVATE or " +
	"BULKACTION_HTTP_PROCESSOR_ALLOWED_CIDRS allow")

// read returns the request of a job, and the pool of credentials for its host; nil if the host has
// none. The error is permanent: the payload is invalid, the request sets the header of the
// credential itself, or the secret would be sent without encryption.
func (g *Guarded) read(job processor.Job) (*http.Request, *pool, error) {
	loaded := g.loaded.Load()
	request, err := newRequest(job, loaded.types)
	if err != nil {
		return nil, nil, invalidPayload(err)
	}
	p, err := g.poolOf(request, loaded)
	return request, p, err
}

// poolOf returns the pool of credentials for a request; see read.
func (g *Guarded) poolOf(request *http.Request, loaded *content) (*pool, error) {
	p := loaded.credentials.of(request.URL)
	if p == nil {
		return nil, nil
	}
	for _, m := range p.members {
		_, given := request.Header[m.header]
		if given || m.header == "Authorization" && request.URL.User != nil {
			err := fmt.Errorf("headers or url has %s, which the host's credential sets", m.header)
			return nil, invalidPayload(err)
		}
	}
	config := g.calls.config
	allowed := config.AllowPrivate || len(config.AllowedCIDRs) > 0 // the address is checked when the connection is made
	if request.URL.Scheme != "https" && !allowed && !targetOf(request.URL).isLoopback() {
		return nil, invalidPayload(errNotEncrypted)
	}
	return p, nil
}

// Process makes the call with the credential that Admit got. The answer decides about the job as
// with [Processor], but a 401 is retried if the call had a credential: the job is not at fault. A
// 403 may be about the path, which the job chooses. The job is deferred if the credentials of its
// host have changed since Admit.
//
// This is what an answer says about the credential and about the host:
//
//	Bulkaction-Outcome       Neutral, or Throttled if it says so
//	2xx                      Success    Success
//	401                      Failure    Neutral
//	429                      Throttled  Throttled
//	503 with Retry-After     Neutral    Throttled
//	any other 5xx            Neutral    Failure
//	no complete response     Neutral    Failure
//	the address is refused   Unused     Unused
//	any other status         Neutral    Success
func (g *Guarded) Process(ctx context.Context, job processor.Job) (any, error) {
	request, credentials, err := g.read(job)
	if err != nil {
		return nil, &outcomes{err, unused, unused}
	}
	return resultOf(g.send(ctx, request, credentials, job.ID(), g.calls.config.MaxResponseBytes))
}

// send makes the call of a request with the credential that Admit got, if its host has any, and signs
// it with this id. It keeps at most most bytes of the answer. Its error says what follows for the
// credential and the host.
func (g *Guarded) send(ctx context.Context, request *http.Request, credentials *pool, id string, most int) (answer, error) {
	loan, err := credential.From(ctx)
	if err != nil {
		return answer{}, err
	}
	var used *member
	client := g.calls.client
	if loan != nil || credentials != nil {
		if loan != nil {
			used = credentials.member(loan.ID())
		}
		if used == nil {
			return answer{}, processor.Deferred(0, "the credentials of the job's host have changed")
		}
		request.Header.Set(used.header, used.value)
		if request.URL.Scheme != "https" {
			client = g.plain
		}
	}
	sign(request, id, time.Now(), g.loaded.Load().signing.of(request.URL))
	a, err := g.calls.exchange(ctx, client, request, used, most)
	if err == nil || a.said != "" {
		return a, err
	}
	if used != nil && a.status == http.StatusUnauthorized {
		err = processor.Retry(processor.Classify(err).Code, err)
	}
	return a, outcomesOf(a.status, err)
}

// outcomes is the error of a call, together with what the call showed about its credential and its
// host.
type outcomes struct {
	error
	account, host credential.Outcome
}

func (o *outcomes) Unwrap() error { return o.error }

var (
	neutral = credential.Outcome{Kind: credential.Neutral}
	unused  = credential.Outcome{Kind: credential.Unused}
)

// outcomesOf returns err with the outcomes that follow from it. status is that of the response; 0
// if there was no whole response.
func outcomesOf(status int, err error) error {
	o := credential.OutcomeOf(err)
	switch {
	case errors.Is(err, egress.ErrAddressRefused), errors.Is(err, errNotEncrypted):
		return &outcomes{err, unused, unused}
	case status == http.StatusUnauthorized:
		return &outcomes{err, credential.Outcome{Kind: credential.Failure}, neutral}
	case status == http.StatusTooManyRequests:
		return &outcomes{err, o, o}
	case status == 0, status/100 == 5:
		return &outcomes{err, neutral, o}
	}
	return &outcomes{err, neutral, credential.Outcome{Kind: credential.Success}}
}

// pass is the pass of a job: the permission to use its credential and that of its host. A field is
// nil if the call does not need it.
type pass struct{ account, host processor.Pass }

func (p *pass) Into(ctx context.Context) context.Context {
	if p.account == nil {
		return ctx
	}
	return p.account.Into(ctx)
}

func (p *pass) Return(err error) {
	account, host := err, err
	var o *outcomes
	if errors.As(err, &o) {
		account, host = credential.Verdict(err, o.account), credential.Verdict(err, o.host)
	}
	if p.account != nil {
		p.account.Return(account)
	}
	if p.host != nil {
		p.host.Return(host)
	}
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
