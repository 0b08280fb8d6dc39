package httpcall

import (
	"encoding/json"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

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

func FuzzRetryAfter(f *testing.F) {
	for _, seed := range []string{"", "0", "120", "-1", " 5", "18446744073709551615", "Fri, 31 Dec 9999 23:59:59 GMT", "Mon, 01 Jan 0001 00:00:00 GMT", "soon"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, header string) {
		after, given := retryAfter(header, time.Now())
		require.True(t, after >= 0 && after <= maxRetryAfter, "%s", after)
		require.False(t, !given && after != 0)
	})
}
