package email_test

import (
	"cmp"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/email"
	"github.com/bulkaction/bulkaction/processor/email/smtpsink"
)

// certificate returns a self-signed certificate for 127.0.0.1 and the name of its PEM file.
func certificate(t *testing.T) (tls.Certificate, string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, file
}

func TestTLSModes(t *testing.T) {
	cert, ca := certificate(t)
	_, otherCA := certificate(t)
	tests := map[string]struct {
		mode, ca           string
		offered, implicit  bool
		encrypted, refused bool
	}{
		"none":                                {mode: email.TLSNone, ca: ca, offered: true},
		"opportunistic, offered":              {mode: email.TLSOpportunistic, ca: ca, offered: true, encrypted: true},
		"opportunistic, not offered":          {mode: email.TLSOpportunistic, ca: ca},
		"opportunistic, unknown authority":    {mode: email.TLSOpportunistic, ca: otherCA, offered: true, refused: true},
		"mandatory, offered":                  {mode: email.TLSMandatory, ca: ca, offered: true, encrypted: true},
		"mandatory, not offered":              {mode: email.TLSMandatory, ca: ca, refused: true},
		"mandatory, authorities of system":    {mode: email.TLSMandatory, offered: true, refused: true},
		"implicit":                            {mode: email.TLSImplicit, ca: ca, offered: true, implicit: true, encrypted: true},
		"implicit, unknown authority":         {mode: email.TLSImplicit, ca: otherCA, offered: true, implicit: true, refused: true},
		"implicit, server speaks plain first": {mode: email.TLSImplicit, ca: ca, refused: true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var encrypted atomic.Int64
			opts := smtpsink.Options{ImplicitTLS: tt.implicit}
			if tt.offered {
				opts.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, VerifyConnection: func(tls.ConnectionState) error {
					encrypted.Add(1)
					return nil
				}}
			}
			sink := startSink(t, opts)
			c := config(t, sink.Addr())
			c.TLS, c.TLSCAFile = tt.mode, tt.ca
			_, err := start(t, c).Process(t.Context(), job(1, toBob))
			if tt.refused {
				v := processor.Classify(err)
				require.Equal(t, processor.RetryLater, v.Kind)
				require.Equal(t, email.CodeUnreachable, v.Code)
				require.Zero(t, sink.Received())
				return
			}
			require.NoError(t, err)
			require.EqualValues(t, 1, sink.Received())
			require.Equal(t, tt.encrypted, encrypted.Load() == 1)
		})
	}
}

func TestAuthentication(t *testing.T) {
	cert, ca := certificate(t)
	all := []string(nil)
	tests := map[string]struct {
		auth, tls, password string
		offered             []string
		code                string // error code of the retry, if authentication fails
	}{
		"plain":                   {auth: email.AuthPlain, tls: email.TLSMandatory, offered: all},
		"plain on this host":      {auth: email.AuthPlain, tls: email.TLSNone, offered: all},
		"login":                   {auth: email.AuthLogin, tls: email.TLSImplicit, offered: all},
		"cram-md5":                {auth: email.AuthCRAMMD5, tls: email.TLSNone, offered: all},
		"auto":                    {auth: email.AuthAuto, tls: email.TLSMandatory, offered: all},
		"auto, plain only":        {auth: email.AuthAuto, tls: email.TLSImplicit, offered: []string{"PLAIN"}},
		"auto, login only":        {auth: email.AuthAuto, tls: email.TLSOpportunistic, offered: []string{"LOGIN"}},
		"wrong password":          {auth: email.AuthPlain, tls: email.TLSMandatory, password: "wrong", code: "SMTP_535"},
		"wrong password, digest":  {auth: email.AuthCRAMMD5, tls: email.TLSNone, password: "wrong", code: "SMTP_535"},
		"not offered":             {auth: email.AuthLogin, tls: email.TLSMandatory, offered: []string{"PLAIN"}, code: email.CodeUnreachable},
		"none where it is needed": {auth: email.AuthNone, tls: email.TLSNone, code: "SMTP_502"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			sink := startSink(t, smtpsink.Options{
				TLS: &tls.Config{Certificates: []tls.Certificate{cert}}, ImplicitTLS: tt.tls == email.TLSImplicit,
				Username: "shop", Password: "s3cret", Mechanisms: tt.offered,
			})
			c := config(t, sink.Addr())
			c.TLS, c.TLSCAFile, c.Auth, c.Username, c.Password = tt.tls, ca, tt.auth, "shop", cmp.Or(tt.password, "s3cret")
			_, err := start(t, c).Process(t.Context(), job(1, toBob))
			if tt.code == "" {
				require.NoError(t, err)
				require.EqualValues(t, 1, sink.Received())
				return
			}
			v := processor.Classify(err)
			require.Equal(t, tt.code, v.Code)
			require.NotContains(t, v.Message, "wrong")
			require.Zero(t, sink.Received())
			if tt.auth != email.AuthNone { // the server refused before MAIL, so the job did not cause it
				require.Equal(t, processor.RetryLater, v.Kind)
			}
		})
	}
}

// TestPasswordIsNotSentInTheClear: on an unencrypted connection to 127.0.0.2, which does not count
// as localhost, the job gets an error, with the settings auto, plain and login of Auth.
func TestPasswordIsNotSentInTheClear(t *testing.T) {
	sink, err := smtpsink.Start("127.0.0.2:0", smtpsink.Options{
		Username: "shop", Password: "s3cret", Mechanisms: []string{"PLAIN", "LOGIN"},
	})
	require.NoError(t, err)
	defer func() { require.NoError(t, sink.Close()) }()
	for _, auth := range []string{email.AuthAuto, email.AuthPlain, email.AuthLogin} {
		c := config(t, sink.Addr())
		c.TLS, c.Auth, c.Username, c.Password = email.TLSOpportunistic, auth, "shop", "s3cret"
		_, err = start(t, c).Process(t.Context(), job(1, toBob))
		require.ErrorContains(t, err, "unencrypted connection", auth)
	}
	require.Zero(t, sink.Received())
}
