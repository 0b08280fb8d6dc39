// Package reducer turns the results of a group's done jobs into the aggregates that were asked for
// at submit, such as
//
//	[{"as": "cost", "op": "sum", "field": "data.cost"}]
//
// An aggregate is a commutative monoid: any number of processes each fold results into a partial
// [State], store it as JSON, take it up again, and whoever reads merges all partials. The value is
// the same, to the last digit, for every split and every order. The caller sees to it that each
// result is added once.
//
// # Fields
//
// A field is a path into {"data": …, "duration_ms": …} of a job's result: data.cost,
// data.items.0.price, duration_ms. A segment of digits is an index where it meets an array and a
// name where it meets an object; \. and \\ stand for a dot and a backslash within a name. Where an
// object repeats a name, the first that leads to a value counts. A result whose field is missing,
// null, of the wrong type or malformed is skipped by that aggregate and counted as such (see
// [State.Skipped]); it stops nothing.
//
// # Operations
//
//	count         results; with a field, those that have it        empty: 0
//	sum           of numbers, exact                                empty: 0
//	min, max      of numbers, exact                                empty: null
//	mean          of numbers; exact where it is an integer, else
//	              the float64 nearest to the exact mean            empty: null
//	distribution  {count, min, max, mean, stddev, p50, p90, p95,   empty: null
//	              p99}; stddev is the population's, percentiles
//	              are within 1 % of the value of nearest rank, unless
//	              it is 10^17 times smaller than the greatest
//	count_by      {value: count} of strings, numbers, booleans     empty: {}
//	collect       [value, …] by ordinal                            empty: []
//
// A number is a JSON number with a magnitude below 1e300; one that is written as a string is not a
// number. It is reduced as the decimal that it is written as, so that ten times 0.1 is 1, and
// integers beyond 2^53 keep their digits. Digits below 1e-400 are rounded away first.
//
// count_by shows at most [MaxKeys] keys: the shortest first and among those of one length the
// alphabetically first, since the choice must not depend on the order of arrival and short values
// are more likely to be categories. The rest is counted as [OtherKey]. A key longer than
// [MaxKeyBytes] is cut and ends in "…". The number 1 and the string "1" are one key.
//
// collect shows the longest run of values, by ordinal, that has at most [MaxValues] of them and at
// most [MaxValuesBytes] of compact JSON. A value that is larger than that by itself or nested
// deeper than [MaxValueDepth] is skipped. The shape is an array in any case.
//
// Reducers written in Go plug in beside these: see [Registry.Register] and [MapReduce].
package reducer

import (
	"encoding/json"
	"errors"
)

// ErrSkip is what a map function returns to leave a result out without it being an error.
var ErrSkip = errors.New("result skipped")

// Result is one done job's outcome.
type Result struct {
	Ordinal    int64           // the job's place in its group, from 0
	Attempts   int             // runs that it took
	DurationMS float64         // the last run, in milliseconds
	Data       json.RawMessage // what the processor returned; may be empty
}

// Spec is one aggregate as asked for at submit.
type Spec struct {
	As    string // its name in the answer, unique in a group
	Op    string // a name in the registry
	Field string // a path into the result; which ops need one is theirs to say
}

// Accumulator is one aggregate's partial state. It is not safe for concurrent use.
type Accumulator interface {
	// Add folds one result in. A result that the aggregate has no use for is skipped and counted,
	// not an error. An error also means that the result was left out, for a reason worth a log
	// line; the accumulator stays usable, and the result is not added again.
	Add(Result) error
	// Merge folds in the partial state of the same Spec, which the caller gives up. After an error
	// neither is to be used.
	Merge(other Accumulator) error
	// MarshalJSON encodes the partial state.
	json.Marshaler
	// UnmarshalJSON replaces the partial state by an encoded one.
	json.Unmarshaler
	// Value is what the group shows, as JSON, computed from the partial state as if it were all.
	Value() (json.RawMessage, error)
}

// Skipper is an Accumulator that counts the results it skipped.
type Skipper interface {
	Skipped() int64
}

// Factory makes the empty state of an aggregate, or refuses the Spec with an error that is shown to
// whoever submitted it. A Spec that it has accepted once it accepts always.
type Factory func(Spec) (Accumulator, error)
