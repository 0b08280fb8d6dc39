package push

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

type accounts map[string]*pool

// pool has the accounts of one platform. They serve the same app, so each can replace the others.
type pool struct {
	source  credential.Source
	members map[string]member
}

// member is one account. If a change of the file does not concern an account, it keeps its sender,
// and so its token and its connection.
type member struct {
	account credential.Account
	digest  accountsfile.Digest // of all from which sender is made
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

type fcmEntry struct {
	accountsfile.Entry `yaml:",inline"`
	CredentialsFile    string `yaml:"credentials_file"` // the key of a service account, as Google's console makes it
	URL                string `yaml:"url"`              // instead of FCM's
}

type apnsEntry struct {
	accountsfile.Entry `yaml:",inline"`
	KeyFile            string `yaml:"key_file"` // AuthKey_….p8
	KeyID              string `yaml:"key_id"`
	TeamID             string `yaml:"team_id"`
	Topic              string `yaml:"topic"`   // the app's bundle id
	Sandbox            bool   `yaml:"sandbox"` // the app is a development build
	URL                string `yaml:"url"`     // instead of APNs'
}

type webPushEntry struct {
	accountsfile.Entry `yaml:",inline"`
	KeyFile            string `yaml:"key_file"` // the private VAPID key: base64url or PEM
	Subject            string `yaml:"subject"`  // mailto:address or an https URL
}

// parts are what senders are made of, besides their entries.
type parts struct {
	services *http.Transport // for FCM and its token endpoints
	public   *http.Client    // for endpoints of Web Push
	roots    *x509.CertPool
	now      func() time.Time
}

// loader makes members from the accounts file and the files with secrets that it names.
type loader struct {
	*accountsfile.Reader
	parts   parts
	before  accounts // whose senders may be used again
	members map[string][]member
}

// load reads the accounts of each platform.
func (l *loader) load() {
	l.members = map[string][]member{}
	var f file
	if !l.Decode(&f) {
		return
	}
	if len(f.FCM)+len(f.APNs)+len(f.WebPush) == 0 {
		l.Mistake("the file lists no account under fcm, apns or webpush")
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
}

// checkURL returns base, or instead if base is empty, with a slash at its end. It reports to c what
// is no absolute https URL.
func checkURL(c *accountsfile.Checker, base, instead string) *url.URL {
	u, err := url.Parse(cmp.Or(strings.TrimRight(base, "/"), instead) + "/") // JoinPath needs a path
	c.Check(err == nil && isHTTPS(u), "url is not an absolute https URL")
	return u
}

// add adds an account unless its entry has a mistake. create makes the account's sender; from are
// all values that it uses. If they are the same as when the file was read before, add uses the old
// sender.
func (l *loader) add(
	platform string, c *accountsfile.Checker, account credential.Account, create func() sender, from ...string,
) {
	if !c.OK() {
		return
	}
	m := member{account: account, digest: sha256.Sum256(fmt.Appendf(nil, "%q", from))}
	if old := l.before[platform]; old != nil && old.members[account.ID].digest == m.digest {
		m.sender = old.members[account.ID].sender
	} else {
		m.sender = create()
	}
	l.members[platform] = append(l.members[platform], m)
}

// tokens holds the token with which an account authenticates, and replaces it when it is too old.
// One caller makes the new token; callers that need it meanwhile wait for it.
type tokens struct {
	// create returns a new token and the time from which on it must not be used.
	create func(ctx context.Context) (token string, until time.Time, err error)
	now    func() time.Time
	// pause is the shortest time between two tokens that are made because the service has refused
	// a valid one. It keeps an account that is refused for another reason from asking for a token
	// with each push.
	pause time.Duration

	mu       sync.Mutex
	token    string
	until    time.Time
	replaced time.Time // when a refused token was replaced
	creation *creation // nil while no caller makes a token
}

// creation is the making of one token, for which several callers may wait.
type creation struct {
	done  chan struct{}
	token string
	err   error
}

// get returns a valid token. refused is the token that the service has just refused, or "". get may
// return that token again: then it is too early for another one.
func (t *tokens) get(ctx context.Context, refused string) (string, error) {
	for {
		t.mu.Lock()
		now := t.now()
		valid := t.token != "" && now.Before(t.until)
		if valid && (t.token != refused || now.Sub(t.replaced) < t.pause) {
			defer t.mu.Unlock()
			return t.token, nil
		}
		if t.creation == nil {
			if valid {
				t.replaced = now
			}
			c := &creation{done: make(chan struct{})}
			t.creation = c
			t.mu.Unlock()
			return t.run(ctx, c)
		}
		c := t.creation
		t.mu.Unlock()
		select {
		case <-c.done:
		case <-ctx.Done():
			return "", ctx.Err()
		}
		if !errors.Is(c.err, context.Canceled) && !errors.Is(c.err, context.DeadlineExceeded) {
			return c.token, c.err
		}
		// The caller that made the token gave up, because its job has ended. Try again.
	}
}

// run makes a token for all callers that wait for c.
func (t *tokens) run(ctx context.Context, c *creation) (string, error) {
	c.err = errors.New("the token was not made")
	var until time.Time
	defer func() {
		t.mu.Lock()
		if c.err == nil {
			t.token, t.until = c.token, until
		}
		t.creation = nil
		t.mu.Unlock()
		close(c.done)
	}()
	c.token, until, c.err = t.create(ctx)
	return c.token, c.err
}
