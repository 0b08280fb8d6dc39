package auth

import "slices"

// Role defines what a principal may do. Each role has a letter, which is part of the text of its
// keys.
type Role string

// The roles.
const (
	Admin    Role = "admin"    // everything
	Operator Role = "operator" // reads all but keys and the activity log; controls groups and tenants
	Reader   Role = "reader"   // only reads: as an operator, or the data of one tenant
	Producer Role = "producer" // submits and controls the groups of its tenant
	Metrics  Role = "metrics"  // reads figures of the whole system
	Service  Role = "service"  // uses entry tokens of the waiting room
)

// Roles are all roles.
var Roles = []Role{Admin, Operator, Reader, Producer, Metrics, Service}

// RoleNames has the names of all roles, for people.
var RoleNames = anyOf(Roles)

// anyOf lists roles in words, such as "admin, operator or reader".
func anyOf(roles []Role) string {
	text := string(roles[0])
	for i, r := range roles[1:] {
		separator := ", "
		if i == len(roles)-2 {
			separator = " or "
		}
		text += separator + string(r)
	}
	return text
}

// Letter returns the letter of a role in the prefix of its keys, 0 for an unknown role.
func (r Role) Letter() byte {
	if !slices.Contains(Roles, r) {
		return 0
	}
	return r[0]
}

// Scope is a kind of calls, such as reading data. Each role may make the calls of some scopes.
type Scope string

// The scopes.
const (
	// Read is the scope of reading the data of tenants: groups, jobs, results, tenants, dead
	// letters.
	Read Scope = "read"
	// ReadSystem is the scope of reading what belongs to no tenant: guards, events of the waiting
	// room, the state of the audit, and messages that ingest has rejected.
	ReadSystem Scope = "read-system"
	// ReadMetrics is the scope of reading figures of the whole system: stats (with types and
	// processes), history, metrics.
	ReadMetrics Scope = "read-metrics"
	// Submit creates groups and appends jobs.
	Submit Scope = "submit"
	// Control seals, cancels, pauses, resumes and retries groups.
	Control Scope = "control"
	// Tenants changes the settings of tenants, and pauses them.
	Tenants Scope = "tenants"
	// System is the scope of changing what belongs to no tenant: keys, types, worker processes,
	// guards, events of the waiting room. It also covers reading keys and the activity log.
	System Scope = "system"
	// EntryTokens is the scope of verifying, renewing and completing entry tokens of the waiting
	// room.
	EntryTokens Scope = "entry-tokens"
)

// Scopes are all scopes.
var Scopes = []Scope{Read, ReadSystem, ReadMetrics, Submit, Control, Tenants, System, EntryTokens}

// allowed are the scopes of each role.
var allowed = map[Role][]Scope{
	Admin:    Scopes,
	Operator: {Read, ReadSystem, ReadMetrics, Control, Tenants},
	Reader:   {Read, ReadSystem, ReadMetrics},
	Producer: {Read, Submit, Control},
	Metrics:  {ReadMetrics},
	Service:  {EntryTokens},
}

// PayloadsByDefault reports whether keys of the role see payloads, the data of results and error
// texts, if the key does not say.
func (r Role) PayloadsByDefault() bool { return r == Admin || r == Operator || r == Producer }
