package reducer_test

import (
	"encoding/json"
	"fmt"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
	"github.com/bulkaction/bulkaction/reducer"
)

var everyOp = []reducer.Spec{
	{As: "count", Op: "count"},
	{As: "count a", Op: "count", Field: "data.a"},
	{As: "sum", Op: "sum", Field: "data.a"},
	{As: "min", Op: "min", Field: "data.a"},
	{As: "max", Op: "max", Field: "data.a"},
	{As: "mean", Op: "mean", Field: "data.a"},
	{As: "distribution", Op: "distribution", Field: "data.a"},
	{As: "duration", Op: "distribution", Field: "duration_ms"},
	{As: "count_by", Op: "count_by", Field: "data.a"},
	{As: "collect", Op: "collect", Field: "data.a"},
	{As: "nested", Op: "collect", Field: "data.b.0"},
	{As: "words", Op: "words"},
}

// drawValue returns the JSON text of any value that a field may have, and of some that it may not
// have.
func drawValue(t *rapid.T) string {
	switch rapid.IntRange(0, 7).Draw(t, "kind") {
	case 0:
		return fmt.Sprint(rapid.Int64().Draw(t, "integer"))
	case 1:
		b, err := json.Marshal(rapid.Float64Range(-1e299, 1e299).Draw(t, "float"))
		require.NoError(t, err)
		return string(b)
	case 2:
		return fmt.Sprintf("%d.%02d", rapid.IntRange(-99, 99).Draw(t, "units"), rapid.IntRange(0, 99).Draw(t, "cents"))
	case 3:
		return rapid.StringMatching(`-?[1-9][0-9]{0,40}(\.[0-9]{1,40})?(e-?[0-9]{1,2})?`).Draw(t, "decimal")
	case 4:
		b, err := json.Marshal(rapid.StringN(0, 200, 400).Draw(t, "string"))
		require.NoError(t, err)
		return string(b)
	case 5:
		return rapid.SampledFrom([]string{`"ok"`, `"no"`, `true`, `false`, `0`, `1`, `1.0`, `0.1`}).Draw(t, "common")
	case 6:
		return rapid.SampledFrom([]string{`{"<": [ "&" ]}`, `[]`, `{}`, "\"\xff\"", `"\u2028"`, `"\ud800"`}).Draw(t, "odd")
	}
	return rapid.SampledFrom([]string{`null`, ``, `tru`, `01`, `1e300`, `1e-999`, `"\x"`, `[`, `}`}).Draw(t, "bad")
}

func drawResults(t *rapid.T) []reducer.Result {
	results := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) reducer.Result {
		data := `{"a":` + drawValue(t) + `,"b":[` + drawValue(t) + `]}`
		if rapid.IntRange(0, 5).Draw(t, "words") == 0 {
			data = `["x","` + rapid.SampledFrom([]string{"x", "y", "z"}).Draw(t, "word") + `"]`
		}
		return reducer.Result{DurationMS: rapid.Float64().Draw(t, "duration"), Data: json.RawMessage(data)}
	}), 0, 60).Draw(t, "results")
	for i := range results {
		results[i].Ordinal = int64(i)
	}
	return results
}

// manyResults returns so many results that count_by, collect and distribution reach their bounds.
// It draws a seed for them, because to draw each result would take too long.
func manyResults(t *rapid.T) []reducer.Result {
	random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
	results := make([]reducer.Result, rapid.SampledFrom([]int{1200, 2500}).Draw(t, "size"))
	wide := rapid.SampledFrom([]int{1, 300, 600}).Draw(t, "width")
	for i := range results {
		data := fmt.Sprintf(`{"a":%d}`, random.IntN(3000))
		switch random.IntN(4) {
		case 0:
			data = fmt.Sprintf(`{"a":%.3fe%d}`, random.NormFloat64(), random.IntN(60)-30)
		case 1:
			data = fmt.Sprintf(`{"a":"%d","b":["%s"]}`, random.IntN(3000), strings.Repeat("x", random.IntN(wide)))
		}
		results[i] = reducer.Result{Ordinal: int64(i), DurationMS: random.ExpFloat64(), Data: json.RawMessage(data)}
	}
	return results
}

