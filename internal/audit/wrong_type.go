package audit

import (
	"maps"
	"slices"

	"github.com/redis/go-redis/v9"
)

// hasWrongType says whether one of a group's own keys is of another type than it must be. Then
// nothing of the group can be judged, and what it counts for is in doubt.
func (ps *pass) hasWrongType(h groupHeader, own []redis.Cmder) bool {
	found := false
	for _, c := range own {
		if isWrongType(c.Err()) {
			ps.wrongTypes[c.Args()[1].(string)] = h.id
			found = true
		}
	}
	if found {
		ps.markUncertain(LawLocation, h.tenant, splitTypes(h.types)...)
	}
	return found
}

// reportWrongTypes reports keys of another type than they must be.
func (ps *pass) reportWrongTypes() {
	for _, key := range slices.Sorted(maps.Keys(ps.wrongTypes)) {
		ps.found.add(finding{LawLocation, ps.wrongTypes[key], noOrdinal, "key " + key},
			"the key %s is of another type than it must be",
			ps.shortKey(key))
	}
}
