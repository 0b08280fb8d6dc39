package reducer

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
)

// fold is the partial state of a built-in op over the values of its field. It is stored as JSON.
type fold interface {
	// add adds the value of the field in one result, which is neither missing nor null; v is nil if
	// the op has no field. It returns false if the value is of the wrong type. It copies what it
	// keeps.
	add(ordinal int64, v *value) bool
	// merge adds another partial state of the same type.
	merge(other fold)
	// check is called after the state was decoded from JSON. It returns an error if the op can't
	// have written this state.
	check() error
	value() json.RawMessage
}

type builtin struct {
	empty    func() fold
	anyField bool // the op can be used without a field
}

var builtins = map[string]builtin{
	"count":        {func() fold { return &countFold{} }, true},
	"sum":          {func() fold { return &sumFold{} }, false},
	"min":          {func() fold { return &extremeFold{sign: -1} }, false},
	"max":          {func() fold { return &extremeFold{sign: 1} }, false},
	"mean":         {func() fold { return &meanFold{} }, false},
	"distribution": {func() fold { return &distributionFold{} }, false},
	"count_by":     {func() fold { return &countByFold{Counts: map[string]*int64{}} }, false},
	"collect":      {func() fold { return &collectFold{} }, false},
}

func (b builtin) factory(spec Spec) (Accumulator, error) {
	if spec.Field == "" {
		if !b.anyField {
			return nil, fmt.Errorf("op %q needs a field, such as data.cost", spec.Op)
		}
		return &fieldAccumulator{spec: spec, empty: b.empty, fold: b.empty()}, nil
	}
	path, err := parsePath(spec.Field)
	if err != nil {
		return nil, err
	}
	return &fieldAccumulator{spec: spec, path: path, empty: b.empty, fold: b.empty()}, nil
}

// fieldAccumulator is the accumulator of a built-in op over one field. It counts the results that
// it skips.
type fieldAccumulator struct {
	spec    Spec
	path    []string // nil: the op adds every result
	empty   func() fold
	fold    fold
	skipped int64
	alone   *lookup // set when the accumulator is used without a State
}

// lookup finds the field's value for an accumulator that is used without a State.
type lookup struct {
	fields  *extractor
	slot    int
	values  []value
	scratch []byte
}

func (a *fieldAccumulator) Add(r Result) error {
	if a.alone == nil {
		l := &lookup{fields: newExtractor()}
		l.slot = l.fields.slot(a.path)
		l.values = make([]value, l.fields.slots)
		a.alone = l
	}
	l := a.alone
	l.scratch = l.fields.find(r, l.values, l.scratch)
	a.observe(r.Ordinal, l.values, l.slot)
	return nil
}

func (a *fieldAccumulator) observe(ordinal int64, values []value, slot int) {
	if slot == noSlot {
		a.fold.add(ordinal, nil)
		return
	}
	if v := &values[slot]; v.missing() || !a.fold.add(ordinal, v) {
		a.skipped++
	}
}

func (a *fieldAccumulator) Skipped() int64 { return a.skipped }

func (a *fieldAccumulator) Merge(other Accumulator) error {
	o, ok := other.(*fieldAccumulator)
	if !ok || o.spec != a.spec {
		return errors.New("the other is of a different spec")
	}
	a.fold.merge(o.fold)
	a.skipped += o.skipped
	return nil
}

type encodedField struct {
	Skipped int64           `json:"skipped"`
	State   json.RawMessage `json:"state"`
}

func (a *fieldAccumulator) MarshalJSON() ([]byte, error) {
	state, err := a.encodeFold()
	if err != nil {
		return nil, err
	}
	out := append(make([]byte, 0, len(state)+32), '{')
	if a.skipped > 0 {
		out = append(strconv.AppendInt(append(out, `"skipped":`...), a.skipped, 10), ',')
	}
	return append(append(append(out, `"state":`...), state...), '}'), nil
}

// encodeFold calls a fold's own encoder directly, since json.Marshal would scan its output again.
func (a *fieldAccumulator) encodeFold() ([]byte, error) {
	if m, ok := a.fold.(json.Marshaler); ok {
		return m.MarshalJSON()
	}
	return json.Marshal(a.fold)
}

func (a *fieldAccumulator) UnmarshalJSON(b []byte) error {
	var e encodedField
	if err := unmarshalStrict(b, &e); err != nil {
		return err
	}
	if !validCount(e.Skipped) || len(e.State) == 0 || string(e.State) == "null" {
		return errors.New("it is incomplete")
	}
	decoded := a.empty()
	if err := unmarshalStrict(e.State, decoded); err != nil {
		return err
	}
	if err := decoded.check(); err != nil {
		return err
	}
	a.fold, a.skipped = decoded, e.Skipped
	return nil
}

func (a *fieldAccumulator) Value() (json.RawMessage, error) { return a.fold.value(), nil }
