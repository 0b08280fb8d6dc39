package app

import (
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// placeholder matches every {…} in a trace URL, including unknown names, which isTraceURL refuses.
var placeholder = regexp.MustCompile(`\{[^{}]*\}`)

// isTraceURL reports whether s can be the trace URL of the console: an http or https URL of at most
// 2,048 bytes that has at least one known placeholder, no unknown ones, and none in its host.
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
