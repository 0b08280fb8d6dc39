package apikey

import (
	"fmt"
	"strings"
	"sync"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
)

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

// find returns the principal of the key with a hash.
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
