package reducer_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/reducer"
)

func TestDecodeRefuses(t *testing.T) {
	plan := compile(t,
		reducer.Spec{As: "n", Op: "count"},
		reducer.Spec{As: "d", Op: "distribution", Field: "data"},
		reducer.Spec{As: "k", Op: "count_by", Field: "data"},
		reducer.Spec{As: "c", Op: "collect", Field: "data"},
		reducer.Spec{As: "m", Op: "mean", Field: "data"},
	)
	const (
		n = `"n":{"state":{"count":1}}`
		d = `"d":{"state":{"count":2,"min":0,"max":1,"sum":1,"squares":1,"zeros":1,"positive":[0,1],"negative":[]}}`
		k = `"k":{"skipped":1,"state":{"counts":{"a":1},"other":0}}`
		c = `"c":{"state":{"ordinals":[0],"values":["a"]}}`
		m = `"m":{"state":{"count":0,"sum":0}}`
	)
	all := func(parts ...string) string {
		out := `{"count":2,"aggregates":{`
		for i, p := range parts {
			if i > 0 {
				out += ","
			}
			out += p
		}
		return out + `}}`
	}
	good := all(n, d, k, c, m)
	s, err := plan.Decode([]byte(good))
	require.NoError(t, err)
	require.Equal(t, int64(2), s.Count())
	require.Equal(t, map[string]int64{"k": 1}, s.Skipped())

	cases := map[string]string{
		"nothing":                  ``,
		"null":                     `null`,
		"no count":                 `{"aggregates":{}}`,
		"a negative count":         `{"count":-1}`,
		"something behind":         good + `{}`,
		"an unknown member":        `{"count":2,"version":2}`,
		"aggregates missing":       `{"count":2}`,
		"another aggregate":        all(n, d, k, c, `"x":{"state":{}}`),
		"no state":                 all(n, d, k, c, `"m":{}`),
		"a null state":             all(n, d, k, c, `"m":{"state":null}`),
		"another op's state":       all(n, d, k, c, `"m":{"state":{"counts":{}}}`),
		"a count beyond bounds":    all(`"n":{"state":{"count":9007199254740993}}`, d, k, c, m),
		"a negative skip":          all(`"n":{"skipped":-1,"state":{"count":1}}`, d, k, c, m),
		"a sum that is no number":  all(n, d, k, c, `"m":{"state":{"count":1,"sum":"1"}}`),
		"a sum beyond bounds":      all(n, d, k, c, `"m":{"state":{"count":1,"sum":1e3000}}`),
		"a mean of minus one":      all(n, d, k, c, `"m":{"state":{"count":-1,"sum":1}}`),
		"buckets that don't add":   all(n, `"d":{"state":{"count":2,"min":0,"max":1,"sum":1,"squares":1,"zeros":1,"positive":[],"negative":[]}}`, k, c, m),
		"no minimum":               all(n, `"d":{"state":{"count":1,"max":1,"sum":1,"squares":1,"zeros":1,"positive":[],"negative":[]}}`, k, c, m),
		"half a bucket":            all(n, `"d":{"state":{"count":2,"min":0,"max":1,"sum":1,"squares":1,"zeros":1,"positive":[0,1,2],"negative":[]}}`, k, c, m),
		"buckets out of order":     all(n, `"d":{"state":{"count":3,"min":0,"max":1,"sum":1,"squares":1,"zeros":1,"positive":[1,1,0,1],"negative":[]}}`, k, c, m),
		"buckets too far apart":    all(n, `"d":{"state":{"count":3,"min":0,"max":1,"sum":1,"squares":1,"zeros":1,"positive":[0,1,2048,1],"negative":[]}}`, k, c, m),
		"an empty bucket":          all(n, `"d":{"state":{"count":1,"min":0,"max":1,"sum":1,"squares":1,"zeros":1,"positive":[0,0],"negative":[]}}`, k, c, m),
		"a bucket out of range":    all(n, `"d":{"state":{"count":2,"min":0,"max":1,"sum":1,"squares":1,"zeros":1,"positive":[40000,1],"negative":[]}}`, k, c, m),
		"no keys":                  all(n, d, `"k":{"state":{"counts":null,"other":1}}`, c, m),
		"a key that counts null":   all(n, d, `"k":{"state":{"counts":{"a":null},"other":1}}`, c, m),
		"a key that counts none":   all(n, d, `"k":{"state":{"counts":{"a":0},"other":1}}`, c, m),
		"ordinals without values":  all(n, d, k, `"c":{"state":{"ordinals":[0],"values":[]}}`, m),
		"something unknown within": all(n, d, k, `"c":{"state":{"ordinals":[],"values":[],"more":1}}`, m),
	}
	for name, encoded := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := plan.Decode([]byte(encoded))
			require.ErrorContains(t, err, "decode aggregate")
		})
	}
}

