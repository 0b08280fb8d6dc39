package aggregate_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/aggregate"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/reducer"
)

// TestPlanIsWhatWasEncoded: the plan of a sum and a count, encoded and compiled again, reduces the
// costs 2 and 3 to the sum 5 and the count 2.
func TestPlanIsWhatWasEncoded(t *testing.T) {
	t.Parallel()
	registry := reducer.NewRegistry()
	encoded, err := aggregate.Encode(registry, []messages.Aggregate{
		{As: "cost", Op: "sum", Field: "data.cost"}, {As: `a "name"`, Op: "count"},
	})
	require.NoError(t, err)
	plan, err := aggregate.Plan(registry, encoded)
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

func TestNothingAsked(t *testing.T) {
	t.Parallel()
	registry := reducer.NewRegistry()
	encoded, err := aggregate.Encode(registry, nil)
	require.NoError(t, err)
	require.Empty(t, encoded)
	plan, err := aggregate.Plan(registry, encoded)
	require.NoError(t, err)
	values, err := plan.New().Values()
	require.NoError(t, err)
	require.Empty(t, values)
}

func TestErrors(t *testing.T) {
	t.Parallel()
	registry := reducer.NewRegistry()
	_, err := aggregate.Encode(registry, []messages.Aggregate{{As: "x", Op: "no such operation"}})
	require.ErrorContains(t, err, "no such operation")
	_, err = aggregate.Plan(registry, "not JSON")
	require.ErrorContains(t, err, "read aggregates")
	// A process that lacks the reducer of an aggregate can't compile it, although another process
	// has accepted the group.
	_, err = aggregate.Plan(registry, `[{"as":"x","op":"custom"}]`)
	require.ErrorContains(t, err, "custom")
}
