package reducer

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/bulkaction/bulkaction/internal/jsonscan"
)

// Bounds of a field path.
const (
	maxFieldBytes    = 512
	maxFieldSegments = 32
)

const noSlot = -1

// parsePath splits a field path into its segments. The first segment is data or duration_ms.
func parsePath(field string) ([]string, error) {
	if len(field) > maxFieldBytes {
		return nil, fmt.Errorf("parse field: it is longer than %d bytes", maxFieldBytes)
	}
	path, err := splitPath(field)
	if err != nil {
		return nil, fmt.Errorf("parse field %q: %w", field, err)
	}
	switch {
	case len(path) > maxFieldSegments:
		return nil, fmt.Errorf("parse field %q: it has more than %d segments", field, maxFieldSegments)
	case path[0] != "data" && path[0] != "duration_ms":
		return nil, fmt.Errorf("parse field %q: it must start with data or be duration_ms", field)
	case path[0] == "duration_ms" && len(path) > 1:
		return nil, fmt.Errorf("parse field %q: duration_ms is a number and has no parts", field)
	}
	return path, nil
}

func splitPath(field string) ([]string, error) {
	var path []string
	var segment strings.Builder
	for i := 0; i <= len(field); i++ {
		switch {
		case i == len(field) || field[i] == '.':
			if segment.Len() == 0 {
				return nil, errors.New("a segment is empty")
			}
			path = append(path, segment.String())
			segment.Reset()
		case field[i] == '\\':
			i++
			if i == len(field) || field[i] != '.' && field[i] != '\\' {
				return nil, errors.New(`a backslash must be followed by a dot or a backslash`)
			}
			segment.WriteByte(field[i])
		default:
			segment.WriteByte(field[i])
		}
	}
	return path, nil
}

// extractor finds several fields of a result in one pass over its JSON. After the last call of slot
// it is immutable.
type extractor struct {
	slots    int
	data     *node // nil: no field is in data
	inData   int   // number of slots for fields in data
	duration int   // slot of duration_ms, or noSlot
}

// node is a place in the JSON: a field, or an object or array that contains fields.
type node struct {
	slot     int
	edges    []edge
	maxIndex int // the greatest array index among its edges, or -1
}

type edge struct {
	name  string
	index int // index in an array, or -1 if name is not an index
	to    *node
}

func newNode() *node { return &node{slot: noSlot, maxIndex: -1} }

func newExtractor() *extractor { return &extractor{duration: noSlot} }

// slot returns the position in values where find stores the value of a path, and reserves one for a
// new path. It returns noSlot for an empty path. Equal paths share one slot.
func (x *extractor) slot(path []string) int {
	if len(path) == 0 {
		return noSlot
	}
	if path[0] == "duration_ms" {
		if x.duration == noSlot {
			x.duration = x.next()
		}
		return x.duration
	}
	if x.data == nil {
		x.data = newNode()
	}
	n := x.data
	for _, name := range path[1:] {
		n = n.child(name)
	}
	if n.slot == noSlot {
		n.slot = x.next()
		x.inData++
	}
	return n.slot
}

func (x *extractor) next() int {
	x.slots++
	return x.slots - 1
}

func (n *node) child(name string) *node {
	for _, e := range n.edges {
		if e.name == name {
			return e.to
		}
	}
	e := edge{name: name, index: arrayIndex(name), to: newNode()}
	n.edges = append(n.edges, e)
	n.maxIndex = max(n.maxIndex, e.index)
	return e.to
}

// arrayIndex returns the index that a segment stands for, or -1 if it can't be one: it is not all
// digits, has a leading zero, or is 2^31 or more.
func arrayIndex(name string) int {
	i, err := strconv.ParseUint(name, 10, 31)
	if err != nil || name[0] == '0' && len(name) > 1 {
		return -1
	}
	return int(i)
}

// find sets values to the values of the result's fields. They point into the result and into
// scratch; find returns the (possibly larger) scratch for the next call.
func (x *extractor) find(r Result, values []value, scratch []byte) []byte {
	clear(values)
	if x.data != nil && len(r.Data) > 0 {
		s := scanner{text: r.Data, values: values, missing: x.inData}
		s.root(x.data)
	}
	if x.duration != noSlot && !math.IsNaN(r.DurationMS) && !math.IsInf(r.DurationMS, 0) {
		scratch = strconv.AppendFloat(scratch[:0], r.DurationMS, 'g', -1, 64)
		values[x.duration].raw = scratch
	}
	return scratch
}

