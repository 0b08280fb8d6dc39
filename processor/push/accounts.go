package push

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

const (
	digestBytes  = sha256.Size
	maxFileBytes = 1 << 20
	othersMay    = fs.FileMode(0o004) // read
)

// accounts has a pool for each platform that has accounts.
type accounts map[string]*pool

// pool has the accounts of one platform. They serve the same app, so each can replace the others.
type pool struct {
	source  credential.Source
	members map[string]member
}

// member is one account. An account that a change of the file leaves as it was keeps its sender,
// with its token and its connection.
type member struct {
	account credential.Account
	digest  [digestBytes]byte // of all from which sender is made
	sender  sender
}

// sender sends messages with one account.
type sender interface {
	send(ctx context.Context, job processor.Job, m *message) answer
	close() // closes idle connections that belong to the account alone
}

// file is the accounts file.
type file struct {
	FCM     []fcmEntry     `yaml:"fcm"`
	APNs    []apnsEntry    `yaml:"apns"`
	WebPush []webPushEntry `yaml:"webpush"`
}

// entry has the fields that all accounts have.
type entry struct {
	ID          string  `yaml:"id"`
	Rate        *string `yaml:"rate"`        // such as 80/10m, or none
	Concurrency *string `yaml:"concurrency"` // a number, or unbounded
}

type fcmEntry struct {
	entry           `yaml:",inline"`
	CredentialsFile string `yaml:"credentials_file"` // the key of a service account, as Google's console makes it
	URL             string `yaml:"url"`              // instead of FCM's
}

type apnsEntry struct {
	entry   `yaml:",inline"`
	KeyFile string `yaml:"key_file"` // AuthKey_….p8
	KeyID   string `yaml:"key_id"`
	TeamID  string `yaml:"team_id"`
	Topic   string `yaml:"topic"`   // the app's bundle id
	Sandbox bool   `yaml:"sandbox"` // the app is a development build
	URL     string `yaml:"url"`     // instead of APNs'
}

type webPushEntry struct {
	entry   `yaml:",inline"`
	KeyFile string `yaml:"key_file"` // the private VAPID key: base64url or PEM
	Subject string `yaml:"subject"`  // mailto:address or an https URL
}

// parts are what senders are made of, besides their entries.
type parts struct {
	services *http.Client // for FCM and its token endpoints
	public   *http.Client // for endpoints of Web Push
	roots    *x509.CertPool
	now      func() time.Time
}

// loader reads an accounts file and the secrets that it names. It goes on after a mistake, so that
// all mistakes are reported together.
type loader struct {
	path   string
	parts  parts
	before accounts // whose senders may be used again

	digest   hash.Hash // of every file that was read, or of the error
	ids      map[string]bool
	members  map[string][]member
	mistakes []error
}

// load returns the accounts of each platform. The error lists every mistake.
func (l *loader) load() (map[string][]member, error) {
	l.digest, l.ids, l.members = sha256.New(), map[string]bool{}, map[string][]member{}
	content, err := l.read(l.path)
	if err != nil {
		l.mistake("%w", err)
		return nil, l.list()
	}
	var f file
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	decoder.KnownFields(true)
	var wrongFields *yaml.TypeError
	switch err := decoder.Decode(&f); {
	case errors.As(err, &wrongFields):
		for _, text := range wrongFields.Errors { // the other fields were decoded
			text = unknownField.ReplaceAllString(goType.ReplaceAllString(text, "accounts"), "unknown field $1")
			l.mistake("%s", text)
		}
	case errors.Is(err, io.EOF):
	case err != nil:
		l.mistake("%w", err)
		return nil, l.list()
	}
	if decoder.Decode(new(yaml.Node)) == nil {
		l.mistake("the file has a second document")
	}
	if len(f.FCM)+len(f.APNs)+len(f.WebPush) == 0 {
		l.mistake("the file lists no account under fcm, apns or webpush")
	}
	for i, e := range f.FCM {
		l.fcm(i, e)
	}
	for i, e := range f.APNs {
		l.apns(i, e)
	}
	for i, e := range f.WebPush {
		l.webPush(i, e)
	}
	return l.members, l.list()
}

// unknownField and goType match what the YAML library says about fields, which is for programmers.
var (
	unknownField = regexp.MustCompile(`field (\S+) not found in .*`)
	goType       = regexp.MustCompile(`(type )?(\[\])?push\.\w+`)
)

