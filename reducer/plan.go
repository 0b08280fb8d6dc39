package reducer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// maxCount bounds the counts in a decoded state. It is far above the number of jobs in any group,
// so that merging a corrupt state can't overflow.
const maxCount = 1 << 53

// Plan is a compiled list of aggregates. It is immutable and safe for concurrent use.
type Plan struct {
	specs   []Spec
	parts   []part
	fields  *extractor
	missing []string // see Missing
}

// part says how to make one aggregate's accumulator, and in which slot its field's value is.
type part struct {
	make Factory
	slot int
}

// Missing returns the ops, sorted, that the registry of [Registry.CompileStored] lacks. A state of
// this plan can be decoded, merged and read without them, but nothing may be added to it.
func (p *Plan) Missing() []string { return p.missing }

// State is the partial state of all aggregates of a plan, and the number of added results. It is
// not safe for concurrent use.
type State struct {
	plan    *Plan
	count   int64
	accs    []Accumulator
	byField []*fieldAccumulator // the accs that use values of fields; nil for the others
	values  []value             // the values of the fields of the result that Add adds
	scratch []byte
}

// New returns an empty state. An aggregate whose factory refuses a Spec that it accepted in Compile
// has failed (see Failed).
func (p *Plan) New() *State {
	n := len(p.parts)
	s := &State{plan: p}
	if n == 0 {
		return s
	}
	s.accs, s.byField = make([]Accumulator, n), make([]*fieldAccumulator, n)
	s.values = make([]value, p.fields.slots)
	for i, part := range p.parts {
		s.accs[i], _ = part.make(p.specs[i]) // the accumulator has the error
		s.byField[i], _ = s.accs[i].(*fieldAccumulator)
	}
	return s
}

// encodedState is the JSON of a State. Aggregates are stored by name, so that people can read a
// stored state.
type encodedState struct {
	Count      *int64                     `json:"count"`
	Aggregates map[string]json.RawMessage `json:"aggregates"`
	Failed     map[string]string          `json:"failed,omitempty"` // see State.Failed
}

// Failed returns, by the aggregate's name, why a reducer written in Go has failed for good: it
// panicked or returned an error when it merged, encoded or decoded its state. The value is null.
func (s *State) Failed() map[string]string {
	reasons := map[string]string{}
	for i, acc := range s.accs {
		if o, ok := acc.(*own); ok && o.err != nil {
			reasons[s.plan.specs[i].As] = o.err.Error()
		}
	}
	return reasons
}

// Decode reads a state that Encode wrote under a plan with the same specs.
func (p *Plan) Decode(encoded []byte) (*State, error) {
	var e encodedState
	if err := unmarshalStrict(encoded, &e); err != nil {
		return nil, fmt.Errorf("decode aggregates: %w", err)
	}
	if e.Count == nil || !validCount(*e.Count) {
		return nil, errors.New("decode aggregates: the count is missing or out of range")
	}
	if len(e.Aggregates) != len(p.specs) {
		return nil, fmt.Errorf("decode aggregates: it holds %d, the plan has %d", len(e.Aggregates), len(p.specs))
	}
	s := p.New()
	s.count = *e.Count
	for i, acc := range s.accs {
		as := p.specs[i].As
		part, ok := e.Aggregates[as]
		if !ok {
			return nil, fmt.Errorf("decode aggregate %q: it is missing", as)
		}
		if reason, failed := e.Failed[as]; failed {
			s.accs[i], s.byField[i] = &own{err: errors.New(reason)}, nil
		} else if err := acc.UnmarshalJSON(part); err != nil {
			return nil, fmt.Errorf("decode aggregate %q: %w", as, err)
		}
	}
	return s, nil
}

// Count returns the number of added results, skipped ones included.
func (s *State) Count() int64 { return s.count }

