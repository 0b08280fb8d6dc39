package app

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// certificateInterval is the least time between two checks of the certificate files for changes.
const certificateInterval = 5 * time.Second

// TLSFiles are the PEM files of a server that speaks TLS. The certificate and its key may be in one
// file.
type TLSFiles struct {
	CertFile, KeyFile string
	// ClientCAFile has the certificates of the authorities that sign client certificates; the
	// server then demands one of each client. "": clients need no certificate.
	ClientCAFile string
}

// certificate is the TLS configuration of a server. A handshake loads it again when its files have
// changed; open connections keep the certificate with which they began. No goroutine watches the
// files.
type certificate struct {
	files TLSFiles
	log   *slog.Logger
	now   func() time.Time

	mu      sync.Mutex
	loaded  *tls.Config
	leaf    *x509.Certificate
	state   fileState // of the files when loaded was read
	checked time.Time
}

// fileState is the sizes and times of change of the files. If it differs, one of them was written
// or replaced.
type fileState [3]fileVersion

type fileVersion struct {
	modified time.Time
	size     int64
}

// ServerTLS returns the TLS configuration of a server: TLS 1.2 and newer, HTTP/2 and HTTP/1.1. When
// the files change, new connections use the new ones within certificateInterval, unless these can't
// be used.
func ServerTLS(files TLSFiles, log *slog.Logger) (*tls.Config, error) {
	c, err := loadCertificate(files, log)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, GetConfigForClient: c.get}, nil
}

// loadCertificate reads the files.
func loadCertificate(files TLSFiles, log *slog.Logger) (*certificate, error) {
	c := &certificate{files: files, log: log, now: time.Now}
	state, err := c.look()
	if err != nil {
		return nil, err
	}
	if err := c.load(state); err != nil {
		return nil, err
	}
	c.checked = c.now()
	return c, nil
}

// get returns the configuration for a handshake. Files that can't be used don't replace the present
// ones: get logs the reason. The first handshake after certificateInterval tries again, because a
// key may be written after its certificate.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Config, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	if now.Sub(c.checked) < certificateInterval {
		return c.loaded, nil
	}
	c.checked = now
	state, err := c.look()
	if err == nil && state != c.state {
		if err = c.load(state); err == nil {
			c.log.Info("certificate changed", "file", c.files.CertFile, "not_after", c.leaf.NotAfter)
		}
	}
	if err != nil {
		c.log.Error("certificate could not be read again, the old one stays in use", "error", err)
	}
	return c.loaded, nil
}

func (c *certificate) load(state fileState) error {
	f := c.files
	pair, err := tls.LoadX509KeyPair(f.CertFile, f.KeyFile)
	if err != nil {
		return fmt.Errorf("read the certificate %s and its key %s: %w", f.CertFile, f.KeyFile, err)
	}
	config := &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2", "http/1.1"},
	}
	if f.ClientCAFile != "" {
		pem, err := os.ReadFile(f.ClientCAFile)
		if err != nil {
			return fmt.Errorf("read the authorities of clients: %w", err)
		}
		config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
		if !config.ClientCAs.AppendCertsFromPEM(pem) {
			return fmt.Errorf("read the authorities of clients: %s has no certificate in PEM", f.ClientCAFile)
		}
	}
	c.loaded, c.leaf, c.state = config, pair.Leaf, state
	return nil
}

func (c *certificate) look() (fileState, error) {
	var s fileState
	for i, name := range []string{c.files.CertFile, c.files.KeyFile, c.files.ClientCAFile} {
		if name == "" {
			continue
		}
		info, err := os.Stat(name)
		if err != nil {
			return fileState{}, fmt.Errorf("read the certificate: %w", err)
		}
		s[i] = fileVersion{info.ModTime(), info.Size()}
	}
	return s, nil
}
