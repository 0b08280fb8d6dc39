package keyspace

import "strings"

// GuardBase is the prefix of all keys of a guard of package guard. Its braces are the hash tag. The
// kind is pool, breaker, lock, semaphore or key.
func GuardBase(prefix, kind, name string) string {
	return prefix + "guard:{" + kind + "/" + name + "}:"
}

// GuardPattern returns a pattern for SCAN that matches the hash of each guard of a kind, or of all
// kinds if kind is "".
func GuardPattern(prefix, kind string) string {
	if kind != "" {
		kind += "/"
	}
	return escapePattern(prefix) + "guard:{" + kind + "*}:guard"
}

// escapePattern returns a SCAN pattern that matches the text and nothing else.
func escapePattern(text string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(text)
}

// Limiter is a hash: the state of one key of a limiter of package guard.
func Limiter(prefix, name, key string) string { return prefix + "limit:{" + name + "/" + key + "}" }

// GuardWake is a channel on which a client of guards hears the ids of its calls that got a grant.
func GuardWake(prefix, client string) string { return prefix + "guard:wake:" + client }
