package audit

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/audittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// A key of the wrong Redis type is reported by its name, and the other groups are audited all the
// same.
func TestKeyOfWrongTypeIsReported(t *testing.T) {
	for _, c := range audittest.WrongTypes {
		t.Run(c.Name, func(t *testing.T) {
			redistest.Both(t, func(t *testing.T, url, prefix string) {
				t.Parallel()
				w := audittest.New(t, url, prefix, 1)
				c.Do(w)
				check := NewIncrementalCheck(w.Conn, w.Space.Partition(0))
				found, r := watch(w, check, false)
				require.Contains(t, found.Groups, "good")
				require.Contains(t, audittest.Summary(r.Violations), audittest.Of(LawLocation, "good", 0))
				require.Len(t, r.Missing[0].Jobs, 1)
				if c.Group != "" && c.Name != "codes" && c.Name != "results" && c.Name != "aggregate" { // an incremental check doesn't read these
					require.True(t, c.IsReported(w, r.Violations), "%v", r.Violations)
				}
				r = run(w, Options{})
				require.True(t, c.IsReported(w, r.Violations), "%v", r.Violations)
			})
		})
	}
}
