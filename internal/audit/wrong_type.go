package audit

import (
	"maps"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit/read"
)

// hasWrongType reports whether one of a group's own keys, whose replies are given, has the wrong
// Redis type, and notes these keys for the report. Such a group is not judged, and the counters
// that it adds to are not judged either.
func (ps *pass) hasWrongType(h groupHeader, own []redis.Cmder) bool {
	wrong := false
	for _, c := range own {
		if read.IsWrongType(c.Err()) {
			ps.WrongTypes[c.Args()[1].(string)] = h.id
			wrong = true
		}
	}
	if wrong {
		ps.markUncertain(LawLocation, h.tenant, read.SplitTypes(h.types)...)
	}
	return wrong
}

// reportWrongTypes reports the keys that this pass found to have the wrong Redis type.
func (ps *pass) reportWrongTypes() {
	for _, key := range slices.Sorted(maps.Keys(ps.WrongTypes)) {
		ps.found.add(finding{LawLocation, ps.WrongTypes[key], noOrdinal, "key " + key},
			"the key %s is of another type than it must be",
			ps.shortKey(key))
	}
}
