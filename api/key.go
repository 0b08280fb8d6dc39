package api

import "time"

// Key is an API key as GET /v1/keys shows it. It has no secret.
type Key struct {
	ID        string     `json:"id"`
	Role      string     `json:"role"`
	Tenant    string     `json:"tenant,omitempty"` // * for a producer of all tenants; "" for none
	Payloads  bool       `json:"payloads"`         // its holder sees payloads, results' data and error texts
	Name      string     `json:"name,omitempty"`
	CreatedAt time.Time  `json:"created_at"`
	CreatedBy string     `json:"created_by,omitempty"` // the id of a key, or cli:USER
	ExpiresAt *time.Time `json:"expires_at,omitempty"` // absent: never
	// LastUsedDay is the last day (UTC) on which the key was used, such as 2026-11-25; absent: it
	// was not used yet.
	LastUsedDay string `json:"last_used_day,omitempty"`
	ReplacedBy  string `json:"replaced_by,omitempty"` // id of the key that replaces it after a rotation
}

// KeyList is a page of API keys, the oldest first.
type KeyList struct {
	Keys   []Key  `json:"keys"`
	Cursor string `json:"cursor,omitempty"` // asks for the next page; empty on the last page
}

// KeyRequest says which API key to create.
type KeyRequest struct {
	Role     string `json:"role"`
	Tenant   string `json:"tenant,omitempty"`
	Payloads *bool  `json:"payloads,omitempty"` // nil: as the role has it
	Name     string `json:"name,omitempty"`     // for people, at most 128 characters
	// ExpiresInSeconds is the lifetime of the key, at least a minute; 0: it does not expire.
	ExpiresInSeconds int64 `json:"expires_in_seconds,omitempty"`
}

// NewKey is the answer to the creation of an API key. It is the only one that has the secret.
type NewKey struct {
	Secret string `json:"key"`
	Key
}

// KeyRevoked is the answer to the revocation of an API key.
type KeyRevoked struct {
	ID      string `json:"id"`
	Revoked bool   `json:"revoked"`
}
