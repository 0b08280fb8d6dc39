package groups

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
)

func TestSplitCalls(t *testing.T) {
	t.Parallel()
	of := func(group string, jobs int) *pendingAppend {
		return &pendingAppend{group: group, jobs: make([]messages.Job, jobs)}
	}
	big := func(group string) *pendingAppend {
		a := of(group, 1)
		a.jobs[0].Payload = make([]byte, ledger.MaxAppendBytes*2/3)
		return a
	}
	a1, b1, a2, b2, a3, b3, b4 := of("a", 1), of("b", ledger.MaxAppend), of("a", ledger.MaxAppend-1), of("b", 1), of("a", 1), big("b"), big("b")
	got := splitCalls([]*pendingAppend{a1, b1, a2, b2, a3, b3, b4})
	require.Equal(t, [][]*pendingAppend{{a1, a2}, {b1}, {b2, b3}, {a3}, {b4}}, got)
}
