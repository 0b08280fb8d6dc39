package app

import (
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"strings"
	"time"
)

// BrokerConfig sets how a broker serves visitors of the waiting room, and the defaults of events.
type BrokerConfig struct {
	// Address for visitors. Port 0 chooses a free port.
	Addr string `env:"ADDR" envDefault:"127.0.0.1:8090" check:"addr"`
	// Address under which visitors reach the brokers: the issuer of tokens, and the base of the
	// addresses in answers. Empty: BROKER_ADDR. With https, cookies are for https only.
	PublicURL string `env:"PUBLIC_URL" check:"public url"`
	// Files in PEM with the certificate chain and its key. When they change, new connections use
	// the new ones within 10s.
	TLSCertFile string `env:"TLS_CERT_FILE" check:"file"`
	// Key of TLS_CERT_FILE.
	TLSKeyFile string `env:"TLS_KEY_FILE" check:"file"`
	// Allows a BROKER_ADDR that is not loopback without TLS files, because a proxy ends TLS.
	AllowPlaintext bool `env:"ALLOW_PLAINTEXT" envDefault:"false"`
	// File in PEM with the Ed25519 keys of tokens: the first signs, all verify. A broker needs it,
	// and ingest to renew tokens.
	TokenKeysFile string `env:"TOKEN_KEYS_FILE" check:"file"`
	// Audience of tokens. Empty: the event.
	TokenAudience string `env:"TOKEN_AUDIENCE" check:"audience"`

	// Default of the setting token_ttl: life of a token.
	TokenTTL time.Duration `env:"TOKEN_TTL" envDefault:"5m" min:"1s" max:"24h"`
	// Default of the setting leeway: how long the slot is held after the token's expiry.
	TokenLeeway time.Duration `env:"TOKEN_LEEWAY" envDefault:"10s" min:"0s" max:"5m"`
	// Default of the setting max_session: the latest expiry that renewals reach, counted from the
	// first token. 0: no limit.
	MaxSession time.Duration `env:"MAX_SESSION" envDefault:"15m" min:"0s" max:"720h"`
	// Default of the setting ready: time to fetch the token after the promotion.
	Ready time.Duration `env:"READY" envDefault:"30s" min:"100ms" max:"24h"`
	// Default of the setting grace: how long an away user keeps the place. 0: the place ends with
	// the stream.
	Grace time.Duration `env:"GRACE" envDefault:"60s" min:"0s" max:"24h"`
	// Default of the setting on_close: whether a user with a token keeps the slot when the stream
	// ends.
	OnClose string `env:"ON_CLOSE" envDefault:"keep" oneof:"keep,release"`
	// Default of the setting no_show: whether a promoted user who is not connected keeps the slot
	// for the time READY.
	NoShow string `env:"NO_SHOW" envDefault:"wait" oneof:"wait,release"`
	// Default of the setting max_waiting: longest queue of an event.
	MaxWaiting int `env:"MAX_WAITING" envDefault:"1000000" min:"1" max:"100000000" unit:"users"`
	// Default of the setting retention: how long a closed event is kept.
	Retention time.Duration `env:"RETENTION" envDefault:"24h" min:"0s" max:"8760h"`

	// Time between two positions on a stream.
	PositionInterval time.Duration `env:"POSITION_INTERVAL" envDefault:"1s" min:"10ms" max:"1m"`
	// Longest pause of the promoter while nothing wakes it.
	PromoteInterval time.Duration `env:"PROMOTE_INTERVAL" envDefault:"1s" min:"10ms" max:"1m"`
	// Silence on a stream after which a comment is sent.
	Heartbeat time.Duration `env:"HEARTBEAT" envDefault:"15s" min:"10ms" max:"5m"`
	// Longest time to write one frame (server-sent event) of a stream; then the connection is
	// closed.
	WriteTimeout time.Duration `env:"WRITE_TIMEOUT" envDefault:"10s" min:"10ms" max:"5m"`
	// Time over which a broker that stops hands its streams to other brokers.
	Drain time.Duration `env:"DRAIN" envDefault:"10s" min:"0s" max:"5m"`
	// Most open streams of a process.
	MaxConnections int `env:"MAX_CONNECTIONS" envDefault:"50000" min:"1" max:"1000000" unit:"streams"`
	// Most open streams of one IP address, or of one /64 network of IPv6.
	MaxConnectionsPerIP int `env:"MAX_CONNECTIONS_PER_IP" envDefault:"1000" min:"1" max:"1000000" unit:"streams"`
	// New visitors of one IP address. Visitors with a valid cookie don't count.
	EnterRatePerIP int `env:"ENTER_RATE_PER_IP" envDefault:"10" min:"1" max:"1000000" unit:"visitors a second"`

	// How users are told apart: by a signed cookie, or by a header that a proxy sets.
	Identity string `env:"IDENTITY" envDefault:"cookie" oneof:"cookie,header"`
	// Header with the user's id, with IDENTITY=header.
	IdentityHeader string `env:"IDENTITY_HEADER" check:"header"`
	// Proxies whose identity header and X-Forwarded-For are believed. The limits per IP don't hold
	// for requests of such a proxy without X-Forwarded-For.
	TrustedProxies []string `env:"TRUSTED_PROXIES" check:"networks"`
	// Hosts that a return_url may name, beside loopback addresses.
	ReturnHosts []string `env:"RETURN_HOSTS" check:"hosts"`
	// Address of the seat service; {event} stands for the event. Empty: events must be declared.
	SeatsURL string `env:"SEATS_URL" secret:"url" check:"seats url"`
	// Longest time to wait for the seat service.
	SeatsTimeout time.Duration `env:"SEATS_TIMEOUT" envDefault:"2s" min:"10ms" max:"1m"`
}

