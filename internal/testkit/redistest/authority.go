package redistest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Authority signs certificates, which it writes as PEM files. A method that fails ends the test.
type Authority struct {
	CAFile string // the certificate of the authority

	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// Pair has the paths of a certificate file and its key file.
type Pair struct{ CertFile, KeyFile string }

// CertOption is a function that changes a certificate before it is signed.
type CertOption func(*x509.Certificate)

// Expired is an option: the certificate expired an hour ago.
func Expired(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Hour) }

// ForName is an option: the certificate is valid only for this DNS name, and not for IP addresses.
func ForName(name string) CertOption {
	return func(c *x509.Certificate) { c.DNSNames, c.IPAddresses = []string{name}, nil }
}

// NewAuthority returns a new authority whose files end with the test.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{t: t, CAFile: filepath.Join(t.TempDir(), "ca.pem")}
	template := a.template("authority of a test")
	template.IsCA, template.BasicConstraintsValid, template.KeyUsage = true, true, x509.KeyUsageCertSign
	a.cert, a.key = template, a.newKey()
	a.write(a.CAFile, "CERTIFICATE", a.sign(template, a.key))
	return a
}

// Issue writes a new certificate for clients and servers at 127.0.0.1 and localhost, and its key.
// It returns their paths.
func (a *Authority) Issue(opts ...CertOption) Pair {
	a.t.Helper()
	dir := a.t.TempDir()
	p := Pair{filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")}
	a.Replace(p, opts...)
	return p
}

// Replace writes a new certificate and its key to the files of a pair, and returns the certificate.
// It replaces each file atomically, as a careful administrator does.
func (a *Authority) Replace(p Pair, opts ...CertOption) *x509.Certificate {
	a.t.Helper()
	template := a.template("bulkaction")
	template.DNSNames, template.IPAddresses = []string{"localhost"}, []net.IP{net.IPv4(127, 0, 0, 1)}
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	for _, opt := range opts {
		opt(template)
	}
	key := a.newKey()
	private, err := x509.MarshalPKCS8PrivateKey(key)
	a.check(err)
	der := a.sign(template, key)
	a.write(p.KeyFile, "PRIVATE KEY", private)
	a.write(p.CertFile, "CERTIFICATE", der)
	cert, err := x509.ParseCertificate(der)
	a.check(err)
	return cert
}

// Pool returns a pool with the authority alone.
func (a *Authority) Pool() *x509.CertPool {
	a.t.Helper()
	pem, err := os.ReadFile(a.CAFile)
	a.check(err)
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	return pool
}

func (a *Authority) template(name string) *x509.Certificate {
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	a.check(err)
	return &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: time.Now().Add(48 * time.Hour),
	}
}

func (a *Authority) newKey() *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	a.check(err)
	return key
}

func (a *Authority) sign(template *x509.Certificate, key *ecdsa.PrivateKey) []byte {
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	a.check(err)
	return der
}

func (a *Authority) write(name, kind string, der []byte) {
	a.t.Helper()
	a.check(os.WriteFile(name+".new", pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
	a.check(os.Rename(name+".new", name))
}

func (a *Authority) check(err error) {
	a.t.Helper()
	if err != nil {
		a.t.Fatal(err)
	}
}
