package reducer_test

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/reducer"
)

func compile(t require.TestingT, specs ...reducer.Spec) *reducer.Plan {
	plan, err := reducer.NewRegistry().Compile(specs)
	require.NoError(t, err)
	return plan
}

// reduce adds results with these data, and ordinals from 0, to one aggregate. It returns the
// aggregate's value and how many results it skipped.
func reduce(t *testing.T, op, field string, data ...string) (value string, skipped int64) {
	t.Helper()
	s := compile(t, reducer.Spec{As: "x", Op: op, Field: field}).New()
	for i, d := range data {
		require.NoError(t, s.Add(reducer.Result{Ordinal: int64(i), Attempts: 1, DurationMS: 1.5, Data: json.RawMessage(d)}))
	}
	values, err := s.Values()
	require.NoError(t, err)
	require.Equal(t, int64(len(data)), s.Count())
	return string(values["x"]), s.Skipped()["x"]
}

func repeat(n int, data string) []string {
	return strings.Split(strings.Repeat(data+"\n", n)[:n*(len(data)+1)-1], "\n")
}

func TestOps(t *testing.T) {
	cases := []struct {
		name, op, field string
		data            []string
		want            string
		skipped         int64
	}{
		{"count of nothing", "count", "", nil, `0`, 0},
		{"count without a field takes all", "count", "", []string{`1`, `null`, ``}, `3`, 0},
		{"count with a field takes where it is", "count", "data.a", []string{`{"a":0}`, `{"a":null}`, `{"a":{}}`, `{}`, ``}, `2`, 3},
		{"sum of nothing", "sum", "data", nil, `0`, 0},
		{"sum of tenths", "sum", "data.cost", repeat(10, `{"cost":0.1}`), `1`, 0},
		{"sum of tenths and fifths", "sum", "data", []string{`0.1`, `0.2`}, `0.3`, 0},
		{"sum beyond 2^53", "sum", "data", []string{`9007199254740993`, `9007199254740992`}, `18014398509481985`, 0},
		{"sum beyond int64", "sum", "data", []string{`9223372036854775807`, `9223372036854775807`, `3`}, `18446744073709551617`, 0},
		{"sum back from beyond int64", "sum", "data", []string{`-9223372036854775808`, `-9223372036854775808`, `18446744073709551616`}, `0`, 0},
		{"sum of far apart", "sum", "data", []string{`1e20`, `1e-6`, `-1e20`}, `0.000001`, 0},
		{"sum across the whole range", "sum", "data", []string{`1e299`, `1e-300`, `-1e299`}, `1e-300`, 0},
		{"sum with an exponent", "sum", "data", []string{`1E2`, `25e-1`, `-1.5e+1`}, `87.5`, 0},
		{"sum skips what is no number", "sum", "data.a", []string{`{"a":"1"}`, `{"a":true}`, `{"a":[1]}`, `{"a":1e300}`, `{"a":01}`, `{"a":1.}`, `{"a":+1}`, `{"a":-}`, `{"a":2}`}, `2`, 8},
		{"sum rounds endless digits away", "sum", "data", []string{`1e-500`, `0.` + strings.Repeat("3", 500)}, `0.3333333333333333`, 0},
		{"sum of duration", "sum", "duration_ms", []string{``, `{}`}, `3`, 0},
		{"sum into an array", "sum", "data.items.1.price", []string{`{"items":[{"price":1},{"price":2.5}]}`, `{"items":[{"price":1}]}`, `{"items":{"1":{"price":4}}}`}, `6.5`, 1},
		{"sum over an escaped name", "sum", `data.a\.b`, []string{`{"a":{"b":1},"a.b":2}`}, `2`, 0},
		{"sum of the whole data", "sum", "data", []string{` 5 `, `5 5`}, `5`, 1},
		{"min of nothing", "min", "data", nil, `null`, 0},
		{"min", "min", "data", []string{`3`, `-2.50`, `-2.4`, `"-9"`}, `-2.5`, 1},
		{"max", "max", "data", []string{`1e2`, `99.9`, `-1e3`}, `100`, 0},
		{"max beyond 2^53", "max", "data", []string{`9007199254740992`, `9007199254740993`}, `9007199254740993`, 0},
		{"max of long numbers", "max", "data", []string{`123456789012345678901`, `123456789012345678902`, `-123456789012345678903`}, `123456789012345678902`, 0},
		{"mean of nothing", "mean", "data", nil, `null`, 0},
		{"mean", "mean", "data", []string{`0.1`, `0.2`, `"x"`}, `0.15`, 1},
		{"mean of a third", "mean", "data", []string{`0`, `0`, `1`}, `0.3333333333333333`, 0},
		{"mean beyond 2^53", "mean", "data", []string{`9007199254740992`, `9007199254740994`}, `9007199254740993`, 0},
		{"distribution of nothing", "distribution", "data", nil, `null`, 0},
		{"distribution of one", "distribution", "data", []string{`12.5`}, `{"count":1,"min":12.5,"max":12.5,"mean":12.5,"stddev":0,"p50":12.5,"p90":12.5,"p95":12.5,"p99":12.5,"histogram":[[12.5,12.5,1]]}`, 0},
		{"distribution of zeros", "distribution", "data", []string{`0`, `-0.0`, `{}`}, `{"count":2,"min":0,"max":0,"mean":0,"stddev":0,"p50":0,"p90":0,"p95":0,"p99":0,"histogram":[[0,0,2]]}`, 1},
		{"distribution of large numbers", "distribution", "data", []string{`4000000000`, `4000000002`}, `{"count":2,"min":4000000000,"max":4000000002,"mean":4000000001,"stddev":1,"p50":4000000002,"p90":4000000002,"p95":4000000002,"p99":4000000002,"histogram":[[4000000000,4000000002,2]]}`, 0},
		{"distribution by nearest rank", "distribution", "data", []string{`1`, `1000`}, `{"count":2,"min":1,"max":1000,"mean":500.5,"stddev":499.5,"p50":1,"p90":1000,"p95":1000,"p99":1000,"histogram":[[1,1.3231,1],[1.3231,1.7861,0],[1.7861,2.411,0],[2.411,3.2545,0],[3.2545,4.3932,0],[4.3932,5.9302,0],[5.9302,8.005,0],[8.005,10.806,0],[10.806,14.586,0],[14.586,19.69,0],[19.69,26.579,0],[26.579,35.878,0],[35.878,48.43,0],[48.43,65.375,0],[65.375,88.248,0],[88.248,119.12,0],[119.12,160.8,0],[160.8,217.06,0],[217.06,293,0],[293,395.52,0],[395.52,533.9,0],[533.9,720.7,0],[720.7,972.85,0],[972.85,1000,1]]}`, 0},
		{"count_by of nothing", "count_by", "data", nil, `{}`, 0},
		{"count_by", "count_by", "data.k", []string{`{"k":"a"}`, `{"k":"b"}`, `{"k":"a"}`, `{"k":1}`, `{"k":1.0}`, `{"k":"1"}`, `{"k":true}`, `{"k":false}`, `{"k":[]}`, `{"k":{}}`, `{"k":tru}`, `{}`}, `{"1":3,"a":2,"b":1,"false":1,"true":1}`, 4},
		{"count_by of escapes", "count_by", "data", []string{`"\u00e9"`, `"é"`, `"a\"b"`, `""`, `"<"`, `"\x"`}, `{"":1,"a\"b":1,"é":2,"\u003c":1}`, 1},
		{"collect of nothing", "collect", "data", nil, `[]`, 0},
		{"collect", "collect", "data.v", []string{`{"v": {"a" : 1} }`, `{"v":null}`, `{}`, `{"v":"x"}`, `{"v":[1, 2]}`, `{"v":{]}`}, `[{"a":1},"x",[1,2]]`, 3},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			value, skipped := reduce(t, c.op, c.field, c.data...)
			require.JSONEq(t, c.want, value)
			require.Equal(t, c.skipped, skipped)
			if c.op != "count_by" && c.op != "distribution" { // JSONEq would compare numbers as float64
				require.Equal(t, c.want, value)
			}
		})
	}
}

