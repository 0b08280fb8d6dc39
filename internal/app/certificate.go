package app

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// certificateInterval is the shortest time between two looks at the files of a certificate.
const certificateInterval = 5 * time.Second

// certificate is a TLS certificate that is loaded again when its files change. Open connections
// keep the certificate with which they began. Without new connections the files are not read, so no
// goroutine is needed.
type certificate struct {
	certFile, keyFile string
	log               *slog.Logger
	now               func() time.Time

	mu      sync.Mutex
	loaded  *tls.Certificate
	state   fileState // of the files when loaded was read
	checked time.Time
}

// fileState changes when one of the two files is written or replaced.
type fileState struct{ cert, key fileVersion }

type fileVersion struct {
	modified time.Time
	size     int64
}

// loadCertificate reads the files. Both may be in one file.
func loadCertificate(certFile, keyFile string, log *slog.Logger) (*certificate, error) {
	c := &certificate{certFile: certFile, keyFile: keyFile, log: log, now: time.Now}
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

// get returns the certificate for a handshake. Files that can't be used don't replace the present
// certificate: get logs the reason and tries again after certificateInterval, because a key may be
// written after its certificate.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
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
			c.log.Info("certificate changed", "file", c.certFile, "not_after", c.loaded.Leaf.NotAfter)
		}
	}
	if err != nil {
		c.log.Error("certificate could not be read again, the old one stays in use", "error", err)
	}
	return c.loaded, nil
}

func (c *certificate) load(state fileState) error {
	loaded, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("read the certificate %s and its key %s: %w", c.certFile, c.keyFile, err)
	}
	c.loaded, c.state = &loaded, state
	return nil
}

func (c *certificate) look() (fileState, error) {
	var s fileState
	for _, f := range []struct {
		name string
		v    *fileVersion
	}{{c.certFile, &s.cert}, {c.keyFile, &s.key}} {
		info, err := os.Stat(f.name)
		if err != nil {
			return fileState{}, fmt.Errorf("read the certificate: %w", err)
		}
		*f.v = fileVersion{info.ModTime(), info.Size()}
	}
	return s, nil
}
