package bulktest_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/bulktest"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/reducer"
)

func results(t *testing.T, n int) []reducer.Result {
	t.Helper()
	all := make([]reducer.Result, n)
	for i := range all {
		all[i] = reducer.Result{Data: bulktest.JSON(t, number{i})}
	}
	return all
}

func numberOf(r reducer.Result) (float64, error) {
	var p number
	err := json.Unmarshal(r.Data, &p)
	return float64(p.N), err
}

func registry(t *testing.T, factory reducer.Factory) *reducer.Registry {
	t.Helper()
	r := reducer.NewRegistry()
	require.NoError(t, r.Register("mine", factory))
	return r
}

func TestReduce(t *testing.T) {
	t.Parallel()
	mine := registry(t, reducer.MapReduce(numberOf, func(a, b float64) float64 { return max(a, b) }))
	all := append(results(t, 30), reducer.Result{Failed: true, Data: json.RawMessage(`{"code":"BAD"}`)})
	values := bulktest.Reduce(t, mine, []client.Aggregate{
		{As: "largest", Op: "mine"}, {As: "sum", Op: "sum", Field: "data.n"}, {As: "first", Op: "collect", Field: "data.n"},
		{As: "codes", Op: "count_by", Field: "data.code", Over: "failed"},
	}, all...)
	require.Equal(t, "29", string(values["largest"]))
	require.Equal(t, "435", string(values["sum"]))
	require.JSONEq(t, `{"BAD":1}`, string(values["codes"]))
	require.Equal(t, "0", string(bulktest.Reduce(t, nil, []client.Aggregate{{As: "n", Op: "count"}})["n"]))
}

// TestReduceAllowsRoundingErrors: the order in which fractions are added changes the last digits of
// their sum. Reduce does not report that.
func TestReduceAllowsRoundingErrors(t *testing.T) {
	t.Parallel()
	sum := registry(t, reducer.MapReduce(
		func(r reducer.Result) (map[string][]float64, error) {
			n, err := numberOf(r)
			return map[string][]float64{"sum": {n / 10}}, err
		},
		func(a, b map[string][]float64) map[string][]float64 {
			return map[string][]float64{"sum": {a["sum"][0] + b["sum"][0]}}
		}))
	values := bulktest.Reduce(t, sum, []client.Aggregate{{As: "x", Op: "mine"}}, results(t, 30)...)
	var got map[string][]float64
	require.NoError(t, json.Unmarshal(values["x"], &got))
	require.InDelta(t, 43.5, got["sum"][0], 1e-9)
}

type counted struct{ sum, n float64 } // its fields are not exported: lost in JSON

// TestReduceFindsBrokenReducers: Reduce reports a reducer that is not commutative, with the two
// results that show it, one that is not associative, and one whose state JSON does not keep.
func TestReduceFindsBrokenReducers(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		factory reducer.Factory
		says    []string
	}{
		"not commutative": {
			reducer.MapReduce(numberOf, func(a, _ float64) float64 { return a }),
			[]string{"x is 0 in one part, and 1 in these parts", `1: {"n":1}`, `0: {"n":0}`},
		},
		"not associative": {
			reducer.MapReduce(numberOf, func(a, b float64) float64 { return (a + b) / 2 }),
			[]string{"in these parts"},
		},
		"state is lost in JSON": {
			reducer.MapReduce(func(r reducer.Result) (counted, error) { n, err := numberOf(r); return counted{n, 1}, err },
				func(a, b counted) counted { return counted{a.sum + b.sum, a.n + b.n} },
				reducer.Finish(func(c counted) (any, error) { return c.n, nil })),
			[]string{"x is 1 in one part, and 0 in these parts"},
		},
	} {
		said := failure(t, func(t testing.TB) {
			bulktest.Reduce(t, registry(t.(*fake).T, test.factory), []client.Aggregate{{As: "x", Op: "mine"}}, results(t.(*fake).T, 20)...)
		})
		for _, want := range test.says {
			require.Contains(t, said, want, name)
		}
		require.Contains(t, said, "associative and commutative", name)
	}
}

func TestReduceMistakes(t *testing.T) {
	t.Parallel()
	require.Contains(t, failure(t, func(t testing.TB) {
		bulktest.Reduce(t, nil, []client.Aggregate{{As: "x", Op: "no_such"}})
	}), `op "no_such" is unknown`)
	require.Contains(t, failure(t, func(t testing.TB) {
		bulktest.Reduce(t, nil, []client.Aggregate{{As: "x", Op: "count"}}, reducer.Result{Data: json.RawMessage("{")})
	}), "result 0: data must be JSON")
}