// value is the value of a field in one result: JSON text that is not validated.
type value struct {
	raw    []byte // nil when missing
	num    number
	parsed bool
	isNum  bool
}

func (v *value) missing() bool { return v.raw == nil || string(v.raw) == "null" }

// number returns the value as a number. It parses the text only once, since several aggregates may
// use the value.
func (v *value) number() (*number, bool) {
	if !v.parsed {
		v.num, v.isNum = parseNumber(v.raw)
		v.parsed = true
	}
	return &v.num, v.isNum
}

// text returns the content of a JSON string. It copies only a string that has escapes or invalid
// UTF-8.
func (v *value) text() ([]byte, bool) { return jsonscan.Unquote(v.raw) }

// scanner reads JSON text once and stores the values that a tree of paths leads to. It validates
// only what it needs to find its way, stops as soon as everything is found or the text is
// malformed, and recurses only as deep as the paths. So one field of a large result does not cost a
// full decoding; BenchmarkAdd/sum_behind_10kB measures that.
type scanner struct {
	text    []byte
	values  []value
	missing int // values still to find
}

// root scans the whole text. Each scanning method takes the offset of a value and returns the
// offset behind it, or -1 to stop: every value is found, or the text is malformed.
func (s *scanner) root(n *node) {
	s.text = bytes.TrimSpace(s.text)
	if n.slot != noSlot {
		s.found(n.slot, s.text)
	}
	if s.missing > 0 && len(n.edges) > 0 {
		s.into(n, 0)
	}
}

func (s *scanner) found(slot int, raw []byte) {
	if s.values[slot].raw == nil && len(raw) > 0 {
		s.values[slot].raw = raw
		s.missing--
	}
}

// value reads the value at the node n of the tree of paths; n is nil for a value that no path leads
// to.
func (s *scanner) value(n *node, start int) int {
	if n == nil {
		return jsonscan.SkipValue(s.text, start)
	}
	end := s.into(n, start)
	if end >= 0 && n.slot != noSlot {
		s.found(n.slot, s.text[start:end])
	}
	if s.missing == 0 {
		return -1
	}
	return end
}

// into reads one value. It looks inside the value if paths of the node continue there.
func (s *scanner) into(n *node, i int) int {
	switch {
	case len(n.edges) > 0 && jsonscan.Is(s.text, i, '{'):
		return s.object(n, i)
	case n.maxIndex >= 0 && jsonscan.Is(s.text, i, '['):
		return s.array(n, i)
	}
	return jsonscan.SkipValue(s.text, i)
}

func (s *scanner) object(n *node, i int) int {
	if i = jsonscan.Space(s.text, i+1); jsonscan.Is(s.text, i, '}') {
		return i + 1
	}
	for more := true; more; {
		start, end := i, jsonscan.SkipString(s.text, i)
		if i = jsonscan.Token(s.text, end, ':'); i < 0 {
			return -1
		}
		name, ok := jsonscan.Unquote(s.text[start:end])
		if !ok {
			return -1
		}
		i = s.value(n.named(name), i)
		i, more = jsonscan.Next(s.text, i, '}')
	}
	return i
}

func (s *scanner) array(n *node, i int) int {
	if i = jsonscan.Space(s.text, i+1); jsonscan.Is(s.text, i, ']') {
		return i + 1
	}
	for index := 0; index <= n.maxIndex; index++ {
		var more bool
		i = s.value(n.indexed(index), i)
		if i, more = jsonscan.Next(s.text, i, ']'); !more {
			return i
		}
	}
	return jsonscan.SkipRest(s.text, i)
}

func (n *node) named(name []byte) *node {
	for i := range n.edges {
		if e := &n.edges[i]; e.name == string(name) {
			return e.to
		}
	}
	return nil
}

func (n *node) indexed(i int) *node {
	for _, e := range n.edges {
		if e.index == i {
			return e.to
		}
	}
	return nil
}
