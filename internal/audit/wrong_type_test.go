package audit

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/audittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestKeyOfWrongTypeIsReported: a key of the wrong Redis type is reported by its name, and the
// other groups are audited all the same.
func TestKeyOfWrongTypeIsReported(t *testing.T) {
	for _, c := range audittest.WrongTypes {
		t.Run(c.Name, func(t *testing.T) {
			redistest.Both(t, func(t *testing.T, url, prefix string) {
				t.Parallel()
				w := audittest.New(t, url, prefix, 1)
				c.Do(w)
				r := run(w, Options{})
				require.True(t, c.IsReported(w, r.Violations), "%v", r.Violations)
			})
		})
	}
}
