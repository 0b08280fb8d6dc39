package audit

import (
	"maps"
	"slices"

	"github.com/redis/go-redis/v9"
)

// alienOf says whether one of a group's own keys is of another type than it must be. Then nothing
// of the group can be judged, and what it counts for is in doubt.
func (ps *pass) alienOf(h groupHeader, own []redis.Cmder) bool {
	met := false
	for _, c := range own {
		if isAlien(c.Err()) {
			ps.alien[c.Args()[1].(string)] = h.id
			met = true
		}
	}
	if met {
		ps.markUncertain(Place, h.tenant, split(h.types)...)
	}
	return met
}

// aliens reports keys of another type than they must be.
func (ps *pass) aliens() {
	for _, key := range slices.Sorted(maps.Keys(ps.alien)) {
		ps.found.add(finding{Place, ps.alien[key], noOrdinal, "key " + key}, "the key %s is of another type than it must be",
			ps.shortKey(key))
	}
}
