package httpcall

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
)

// Trust lets the processor trust the certificate of a test's server.
func (g *Guarded) Trust(certificate *x509.Certificate) {
	roots := x509.NewCertPool()
	roots.AddCert(certificate)
	g.calls.client.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
}

// FuzzNewRequest: a payload is refused, or makes a request by HTTP or HTTPS to a host. The method
// is allowed, and no header is about the connection or has a line break or a NUL.
func FuzzNewRequest(f *testing.F) {
	for _, seed := range []string{
		`{"url":"http://h/x"}`, `{"url":"https://u:p@h:1/?a=b#c","method":"get","headers":{"X-A":"b"},"body":{"a":1}}`, `{"url":"http://h","body":"text"}`,
		`{"url":"http://h","headers":{"Host":"other"}}`, `{"url":"http://h","headers":{"A\r\nB":"c"}}`, `{"url":"http://h","headers":{"A":"b\r\nC: d"}}`,
		`{"url":"file:///etc/passwd"}`, `{"url":"http:///x"}`, `{"url":"http://h","method":"CONNECT"}`, `{"url":7}`, `[]`, ``, `{"url":"http://h\u0000"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		r, err := newRequest(processor.Job{Group: "g", Payload: json.RawMessage(payload)}, nil)
		if err != nil {
			return
		}
		require.Contains(t, []string{"http", "https"}, r.URL.Scheme)
		require.NotEmpty(t, r.URL.Hostname())
		require.True(t, slices.Contains(methods, r.Method))
		for name, values := range r.Header {
			require.NotContains(t, connectionHeaders, name)
			require.False(t, strings.ContainsAny(name+strings.Join(values, ""), "\r\n\x00"))
		}
		_ = r.Write(io.Discard)
	})
}

// FuzzHide: a secret of printable characters without * is hidden between any two texts, as it is
// and with any of its characters escaped as in JSON or in a URL. The length stays the same.
func FuzzHide(f *testing.F) {
	f.Add("a", `Bearer s3cret/t0ken+="`, "b", uint64(0))
	f.Add(`{"a":"\u00`, `s3cret\%`, `41"}`, uint64(0x5555))
	f.Fuzz(func(t *testing.T, before, secret, after string, escapes uint64) {
		if secret == "" || strings.Contains(secret, "*") || strings.ContainsFunc(secret, notPrintable) {
			return
		}
		m := &member{value: secret, hidden: hiddenTexts(secret)}
		var json, url strings.Builder
		for i, c := range []byte(secret) {
			switch escaped := escapes>>(i%64)&1 == 1; {
			case escaped:
				fmt.Fprintf(&json, `\u00%02X`, c)
				fmt.Fprintf(&url, `%%%02x`, c)
			case c == '\\':
				json.WriteString(`\\`)
				url.WriteString(`%5C`)
			case c == '%':
				json.WriteString(`\u0025`)
				url.WriteString(`%25`)
			default:
				json.WriteByte(c)
				url.WriteByte(c)
			}
		}
		for _, form := range []string{secret, json.String(), url.String()} {
			require.LessOrEqual(t, len(form), m.longestForm())
			text := before + form + after
			hidden := string(m.hide([]byte(text)))
			require.Len(t, hidden, len(text))
			require.NotContains(t, hidden, form)
		}
	})
}

// FuzzTarget: if the credentials file accepts the text of a URL's target as a host, it means the
// same target there.
func FuzzTarget(f *testing.F) {
	for _, seed := range []string{"http://h", "https://H.:0443/a", "http://[::ffff:1.2.3.4]:80", "http://ａ。b", "https://h:99999", "http://[fe80::1%25lo]"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		u, err := url.Parse(s)
		if err != nil || u.Hostname() == "" {
			return
		}
		name := targetOf(u).String()
		again, ok := parseTarget(name)
		if ok {
			require.Equal(t, name, again.String())
		}
	})
}
