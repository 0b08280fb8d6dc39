package audit

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// A key of the wrong Redis type is reported by its name, and the other groups are audited and
// repaired all the same.
func TestKeyOfWrongTypeIsReported(t *testing.T) {
	for name, c := range map[string]struct {
		key   func(p keyspace.Partition) string
		group string
	}{
		"group":     {func(p keyspace.Partition) string { return p.Group("bad") }, "bad"},
		"states":    {func(p keyspace.Partition) string { return p.States("bad") }, "bad"},
		"failures":  {func(p keyspace.Partition) string { return p.Failures("bad") }, "bad"},
		"codes":     {func(p keyspace.Partition) string { return p.Codes("bad") }, "bad"},
		"results":   {func(p keyspace.Partition) string { return p.Results("bad") }, "bad"},
		"aggregate": {func(p keyspace.Partition) string { return p.Aggregate("bad") }, "bad"},
		"queue":     {func(p keyspace.Partition) string { return p.Queue("bad", "U") }, "bad"},
		"non-ready": {func(p keyspace.Partition) string { return p.NonReadyOf("evil") }, ""},
		"load":      {func(p keyspace.Partition) string { return p.Load("U") }, ""},
		"stream":    {func(p keyspace.Partition) string { return p.Ready("U") }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			redistest.Both(t, func(t *testing.T, url, prefix string) {
				t.Parallel()
				w := newWorld(t, url, prefix, 1)
				p := w.space.Partition(0)
				w.create("good", "acme", "T")
				w.append("good", jobs(3))
				w.create("bad", "evil", "U")
				w.append("bad", jobs(3))
				w.append("bad", jobs(1, later))
				w.admit(p, "U", 1, noLimit)
				key := c.key(p)
				w.ok(w.c.Del(w.Context(), key).Err())
				if name == "states" {
					w.ok(w.c.RPush(w.Context(), key, "x").Err())
				} else {
					w.ok(w.c.Set(w.Context(), key, "x", 0).Err())
				}
				w.ok(w.c.LPop(w.Context(), p.Queue("good", "T")).Err())
				named := func(r Report) bool {
					for _, v := range r.Violations {
						if v.Group == c.group && strings.HasPrefix(v.Detail, "the key ") && strings.HasSuffix(key, strings.Fields(v.Detail)[2]) {
							return true
						}
					}
					return false
				}

				s := NewIncrementalCheck(w.conn, p)
				found, r := w.watch(s, false)
				require.Contains(t, found.Groups, "good")
				require.Contains(t, summary(r), of(LawLocation, "good", 0))
				require.Len(t, r.Missing[0].Jobs, 1)
				if c.group != "" && name != "codes" && name != "results" && name != "aggregate" { // an incremental check doesn't read these
					require.True(t, named(r), "%v", r.Violations)
				}
				r = w.audit(Options{})
				require.True(t, named(r), "%v", r.Violations)
				r, repairs := w.repair()
				require.True(t, named(r), "%v", r.Violations)
				require.NotContains(t, summary(r), of(LawLocation, "good", 0))
				require.NotEmpty(t, repairs)
				if c.group != "" {
					require.Equal(t, []string{whole(LawLocation, "bad")}, summary(r))
				}
			})
		})
	}
}
