package bulktest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/reducer"
)

// divisions is how many random orders and divisions of the results Reduce tries.
const divisions = 100

// Reduce returns the aggregates that a group with these results has, by name. With reducers nil,
// the aggregates may have the ops that need no Go code.
//
// Aggregators of several processes each reduce a part of the results, in the order in which jobs
// end; they store partial states as JSON, and merge them. So Reduce computes the aggregates for 100
// divisions and orders of the results. The test fails if the values differ, and says for which
// results: then a reducer is not associative and commutative, or its state does not survive JSON.
// Numbers may differ by a rounding error. The divisions are the same in each run.
//
// Only Data is required of a result. The results get the ordinals 0, 1, 2 and so on; Attempts is at
// least 1. If a reducer returns an error for a result, Reduce logs it and leaves the result out, as
// an aggregator does.
func Reduce(
	t testing.TB, reducers *reducer.Registry, aggregates []client.Aggregate, results ...reducer.Result,
) map[string]json.RawMessage {
	t.Helper()
	if reducers == nil {
		reducers = reducer.NewRegistry()
	}
	specs := make([]reducer.Spec, len(aggregates))
	for i, a := range aggregates {
		specs[i] = reducer.Spec{As: a.As, Op: a.Op, Field: a.Field, Over: a.Over}
	}
	plan, err := reducers.Compile(specs)
	if err != nil {
		t.Fatalf("bulktest: %v", err)
	}
	results = slices.Clone(results)
	for i := range results {
		r := &results[i]
		r.Ordinal, r.Attempts = int64(i), max(1, r.Attempts)
		if r.Failed {
			r.DurationMS = math.NaN()
		}
		if !json.Valid(r.Data) {
			t.Fatalf("bulktest: result %d: data must be JSON", i)
		}
	}
	all, left, err := reduceParts(plan, [][]reducer.Result{results}, nil)
	if err != nil {
		t.Fatalf("bulktest: %v", err)
	}
	for _, err := range left {
		t.Logf("bulktest: left out: %v", err)
	}
	if found := contradiction(plan, results); found != nil {
		for i := len(results) - 1; i >= 0; i-- { // leave out what the contradiction does not need
			fewer := slices.Delete(slices.Clone(results), i, i+1)
			if c := contradiction(plan, fewer); c != nil {
				results, found = fewer, c
			}
		}
		t.Fatalf("bulktest: the aggregates depend on how the results are divided and ordered:\n%s\n"+
			"A reducer must be associative and commutative, and its state must survive a round trip through JSON.",
			found)
	}
	return all
}

// difference has two different values of one aggregate, computed from the same results: the first
// one, and the one after dividing the results into parts.
type difference struct {
	name        string
	parts       [][]reducer.Result
	first, then string
}

func (d *difference) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s is %s in one part, and %s in these parts (ordinal: data):", d.name, d.first, d.then)
	for _, part := range d.parts {
		if len(part) == 0 {
			continue
		}
		b.WriteString("\n ")
		for _, r := range part {
			fmt.Fprintf(&b, " %d: %s", r.Ordinal, r.Data)
		}
	}
	return b.String()
}

// contradiction tries divisions of the results. It returns one for which an aggregate has another
// value than without a division, or for which a reducer fails; nil: none.
func contradiction(plan *reducer.Plan, results []reducer.Result) *difference {
	want, _, err := reduceParts(plan, [][]reducer.Result{results}, nil)
	if err != nil {
		return &difference{"an aggregate", [][]reducer.Result{results}, "computed", err.Error()}
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range divisions {
		shuffled := slices.Clone(results)
		random.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		parts := make([][]reducer.Result, 1+random.IntN(5)) // some may be empty
		for _, r := range shuffled {
			i := random.IntN(len(parts))
			parts[i] = append(parts[i], r)
		}
		got, _, err := reduceParts(plan, parts, random)
		if err != nil {
			return &difference{"an aggregate", parts, "computed", err.Error()}
		}
		for name := range want {
			if !sameJSON(want[name], got[name]) {
				return &difference{name, parts, string(want[name]), string(got[name])}
			}
		}
	}
	return nil
}

// sameJSON reports whether two JSON values are equal, except for small differences of numbers: a
// sum of fractions depends a little on the order in which they are added.
func sameJSON(a, b json.RawMessage) bool {
	if bytes.Equal(a, b) {
		return true
	}
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && same(x, y)
}

// rounding is the relative difference up to which two numbers count as equal.
const rounding = 1e-9

func same(x, y any) bool {
	switch x := x.(type) {
	case float64:
		y, ok := y.(float64)
		return ok && math.Abs(x-y) <= rounding*max(math.Abs(x), math.Abs(y))
	case []any:
		y, ok := y.([]any)
		return ok && slices.EqualFunc(x, y, same)
	case map[string]any:
		y, ok := y.(map[string]any)
		return ok && maps.EqualFunc(x, y, same)
	}
	return x == y
}

// reduceParts reduces each part of the results separately, and merges the states in their order.
// With random, about half of the states are encoded as JSON and decoded before. left has the errors
// of the results that reducers refused.
func reduceParts(
	plan *reducer.Plan, parts [][]reducer.Result, random *rand.Rand,
) (values map[string]json.RawMessage, left []error, err error) {
	stored := func(s *reducer.State) (*reducer.State, error) {
		if random == nil || random.IntN(2) == 0 {
			return s, nil
		}
		encoded, err := s.Encode()
		if err != nil {
			return nil, err
		}
		return plan.Decode(encoded)
	}
	total := plan.New()
	for i, part := range parts {
		s := plan.New()
		for _, r := range part {
			if err := s.Add(r); err != nil {
				left = append(left, err)
			}
		}
		if s, err = stored(s); err != nil {
			return nil, nil, err
		}
		if i == 0 {
			total = s
		} else if err := total.Merge(s); err != nil {
			return nil, nil, err
		}
		if total, err = stored(total); err != nil {
			return nil, nil, err
		}
	}
	values, err = total.Values()
	for name, v := range values {
		var line bytes.Buffer
		if err := json.Compact(&line, v); err != nil {
			return nil, nil, fmt.Errorf("aggregate %s: %w", name, err)
		}
		values[name] = line.Bytes()
	}
	return values, left, err
}
