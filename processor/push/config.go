package push

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/bulkaction/bulkaction/internal/calls/egress"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// Config says where the accounts are and what calls may do. Each field is set by an environment
// variable with the prefix PUSH_.
type Config struct {
	// AccountsFile is a YAML file that lists the accounts of FCM, APNs and Web Push. It is read
	// again when it changes. Empty means that the process does not serve PUSH_NOTIFICATION.
	AccountsFile string `env:"ACCOUNTS_FILE"`
	credential.Limits
	// Timeout is the longest time for one push with its answer. The job's own timeout applies as
	// well.
	Timeout time.Duration `env:"TIMEOUT" envDefault:"30s"`
	// TLSCAFile is a PEM file. If it is set, only the certificate authorities in it are trusted; if
	// it is empty, those of the operating system are.
	TLSCAFile string `env:"TLS_CA_FILE"`
	// AllowPrivate lets endpoints of Web Push have every address, also private and loopback
	// addresses. Each producer can then reach every HTTPS service that this process can reach.
	AllowPrivate bool `env:"ALLOW_PRIVATE" envDefault:"false"`
	// AllowedCIDRs are networks in which endpoints of Web Push may be although they are not public,
	// for example 10.1.0.0/16.
	AllowedCIDRs []netip.Prefix `env:"ALLOWED_CIDRS"`
}

// Validate checks every field, but not the content of AccountsFile, because only workers can read
// it. The error joins one error for each invalid field and names the field as its environment
// variable, without the prefix.
func (c Config) Validate() error {
	var errs []error
	if c.Timeout <= 0 {
		errs = append(errs, fmt.Errorf("TIMEOUT: %s is not above 0", c.Timeout))
	}
	for _, err := range c.policy().Validate() {
		errs = append(errs, fmt.Errorf("ALLOWED_CIDRS: %w", err))
	}
	if _, err := c.rootCAs(); err != nil {
		errs = append(errs, fmt.Errorf("TLS_CA_FILE: %w", err))
	}
	return errors.Join(errs...)
}

func (c Config) policy() egress.Policy {
	return egress.Policy{AllowPrivate: c.AllowPrivate, AllowedCIDRs: c.AllowedCIDRs}
}

// rootCAs returns the certificate authorities in TLSCAFile; nil without a file, so that those of
// the operating system are trusted.
func (c Config) rootCAs() (*x509.CertPool, error) {
	if c.TLSCAFile == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(c.TLSCAFile)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no PEM certificate", c.TLSCAFile)
	}
	return pool, nil
}
