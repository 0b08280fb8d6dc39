package aggregator

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGroupCacheIsBounded: the cache keeps its bounds in number and in bytes, and always holds the
// group that was put last.
func TestGroupCacheIsBounded(t *testing.T) {
	t.Parallel()
	m := groupCache{groups: map[string]*cachedGroup{}}
	for i := range 3 * maxCachedGroups {
		k := &cachedGroup{size: 1 + i%3*maxCachedBytes/100}
		m.put(fmt.Sprint(i/2), k)
		require.Same(t, k, m.groups[fmt.Sprint(i/2)])
		require.LessOrEqual(t, len(m.groups), maxCachedGroups)
		require.LessOrEqual(t, m.bytes, maxCachedBytes)
	}
	for g := range m.groups {
		m.remove(g)
	}
	require.Zero(t, m.bytes)
}