// Add adds one result to every aggregate whose Spec.Over covers the job; it copies what it keeps.
// The result counts even if Add returns an error, and must not be added again. The error joins
// those of all reducers written in Go that left the result out.
func (s *State) Add(r Result) error {
	s.count++
	if len(s.accs) == 0 {
		return nil
	}
	s.scratch = s.plan.fields.find(r, s.values, s.scratch)
	var errs []error
	cloned := false
	for i, acc := range s.accs {
		if !s.plan.specs[i].covers(r.Failed) {
			continue
		}
		if f := s.byField[i]; f != nil {
			f.observe(r.Ordinal, s.values, s.plan.parts[i].slot)
			continue
		}
		if !cloned { // a reducer may keep a part of the data
			r.Data, cloned = bytes.Clone(r.Data), true
		}
		if err := acc.Add(r); err != nil {
			errs = append(errs, fmt.Errorf("add result %d to aggregate %q: %w", r.Ordinal, s.plan.specs[i].As, err))
		}
	}
	return errors.Join(errs...)
}

// Merge adds another partial state under a plan with the same specs. The caller must not use the
// other state afterwards. After an error, neither state may be used.
func (s *State) Merge(other *State) error {
	if s == other {
		return errors.New("merge aggregates: a state can't be merged with itself")
	}
	if s.plan != other.plan && !slices.Equal(s.plan.specs, other.plan.specs) {
		return errors.New("merge aggregates: the states are of different plans")
	}
	for i, acc := range s.accs {
		if o, ok := other.accs[i].(*own); ok && o.err != nil {
			s.accs[i], s.byField[i] = o, nil
		} else if err := acc.Merge(other.accs[i]); err != nil {
			return fmt.Errorf("merge aggregate %q: %w", s.plan.specs[i].As, err)
		}
	}
	s.count += other.count
	return nil
}

// Encode returns the state as JSON for Plan.Decode.
func (s *State) Encode() ([]byte, error) {
	if missing := s.plan.missing; len(missing) > 0 {
		return nil, fmt.Errorf("encode aggregates: this process lacks the reducer %s", strings.Join(missing, ", "))
	}
	out := strconv.AppendInt([]byte(`{"count":`), s.count, 10)
	for i, acc := range s.accs {
		as := s.plan.specs[i].As
		if o, ok := acc.(*own); ok && o.other {
			return nil, fmt.Errorf("encode aggregate %q: this process can't use its state: %w", as, o.err)
		}
		name, err := json.Marshal(as)
		if err != nil {
			return nil, fmt.Errorf("encode aggregate %q: %w", as, err)
		}
		// Call MarshalJSON directly: json.Marshal would scan a large state three more times.
		part, err := acc.MarshalJSON()
		if err != nil {
			return nil, fmt.Errorf("encode aggregate %q: %w", as, err)
		}
		out = append(out, separator(i, `,"aggregates":{`)...)
		out = append(append(append(out, name...), ':'), part...)
	}
	if len(s.accs) > 0 {
		out = append(out, '}')
	}
	if reasons := s.Failed(); len(reasons) > 0 {
		text, err := json.Marshal(reasons)
		if err != nil {
			return nil, fmt.Errorf("encode aggregates: %w", err)
		}
		out = append(append(out, `,"failed":`...), text...)
	}
	return append(out, '}'), nil
}

// Values returns the aggregates by name, each as valid JSON. An aggregate that a reducer written in
// Go can't compute is null, and the joined error says why. The map always contains every aggregate.
func (s *State) Values() (map[string]json.RawMessage, error) {
	values := make(map[string]json.RawMessage, len(s.accs))
	var errs []error
	for i, acc := range s.accs {
		as := s.plan.specs[i].As
		v, err := acc.Value()
		if err != nil {
			errs = append(errs, fmt.Errorf("compute aggregate %q: %w", as, err))
			v = null()
		}
		values[as] = v
	}
	return values, errors.Join(errs...)
}

// Skipped returns, by the aggregate's name, how many results the aggregate skipped. Aggregates that
// skipped none, or whose Accumulator is no Skipper, are left out.
func (s *State) Skipped() map[string]int64 {
	skipped := make(map[string]int64)
	for i, acc := range s.accs {
		if k, ok := acc.(Skipper); ok {
			skipped[s.plan.specs[i].As] = k.Skipped()
		}
	}
	maps.DeleteFunc(skipped, func(_ string, n int64) bool { return n == 0 })
	return skipped
}
