package reducer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"unicode/utf8"
)

// Bounds of the op collect.
const (
	MaxValues      = 1000
	MaxValuesBytes = 256 << 10 // bytes of compact JSON, all values together
	MaxValueDepth  = 1000      // arrays and objects inside each other
)

// collectFold is the partial state of the op collect. It keeps the longest sequence of values, by
// ordinal, that is within the bounds. cut is the first ordinal that was left out; no value from cut
// on is kept. Merging is exact: a partial state leaves out a value only if it doesn't fit behind
// the values before it, and the merged state has at least as many values before it.
type collectFold struct {
	values []collected // by ordinal; values with equal ordinals (a caller's mistake) by their text
	bytes  int
	cut    *int64 // nil: nothing left out
}

type collected struct {
	ordinal int64
	raw     []byte
}

func byOrdinal(a, b collected) int {
	return cmp.Or(cmp.Compare(a.ordinal, b.ordinal), bytes.Compare(a.raw, b.raw))
}

func (f *collectFold) add(ordinal int64, v *value) bool {
	raw, ok := canonical(v.raw)
	if ok {
		f.insert(collected{ordinal, raw})
	}
	return ok
}

func (f *collectFold) insert(c collected) {
	if f.cut != nil && c.ordinal >= *f.cut {
		return
	}
	at := len(f.values)
	if at > 0 && byOrdinal(f.values[at-1], c) > 0 {
		at, _ = slices.BinarySearchFunc(f.values, c, byOrdinal)
	}
	f.values = slices.Insert(f.values, at, c)
	f.bytes += len(c.raw)
	for len(f.values) > MaxValues || f.bytes > MaxValuesBytes {
		f.cutAt(f.values[len(f.values)-1].ordinal)
	}
}

// cutAt removes all values from the given ordinal on. Later values from there on are left out, too.
func (f *collectFold) cutAt(ordinal int64) {
	if f.cut == nil || ordinal < *f.cut {
		f.cut = new(ordinal)
	}
	last := len(f.values)
	for last > 0 && f.values[last-1].ordinal >= ordinal {
		last--
		f.bytes -= len(f.values[last].raw)
	}
	clear(f.values[last:])
	f.values = f.values[:last]
}

func (f *collectFold) merge(other fold) {
	o := other.(*collectFold)
	if o.cut != nil {
		f.cutAt(*o.cut)
	}
	for _, c := range o.values {
		f.insert(c)
	}
}

func (f *collectFold) value() json.RawMessage {
	out := append(make([]byte, 0, f.bytes+len(f.values)+2), '[')
	for i, c := range f.values {
		out = append(append(out, separator(i, "")...), c.raw...)
	}
	return append(out, ']')
}

// MarshalJSON returns the state of the op collect: {"cut": n, "ordinals": […], "values": […]},
// without cut if nothing was left out.
func (f *collectFold) MarshalJSON() ([]byte, error) {
	out := append(make([]byte, 0, f.bytes+16*len(f.values)+64), '{')
	if f.cut != nil {
		out = append(strconv.AppendInt(append(out, `"cut":`...), *f.cut, 10), ',')
	}
	out = append(out, `"ordinals":[`...)
	for i, c := range f.values {
		out = strconv.AppendInt(append(out, separator(i, "")...), c.ordinal, 10)
	}
	out = append(append(out, `],"values":`...), f.value()...)
	return append(out, '}'), nil
}

func (f *collectFold) UnmarshalJSON(b []byte) error {
	var e struct {
		Cut      *int64            `json:"cut"`
		Ordinals []int64           `json:"ordinals"`
		Values   []json.RawMessage `json:"values"`
	}
	if err := unmarshalStrict(b, &e); err != nil {
		return err
	}
	if len(e.Ordinals) != len(e.Values) {
		return errors.New("its ordinals and values differ in number")
	}
	*f = collectFold{cut: e.Cut}
	for i, ordinal := range e.Ordinals {
		f.insert(collected{ordinal, e.Values[i]}) // already canonical: add made it so
	}
	return nil
}

func (f *collectFold) check() error { return nil }

// canonical returns a copy of a value in the form that json.Marshal would write, so that storing
// the value doesn't change its size. It replaces invalid UTF-8, and refuses a value that is invalid
// JSON or exceeds the bounds alone.
func canonical(raw []byte) ([]byte, bool) {
	if depth(raw) > MaxValueDepth {
		return nil, false
	}
	if !utf8.Valid(raw) {
		raw = bytes.ToValidUTF8(raw, []byte("\uFFFD"))
	}
	compact, err := json.Marshal(json.RawMessage(raw))
	return compact, err == nil && len(compact) <= MaxValuesBytes
}

// depth returns how deeply arrays and objects are nested in raw. encoding/json reads at most 10,000
// levels, and the stored document adds several levels around the value.
func depth(raw []byte) (deepest int) {
	var now int
	inString := false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			now++
			deepest = max(deepest, now)
		case c == '}' || c == ']':
			now--
		}
	}
	return deepest
}
