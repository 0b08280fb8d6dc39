package httpcall

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/bulkaction/bulkaction/internal/calls/egress"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// Config says what calls may do. Each field is set by an environment variable with the prefix
// HTTP_PROCESSOR_.
type Config struct {
	// Timeout is the longest time for one call with its response. The job's own timeout applies as
	// well.
	Timeout time.Duration `env:"TIMEOUT" envDefault:"30s"`
	// MaxResponseBytes is how much of a response body is kept; the rest is cut off.
	MaxResponseBytes int `env:"MAX_RESPONSE_BYTES" envDefault:"65536"`
	// MaxIdleConnsPerHost is how many connections to one host are kept open for reuse.
	MaxIdleConnsPerHost int `env:"MAX_IDLE_CONNS_PER_HOST" envDefault:"64"`
	// AllowPrivate lets jobs call every address, also private and loopback addresses. Each
	// producer can then reach every service that this process can reach.
	AllowPrivate bool `env:"ALLOW_PRIVATE" envDefault:"false"`
	// AllowedCIDRs are networks that jobs may call although they are not public, for example
	// 10.1.0.0/16.
	AllowedCIDRs []netip.Prefix `env:"ALLOWED_CIDRS"`
	// CredentialsFile is a YAML file that lists credentials and secrets for signatures with the hosts
	// that they are for, and further job types whose calls have their URL there. It is read again
	// when it changes. Empty means that calls have no credentials but those in payloads.
	CredentialsFile string `env:"CREDENTIALS_FILE"`
	credential.Limits
	// HostRate is how often one host may be called in a time span, such as 100/1s; none is no
	// limit. ACCOUNT_LIMITER says how calls are counted.
	HostRate credential.Rate `env:"HOST_RATE" envDefault:"none" check:"rate"`
	// HostBreaker says when a host is not called because it fails: after this many failures in a
	// row, for this time, until this many calls succeed, such as 3/10m/3; none is no breaker.
	HostBreaker credential.Breaker `env:"HOST_BREAKER" envDefault:"none" check:"breaker"`
}

// GuardsHosts says whether HostRate or HostBreaker limits the calls of each host.
func (c Config) GuardsHosts() bool { return c.HostRate.Permits > 0 || c.HostBreaker.Failures > 0 }

// Validate checks every field, but not the content of CredentialsFile, because only workers can
// read it. The error joins one error for each invalid field and names the field as its environment
// variable, without the prefix.
func (c Config) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.Timeout > 0, "TIMEOUT: %s is not above 0", c.Timeout)
	check(c.MaxResponseBytes >= 0 && c.MaxResponseBytes <= processor.MaxResultBytes,
		"MAX_RESPONSE_BYTES: %d is not between 0 and %d", c.MaxResponseBytes, processor.MaxResultBytes)
	check(c.MaxIdleConnsPerHost >= 1, "MAX_IDLE_CONNS_PER_HOST: %d is not above 0", c.MaxIdleConnsPerHost)
	for _, err := range c.policy().Validate() {
		check(false, "ALLOWED_CIDRS: %w", err)
	}
	return errors.Join(errs...)
}

func (c Config) policy() egress.Policy {
	return egress.Policy{AllowPrivate: c.AllowPrivate, AllowedCIDRs: c.AllowedCIDRs}
}
