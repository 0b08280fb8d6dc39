package worker

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func divide(a, b int) int { return a / b }

func TestPanickedAt(t *testing.T) {
	t.Parallel()
	at := func(f func()) (place string) {
		defer func() {
			if recover() != nil {
				place = panickedAt()
			}
		}()
		f()
		return
	}
	require.Contains(t, at(func() { panic("x") }), "TestPanickedAt.func")
	require.Regexp(t, `worker\.divide \(.*panic_internal_test\.go:9\)`, at(func() { require.Zero(t, divide(1, 0)) }))
}
