package audit

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/audittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestKeyOfWrongTypeIsReported: for each kind of key, a key of the wrong Redis type does not stop
// the audit, and a violation names it.
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
