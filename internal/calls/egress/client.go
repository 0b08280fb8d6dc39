// Package egress makes the HTTP client for calls to a URL that comes from a user's input, such as
// the URL of an HTTP job or the endpoint of a Web Push subscription. The package hides which
// addresses are public: by default, its client refuses to connect to any other address, so that a
// job can't reach services inside of the worker's own network.
package egress

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"time"
)

const (
	maxHeaderBytes     = 64 << 10
	idleTimeout        = 90 * time.Second
	handshakeTimeout   = 10 * time.Second
	maxIdleConnections = 1024
)

// Options are the settings of a client.
type Options struct {
	Policy
	MaxIdleConnsPerHost int            // connections to one host that are kept open for reuse
	RootCAs             *x509.CertPool // the certificate authorities to trust; nil: those of the operating system
}

// NewClient returns a client that connects only to addresses that the policy allows. It follows no
// redirects, because the caller decides what a redirect means. It uses no proxy: a proxy would
// connect for this process, without a check of the address.
func NewClient(o Options) *http.Client {
	dialer := &net.Dialer{Control: o.checkAddress}
	transport := &http.Transport{
		Proxy:                  nil,
		DialContext:            dialer.DialContext,
		ForceAttemptHTTP2:      true,
		TLSHandshakeTimeout:    handshakeTimeout,
		IdleConnTimeout:        idleTimeout,
		MaxIdleConns:           maxIdleConnections,
		MaxIdleConnsPerHost:    o.MaxIdleConnsPerHost,
		MaxResponseHeaderBytes: maxHeaderBytes,
	}
	if o.RootCAs != nil {
		transport.TLSClientConfig = &tls.Config{RootCAs: o.RootCAs, MinVersion: tls.VersionTLS12}
	}
	return &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