func TestMergeRefuses(t *testing.T) {
	cost := reducer.Spec{As: "x", Op: "sum", Field: "data.cost"}
	s := compile(t, cost).New()
	require.ErrorContains(t, s.Merge(s), "itself")
	require.ErrorContains(t, s.Merge(compile(t).New()), "different plans")
	require.ErrorContains(t, s.Merge(compile(t, reducer.Spec{As: "x", Op: "sum", Field: "data.price"}).New()), "different plans")
	require.NoError(t, s.Merge(compile(t, cost).New()), "another plan of the same specs will do")
}

// faulty is a reducer for tests. It makes every mistake that the interface allows.
type faulty struct{ encoded, value string }

var errFaulty = errors.New("no")

func (f *faulty) Add(reducer.Result) error        { return errFaulty }
func (f *faulty) Merge(reducer.Accumulator) error { return errFaulty }
func (f *faulty) MarshalJSON() ([]byte, error)    { return []byte(f.encoded), nil }
func (f *faulty) UnmarshalJSON([]byte) error      { return errFaulty }
func (f *faulty) Value() (value json.RawMessage, err error) {
	if f.value == "" {
		return nil, errFaulty
	}
	return json.RawMessage(f.value), nil
}

// panicking is a reducer all of whose methods panic, that of its errors too.
type panicking struct{}

func (*panicking) Add(reducer.Result) error        { return panickingError{} }
func (*panicking) Merge(reducer.Accumulator) error { panic("secret") }
func (*panicking) MarshalJSON() ([]byte, error)    { panic("secret") }
func (*panicking) UnmarshalJSON([]byte) error      { panic("secret") }
func (*panicking) Value() (json.RawMessage, error) { panic("secret") }
func (*panicking) Skipped() int64                  { panic("secret") }

type panickingError struct{}

func (panickingError) Error() string { panic("secret") }

// TestPanicsOfAReducerAreErrors: a reducer that panics, in any method, harms neither the process nor
// the other aggregates, and neither does one whose factory accepts a Spec only once.
func TestPanicsOfAReducerAreErrors(t *testing.T) {
	accepted := false
	r := reducer.NewRegistry()
	require.NoError(t, r.Register("panics", func(reducer.Spec) (reducer.Accumulator, error) { return &panicking{}, nil }))
	require.NoError(t, r.Register("fickle", func(reducer.Spec) (reducer.Accumulator, error) {
		if accepted {
			return nil, errFaulty
		}
		accepted = true
		return &faulty{encoded: "1"}, nil
	}))
	require.NoError(t, r.Register("explodes", func(reducer.Spec) (reducer.Accumulator, error) { panic("secret") }))
	_, err := r.Compile([]reducer.Spec{{As: "x", Op: "explodes"}})
	require.ErrorContains(t, err, "panicked with a string")
	for op, says := range map[string]string{"panics": "panicked with a string", "fickle": "no"} {
		plan, err := r.Compile([]reducer.Spec{{As: "x", Op: op}, {As: "n", Op: "count"}})
		require.NoError(t, err)
		s := plan.New()
		require.Equal(t, op == "panics", s.Add(reducer.Result{}) != nil)
		require.ErrorContains(t, second(s.Values()), says)
		merged, encoded := plan.New(), plan.New()
		require.NoError(t, merged.Merge(plan.New()))
		require.NoError(t, second(encoded.Encode()))
		decoded, err := plan.Decode([]byte(`{"count":1,"aggregates":{"x":1,"n":{"state":{"count":1}}}}`))
		require.NoError(t, err)
		for _, s := range []*reducer.State{merged, encoded, decoded} {
			require.Contains(t, s.Failed()["x"], says, op)
		}
		require.Empty(t, s.Skipped())
		values, _ := s.Values()
		require.Equal(t, map[string]json.RawMessage{"x": json.RawMessage("null"), "n": json.RawMessage("1")}, values)
	}
}

func second[T any](_ T, err error) error { return err }

