package httpcall

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
)

// Trust lets the processor trust the certificate of a test's server.
func (g *Guarded) Trust(certificate *x509.Certificate) {
	roots := x509.NewCertPool()
	roots.AddCert(certificate)
	g.calls.client.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
}
