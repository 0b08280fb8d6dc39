package ledger_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/reducer"
)

// TestAggregatePlanIsWhatWasEncoded: the plan of a sum and a count, encoded and compiled again, reduces the
// costs 2 and 3 to the sum 5 and the count 2.
func TestAggregatePlanIsWhatWasEncoded(t *testing.T) {
	t.Parallel()
	registry := reducer.NewRegistry()
	encoded, err := ledger.EncodeAggregates(registry, []messages.Aggregate{
		{As: "cost", Op: "sum", Field: "data.cost"}, {As: `a "name"`, Op: "count"},
	})
	require.NoError(t, err)
	plan, err := ledger.AggregatePlan(registry, encoded)
	require.NoError(t, err)
	state := plan.New()
	for _, data := range []string{`{"cost":2}`, `{"cost":3}`} {
		require.NoError(t, state.Add(reducer.Result{Data: []byte(data)}))
	}
	values, err := state.Values()
	require.NoError(t, err)
	require.Len(t, values, 2)
	require.JSONEq(t, "5", string(values["cost"]))
	require.JSONEq(t, "2", string(values[`a "name"`]))
}

func TestNoAggregates(t *testing.T) {
	t.Parallel()
	registry := reducer.NewRegistry()
	encoded, err := ledger.EncodeAggregates(registry, nil)
	require.NoError(t, err)
	require.Empty(t, encoded)
	plan, err := ledger.AggregatePlan(registry, encoded)
	require.NoError(t, err)
	values, err := plan.New().Values()
	require.NoError(t, err)
	require.Empty(t, values)
}

func TestAggregateErrors(t *testing.T) {
	t.Parallel()
	registry := reducer.NewRegistry()
	_, err := ledger.EncodeAggregates(registry, []messages.Aggregate{{As: "x", Op: "no such operation"}})
	require.ErrorContains(t, err, "no such operation")
	_, err = ledger.AggregatePlan(registry, "not JSON")
	require.ErrorContains(t, err, "read aggregates")
	// A process that lacks the reducer of an aggregate can't compile it, although another process
	// has accepted the group.
	_, err = ledger.AggregatePlan(registry, `[{"as":"x","op":"custom"}]`)
	require.ErrorContains(t, err, "custom")
}