func TestFaultyReducerLeavesTheOthersAlone(t *testing.T) {
	r := reducer.NewRegistry()
	require.NoError(t, r.Register("fails", func(reducer.Spec) (reducer.Accumulator, error) { return &faulty{encoded: "1"}, nil }))
	require.NoError(t, r.Register("babbles", func(reducer.Spec) (reducer.Accumulator, error) { return &faulty{encoded: "{", value: "{"}, nil }))
	plan, err := r.Compile([]reducer.Spec{{As: "f", Op: "fails"}, {As: "n", Op: "count"}})
	require.NoError(t, err)
	s := plan.New()
	err = s.Add(reducer.Result{Ordinal: 7})
	require.EqualError(t, err, `add result 7 to aggregate "f": no`)
	require.Equal(t, int64(1), s.Count())
	values, err := s.Values()
	require.EqualError(t, err, `compute aggregate "f": no`)
	require.Equal(t, map[string]json.RawMessage{"f": json.RawMessage("null"), "n": json.RawMessage("1")}, values)
	encoded, err := s.Encode()
	require.NoError(t, err)
	failed := map[string]string{"f": "no"}
	refused, err := plan.Decode(encoded) // it refuses its own state: for good, and with the reason
	require.NoError(t, err)
	require.Equal(t, failed, refused.Failed())
	require.Empty(t, s.Failed())
	require.NoError(t, s.Merge(plan.New()))
	require.Equal(t, failed, s.Failed())
	encoded, err = s.Encode()
	require.NoError(t, err)
	require.JSONEq(t, `{"count":1,"aggregates":{"f":null,"n":{"state":{"count":1}}},"failed":{"f":"no"}}`, string(encoded))
	again, err := plan.Decode(encoded)
	require.NoError(t, err)
	require.NoError(t, again.Merge(plan.New()))
	require.NoError(t, again.Add(reducer.Result{Ordinal: 8}))
	require.Equal(t, failed, again.Failed())
	values, err = again.Values()
	require.EqualError(t, err, `compute aggregate "f": no`)
	require.Equal(t, map[string]json.RawMessage{"f": json.RawMessage("null"), "n": json.RawMessage("2")}, values)

	plan, err = r.Compile([]reducer.Spec{{As: "b", Op: "babbles"}})
	require.NoError(t, err)
	values, err = plan.New().Values()
	require.ErrorContains(t, err, "invalid JSON")
	require.Equal(t, "null", string(values["b"]))
	s = plan.New()
	require.NoError(t, second(s.Encode()))
	require.Contains(t, s.Failed()["b"], "invalid JSON")
}

type words map[string]int

func mapReduceRegistry(t require.TestingT) *reducer.Registry {
	r := reducer.NewRegistry()
	require.NoError(t, r.Register("words", reducer.MapReduce(
		func(res reducer.Result) (words, error) {
			var list []string
			if err := json.Unmarshal(res.Data, &list); err != nil {
				return nil, err
			}
			if len(list) == 0 {
				return nil, reducer.ErrSkip
			}
			w := words{}
			for _, word := range list {
				if word == "panic" {
					panic(word)
				}
				w[word]++
			}
			return w, nil
		},
		func(a, b words) words {
			for word, n := range b {
				a[word] += n
			}
			return a
		},
		reducer.Finish(func(w words) (any, error) {
			if w["unspeakable"] > 0 {
				return nil, errFaulty
			}
			return map[string]any{"distinct": len(w), "words": w}, nil
		}),
	)))
	return r
}

func TestMapReduce(t *testing.T) {
	plan, err := mapReduceRegistry(t).Compile([]reducer.Spec{{As: "w", Op: "words"}})
	require.NoError(t, err)
	a, b := plan.New(), plan.New()
	values, err := a.Values()
	require.NoError(t, err)
	require.Equal(t, "null", string(values["w"]))

	require.NoError(t, a.Add(reducer.Result{Data: json.RawMessage(`["x","y"]`)}))
	require.NoError(t, a.Add(reducer.Result{Ordinal: 1, Data: json.RawMessage(`[]`)}), "skipped silently")
	require.ErrorContains(t, a.Add(reducer.Result{Ordinal: 2, Data: json.RawMessage(`{}`)}), `add result 2 to aggregate "w": json:`)
	err = a.Add(reducer.Result{Ordinal: 3, Data: json.RawMessage(`["panic"]`)})
	require.EqualError(t, err, `add result 3 to aggregate "w": the reducer's function panicked with a string`)
	require.NoError(t, b.Add(reducer.Result{Ordinal: 4, Data: json.RawMessage(`["y","z"]`)}))

	encoded, err := b.Encode()
	require.NoError(t, err)
	b, err = plan.Decode(encoded)
	require.NoError(t, err)
	require.NoError(t, a.Merge(b))
	require.NoError(t, a.Merge(plan.New()))
	values, err = a.Values()
	require.NoError(t, err)
	require.JSONEq(t, `{"distinct":3,"words":{"x":1,"y":2,"z":1}}`, string(values["w"]))
	require.Equal(t, int64(5), a.Count())
	require.Equal(t, map[string]int64{"w": 3}, a.Skipped())

	require.NoError(t, a.Add(reducer.Result{Ordinal: 5, Data: json.RawMessage(`["unspeakable"]`)}))
	_, err = a.Values()
	require.EqualError(t, err, `compute aggregate "w": no`)

	for _, bad := range []string{`{}`, `{"count":1}`, `{"count":0,"reduced":{}}`, `{"count":1,"reduced":[]}`, `{"count":-1}`, `{"x":1}`} {
		s, err := plan.Decode([]byte(`{"count":1,"aggregates":{"w":` + bad + `}}`))
		require.NoError(t, err)
		require.Equal(t, bad != `{}`, s.Failed()["w"] != "", "all but the empty state fail for good: %s", bad)
	}
}

