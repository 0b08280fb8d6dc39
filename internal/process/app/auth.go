package app

import (
	"cmp"
	"net/netip"
)

// The values of AUTH.
const (
	AuthOff  = "off"  // the API asks for no key, and every caller may do everything
	AuthKeys = "keys" // the API asks for keys
)

// AuthMode returns AuthOff or AuthKeys. If the variable AUTH is empty, it is AuthOff for an API on
// loopback, AuthKeys otherwise.
func (c Config) AuthMode() string {
	if isLoopback(c.Ingest.APIAddr) {
		return cmp.Or(c.Auth.Mode, AuthOff)
	}
	return cmp.Or(c.Auth.Mode, AuthKeys)
}

// SecureUI reports whether the cookie of the console may be marked Secure (https only): the API
// speaks TLS, or its address is not loopback, so that a proxy in front of it has to end TLS.
func (c Config) SecureUI() bool { return c.Ingest.TLSCertFile != "" || !isLoopback(c.Ingest.APIAddr) }

// OpenToAll reports whether callers on other hosts may use the API without a key.
func (c Config) OpenToAll() bool { return c.AuthMode() == AuthOff && !isLoopback(c.Ingest.APIAddr) }

// Proxies returns the trusted proxies in front of the API as networks.
func (c AuthConfig) Proxies() []netip.Prefix { return networks(c.TrustedProxies) }

// authentication calls check once for each rule that relates the address of the API to its
// protection by keys and TLS.
func (c Config) authentication(check func(holds bool, name, other, problem string)) {
	check(!c.OpenToAll() || c.Ingest.AllowUnauthenticated, "API_ADDR", "API_ALLOW_UNAUTHENTICATED",
		"must be on 127.0.0.1 with BULKACTION_AUTH=off; OTHER=true opens it to everyone all the same")
	private := isLoopback(c.Ingest.APIAddr) || c.Ingest.TLSCertFile != ""
	check(private || c.AuthMode() == AuthOff || c.Auth.AllowPlaintext, "API_ADDR", "API_ALLOW_PLAINTEXT",
		"must be on 127.0.0.1, unless BULKACTION_API_TLS_CERT_FILE is set, so that API keys don't cross a network "+
			"unencrypted; OTHER=true allows it behind a proxy that ends TLS")
}
