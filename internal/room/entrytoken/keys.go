// Package entrytoken signs and checks the entry tokens of the waiting room. It reads the token keys
// of an installation from a file, with Watch again when the file changes, and publishes their
// public halves as a JWKS. It hides the formats: PEM, JWT, JWK and the derivation of the keys that
// sign the visitors' cookies.
//
// A process signs with the first key of the file, and accepts all of them. So a key is replaced in
// three steps: add the new key as the second, make it the first after 5 minutes (services keep a
// JWKS for that long), and remove the old key 24 hours later (the life of a visitor's cookie).
package entrytoken

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// interval is the time between two looks at the file.
	interval         = time.Second
	maxFileBytes     = 1 << 20
	readableByOthers = fs.FileMode(0o004)
)

// Keys are the token keys in a file. Several goroutines may use them.
type Keys struct {
	path    string
	log     *slog.Logger
	current atomic.Pointer[keySet]

	mu   sync.Mutex // guards seen, and is held while the file is read
	seen [sha256.Size]byte
}

// keySet holds the keys of one version of the file, and what is derived from them: ids, JWKS and
// cookie keys.
type keySet struct {
	keys    []key // the first signs
	byID    map[string]ed25519.PublicKey
	jwks    []byte
	cookies [][]byte
}

type key struct {
	id      string // RFC 7638
	private ed25519.PrivateKey
}

// Read reads the file of token keys at path. Its errors name the file and the faulty PEM block.
func Read(path string, log *slog.Logger) (*Keys, error) {
	k := &Keys{path: path, log: log}
	if _, err := k.reload(); err != nil {
		return nil, err
	}
	return k, nil
}

// Watch reads the file each second until ctx ends. It uses the keys of a changed file. If the file
// can't be used, it logs that once, and the old keys stay in use.
func (k *Keys) Watch(ctx context.Context) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		k.look()
	}
}

// look is one step of Watch.
func (k *Keys) look() {
	old := k.current.Load()
	switch changed, err := k.reload(); {
	case err != nil:
		k.log.Error("token keys could not be read again, the old keys stay in use", "error", err)
	case changed:
		now := k.current.Load()
		k.log.Info("token keys changed", "keys", len(now.keys), "signing_key", now.keys[0].id)
		if dropped := old.keys[0].id; now.byID[dropped] == nil {
			k.log.Warn("the key that signed until now was removed, its tokens are no longer accepted",
				"key", dropped)
		}
	}
}

// reload reads the file and uses its keys. If the file has not changed since the last call, it does
// nothing, so that a mistake is returned only once.
func (k *Keys) reload() (changed bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	text, err := readFile(k.path)
	digest := sha256.Sum256(fmt.Appendf(nil, "%v %q", err, text))
	if digest == k.seen {
		return false, nil
	}
	k.seen = digest
	var keys []key
	if err == nil {
		keys, err = parse(text)
	}
	if err != nil {
		return false, fmt.Errorf("read token keys in %s: %w", k.path, err)
	}
	if old := k.current.Load(); old != nil && slices.EqualFunc(old.keys, keys, key.equal) {
		return false, nil // only the text around the keys has changed
	}
	k.current.Store(newKeySet(keys))
	return true, nil
}

// readFile returns the content of a file of secrets. It refuses a file that all users may read, or
// of more than 1 MiB. Its errors don't name the file.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, withoutPath(err)
	}
	defer func() { _ = f.Close() }() // it was only read
	info, err := f.Stat()
	if err != nil {
		return nil, withoutPath(err)
	}
	if info.Mode()&readableByOthers != 0 {
		return nil, fmt.Errorf("others may read it (mode %04o); run chmod o-r on it", info.Mode().Perm())
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, withoutPath(err)
	}
	if len(text) > maxFileBytes {
		return nil, fmt.Errorf("it has more than %d bytes", maxFileBytes)
	}
	return text, nil
}

// withoutPath returns the cause of an error of package os.
func withoutPath(err error) error {
	var inPath *fs.PathError
	if errors.As(err, &inPath) {
		return inPath.Err
	}
	return err
}

func newKeySet(keys []key) *keySet {
	s := &keySet{keys: keys, byID: map[string]ed25519.PublicKey{}}
	var document struct {
		Keys []jwk `json:"keys"`
	}
	for _, k := range keys {
		s.byID[k.id] = k.public()
		s.cookies = append(s.cookies, k.cookieKey())
		document.Keys = append(document.Keys, newJWK(k))
	}
	var err error
	if s.jwks, err = json.Marshal(document); err != nil {
		panic(fmt.Errorf("encode the JWKS: %w", err)) // it consists of strings
	}
	return s
}

func (k key) public() ed25519.PublicKey { return k.private.Public().(ed25519.PublicKey) }

func (k key) equal(other key) bool { return bytes.Equal(k.private, other.private) }

// JWKS returns the JSON document with the public keys, for /.well-known/jwks.json. The caller must
// not change it.
func (k *Keys) JWKS() []byte { return k.current.Load().jwks }

// CookieKeys returns the HMAC-SHA256 keys of visitors' cookies. The first one signs, all are
// accepted. They are derived from the token keys, so that all brokers have the same. The caller
// must not change them.
func (k *Keys) CookieKeys() [][]byte { return k.current.Load().cookies }
