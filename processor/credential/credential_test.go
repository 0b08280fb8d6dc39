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
	err := &credential.DeniedError{After: 3 * time.Second, Reason: "circuit open"}
	require.EqualError(t, err, "no account is free for 3s: circuit open")
}
