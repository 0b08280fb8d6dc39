// Package reducer computes a group's aggregates from the results of its done jobs, and from the
// errors of its failed ones if the aggregate says over failed or ended. The submission
// lists the aggregates, for example
//
//	[{"as": "cost", "op": "sum", "field": "data.cost"},
//	 {"as": "why", "op": "count_by", "field": "data.code", "over": "failed"}]
//
// An aggregate is a commutative monoid: each of several processes adds results to a partial [State]
// and stores it as JSON; a reader merges all partial states. The value is exactly the same for
// every division of the results and every order. The caller must add each result exactly once.
//
// # Fields
//
// A field is a path into {"data": …, "duration_ms": …} of a job's result: data.cost,
// data.items.0.price, duration_ms. A segment of digits is an index if the value is an array, and a
// name if it is an object. \. and \\ stand for a dot and a backslash in a name. If an object
// repeats a name, the first one that leads to a value counts. If the field is missing, null,
// malformed or of the wrong type, the aggregate skips the result and counts it as skipped (see
// [State.Skipped]); this is not an error.
//
// # Operations
//
//	count         results; with a field, those that have it        empty: 0
//	sum           of numbers, exact                                empty: 0
//	min, max      of numbers, exact                                empty: null
//	mean          of numbers; exact where it is an integer, else
//	              the float64 nearest to the exact mean            empty: null
//	distribution  {count, min, max, mean, stddev, p50, p90, p95,   empty: null
//	              p99, histogram}; stddev is the population's,
//	              histogram is [[from, to, count], …] of up to 24
//	              ranges, percentiles
//	              are within 1 % of the value of nearest rank, unless
//	              it is 10^17 times smaller than the greatest
//	count_by      {value: count} of strings, numbers, booleans     empty: {}
//	collect       [value, …] by ordinal                            empty: []
//
// A number is a JSON number with a magnitude below 1e300; a string that contains a number is not
// one. Numbers are added as decimals: ten times 0.1 is 1, and integers above 2^53 keep their
// digits. A number with digits below 1e-400 is rounded to the nearest float64 first.
//
// count_by shows at most [MaxKeys] keys: short keys first, and alphabetically among keys of one
// length. The choice must not depend on the order of arrival, and short values are more often
// categories. All other values are counted under [OtherKey]. A key longer than [MaxKeyBytes] is cut
// and ends in "…". The number 1 and the string "1" are one key.
//
// collect shows the longest sequence of values, by ordinal, that has at most [MaxValues] values and
// at most [MaxValuesBytes] of compact JSON. A value that is larger than that alone, or nested
// deeper than [MaxValueDepth], is skipped. The aggregate is always an array.
//
// Reducers written in Go can be added: see [Registry.Register] and [MapReduce].
package reducer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/api"
)

// ErrSkip tells MapReduce to leave a result out without reporting an error; the map function
// returns it.
var ErrSkip = errors.New("result skipped")

// Result is what reducers get of one ended job: the result of a done job, or the error of a failed
// one.
type Result struct {
	Ordinal    int64           // the job's place in its group, from 0
	Attempts   int             // number of attempts
	DurationMS float64         // duration of the last attempt, in milliseconds
	Data       json.RawMessage // what the processor returned; may be empty; see also Failed
	// Failed says that the job failed. Data is then {"code": …, "error": …, "attempts": …}, and
	// DurationMS is NaN, so that the field duration_ms counts as missing.
	Failed bool
}

// Spec is one aggregate that a submission asks for.
type Spec struct {
	As    string // the aggregate's name, unique in a group
	Op    string // the name of a reducer in the registry
	Field string // a path into the result; each op decides whether it needs one
	Over  string // OverDone ("" too), OverFailed or OverEnded
}

// These are the values of [Spec.Over]: of which jobs an aggregate is.
const (
	OverDone   = "done"
	OverFailed = "failed"
	OverEnded  = "ended" // done and failed
)

// covers reports whether the aggregate is of such a job.
func (s Spec) covers(failed bool) bool {
	return s.Over == OverEnded || failed == (s.Over == OverFailed)
}

// Accumulator is one aggregate's partial state. It is not safe for concurrent use.
type Accumulator interface {
	// Add adds one result. A result that the aggregate can't use is skipped and counted; this is
	// not an error. An error means that the result was left out for a reason that should be logged.
	// Even then the accumulator stays usable, and the result must not be added again.
	Add(Result) error
	// Merge adds another partial state of the same Spec. The caller must not use it afterwards.
	// After an error, neither may be used.
	Merge(other Accumulator) error
	// MarshalJSON encodes the partial state.
	json.Marshaler
	// UnmarshalJSON replaces the partial state by an encoded one.
	json.Unmarshaler
	// Value returns the aggregate's value as JSON, computed from this partial state alone.
	Value() (json.RawMessage, error)
}

