// Package auth defines who makes a call of the API and what the caller may do: principals, roles
// and the scopes of roles; and the address of the client, also behind proxies, by which rates are
// limited. It hides how API keys are written and hashed, and the rules of X-Forwarded-For and of
// IPv6. It does not store keys: package apikey does.
package auth

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/bulkaction/bulkaction/api"
)

// AllTenants is the Tenant of a producer's principal that may submit for any tenant: it names the
// tenant in each submission.
const AllTenants = "*"

// Principal is the caller of the API. The zero Principal may do nothing.
type Principal struct {
	KeyID    string // names the key in logs and metrics
	Role     Role
	Tenant   string // "" for none
	Payloads bool   // sees payloads, results' data and error texts of jobs
}

// Check returns an error if the role is unknown, or if a principal of this role can't have this
// tenant.
func (p Principal) Check() error {
	switch {
	case p.Role.Letter() == 0:
		return fmt.Errorf("role %q: must be one of %s", p.Role, RoleNames)
	case p.Role == Producer && p.Tenant == "":
		return errors.New("tenant: a producer needs one, or * to name the tenant of each submission itself")
	case p.Tenant == AllTenants && p.Role != Producer:
		return fmt.Errorf("tenant *: only a producer can have it; a key of role %s without a tenant sees all",
			p.Role)
	case p.Tenant != "" && p.Role != Producer && p.Role != Reader:
		return fmt.Errorf("tenant %q: a key of role %s has none", p.Tenant, p.Role)
	case p.Tenant != "" && p.Tenant != AllTenants && !api.ValidID(p.Tenant):
		return fmt.Errorf("tenant %q: must "+api.IDRule, p.Tenant)
	}
	return nil
}

// May reports whether the principal may make calls of a scope. For calls on the data of tenants,
// Owns decides for which tenants. A principal with a tenant may not read what belongs to no tenant.
func (p Principal) May(s Scope) bool {
	if p.Tenant != "" && (s == ReadSystem || s == ReadMetrics) {
		return false
	}
	return slices.Contains(allowed[p.Role], s)
}

// WhoMay says in words which keys may make calls of a scope, for error messages, such as "a key of
// role admin, operator or reader without a tenant".
func WhoMay(s Scope) string {
	var roles []Role
	for _, r := range Roles {
		if slices.Contains(allowed[r], s) && (r != Producer || (Principal{Role: r, Tenant: AllTenants}).May(s)) {
			roles = append(roles, r)
		}
	}
	text := "a key of role " + anyOf(roles)
	if slices.Contains(allowed[Reader], s) && !(Principal{Role: Reader, Tenant: "t"}).May(s) {
		text += " without a tenant"
	}
	return text
}

// Owns reports whether the data of a tenant is visible to the principal: to others, the API answers
// as if it did not exist. What the principal may do with it, May decides.
func (p Principal) Owns(tenant string) bool {
	switch {
	case p.Check() != nil:
		return false
	case p.Tenant == "" || p.Tenant == AllTenants:
		return p.May(Read)
	}
	return p.Tenant == tenant
}

// TenantFor returns the tenant of a call. If the call names one, that is the result, and ok is
// false if the principal does not own it. If named is "", the result is the tenant of the
// principal; "" if the principal is not bound to one.
func (p Principal) TenantFor(named string) (tenant string, ok bool) {
	switch {
	case named != "":
		return named, p.Owns(named)
	case p.Tenant == AllTenants:
		return "", true
	}
	return p.Tenant, true
}

// trusted may do everything, and is no key.
var trusted = Principal{Role: Admin, Payloads: true}

// Trust returns a context whose calls may do everything without a key. It is for calls by the roles
// themselves, for messages of the ingest stream (Redis's rights protect it), and for an API with
// AUTH=off.
func Trust(ctx context.Context) context.Context { return With(ctx, trusted) }

// SeesPayloads reports whether the principal of a context may see payloads, the data of results,
// and error texts of jobs.
func SeesPayloads(ctx context.Context) bool {
	p, _ := From(ctx)
	return p.Payloads
}

type contextKey struct{}

// With returns a context whose calls are made by p.
func With(ctx context.Context, p Principal) context.Context {
	return context.WithValue(ctx, contextKey{}, p)
}

// From returns the principal of a context; ok is false if the context has no principal.
func From(ctx context.Context) (p Principal, ok bool) {
	p, ok = ctx.Value(contextKey{}).(Principal)
	return p, ok
}

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
	// ReadSystem is the scope of reading what belongs to no tenant: limits, guards, events of the
	// waiting room, the state of the audit, and messages that ingest has rejected.
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
	// System is the scope of changing what belongs to no tenant: keys, limits, types, worker
	// processes, guards, events of the waiting room. It also covers reading keys and the activity log.
	System Scope = "system"
	// EntryTokens is the scope of verifying, renewing and completing entry tokens of the waiting
	// room.
	EntryTokens Scope = "entry-tokens"
)

// Scopes are all scopes.
var Scopes = []Scope{Read, ReadSystem, ReadMetrics, Submit, Control, Tenants, System, EntryTokens}

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