func TestCompileRefuses(t *testing.T) {
	cases := []struct {
		name string
		spec reducer.Spec
		want string
	}{
		{"no name", reducer.Spec{Op: "count"}, "it has no name"},
		{"a long name", reducer.Spec{As: strings.Repeat("x", 129), Op: "count"}, "longer than 128 bytes"},
		{"a name with controls", reducer.Spec{As: "a\nb", Op: "count"}, "not printable"},
		{"an unknown op", reducer.Spec{As: "x", Op: "summ", Field: "data"}, `op "summ" is unknown, use one of collect, count, count_by, distribution, max, mean, min, sum`},
		{"no field", reducer.Spec{As: "x", Op: "sum"}, "needs a field"},
		{"another root", reducer.Spec{As: "x", Op: "sum", Field: "cost"}, "must start with data or be duration_ms"},
		{"parts of a number", reducer.Spec{As: "x", Op: "sum", Field: "duration_ms.a"}, "has no parts"},
		{"an empty segment", reducer.Spec{As: "x", Op: "sum", Field: "data..a"}, "a segment is empty"},
		{"a dot at the end", reducer.Spec{As: "x", Op: "count", Field: "data."}, "a segment is empty"},
		{"a lone backslash", reducer.Spec{As: "x", Op: "sum", Field: `data.a\b`}, "a backslash must be followed"},
		{"a backslash at the end", reducer.Spec{As: "x", Op: "sum", Field: `data.a\`}, "a backslash must be followed"},
		{"a long field", reducer.Spec{As: "x", Op: "sum", Field: "data." + strings.Repeat("x", 512)}, "longer than 512 bytes"},
		{"a deep field", reducer.Spec{As: "x", Op: "sum", Field: "data" + strings.Repeat(".x", 32)}, "more than 32 segments"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			_, err := reducer.NewRegistry().Compile([]reducer.Spec{{As: "fine", Op: "count"}, c.spec})
			require.ErrorContains(t, err, "compile aggregate 1 ")
			require.ErrorContains(t, err, c.want)
		})
	}

	_, err := reducer.NewRegistry().Compile([]reducer.Spec{{As: "x", Op: "a"}, {As: "x", Op: "count"}, {As: "y", Op: "b"}})
	require.ErrorContains(t, err, `op "a" is unknown`)
	require.ErrorContains(t, err, `aggregate 1 "x": the name is used twice`)
	require.ErrorContains(t, err, `op "b" is unknown`)
}

func TestPlanWithoutSpecsCounts(t *testing.T) {
	plan := compile(t)
	s, other := plan.New(), plan.New()
	for range 3 {
		require.NoError(t, s.Add(reducer.Result{Data: json.RawMessage(`{`)}))
	}
	require.NoError(t, other.Add(reducer.Result{}))
	require.NoError(t, s.Merge(other))
	encoded, err := s.Encode()
	require.NoError(t, err)
	require.Equal(t, `{"count":4}`, string(encoded))
	s, err = plan.Decode(encoded)
	require.NoError(t, err)
	require.Equal(t, int64(4), s.Count())
	values, err := s.Values()
	require.NoError(t, err)
	require.Empty(t, values)
}

func TestManyFieldsInOnePass(t *testing.T) {
	plan := compile(t,
		reducer.Spec{As: "whole", Op: "collect", Field: "data"},
		reducer.Spec{As: "a", Op: "collect", Field: "data.a"},
		reducer.Spec{As: "ab", Op: "sum", Field: "data.a.b"},
		reducer.Spec{As: "ab again", Op: "max", Field: "data.a.b"},
		reducer.Spec{As: "ac1", Op: "collect", Field: "data.a.c.1"},
		reducer.Spec{As: "z", Op: "count", Field: "data.z"},
		reducer.Spec{As: "ms", Op: "max", Field: "duration_ms"},
	)
	s := plan.New()
	data := `{ "n": {"a":"}\\\"{"}, "a" : {"c":[ [0], {"x":"]"} , 2], "b": 7, "b": 8}, "a":{"b":9}, "z" : 0 }`
	require.NoError(t, s.Add(reducer.Result{DurationMS: 0.0000001, Data: json.RawMessage(data)}))
	require.NoError(t, s.Add(reducer.Result{Ordinal: 1, DurationMS: math.NaN(), Data: json.RawMessage(`{"a":{"b":1},"z":`)}))
	values, err := s.Values()
	require.NoError(t, err)
	got := make(map[string]string, len(values))
	for as, v := range values {
		got[as] = string(v)
	}
	require.Equal(t, map[string]string{
		"whole":    `[{"n":{"a":"}\\\"{"},"a":{"c":[[0],{"x":"]"},2],"b":7,"b":8},"a":{"b":9},"z":0}]`,
		"a":        `[{"c":[[0],{"x":"]"},2],"b":7,"b":8},{"b":1}]`,
		"ab":       `8`,
		"ab again": `7`,
		"ac1":      `[{"x":"]"}]`,
		"z":        `1`,
		"ms":       `1e-7`,
	}, got)
	require.Equal(t, map[string]int64{"whole": 1, "ac1": 1, "z": 1, "ms": 1}, s.Skipped())
}

func TestCollectBounds(t *testing.T) {
	t.Run("values", func(t *testing.T) {
		s := compile(t, reducer.Spec{As: "x", Op: "collect", Field: "data"}).New()
		for i := int64(2999); i >= 0; i-- {
			require.NoError(t, s.Add(reducer.Result{Ordinal: i, Data: fmt.Appendf(nil, "%d", i)}))
		}
		values, err := s.Values()
		require.NoError(t, err)
		var got []int
		require.NoError(t, json.Unmarshal(values["x"], &got))
		require.Len(t, got, reducer.MaxValues)
		for i, v := range got {
			require.Equal(t, i, v)
		}
		require.Empty(t, s.Skipped())
	})
	t.Run("bytes", func(t *testing.T) {
		half := `"` + strings.Repeat("x", reducer.MaxValuesBytes/2-2) + `"`
		value, skipped := reduce(t, "collect", "data", half, half, `1`)
		require.Equal(t, "["+half+","+half+"]", value)
		require.Zero(t, skipped)
	})
	t.Run("the rest stays out behind a value that doesn't fit", func(t *testing.T) {
		half := `"` + strings.Repeat("x", reducer.MaxValuesBytes/2) + `"`
		value, _ := reduce(t, "collect", "data", half, half, `1`)
		require.Equal(t, "["+half+"]", value)
	})
	t.Run("a value too large or deep by itself is skipped", func(t *testing.T) {
		large := `"` + strings.Repeat("x", reducer.MaxValuesBytes) + `"`
		deep := strings.Repeat("[", reducer.MaxValueDepth+1) + strings.Repeat("]", reducer.MaxValueDepth+1)
		value, skipped := reduce(t, "collect", "data", large, deep, deep[1:len(deep)-1], `1`)
		require.Equal(t, "["+deep[1:len(deep)-1]+",1]", value)
		require.Equal(t, int64(2), skipped)
	})
}

func TestCountByBounds(t *testing.T) {
	s := compile(t, reducer.Spec{As: "x", Op: "count_by", Field: "data"}).New()
	for i := range 5000 {
		require.NoError(t, s.Add(reducer.Result{Data: fmt.Appendf(nil, `"%04d"`, 4999-i)}))
		require.NoError(t, s.Add(reducer.Result{Data: json.RawMessage(`"ok"`)}))
	}
	require.NoError(t, s.Add(reducer.Result{Data: json.RawMessage(`"__other__"`)}))
	values, err := s.Values()
	require.NoError(t, err)
	var got map[string]int
	require.NoError(t, json.Unmarshal(values["x"], &got))
	require.Len(t, got, reducer.MaxKeys+1)
	require.Equal(t, 5000, got["ok"], "the shortest key stays")
	require.Equal(t, 1, got["0000"])
	require.Equal(t, 1, got["0998"])
	require.Equal(t, 4001+1, got[reducer.OtherKey])

	value, _ := reduce(t, "count_by", "data", `"`+strings.Repeat("é", 100)+`"`, strings.Repeat("9", 200))
	require.Equal(t, `{"`+strings.Repeat("9", 125)+`…":1,"`+strings.Repeat("é", 62)+`…":1}`, value)
}

func TestRegistry(t *testing.T) {
	r := reducer.NewRegistry()
	last := reducer.MapReduce(func(res reducer.Result) (int64, error) { return res.Ordinal, nil }, func(a, b int64) int64 { return max(a, b) })
	require.NoError(t, r.Register("last", last))
	require.ErrorContains(t, r.Register("last", last), "the name is taken")
	require.ErrorContains(t, r.Register("sum", last), "the name is taken")
	require.ErrorContains(t, r.Register("a b", last), "must match")
	require.ErrorContains(t, r.Register("none", nil), "no factory")
	require.Equal(t, []string{"collect", "count", "count_by", "distribution", "last", "max", "mean", "min", "sum"}, r.Ops())
	require.NotContains(t, reducer.NewRegistry().Ops(), "last", "registries are independent")

	require.NoError(t, r.Register("empty", func(reducer.Spec) (reducer.Accumulator, error) { return nil, nil }))
	_, err := r.Compile([]reducer.Spec{{As: "x", Op: "empty"}})
	require.ErrorContains(t, err, "made no accumulator")
}
