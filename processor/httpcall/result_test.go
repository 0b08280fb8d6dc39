package httpcall_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/httpcall"
)

func TestResult(t *testing.T) {
	tests := map[string]struct {
		body  string
		limit int
		want  string
	}{
		"nothing":           {"", 100, `{"status":200,"body":null}`},
		"JSON":              {" {\"a\": [1, \"ü\"]}\n", 100, `{"status":200,"body":{"a":[1,"ü"]}}`},
		"text":              {"it's \"fine\"\n", 100, `{"status":200,"body":"it's \"fine\"\n"}`},
		"not UTF-8":         {"a\xff", 100, `{"status":200,"body":"a` + "\uFFFD" + `"}`},
		"JSON not UTF-8":    {"\"a\xff\"", 100, `{"status":200,"body":"\"a` + "\uFFFD" + `\""}`},
		"exactly the limit": {"12345", 5, `{"status":200,"body":12345}`},
		"cut":               {"abcdef", 5, `{"status":200,"body":"abcde","truncated":true}`},
		"JSON that is cut":  {"123456", 5, `{"status":200,"body":"12345","truncated":true}`},
		"nothing is kept":   {"abc", 0, `{"status":200,"body":"","truncated":true}`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			server := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, tt.body) })
			p := start(t, func(c *httpcall.Config) { c.MaxResponseBytes = tt.limit })
			result, err := p.Process(t.Context(), job(`{"url":"`+server.URL+`"}`))
			require.NoError(t, err)
			require.Equal(t, tt.want, string(result.(json.RawMessage)))
		})
	}
}

func TestResultIsBoundedHoweverItIsEncoded(t *testing.T) {
	for name, body := range map[string]string{
		"plain":                strings.Repeat("a", 70000),
		"escapes":              strings.Repeat("\x01", 65536),
		"escapes at the end":   strings.Repeat("a", 60000) + strings.Repeat("\x01", 5000),
		"escapes at the start": strings.Repeat("<", 9000) + strings.Repeat("a", 50000),
		"wide characters":      strings.Repeat("世", 21845),
		"not UTF-8":            strings.Repeat("a\xff", 32768),
		"JSON of full length":  `"` + strings.Repeat("a", 65534) + `"`,
		"JSON with angles":     `"` + strings.Repeat("<", 30000) + `"`,
	} {
		t.Run(name, func(t *testing.T) {
			server := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) })
			result, err := start(t, nil).Process(t.Context(), job(`{"url":"`+server.URL+`"}`))
			require.NoError(t, err)
			encoded, err := json.Marshal(result)
			require.NoError(t, err)
			require.LessOrEqual(t, len(encoded), processor.MaxResultBytes)
			require.Greater(t, len(encoded), processor.MaxResultBytes-8, "no more is cut than must be")
			require.Contains(t, string(encoded), `"truncated":true`)
		})
	}
}
