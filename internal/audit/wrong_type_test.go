package audit

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/audittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestKeyOfWrongTypeIsReported: a key of one of ten kinds has the wrong Redis type. The audit does
// not stop, and a violation names the key.
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