// Skipper is an Accumulator that counts skipped results.
type Skipper interface {
	Skipped() int64
}

// Factory returns an empty accumulator, or refuses the Spec with an error that the submitter sees.
// If a factory accepts a Spec once, it must accept it always.
type Factory func(Spec) (Accumulator, error)

// maxNameBytes bounds an aggregate's name.
const maxNameBytes = 128

// Registry holds reducers by the name of their op. Call Register only before the registry is
// shared; afterwards it is safe for concurrent use.
type Registry struct {
	factories map[string]Factory
}

// NewRegistry returns a registry with the built-in ops.
func NewRegistry() *Registry {
	r := &Registry{factories: make(map[string]Factory, len(builtins))}
	for op, b := range builtins {
		r.factories[op] = b.factory
	}
	return r
}

// Register adds a reducer. It refuses a name that is already used or that is no valid id.
func (r *Registry) Register(op string, factory Factory) error {
	switch {
	case !api.ValidID(op):
		return fmt.Errorf("register reducer %q: the name must "+api.IDRule, op)
	case factory == nil:
		return fmt.Errorf("register reducer %q: it has no factory", op)
	case r.factories[op] != nil:
		return fmt.Errorf("register reducer %q: the name is taken", op)
	}
	r.factories[op] = ownFactory(factory)
	return nil
}

// Ops returns the names of all registered ops, sorted.
func (r *Registry) Ops() []string { return slices.Sorted(maps.Keys(r.factories)) }

// Compile checks the specs and makes a plan for many results. The error names every invalid spec. A
// plan without specs is valid; its states only count results.
func (r *Registry) Compile(specs []Spec) (*Plan, error) {
	p := &Plan{specs: slices.Clone(specs), fields: newExtractor()}
	seen := make(map[string]bool, len(specs))
	var errs []error
	for i, spec := range specs {
		if err := r.compile(p, spec, seen[spec.As]); err != nil {
			errs = append(errs, fmt.Errorf("compile aggregate %d %q: %w", i, spec.As, err))
		}
		seen[spec.As] = true
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return p, nil
}

// CompileStored makes the plan of specs that were accepted before, perhaps by another process. An
// aggregate whose reducer this registry lacks (see [Plan.Missing]), or whose reducer refuses it
// now, is null.
func (r *Registry) CompileStored(specs []Spec) *Plan {
	p := &Plan{specs: slices.Clone(specs), fields: newExtractor()}
	for _, spec := range specs {
		if err := r.compile(p, spec, false); err != nil {
			failed := &own{other: true}
			failed.keep(err)
			p.parts = append(p.parts, part{slot: noSlot, make: func(Spec) (Accumulator, error) { return failed, err }})
			if r.factories[spec.Op] == nil {
				p.missing = append(p.missing, spec.Op)
			}
		}
	}
	slices.Sort(p.missing)
	p.missing = slices.Compact(p.missing)
	return p
}

func (r *Registry) compile(p *Plan, spec Spec, duplicate bool) error {
	if err := checkName(spec.As); err != nil {
		return err
	}
	if duplicate {
		return errors.New("the name is used twice")
	}
	if !slices.Contains([]string{"", OverDone, OverFailed, OverEnded}, spec.Over) {
		return fmt.Errorf("over %q is unknown, use done, failed or ended", spec.Over)
	}
	factory, ok := r.factories[spec.Op]
	if !ok {
		return fmt.Errorf("op %q is unknown, use one of %s", spec.Op, strings.Join(r.Ops(), ", "))
	}
	acc, err := factory(spec)
	if err != nil {
		return err
	}
	part := part{make: factory, slot: noSlot}
	if f, ok := acc.(*fieldAccumulator); ok {
		part.slot = p.fields.slot(f.path)
	}
	p.parts = append(p.parts, part)
	return nil
}

func checkName(as string) error {
	switch {
	case as == "":
		return errors.New("it has no name, set as")
	case len(as) > maxNameBytes:
		return fmt.Errorf("the name is longer than %d bytes", maxNameBytes)
	case !utf8.ValidString(as) || strings.ContainsFunc(as, unicode.IsControl):
		return errors.New("the name has bytes that are not printable UTF-8")
	}
	return nil
}

// unmarshalStrict decodes JSON, but refuses unknown fields and trailing data: a state of another
// format must not be read as if it were complete.
func unmarshalStrict(b []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the JSON value")
	}
	return nil
}

func validCount(n int64) bool { return n >= 0 && n <= maxCount }

func separator(i int, first string) string {
	if i == 0 {
		return first
	}
	return ","
}

func null() json.RawMessage { return json.RawMessage("null") }

// floatJSON returns f as JSON, but null for NaN and infinities, which only a corrupt state can
// produce.
func floatJSON(f float64) json.RawMessage {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return null()
	}
	b, err := json.Marshal(f)
	if err != nil {
		return null()
	}
	return b
}
