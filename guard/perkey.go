package guard

import (
	"fmt"
	"strings"
)

// PerKey makes a guard for each key, for example for each host. Each is a Pool with one member.
type PerKey struct {
	c    *Client
	name string
	spec Spec
	err  error
}

// PerKey returns guards with the same spec, one for each key. The spec has no Members. Redis
// forgets the guard of a key 30 to 60 minutes after its last use, or later if a lease, window or
// OpenFor is long; until then it needs about 1 KB. Call it once: keys in use keep the spec with
// which they were first used.
func (c *Client) PerKey(name string, s Spec) *PerKey {
	p := &PerKey{c: c, name: name, spec: s}
	if !validID(name) {
		p.err = fmt.Errorf("guard %.140q: %w", name, invalid("name: must be 1 to 128 of A-Z a-z 0-9 . _ -"))
	}
	return p
}

// For returns the guard of a key. Upper and lower case are the same. A key that is not 1 to 128 of
// the characters A-Z a-z 0-9 . _ - is stored as its SHA-256.
func (p *PerKey) For(key string) *Pool {
	return &Pool{p.c.use(kindKey, p.name+"/"+storedKey(strings.ToLower(key)), func(g *shared) {
		g.broken = joinMistakes(p.err, g.setSpec(p.spec))
	})}
}
