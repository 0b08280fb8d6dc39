package reducer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
)

// maxCount bounds the counts that a decoded state may hold, far above any group's jobs, so that
// merging a corrupt one can't overflow.
const maxCount = 1 << 53

// Plan is a compiled list of aggregates. It is immutable and safe for concurrent use.
type Plan struct {
	specs  []Spec
	parts  []part
	fields *extractor
}

// part is how one aggregate is made and where its field lands.
type part struct {
	make Factory
	slot int
}

// State is the partial state of all aggregates of a plan, and the number of results it holds. It
// is not safe for concurrent use.
type State struct {
	plan    *Plan
	count   int64
	accs    []Accumulator
	byField []*fieldAccumulator // accs that take the field found for them, nil for the others
	values  []value             // what the fields of the result at hand hold
	scratch []byte
}

// New makes an empty state. It panics when a registered factory refuses a Spec that it took in
// Compile.
func (p *Plan) New() *State {
	n := len(p.parts)
	s := &State{plan: p}
	if n == 0 {
		return s
	}
	s.accs, s.byField = make([]Accumulator, n), make([]*fieldAccumulator, n)
	s.values = make([]value, p.fields.slots)
	for i, part := range p.parts {
		acc, err := part.make(p.specs[i])
		if err != nil || acc == nil {
			panic(fmt.Sprintf("reducer %q refuses a spec that it has taken before: %v", p.specs[i].Op, err))
		}
		s.accs[i] = acc
		s.byField[i], _ = acc.(*fieldAccumulator)
	}
	return s
}

// encodedState is a State as JSON. Aggregates go by name, so that a state can be read by eye.
type encodedState struct {
	Count      *int64                     `json:"count"`
	Aggregates map[string]json.RawMessage `json:"aggregates"`
}

// Decode takes up a state that Encode wrote under a plan of the same specs.
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
		if err := acc.UnmarshalJSON(part); err != nil {
			return nil, fmt.Errorf("decode aggregate %q: %w", as, err)
		}
	}
	return s, nil
}

// Count is the number of results that were added, skipped ones included.
func (s *State) Count() int64 { return s.count }

// Add folds one result into every aggregate, and keeps nothing of it that it doesn't copy. The
// result counts whatever is returned and must not be added again: an error, joined over all
// aggregates, tells which of the reducers written in Go left it out, and why.
func (s *State) Add(r Result) error {
	s.count++
	if len(s.accs) == 0 {
		return nil
	}
	s.scratch = s.plan.fields.find(r, s.values, s.scratch)
	var errs []error
	cloned := false
	for i, acc := range s.accs {
		if f := s.byField[i]; f != nil {
			f.observe(r.Ordinal, s.values, s.plan.parts[i].slot)
			continue
		}
		if !cloned { // for whoever keeps a part of it
			r.Data, cloned = bytes.Clone(r.Data), true
		}
		if err := acc.Add(r); err != nil {
			errs = append(errs, fmt.Errorf("add result %d to aggregate %q: %w", r.Ordinal, s.plan.specs[i].As, err))
		}
	}
	return errors.Join(errs...)
}

// Merge folds in another partial state, made under a plan of the same specs, which the caller gives
// up. After an error neither is to be used.
func (s *State) Merge(other *State) error {
	if s == other {
		return errors.New("merge aggregates: a state can't be merged with itself")
	}
	if s.plan != other.plan && !slices.Equal(s.plan.specs, other.plan.specs) {
		return errors.New("merge aggregates: the states are of different plans")
	}
	for i, acc := range s.accs {
		if err := acc.Merge(other.accs[i]); err != nil {
			return fmt.Errorf("merge aggregate %q: %w", s.plan.specs[i].As, err)
		}
	}
	s.count += other.count
	return nil
}

// Encode writes the state as JSON for Plan.Decode.
func (s *State) Encode() ([]byte, error) {
	out := strconv.AppendInt([]byte(`{"count":`), s.count, 10)
	for i, acc := range s.accs {
		as := s.plan.specs[i].As
		name, err := json.Marshal(as)
		if err != nil {
			return nil, fmt.Errorf("encode aggregate %q: %w", as, err)
		}
		// Not through json.Marshal, which would scan a large state three times more.
		part, err := acc.MarshalJSON()
		if err != nil {
			return nil, fmt.Errorf("encode aggregate %q: %w", as, err)
		}
		if s.byField[i] == nil && !json.Valid(part) {
			return nil, fmt.Errorf("encode aggregate %q: its reducer wrote invalid JSON", as)
		}
		out = append(out, separator(i, `,"aggregates":{`)...)
		out = append(append(append(out, name...), ':'), part...)
	}
	if len(s.accs) > 0 {
		out = append(out, '}')
	}
	return append(out, '}'), nil
}

// Values are the aggregates by name, each valid JSON. One that a reducer written in Go can't
// compute is null, and the joined error says why; the map is complete in any case.
func (s *State) Values() (map[string]json.RawMessage, error) {
	values := make(map[string]json.RawMessage, len(s.accs))
	var errs []error
	for i, acc := range s.accs {
		as := s.plan.specs[i].As
		v, err := acc.Value()
		if err == nil && s.byField[i] == nil && !json.Valid(v) {
			err = errors.New("its reducer wrote invalid JSON")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("compute aggregate %q: %w", as, err))
			v = null()
		}
		values[as] = v
	}
	return values, errors.Join(errs...)
}

// Skipped counts by name the results that an aggregate had no use for; names without any are left
// out.
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
