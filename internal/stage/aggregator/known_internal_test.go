package aggregator

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// What is remembered is bounded in number and in bytes, and never lacks who came last.
func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	m := memory{groups: map[string]*known{}}
	for i := range 3 * maxKnown {
		k := &known{size: 1 + i%3*maxKnownBytes/100}
		m.keep(fmt.Sprint(i/2), k)
		require.Same(t, k, m.groups[fmt.Sprint(i/2)])
		require.LessOrEqual(t, len(m.groups), maxKnown)
		require.LessOrEqual(t, m.bytes, maxKnownBytes)
	}
	for g := range m.groups {
		m.forget(g)
	}
	require.Zero(t, m.bytes)
}
