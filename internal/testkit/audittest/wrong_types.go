package audittest

import (
	"slices"
	"strings"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// WrongType is a key that gets the wrong Redis type.
type WrongType struct {
	Name  string
	Group string // the group that the key belongs to; "" if it is not the key of one group
	key   func(p keyspace.Partition) string
}

// WrongTypes lists one key of each of ten kinds.
var WrongTypes = []WrongType{
	{"group", "bad", func(p keyspace.Partition) string { return p.Group("bad") }},
	{"states", "bad", func(p keyspace.Partition) string { return p.States("bad") }},
	{"failures", "bad", func(p keyspace.Partition) string { return p.Failures("bad") }},
	{"codes", "bad", func(p keyspace.Partition) string { return p.Codes("bad") }},
	{"results", "bad", func(p keyspace.Partition) string { return p.Results("bad") }},
	{"aggregate", "bad", func(p keyspace.Partition) string { return p.Aggregate("bad") }},
	{"queue", "bad", func(p keyspace.Partition) string { return p.Queue("bad", "U") }},
	{"non-ready", "", func(p keyspace.Partition) string { return p.NonReadyOf("evil") }},
	{"load", "", func(p keyspace.Partition) string { return p.Load("U") }},
	{"stream", "", func(p keyspace.Partition) string { return p.Ready("U") }},
}

// Do fills a world of one partition with the groups "good" and "bad". The key gets a wrong Redis
// type, and job 0 of "good" is removed from its location.
func (wt WrongType) Do(w *World) {
	p := w.Space.Partition(0)
	w.Create("good", "acme", "T")
	w.Append("good", Jobs(3))
	w.Create("bad", "evil", "U")
	w.Append("bad", Jobs(3))
	w.Append("bad", Jobs(1, Later))
	w.Admit(p, "U", 1, NoLimit)
	key := wt.key(p)
	w.OK(w.C.Del(w.Context(), key).Err())
	if wt.Name == "states" {
		w.OK(w.C.RPush(w.Context(), key, "x").Err())
	} else {
		w.OK(w.C.Set(w.Context(), key, "x", 0).Err())
	}
	w.OK(w.C.LPop(w.Context(), p.Queue("good", "T")).Err())
}

// IsReported reports whether one of the violations names the key of the wrong Redis type and its
// group.
func (wt WrongType) IsReported(w *World, violations []api.Violation) bool {
	key := wt.key(w.Space.Partition(0))
	return slices.ContainsFunc(violations, func(v api.Violation) bool {
		return v.Group == wt.Group && strings.HasPrefix(v.Detail, "the key ") &&
			strings.HasSuffix(key, strings.Fields(v.Detail)[2])
	})
}
