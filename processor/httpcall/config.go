package httpcall

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/bulkaction/bulkaction/internal/egress"
	"github.com/bulkaction/bulkaction/processor"
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
	// AllowPrivate lets jobs call every address, also private and loopback addresses. Each producer
	// can then reach every service that this process can reach.
	AllowPrivate bool `env:"ALLOW_PRIVATE" envDefault:"false"`
	// AllowedCIDRs are networks that jobs may call although they are not public, for example
	// 10.1.0.0/16.
	AllowedCIDRs []netip.Prefix `env:"ALLOWED_CIDRS"`
}

// Validate checks every field. The error joins one error for each invalid field and names the field
// as its environment variable, without the prefix.
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
