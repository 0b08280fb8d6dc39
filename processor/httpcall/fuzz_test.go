package httpcall

import (
	"encoding/json"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
)

// A payload makes exactly one request on the wire, or none. An error contains nothing of a header's
// value.
func FuzzNewRequest(f *testing.F) {
	for _, seed := range []string{
		`{"url":"http://h/x"}`, `{"url":"https://u:p@h:1/?a=b#c","method":"get","headers":{"X-A":"b"},"body":{"a":1}}`, `{"url":"http://h","body":"text"}`,
		`{"url":"http://h","headers":{"Host":"other"}}`, `{"url":"http://h","headers":{"A\r\nB":"c"}}`, `{"url":"http://h","headers":{"A":"b\r\nC: d"}}`,
		`{"url":"file:///etc/passwd"}`, `{"url":"http:///x"}`, `{"url":"http://h","method":"CONNECT"}`, `{"url":7}`, `[]`, ``, `{"url":"http://h\u0000"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		r, err := newRequest(processor.Job{Group: "g", Payload: json.RawMessage(payload)})
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
