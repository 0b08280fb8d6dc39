package apikey

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/internal/access/auth"
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

// encode returns the record as it is stored.
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