func TestMapReduceRefuses(t *testing.T) {
	r := mapReduceRegistry(t)
	_, err := r.Compile([]reducer.Spec{{As: "w", Op: "words", Field: "data"}})
	require.ErrorContains(t, err, `op "words" takes no field`)
	require.NoError(t, r.Register("half", reducer.MapReduce(nil, func(a, b int) int { return a + b })))
	_, err = r.Compile([]reducer.Spec{{As: "w", Op: "half"}})
	require.ErrorContains(t, err, "lacks a function")
}

func BenchmarkAdd(b *testing.B) {
	small := func(i int) []byte {
		return fmt.Appendf(nil, `{"id":"msg-%06d","accepted":true,"cost":%d.%02d,"code":"%d"}`, i, i%7, i%100, 200+i%5)
	}
	cases := []struct {
		name  string
		specs []reducer.Spec
		data  func(i int) []byte
	}{
		{"no_specs", nil, small},
		{"sum", []reducer.Spec{{As: "x", Op: "sum", Field: "data.cost"}}, small},
		{"sum_of_floats", []reducer.Spec{{As: "x", Op: "sum", Field: "data"}}, func(i int) []byte { return fmt.Appendf(nil, "%v", 1/float64(i+3)) }},
		{"sum_behind_10kB", []reducer.Spec{{As: "x", Op: "sum", Field: "data.cost"}}, func(i int) []byte {
			return fmt.Appendf(nil, `{"body":%q,"cost":%d}`, strings.Repeat("x", 10_000), i)
		}},
		{"max", []reducer.Spec{{As: "x", Op: "max", Field: "data.cost"}}, small},
		{"mean_of_duration", []reducer.Spec{{As: "x", Op: "mean", Field: "duration_ms"}}, small},
		{"distribution", []reducer.Spec{{As: "x", Op: "distribution", Field: "data.cost"}}, small},
		{"distribution_of_duration", []reducer.Spec{{As: "x", Op: "distribution", Field: "duration_ms"}}, small},
		{"count_by", []reducer.Spec{{As: "x", Op: "count_by", Field: "data.code"}}, small},
		{"count_by_ids", []reducer.Spec{{As: "x", Op: "count_by", Field: "data.id"}}, small},
		{"collect", []reducer.Spec{{As: "x", Op: "collect", Field: "data.id"}}, small},
		{"eight", []reducer.Spec{
			{As: "a", Op: "count"}, {As: "b", Op: "sum", Field: "data.cost"}, {As: "c", Op: "min", Field: "data.cost"},
			{As: "d", Op: "max", Field: "data.cost"}, {As: "e", Op: "mean", Field: "data.cost"}, {As: "f", Op: "distribution", Field: "duration_ms"},
			{As: "g", Op: "count_by", Field: "data.code"}, {As: "h", Op: "collect", Field: "data.id"},
		}, small},
	}
	for _, c := range cases {
		b.Run(c.name, func(b *testing.B) {
			results := make([]reducer.Result, 10_000)
			for i := range results {
				results[i] = reducer.Result{Ordinal: int64(i), DurationMS: float64(i*7919%100_000) / 1e3, Data: c.data(i)}
			}
			s := compile(b, c.specs...).New()
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				_ = s.Add(results[i])
				if i++; i == len(results) {
					i = 0
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "jobs/s")
		})
	}
}

// BenchmarkStore measures how long it takes to encode and decode a state of 2,000 results. That is
// what an aggregator does to store a group's partial aggregate and to load it.
func BenchmarkStore(b *testing.B) {
	for _, op := range []string{"sum", "distribution", "count_by", "collect"} {
		b.Run(op, func(b *testing.B) {
			plan := compile(b, reducer.Spec{As: "x", Op: op, Field: "data"})
			s := plan.New()
			for i := range 2000 {
				require.NoError(b, s.Add(reducer.Result{Ordinal: int64(i), Data: fmt.Appendf(nil, "%d.%d", i, i%10)}))
			}
			b.ReportAllocs()
			var size int
			for b.Loop() {
				encoded, err := s.Encode()
				require.NoError(b, err)
				s, err = plan.Decode(encoded)
				require.NoError(b, err)
				size = len(encoded)
			}
			b.ReportMetric(float64(size), "bytes")
		})
	}
}