func (l *loader) mistake(format string, args ...any) {
	l.mistakes = append(l.mistakes, fmt.Errorf(format, args...))
}

func (l *loader) list() error {
	if len(l.mistakes) == 0 {
		return nil
	}
	return fmt.Errorf("read push accounts in %s:\n%w", l.path, errors.Join(l.mistakes...))
}

// read returns the content of a file that must not be readable by others.
func (l *loader) read(path string) ([]byte, error) {
	content, mode, err := readFile(path)
	if err == nil && mode&othersMay != 0 {
		err = fmt.Errorf("%s: others may read it (mode %04o); run chmod o-r on it", path, mode.Perm())
	}
	fmt.Fprintf(l.digest, "%q %o %v %q\n", path, mode, err, content)
	return content, err
}

func readFile(path string) ([]byte, fs.FileMode, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	content, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err == nil && len(content) > maxFileBytes {
		err = fmt.Errorf("%s: is larger than %d bytes", path, maxFileBytes)
	}
	return content, info.Mode(), err
}

// checker reports the mistakes of one entry.
type checker struct {
	l     *loader
	where string // the entry, for people
	bad   bool
}

func (c *checker) check(ok bool, format string, args ...any) {
	if !ok {
		c.bad = true
		c.l.mistake("%s: %w", c.where, fmt.Errorf(format, args...))
	}
}

// secret returns the content of a file that the entry names, and nil after a mistake. Relative
// names are relative to the accounts file.
func (c *checker) secret(field, name string) []byte {
	c.check(name != "", "%s is missing", field)
	if name == "" {
		return nil
	}
	if !filepath.IsAbs(name) {
		name = filepath.Join(filepath.Dir(c.l.path), name)
	}
	content, err := c.l.read(name)
	c.check(err == nil, "%s: %w", field, err)
	return content
}

// url returns base without a slash at its end, or instead if base is empty.
func (c *checker) url(base, instead string) string {
	if base == "" {
		return instead
	}
	c.check(isHTTPS(base), "url is not an absolute https URL")
	return strings.TrimRight(base, "/")
}

var accountID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)

// begin checks the fields that all accounts have.
func (l *loader) begin(platform string, i int, e entry) (*checker, credential.Account) {
	c := &checker{l: l, where: fmt.Sprintf("%s account %d", platform, i+1)}
	c.check(accountID.MatchString(e.ID), "id is not 1 to 128 letters, digits, dots, underscores or dashes")
	if !c.bad {
		c.where = platform + " account " + e.ID
		c.check(!l.ids[e.ID], "the id is used twice")
		l.ids[e.ID] = true
	}
	account := credential.Account{ID: e.ID}
	if e.Rate != nil {
		rate, err := parseRate(*e.Rate)
		c.check(err == nil, "rate: %w", err)
		account.Rate = &rate
	}
	if e.Concurrency != nil {
		n, err := strconv.Atoi(*e.Concurrency)
		if *e.Concurrency == "unbounded" {
			n, err = credential.Unbounded, nil
		}
		c.check(err == nil && (n >= 1 || n == credential.Unbounded && *e.Concurrency == "unbounded"),
			"concurrency: %q is neither a number above 0 nor unbounded", *e.Concurrency)
		account.Concurrency = n
	}
	return c, account
}

func parseRate(s string) (credential.Rate, error) {
	if s == "none" {
		return credential.Rate{}, nil
	}
	permits, window, _ := strings.Cut(s, "/")
	n, err := strconv.Atoi(permits)
	d, badWindow := time.ParseDuration(window)
	if err != nil || badWindow != nil || n < 1 || d < time.Millisecond {
		return credential.Rate{}, fmt.Errorf("%q is neither a number above 0 with a time, such as 80/10m, nor none", s)
	}
	return credential.Rate{Permits: n, Window: d}, nil
}

// end adds the account unless it has a mistake. from is all from which create makes the sender.
func (c *checker) end(platform string, account credential.Account, create func() sender, from ...string) {
	if c.bad {
		return
	}
	m := member{account: account, digest: sha256.Sum256(fmt.Appendf(nil, "%q", from))}
	if old := c.l.before[platform]; old != nil && old.members[account.ID].digest == m.digest {
		m.sender = old.members[account.ID].sender
	} else {
		m.sender = create()
	}
	c.l.members[platform] = append(c.l.members[platform], m)
}
