package app

import (
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// placeholder matches any {…} in the URL of a trace, including names that isTraceURL refuses.
var placeholder = regexp.MustCompile(`\{[^{}]*\}`)

// isTraceURL reports whether s can be the URL of a trace: its placeholders are known, and whatever
// replaces them, the host stays the same.
func isTraceURL(s string) bool {
	known := []string{"{trace_id}", "{group}", "{ordinal}"}
	found := placeholder.FindAllString(s, -1)
	isUnknown := func(p string) bool { return !slices.Contains(known, p) }
	if len(found) == 0 || slices.ContainsFunc(found, isUnknown) || len(s) > 2048 {
		return false
	}
	parse := func(replacement string) (*url.URL, bool) {
		text := placeholder.ReplaceAllLiteralString(s, replacement)
		u, err := url.Parse(text)
		return u, err == nil && !strings.ContainsAny(text, "{} \"<>\\`")
	}
	a, ok := parse("a")
	b, alsoOK := parse("b")
	return ok && alsoOK && (a.Scheme == "http" || a.Scheme == "https") && a.Scheme == b.Scheme && a.Host == b.Host &&
		a.Hostname() != "" && a.User == nil && (a.Port() == "" || isAddr("host:"+a.Port())) &&
		!strings.HasSuffix(a.Host, ":")
}
