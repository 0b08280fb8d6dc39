package acl

// NeedOf returns what roles_gen.go has of a user.
func NeedOf(name string) (scripts, commands, keys, channels []string) {
	n := needs[name]
	return n.scripts, n.commands, n.keys, n.channels
}
