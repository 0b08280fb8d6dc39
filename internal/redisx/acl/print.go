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

// Placeholder stands for the hash of a user's password. Redis refuses it, so that a user with a
// known password can't come into being by mistake.
func Placeholder(user string) string { return "SHA256-OF-THE-PASSWORD-OF-" + user }

// Rules returns the rules of a user, as ACL SETUSER and a file of users have them. hash is that of
// the password, or a placeholder. Names of keys with a brace stand for themselves: in patterns only
// * ? [ ] and \ have a meaning, and no prefix contains these.
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
