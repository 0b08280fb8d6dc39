package stream

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestID(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "7", "x", "1-x", "-1-0", "1--1", "1-+1", "99999999999999999999-0"} {
		_, err := ParseID(text)
		require.ErrorContains(t, err, `"`+text+`" is not the id`)
	}
	id := func(text string) ID {
		id, err := ParseID(text)
		require.NoError(t, err)
		require.Equal(t, text, id.String())
		return id
	}
	for _, c := range [][2]string{{"0-0", "0-1"}, {"5-9", "10-1"}, {"10-2", "10-10"}, {"7-1", "18446744073709551615-0"}} {
		require.True(t, id(c[1]).After(id(c[0])), c)
		require.False(t, id(c[0]).After(id(c[1])), c)
		require.False(t, id(c[1]).After(id(c[1])), c)
	}
}
