package redisx

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestCache(t *testing.T) {
	t.Parallel()
	now := time.Now()
	c := NewCache[int, string](time.Minute, 3)
	c.Now = func() time.Time { return now }
	get := func(key int) string { v, _, _ := c.Get(key); return v }
	for i, v := range []string{"a", "b", "c"} {
		c.Put(i, v)
	}
	c.Put(0, "A") // the oldest is 1 now
	c.Put(3, "d")
	require.Equal(t, map[int]string{0: "A", 2: "c", 3: "d"}, c.All())
	c.Delete(2)
	c.Delete(2)
	require.Equal(t, []string{"A", "", "", "d"}, []string{get(0), get(1), get(2), get(3)})

	now = now.Add(time.Minute / 2)
	c.Put(4, "e")
	_, at, ok := c.Get(4)
	require.True(t, ok)
	require.Equal(t, now, at)
	now = now.Add(time.Minute / 2)
	require.Equal(t, []string{"", "", "e"}, []string{get(0), get(3), get(4)}, "values end after TTL")
	c.Put(5, "f")
	require.Equal(t, map[int]string{4: "e", 5: "f"}, c.All(), "what is too old is removed")
}

func TestGetOr(t *testing.T) {
	t.Parallel()
	c, reads := NewCache[string, int](time.Hour, 10), 0
	read := func() (int, error) { reads++; return reads, nil }
	for range 3 {
		n, err := c.GetOr("a", read)
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
	lost := errors.New("lost")
	_, err := c.GetOr("b", func() (int, error) { return 0, lost })
	require.ErrorIs(t, err, lost)
	n, err := c.GetOr("b", read)
	require.NoError(t, err)
	require.Equal(t, 2, n, "an error is not kept")
	c.TTL = 0
	n, _ = c.GetOr("a", read)
	require.Equal(t, 3, n, "an old value is read again")
}
