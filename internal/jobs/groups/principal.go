package groups

import (
	"cmp"
	"context"
	"errors"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
)

// errNoPrincipal is the error for a context without a principal, which is a mistake in the program:
// a caller without a key must use auth.Trust.
var errNoPrincipal = errors.New("the call has no principal")

// caller returns the principal of a call.
func caller(ctx context.Context) (auth.Principal, error) {
	p, ok := auth.From(ctx)
	if !ok {
		return p, errNoPrincipal
	}
	return p, nil
}

// callFor returns the principal of a call, and the call's tenant. named is the tenant that the call
// names; "" if it names none. It returns api.ErrTenant if the principal may not act for that
// tenant.
func callFor(ctx context.Context, named string) (p auth.Principal, tenant string, err error) {
	if p, err = caller(ctx); err != nil {
		return p, "", err
	}
	tenant, ok := p.TenantFor(named)
	switch {
	case !ok && p.KeyID != "" && p.Tenant != "":
		return p, "", &api.OtherTenantError{Named: named, Own: p.Tenant}
	case !ok: // such as a stream of one tenant, which has no key
		return p, "", api.ErrTenant
	}
	return p, tenant, nil
}

// ownTenant returns the only tenant whose data the principal of a call may see; "" for a principal
// that may see the data of all tenants. It returns api.ErrNotAllowed if the principal may see none.
func ownTenant(ctx context.Context) (string, error) {
	p, err := caller(ctx)
	switch {
	case err != nil:
		return "", err
	case p.Tenant == "" || p.Tenant == auth.AllTenants:
		if !p.Owns("") { // its role may not see the data of tenants at all
			return "", api.ErrNotAllowed
		}
		return "", nil
	}
	return p.Tenant, nil
}

// checkTenant returns the error for an unknown tenant if the principal of the call may not see this
// tenant.
func checkTenant(ctx context.Context, tenant string) error {
	p, err := caller(ctx)
	if err == nil && !p.Owns(tenant) {
		err = unknownTenant(tenant)
	}
	return err
}

func unknownTenant(tenant string) error {
	return &api.NotFoundError{Text: "tenant " + tenant + ": has neither groups nor settings"}
}

// idempotencyScope returns a prefix for idempotency keys before they are hashed. With it each
// tenant has keys of its own; all principals without a tenant share theirs.
func idempotencyScope(p auth.Principal, tenant string) string {
	if p.Tenant == "" {
		return ""
	}
	return cmp.Or(tenant, p.Tenant) + "\x00"
}
