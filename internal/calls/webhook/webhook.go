// Package webhook signs callbacks and checks the signatures, by the specification Standard Webhooks
// (github.com/standard-webhooks/standard-webhooks), and says which URLs a callback may have.
package webhook

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/calls/egress"
)

// The headers of a callback.
const (
	HeaderID        = "webhook-id"
	HeaderTimestamp = "webhook-timestamp" // seconds since 1970
	HeaderSignature = "webhook-signature" // signatures, divided by spaces
)

const (
	secretPrefix = "whsec_"
	version      = "v1,"
	secretSize   = 32
	// minMaster is the least number of bytes of a master key.
	minMaster = 32
	// maxHost is the most bytes of a host with its port.
	maxHost = 253 + len(":65535")
	// tolerance is how far the time of a callback may be from that of its receiver.
	tolerance = 5 * time.Minute
)

// Keys derives the secrets of tenants from a master key, so that no secret is stored.
type Keys struct{ master []byte }

// ReadKeys reads the file of the master key.
func ReadKeys(path string) (*Keys, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read the master key: %w", err)
	}
	if info.Mode()&fs.FileMode(0o004) != 0 {
		return nil, fmt.Errorf("read the master key: %s: others may read it (mode %04o); run chmod o-r on it",
			path, info.Mode().Perm())
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the master key: %w", err)
	}
	master := strings.TrimRight(string(text), "\r\n")
	if len(master) < minMaster {
		return nil, fmt.Errorf("read the master key: %s has %d bytes, at least %d are needed", path, len(master), minMaster)
	}
	return &Keys{[]byte(master)}, nil
}

// String hides the key.
func (k *Keys) String() string { return "master key" }

// GoString hides the key.
func (k *Keys) GoString() string { return k.String() }

// Secret returns the secret of a tenant, as its receivers need it. Version is a number from 1.
func (k *Keys) Secret(tenant string, version int) string {
	key, err := hkdf.Key(sha256.New, k.master, nil, tenant+"|"+strconv.Itoa(version), secretSize)
	if err != nil {
		panic(err) // only for a length that no key has
	}
	return secretPrefix + base64.StdEncoding.EncodeToString(key)
}

// ErrSignature says that a callback has no valid signature.
var ErrSignature = errors.New("no valid signature")

func mac(secret, id, timestamp string, body []byte) ([]byte, error) {
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, secretPrefix))
	if err != nil || len(key) == 0 {
		return nil, errors.New("the secret must be whsec_ and base64")
	}
	h := hmac.New(sha256.New, key)
	_, _ = fmt.Fprintf(h, "%s.%s.", id, timestamp)
	_, _ = h.Write(body)
	return h.Sum(nil), nil
}

// Sign sets the headers of a callback, with a signature for each secret.
func Sign(header http.Header, id string, at time.Time, body []byte, secrets ...string) error {
	timestamp := strconv.FormatInt(at.Unix(), 10)
	signatures := make([]string, len(secrets))
	for i, secret := range secrets {
		sum, err := mac(secret, id, timestamp, body)
		if err != nil {
			return err
		}
		signatures[i] = version + base64.StdEncoding.EncodeToString(sum)
	}
	header.Set(HeaderID, id)
	header.Set(HeaderTimestamp, timestamp)
	header.Set(HeaderSignature, strings.Join(signatures, " "))
	return nil
}

// Verify checks that a callback was signed with a secret, at most 5 minutes before or after now. An
// error of a callback that was not wraps ErrSignature.
func Verify(secret string, header http.Header, body []byte, now time.Time) error {
	id, timestamp := header.Get(HeaderID), header.Get(HeaderTimestamp)
	want, err := mac(secret, id, timestamp, body)
	if err != nil {
		return err
	}
	at, err := strconv.ParseInt(timestamp, 10, 64)
	if id == "" || err != nil {
		return fmt.Errorf("%w: %s and %s are needed", ErrSignature, HeaderID, HeaderTimestamp)
	}
	if age := now.Sub(time.Unix(at, 0)); age > tolerance || age < -tolerance {
		return fmt.Errorf("%w: it was signed at %s, too far from now", ErrSignature, time.Unix(at, 0).UTC().Format(time.RFC3339))
	}
	for signature := range strings.FieldsSeq(header.Get(HeaderSignature)) {
		text, ok := strings.CutPrefix(signature, version)
		got, err := base64.StdEncoding.DecodeString(text)
		if ok && err == nil && hmac.Equal(got, want) {
			return nil
		}
	}
	return ErrSignature
}

// Policy says which URLs a callback may have.
type Policy struct {
	egress.Policy
	AllowHTTP bool
}

// Check returns an error for a URL to which no callback may be sent. Addresses behind a name are
// checked when the connection is made.
func (p Policy) Check(text string) error {
	if len(text) > api.MaxCallbackURL {
		return fmt.Errorf("must be at most %d bytes, not %d", api.MaxCallbackURL, len(text))
	}
	u, err := url.Parse(text)
	switch {
	case err != nil, u.Host == "", u.Hostname() == "", u.Scheme != "https" && u.Scheme != "http":
		return errors.New("must be a URL such as https://example.com/hook")
	case u.Scheme == "http" && !p.AllowHTTP:
		return errors.New("must begin with https://, unless BULKACTION_CALLBACK_ALLOW_HTTP is true")
	case u.User != nil:
		return errors.New("must have no user name or password: callbacks are signed instead")
	case u.Fragment != "":
		return errors.New("must have no #fragment")
	case len(u.Host) > maxHost:
		return errors.New("must have a host of at most 253 bytes, as names have")
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			return fmt.Errorf("port %s: must be from 1 to 65535", port)
		}
	}
	host := u.Hostname()
	ip, err := netip.ParseAddr(host)
	if strings.EqualFold(strings.TrimSuffix(host, "."), "localhost") {
		ip, err = netip.MustParseAddr("127.0.0.1"), nil
	}
	if err == nil && !p.MayCall(ip) {
		return fmt.Errorf("%s is not a public address, and not in BULKACTION_CALLBACK_ALLOWED_CIDRS", host)
	}
	return nil
}

// WithoutQuery returns a URL without what follows its question mark, which may be a secret.
func WithoutQuery(text string) string {
	path, _, _ := strings.Cut(text, "?")
	return path
}

// Origin returns the part of a URL that names its server, the same for all ways to write it.
func Origin(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return ""
	}
	port := map[string]string{"https": ":443", "http": ":80"}[u.Scheme]
	return u.Scheme + "://" + strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(strings.ToLower(u.Host), port), ":"), ".")
}