// HasTLS reports whether the broker itself serves https.
func (c BrokerConfig) HasTLS() bool { return c.TLSCertFile != "" }

// PublicURLOf returns the public URL of a broker that listens on addr, without a slash at its end:
// PublicURL or, if that is empty, a URL of addr.
func (c BrokerConfig) PublicURLOf(addr net.Addr) string {
	switch {
	case c.PublicURL != "":
		return strings.TrimSuffix(c.PublicURL, "/")
	case c.HasTLS():
		return "https://" + addr.String()
	}
	return "http://" + addr.String()
}

// Proxies returns the trusted proxies as networks.
func (c BrokerConfig) Proxies() []netip.Prefix { return networks(c.TrustedProxies) }

// relations calls check once for each rule that relates two variables of the section.
func (c BrokerConfig) relations(check func(holds bool, name, other, problem string)) {
	check((c.TLSCertFile == "") == (c.TLSKeyFile == ""), "BROKER_TLS_CERT_FILE", "BROKER_TLS_KEY_FILE",
		"must be set together with OTHER, or not at all")
	check(isLoopback(c.Addr) || c.HasTLS() || c.AllowPlaintext, "BROKER_ADDR", "BROKER_ALLOW_PLAINTEXT",
		"must be on 127.0.0.1, unless BULKACTION_BROKER_TLS_CERT_FILE is set; "+
			"OTHER=true allows it behind a proxy that ends TLS")
	check(isLoopback(c.Addr) || c.PublicURL != "", "BROKER_ADDR", "BROKER_PUBLIC_URL",
		"must be on 127.0.0.1, unless OTHER tells the address for visitors")
	check(c.Identity != "header" || c.IdentityHeader != "", "BROKER_IDENTITY", "BROKER_IDENTITY_HEADER",
		"must be cookie, unless OTHER is set")
	check(c.Identity != "header" || len(c.TrustedProxies) > 0, "BROKER_IDENTITY", "BROKER_TRUSTED_PROXIES",
		"must be cookie, unless OTHER is set")
}

var (
	audience   = regexp.MustCompile(`^[A-Za-z0-9._:/-]{1,128}$`)
	headerName = regexp.MustCompile(`^[A-Za-z0-9-]{1,64}$`)
	hostName   = regexp.MustCompile(`^([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$`)
)

// isHost reports whether s can be a host, with or without a port. The length is no part of the
// pattern, because the compiled pattern would then have hundreds of parts.
func isHost(s string) bool {
	const longest = 253 // of a name in DNS
	parts := hostName.FindStringSubmatch(s)
	return parts != nil && len(parts[1]) <= longest
}

// isPublicURL reports whether s can be the base of the URLs that visitors get. http is allowed only
// for loopback: cookies and tokens must not cross a network unencrypted.
func isPublicURL(s string) bool {
	u, err := url.Parse(s)
	if err != nil || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.ForceQuery ||
		strings.Contains(s, "#") || strings.ContainsAny(u.Path, "\"'<>;, ") {
		return false
	}
	port := u.Port()
	if strings.HasSuffix(u.Host, ":") || port != "" && !isAddr("host:"+port) {
		return false
	}
	return u.Scheme == "https" || u.Scheme == "http" && isLoopback(net.JoinHostPort(u.Hostname(), "0"))
}

// isIdentityHeader reports whether s can be the name of the header in which a proxy puts the user's
// id. Headers with another purpose, such as Cookie, can't.
func isIdentityHeader(s string) bool {
	switch http.CanonicalHeaderKey(s) {
	case "Authorization", "Cookie", "Host", "Origin", "Connection", "Last-Event-Id", "X-Forwarded-For":
		return false
	}
	return headerName.MatchString(s)
}

// networks parses a list of networks. It skips invalid ones, which the check of the variable
// refuses.
func networks(list []string) []netip.Prefix {
	all := make([]netip.Prefix, 0, len(list))
	for _, s := range list {
		if p, ok := network(s); ok {
			all = append(all, p)
		}
	}
	return all
}

// network parses a network, or an address as the network of this address alone.
func network(s string) (netip.Prefix, bool) {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p.Masked(), true
	}
	ip, err := netip.ParseAddr(s)
	if err != nil || ip.Zone() != "" {
		return netip.Prefix{}, false
	}
	ip = ip.Unmap()
	return netip.PrefixFrom(ip, ip.BitLen()), true
}

// isSeatsURL reports whether s can be the URL of the seat service: it has {event} in its path or
// query, and not in its host.
func isSeatsURL(s string) bool {
	authority, rest, ok := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(s, "https://"), "http://"), "/")
	if !ok || strings.Contains(authority, "{") || !strings.Contains(rest, "{event}") {
		return false
	}
	u, err := url.Parse(strings.ReplaceAll(s, "{event}", "event"))
	return err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" && u.Fragment == ""
}
