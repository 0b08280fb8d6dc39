package acl

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// Hash returns the form in which Redis keeps a password.
func Hash(password string) string {
	sum := sha256.Sum256([]byte(password))
	return hex.EncodeToString(sum[:])
}

// Placeholder returns a text that printed rules have in place of the hash of a user's password.
// Redis refuses it, so that nobody creates a user with a known password by mistake.
func Placeholder(user string) string { return "SHA256-OF-THE-PASSWORD-OF-" + user }

// Rules returns the rules of a user in the form of ACL SETUSER and of an ACL file. hash is the
// SHA-256 of the password, or a placeholder. The braces in key names need no escape: in patterns
// only * ? [ ] and \ have a meaning, and no key prefix contains these.
func (u User) Rules(hash string) string {
	rules := []string{"on", "#" + hash, "-@all"}
	for _, name := range u.Commands {
		rules = append(rules, "+"+name)
	}
	rules = append(rules, "resetkeys")
	for _, pattern := range u.Keys {
		rules = append(rules, "~"+pattern)
	}
	for _, pattern := range u.ReadOnly {
		rules = append(rules, "%R~"+pattern)
	}
	rules = append(rules, "resetchannels")
	for _, pattern := range u.Channels {
		rules = append(rules, "&"+pattern)
	}
	return strings.Join(rules, " ")
}