// checkSplit divides the results among partial states in any order, encodes and decodes some of
// them, and merges them in any order. The values must be those of one state to which all results
// were added.
func checkSplit(t *rapid.T, plan *reducer.Plan, results []reducer.Result) {
	whole := plan.New()
	for _, r := range results {
		_ = whole.Add(r) // a result that the op words refuses counts as skipped
	}
	random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "order"), 1))
	parts := make([]*reducer.State, rapid.IntRange(1, 6).Draw(t, "parts"))
	for i := range parts {
		parts[i] = plan.New()
	}
	for _, i := range random.Perm(len(results)) {
		p := random.IntN(len(parts))
		_ = parts[p].Add(results[i])
		if random.IntN(len(results)/4+2) == 0 {
			parts[p] = recode(t, plan, parts[p])
		}
	}
	for len(parts) > 1 {
		random.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		require.NoError(t, parts[0].Merge(parts[len(parts)-1]))
		parts = parts[:len(parts)-1]
		if random.IntN(2) == 0 {
			parts[0] = recode(t, plan, parts[0])
		}
	}
	require.Equal(t, int64(len(results)), parts[0].Count())
	require.Equal(t, whole.Skipped(), parts[0].Skipped())
	want, got := values(t, whole), values(t, parts[0])
	for as := range want {
		require.True(t, json.Valid(got[as]), "%s: %s", as, got[as])
		require.Equal(t, string(want[as]), string(got[as]), as)
	}
}

func recode(t *rapid.T, plan *reducer.Plan, s *reducer.State) *reducer.State {
	encoded, err := s.Encode()
	require.NoError(t, err)
	decoded, err := plan.Decode(encoded)
	require.NoError(t, err)
	again, err := decoded.Encode()
	require.NoError(t, err)
	require.Equal(t, string(encoded), string(again))
	return decoded
}

func values(t *rapid.T, s *reducer.State) map[string]json.RawMessage {
	v, err := s.Values()
	require.NoError(t, err)
	return v
}

func TestAnySplitGivesTheSame(t *testing.T) {
	plan, err := mapReduceRegistry(t).Compile(everyOp)
	require.NoError(t, err)
	rapidtest.Check(t, 0, func(t *rapid.T) { checkSplit(t, plan, drawResults(t)) })
}

func TestAnySplitGivesTheSameBeyondBounds(t *testing.T) {
	plan := compile(t, everyOp[:len(everyOp)-1]...)
	rapidtest.Check(t, 0, func(t *rapid.T) { checkSplit(t, plan, manyResults(t)) })
}

// TestAnySplitCollectsTheSame draws large values that don't fit the bounds of collect, followed by
// small ones that would, and sometimes the same ordinal twice.
func TestAnySplitCollectsTheSame(t *testing.T) {
	plan := compile(t, reducer.Spec{As: "x", Op: "collect", Field: "data"})
	rapidtest.Check(t, 0, func(t *rapid.T) {
		checkSplit(t, plan, rapid.SliceOfN(rapid.Custom(func(t *rapid.T) reducer.Result {
			ordinal := rapid.Int64Range(0, 30).Draw(t, "ordinal")
			length := rapid.SampledFrom([]int{1, 1, 1, 60_000, 130_000, 200_000}).Draw(t, "length")
			text := strings.Repeat(string(rune('a'+rapid.IntRange(0, 2).Draw(t, "letter"))), length)
			return reducer.Result{Ordinal: ordinal, Data: json.RawMessage(`"` + text + `"`)}
		}), 0, 12).Draw(t, "results"))
	})
}

func TestSumIsExact(t *testing.T) {
	plan := compile(t, reducer.Spec{As: "x", Op: "sum", Field: "data"})
	rapidtest.Check(t, 0, func(t *rapid.T) {
		numbers := rapid.SliceOf(rapid.StringMatching(`-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?`)).Draw(t, "numbers")
		s, want := plan.New(), new(big.Rat)
		for _, n := range numbers {
			require.NoError(t, s.Add(reducer.Result{Data: json.RawMessage(n)}))
			r, ok := new(big.Rat).SetString(n)
			require.True(t, ok)
			want.Add(want, r)
		}
		require.Empty(t, s.Skipped())
		got, ok := new(big.Rat).SetString(string(values(t, s)["x"]))
		require.True(t, ok)
		require.Zero(t, want.Cmp(got), "want %v, got %v", want, got)
	})
}
