package credential_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor/credential"
)

func TestAccountsAreLentInTurn(t *testing.T) {
	source := credential.InTurn("a", "b", "c")
	var got []string
	for range 7 {
		loan, err := source.Borrow(t.Context())
		require.NoError(t, err)
		got = append(got, loan.ID())
		loan.Return(credential.Outcome{Kind: credential.Failure})
	}
	require.Equal(t, []string{"a", "b", "c", "a", "b", "c", "a"}, got)
}

func TestNothingIsLentAfterTheEndOfTheContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := credential.InTurn("a").Borrow(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

func TestTextOfADenial(t *testing.T) {
	err := &credential.DeniedError{Guard: "smtp", After: 3 * time.Second, Reason: "rate limit"}
	require.Regexp(t, `^no account of guard smtp is free until \d\d:\d\d:\d\d: rate limit$`, err.Error())
	require.EqualError(t, &credential.DeniedError{Reason: "others wait for one"}, "no account is free: others wait for one")
}
