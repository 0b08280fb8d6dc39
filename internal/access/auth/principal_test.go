package auth_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/access/auth"
)

func TestScopes(t *testing.T) {
	t.Parallel()
	for p, want := range map[auth.Principal][]auth.Scope{
		{Role: auth.Admin}:                             auth.Scopes,
		{Role: auth.Operator}:                          {auth.Read, auth.ReadSystem, auth.ReadMetrics, auth.Control, auth.Tenants},
		{Role: auth.Reader}:                            {auth.Read, auth.ReadSystem, auth.ReadMetrics},
		{Role: auth.Reader, Tenant: "acme"}:            {auth.Read},
		{Role: auth.Producer, Tenant: "acme"}:          {auth.Read, auth.Submit, auth.Control},
		{Role: auth.Producer, Tenant: auth.AllTenants}: {auth.Read, auth.Submit, auth.Control},
		{Role: auth.Metrics}:                           {auth.ReadMetrics},
		{Role: auth.Service}:                           {auth.EntryTokens},
		{}:                                             nil,
		{Role: "root"}:                                 nil,
		{Role: "root", Tenant: "acme", Payloads: true}: nil,
		{Role: "Admin", Tenant: auth.AllTenants, KeyID: "k"}: nil,
	} {
		var may []auth.Scope
		for _, s := range auth.Scopes {
			if p.May(s) {
				may = append(may, s)
			}
		}
		require.Equal(t, want, may, "%+v", p)
		require.False(t, p.May("everything"), "%+v", p)
	}
	letters := ""
	for _, r := range auth.Roles {
		require.Contains(t, auth.RoleNames, string(r))
		letters += string(r.Letter())
		require.Equal(t, r == auth.Admin || r == auth.Operator || r == auth.Producer, r.PayloadsByDefault(), r)
	}
	require.Equal(t, "aorpms", letters)
	require.Zero(t, auth.Role("root").Letter())
	require.Zero(t, auth.Role("").Letter())
}

func TestTenantOfPrincipal(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		p                 auth.Principal
		ownsAcme, ownsAll bool
		valid             bool
	}{
		"admin":                  {auth.Principal{Role: auth.Admin}, true, true, true},
		"admin of a tenant":      {auth.Principal{Role: auth.Admin, Tenant: "acme"}, false, false, false},
		"operator":               {auth.Principal{Role: auth.Operator}, true, true, true},
		"operator of a tenant":   {auth.Principal{Role: auth.Operator, Tenant: "acme"}, false, false, false},
		"reader":                 {auth.Principal{Role: auth.Reader}, true, true, true},
		"reader of a tenant":     {auth.Principal{Role: auth.Reader, Tenant: "acme"}, true, false, true},
		"reader of *":            {auth.Principal{Role: auth.Reader, Tenant: "*"}, false, false, false},
		"producer":               {auth.Principal{Role: auth.Producer, Tenant: "acme"}, true, false, true},
		"producer of *":          {auth.Principal{Role: auth.Producer, Tenant: "*"}, true, true, true},
		"producer of no tenant":  {auth.Principal{Role: auth.Producer}, false, false, false},
		"producer of a bad name": {auth.Principal{Role: auth.Producer, Tenant: "a:b"}, false, false, false},
		"metrics":                {auth.Principal{Role: auth.Metrics}, false, false, true},
		"service":                {auth.Principal{Role: auth.Service}, false, false, true},
		"service of a tenant":    {auth.Principal{Role: auth.Service, Tenant: "acme"}, false, false, false},
		"nobody":                 {auth.Principal{}, false, false, false},
		"an unknown role":        {auth.Principal{Role: "root"}, false, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, c.ownsAcme, c.p.Owns("acme"))
			require.Equal(t, c.ownsAll, c.p.Owns("other"))
			require.Equal(t, c.valid, c.p.Check() == nil, c.p.Check())
		})
	}
}

func TestTenantFor(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		p           auth.Principal
		named, want string
		ok          bool
	}{
		"own, not named":           {auth.Principal{Role: auth.Producer, Tenant: "acme"}, "", "acme", true},
		"own, named":               {auth.Principal{Role: auth.Producer, Tenant: "acme"}, "acme", "acme", true},
		"another one":              {auth.Principal{Role: auth.Producer, Tenant: "acme"}, "b", "b", false},
		"the star itself":          {auth.Principal{Role: auth.Producer, Tenant: "acme"}, "*", "*", false},
		"any, named":               {auth.Principal{Role: auth.Producer, Tenant: "*"}, "b", "b", true},
		"any, not named":           {auth.Principal{Role: auth.Producer, Tenant: "*"}, "", "", true},
		"an admin, named":          {auth.Principal{Role: auth.Admin}, "b", "b", true},
		"an admin, not named":      {auth.Principal{Role: auth.Admin}, "", "", true},
		"a reader of another one":  {auth.Principal{Role: auth.Reader, Tenant: "acme"}, "b", "b", false},
		"a reader of its tenant":   {auth.Principal{Role: auth.Reader, Tenant: "acme"}, "", "acme", true},
		"metrics have no tenants":  {auth.Principal{Role: auth.Metrics}, "b", "b", false},
		"nobody may name a tenant": {auth.Principal{}, "b", "b", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tenant, ok := c.p.TenantFor(c.named)
			require.Equal(t, c.want, tenant)
			require.Equal(t, c.ok, ok)
		})
	}
}

func TestPrincipalInContext(t *testing.T) {
	t.Parallel()
	_, ok := auth.From(t.Context())
	require.False(t, ok)
	p := auth.Principal{KeyID: "key_1", Role: auth.Reader}
	got, ok := auth.From(auth.With(t.Context(), p))
	require.True(t, ok)
	require.Equal(t, p, got)
}

func TestWhoMay(t *testing.T) {
	require.Equal(t, "a key of role admin, operator or reader without a tenant", auth.WhoMay(auth.ReadSystem))
	require.Equal(t, "a key of role admin, operator, reader or producer", auth.WhoMay(auth.Read))
	require.Equal(t, "a key of role admin", auth.WhoMay(auth.System))
	require.Equal(t, "a key of role admin, operator, reader or metrics without a tenant", auth.WhoMay(auth.ReadMetrics))
}
