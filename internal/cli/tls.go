package cli

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"strings"

	"github.com/spf13/pflag"
)

// tlsFlags are the global flags for an API that speaks https.
type tlsFlags struct{ caFile, certFile, keyFile string }

func (f *tlsFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.caFile, "ca-file", os.Getenv("BULKACTION_CA_FILE"),
		"PEM file with the authorities that may sign the API's certificate (default: those of the system);\n"+
			"BULKACTION_CA_FILE sets the default")
	flags.StringVar(&f.certFile, "cert-file", os.Getenv("BULKACTION_CERT_FILE"),
		"PEM file with a certificate, if the API demands one; BULKACTION_CERT_FILE sets the default")
	flags.StringVar(&f.keyFile, "key-file", os.Getenv("BULKACTION_KEY_FILE"),
		"key of --cert-file; BULKACTION_KEY_FILE sets the default")
}

// config returns the TLS configuration from the flags; an error unless the scheme of the API's
// address is https.
func (f *tlsFlags) config(scheme string) (*tls.Config, error) {
	if scheme != "https" {
		return nil, usagef("--ca-file, --cert-file and --key-file need an --api that begins with https://")
	}
	if (f.certFile == "") != (f.keyFile == "") {
		return nil, usagef("give --cert-file and --key-file together")
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if f.caFile != "" {
		pem, err := os.ReadFile(f.caFile)
		if err != nil {
			return nil, usagef("--ca-file: %v", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, usagef("--ca-file %s: has no certificate in PEM", f.caFile)
		}
	}
	if f.certFile != "" {
		pair, err := tls.LoadX509KeyPair(f.certFile, f.keyFile)
		if err != nil {
			return nil, usagef("--cert-file: %v", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// tlsAdvice returns a hint what to do about a failed TLS handshake; "" for other errors.
func tlsAdvice(err error) string {
	_, unknownAuthority := errors.AsType[x509.UnknownAuthorityError](err)
	_, wrongName := errors.AsType[x509.HostnameError](err)
	invalid, isInvalid := errors.AsType[x509.CertificateInvalidError](err)
	says := func(text string) bool { return strings.Contains(err.Error(), text) } // errors without a type
	switch {
	case unknownAuthority:
		return "Give the authority that signed the API's certificate with --ca-file or BULKACTION_CA_FILE."
	case wrongName:
		return "Give --api a name that the API's certificate has."
	case isInvalid && invalid.Reason == x509.Expired:
		return "The API needs a certificate that is valid now; or a clock is wrong."
	case says("server gave HTTP response to HTTPS client"):
		return "The API does not speak TLS: give --api with http://."
	case says("HTTP request to an HTTPS server"):
		return "The API speaks TLS: give --api with https://."
	case says("remote error: tls: "), says("http2: client conn could not be established"):
		return "The API demands a certificate that it trusts: give it with --cert-file and --key-file."
	}
	return ""
}
