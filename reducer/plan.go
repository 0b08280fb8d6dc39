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
	make    Factory
	slot    int
	refused error // why the aggregate can't be computed; nil: it can
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

// New returns an empty state.
func (p *Plan) New() *State {
	n := len(p.parts)
	s := &State{plan: p}
	if n == 0 {
		return s
	}
	s.accs, s.byField = make([]Accumulator, n), make([]*fieldAccumulator, n)
	s.values = make([]value, p.fields.slots)
	for i, part := range p.parts {
		acc, err := Accumulator(nil), part.refused
		if err == nil {
			acc, err = makeAccumulator(part.make, p.specs[i])
		}
		if err != nil {
			acc = &failed{err.Error()}
		}
		s.accs[i] = acc
		s.byField[i], _ = acc.(*fieldAccumulator)
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

// failed takes the place of an accumulator that has failed for good: it can't encode its state, or
// refuses the state that it has encoded. It keeps the reason, so that the group can end.
type failed struct{ reason string }

func (*failed) Add(Result) error                  { return nil }
func (*failed) Merge(Accumulator) error           { return nil }
func (*failed) MarshalJSON() ([]byte, error)      { return null(), nil }
func (*failed) UnmarshalJSON([]byte) error        { return nil }
func (f *failed) Value() (json.RawMessage, error) { return nil, errors.New(f.reason) }

// guardOwn calls a method of the i-th accumulator. If it is a reducer written in Go, an error or a
// panic makes the aggregate fail for good; an error of a built-in one, which only a damaged state
// can cause, is returned.
func (s *State) guardOwn(i int, call func() error) error {
	if s.byField[i] != nil {
		return call()
	}
	if err := guard(call); err != nil {
		s.accs[i] = &failed{cutReason(err.Error())}
	}
	return nil
}

// cutReason bounds the text of an error that is stored with the aggregate.
func cutReason(reason string) string {
	const most = 500
	if len(reason) > most {
		reason = reason[:most] + "…"
	}
	return strings.ToValidUTF8(reason, "")
}

// Failed returns, by the aggregate's name, why an aggregate has failed for good: its value is null.
func (s *State) Failed() map[string]string {
	reasons := map[string]string{}
	for i, acc := range s.accs {
		if f, ok := acc.(*failed); ok {
			reasons[s.plan.specs[i].As] = f.reason
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
		if reason, bad := e.Failed[as]; bad {
			s.accs[i], s.byField[i] = &failed{reason}, nil
			continue
		}
		if err := s.guardOwn(i, func() error { return acc.UnmarshalJSON(part) }); err != nil {
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
		if err := guard(func() error { return acc.Add(r) }); err != nil {
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
		if f, bad := other.accs[i].(*failed); bad {
			s.accs[i], s.byField[i] = f, nil
			continue
		}
		if err := s.guardOwn(i, func() error { return acc.Merge(other.accs[i]) }); err != nil {
			return fmt.Errorf("merge aggregate %q: %w", s.plan.specs[i].As, err)
		}
	}
	s.count += other.count
	return nil
}

// Encode returns the state as JSON for Plan.Decode. A reducer that can't encode its state fails for
// good (see Failed).
func (s *State) Encode() ([]byte, error) {
	if missing := s.plan.missing; len(missing) > 0 {
		return nil, fmt.Errorf("encode aggregates: this process lacks the reducer %s", strings.Join(missing, ", "))
	}
	out := strconv.AppendInt([]byte(`{"count":`), s.count, 10)
	for i, acc := range s.accs {
		as := s.plan.specs[i].As
		name, err := json.Marshal(as)
		if err != nil {
			return nil, fmt.Errorf("encode aggregate %q: %w", as, err)
		}
		// Call MarshalJSON directly: json.Marshal would scan a large state three more times.
		part := json.RawMessage(nil)
		err = s.guardOwn(i, func() (err error) {
			if part, err = acc.MarshalJSON(); err == nil && s.byField[i] == nil && !json.Valid(part) {
				err = errors.New("its reducer wrote invalid JSON")
			}
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("encode aggregate %q: %w", as, err)
		}
		if _, bad := s.accs[i].(*failed); bad {
			part = null()
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
		var v json.RawMessage
		err := guard(func() (err error) {
			if v, err = acc.Value(); err == nil && s.byField[i] == nil && !json.Valid(v) {
				err = errors.New("its reducer wrote invalid JSON")
			}
			return err
		})
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
