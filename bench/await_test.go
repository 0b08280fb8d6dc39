package bench

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAwaitEndsWhenNothingIsLeft(t *testing.T) {
	f := &fleet{}
	left := 3
	require.NoError(t, f.await(t.Context(), "things", time.Millisecond, func() (int, error) {
		left--
		return left, nil
	}))
	require.Zero(t, left)

	broken := errors.New("broken")
	require.ErrorIs(t, f.await(t.Context(), "things", time.Millisecond, func() (int, error) { return 1, broken }), broken)
}
