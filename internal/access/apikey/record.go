package apikey

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
)

// Record is what Redis stores of a key, and what commands show of it. It contains no secret.
type Record struct {
	ID        string    `json:"id"`
	Role      auth.Role `json:"role"`
	Tenant    string    `json:"tenant"` // "" for none, * for a producer of all tenants
	Payloads  bool      `json:"payloads"`
	Name      string    `json:"name"`
	CreatedAt time.Time `json:"created_at"`
	CreatedBy string    `json:"created_by"`
	ExpiresAt time.Time `json:"expires_at,omitzero"` // zero: never
	// LastUsedDay is the last day (UTC) on which the key was used, such as 2026-11-25, or "". A day
	// may be missing if Redis could not store it.
	LastUsedDay string `json:"last_used_day"`
	// ReplacedBy is the id of the new key, if a rotation has replaced this one.
	ReplacedBy string `json:"replaced_by,omitempty"`
}

const (
	maxName     = 128 // characters
	minLifetime = time.Minute
	maxLifetime = 10 * 365 * 24 * time.Hour
)

// principal returns the principal that a key stands for.
func (r Record) principal() auth.Principal {
	return auth.Principal{KeyID: r.ID, Role: r.Role, Tenant: r.Tenant, Payloads: r.Payloads}
}

// Expired reports whether the key is not valid any more at a time.
func (r Record) Expired(now time.Time) bool { return !r.ExpiresAt.IsZero() && !now.Before(r.ExpiresAt) }

// checkName returns an error if the name of a key is not allowed. An empty name is allowed.
func checkName(name string) error {
	if utf8.RuneCountInString(name) > maxName || strings.ContainsFunc(name, func(r rune) bool {
		return r == utf8.RuneError || !unicode.IsPrint(r)
	}) {
		return fmt.Errorf("name: must be at most %d printable characters", maxName)
	}
	return nil
}

func (r Record) encode() (string, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(r); err != nil {
		return "", fmt.Errorf("encode the record of key %s: %w", r.ID, err)
	}
	return strings.TrimSuffix(b.String(), "\n"), nil
}

// decode parses the record that is stored under a hash. It refuses unknown fields: a newer version
// may have added one that restricts the key.
func decode(hash auth.Hash, text string) (Record, error) {
	var r Record
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	err := d.Decode(&r)
	switch {
	case err != nil:
	case !errors.Is(d.Decode(new(json.RawMessage)), io.EOF):
		err = errors.New("text follows its record")
	case !hash.Valid() || r.ID != hash.KeyID():
		err = errors.New("its id does not belong to its hash")
	default:
		err = r.principal().Check()
	}
	if err != nil {
		return Record{}, fmt.Errorf("key %s: its record can't be used: %w", hash.KeyID(), err)
	}
	return r, nil
}

// File has the API keys of a file, which are valid without Redis. Each line is a key:
//
//	ID ROLE TENANT SHA256
//
// TENANT is - for none. SHA256 is that of the token, even if keys in Redis have a pepper. The rest
// of a line after # is a comment. Keys of a file never expire: a key is revoked by removing its
// line. It is safe for concurrent use.
type File struct {
	file *accountsfile.File

	mu   sync.Mutex // guards the next two, which are replaced and never changed
	keys map[auth.Hash]auth.Principal
	byID map[string]auth.Principal
}

// OpenFile reads the file at path. Its error lists all mistakes in the file, with their lines.
func OpenFile(path string) (*File, error) {
	f := &File{}
	f.file = accountsfile.NewFile(path, "API keys", func(r *accountsfile.Reader) func() error {
		keys := parseFile(r)
		byID := map[string]auth.Principal{}
		for _, p := range keys {
			byID[p.KeyID] = p
		}
		return func() error {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.keys, f.byID = keys, byID
			return nil
		}
	})
	if _, err := f.file.Reload(); err != nil {
		return nil, err
	}
	return f, nil
}

// Reload reads the file again if it has changed. If the new content has a mistake, the keys that
// were read before stay in use, and the mistake is returned once.
func (f *File) Reload() (changed bool, err error) { return f.file.Reload() }

func (f *File) find(hash auth.Hash) (auth.Principal, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p, ok := f.keys[hash]
	return p, ok
}

// has reports whether the file still has a key with exactly this principal.
func (f *File) has(p auth.Principal) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return p.KeyID != "" && f.byID[p.KeyID] == p
}

// FileLine returns the line for a file of keys that contains a new key under this id.
func FileLine(id string, k NewKey) (string, error) {
	if !api.ValidID(id) {
		return "", fmt.Errorf("id %q: must "+api.IDRule, id)
	}
	tenant := k.Tenant
	if tenant == "" {
		tenant = "-"
	}
	return fmt.Sprintf("%s %s %s %s", id, k.Role, tenant, auth.SHA256(k.Token)), nil
}

// parseFile parses a file of keys. It adds the mistakes to r, without values from the file, because
// a secret may be in a wrong place.
func parseFile(r *accountsfile.Reader) map[auth.Hash]auth.Principal {
	text, ok := r.Text()
	if !ok {
		return nil
	}
	keys := map[auth.Hash]auth.Principal{}
	ids, hashes := map[string]int{}, map[auth.Hash]int{} // the lines that have them
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if len(fields) != 4 {
			r.Mistake("line %d: has %d fields; write ID ROLE TENANT SHA256, with - for no tenant", n, len(fields))
			continue
		}
		p := auth.Principal{KeyID: fields[0], Role: auth.Role(fields[1]), Tenant: fields[2]}
		p.Payloads = p.Role.PayloadsByDefault()
		if p.Tenant == "-" {
			p.Tenant = ""
		}
		hash := auth.Hash(fields[3])
		mistake := func(format string, args ...any) {
			r.Mistake("line %d: %w", n, fmt.Errorf(format, args...))
		}
		switch {
		case looksLikeToken(fields):
			mistake("has the key itself: write its SHA-256, and revoke this key, since others may have read it")
			continue
		case !api.ValidID(p.KeyID):
			mistake("id: must " + api.IDRule)
		case ids[p.KeyID] != 0:
			mistake("id %s: line %d has it too", p.KeyID, ids[p.KeyID])
		}
		if err := p.Check(); err != nil {
			mistake("%w", err)
		}
		switch {
		case !hash.Valid():
			mistake("sha256: must be 64 hexadecimal digits, in lower case")
		case hashes[hash] != 0:
			mistake("sha256: line %d has the same key", hashes[hash])
		}
		ids[p.KeyID], hashes[hash], keys[hash] = n, n, p
	}
	return keys
}

func looksLikeToken(fields []string) bool {
	for _, f := range fields {
		if _, err := auth.ParseToken(f); err == nil {
			return true
		}
	}
	return false
}
