package reducer

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Bounds of a field.
const (
	maxFieldBytes    = 512
	maxFieldSegments = 32
)

const noSlot = -1

// parsePath splits a field into its segments, the first of which is data or duration_ms.
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

// extractor finds several fields of a result in one pass over its data. Once its slots are given
// out it is immutable.
type extractor struct {
	slots    int
	data     *node // nil: no field lies in data
	inData   int   // slots in data
	duration int   // slot of duration_ms
}

// node is a place that paths lead to or through.
type node struct {
	slot     int
	edges    []edge
	maxIndex int // the greatest index among its edges, -1 without one
}

type edge struct {
	name  string
	index int // of an array's element, -1 where the name is none
	to    *node
}

func newNode() *node { return &node{slot: noSlot, maxIndex: -1} }

func newExtractor() *extractor { return &extractor{duration: noSlot} }

// slot says where the values of a path will be found; equal paths share one.
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

// arrayIndex is -1 for a segment that can't be an index: not all digits, or with a leading zero.
func arrayIndex(name string) int {
	i, err := strconv.ParseUint(name, 10, 31)
	if err != nil || name[0] == '0' && len(name) > 1 {
		return -1
	}
	return int(i)
}

// find sets values to what the result's fields hold. They point into the result and into scratch,
// which it may have grown and returns for the next call.
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

// value is what a field of one result holds: JSON text, not validated.
type value struct {
	raw    []byte // nil when missing
	num    number
	parsed bool
	isNum  bool
}

func (v *value) missing() bool { return v.raw == nil || string(v.raw) == "null" }

// number parses at most once, since several aggregates may ask.
func (v *value) number() (*number, bool) {
	if !v.parsed {
		v.num, v.isNum = parseNumber(v.raw)
		v.parsed = true
	}
	return &v.num, v.isNum
}

// text is a JSON string's content. A plain one isn't copied.
func (v *value) text() ([]byte, bool) { return unquote(v.raw) }

func unquote(raw []byte) ([]byte, bool) {
	if len(raw) < 2 || raw[0] != '"' || raw[len(raw)-1] != '"' {
		return nil, false
	}
	inner := raw[1 : len(raw)-1]
	ascii := true
	for _, c := range inner {
		if c < ' ' || c == '\\' || c == '"' {
			return unescape(raw)
		}
		ascii = ascii && c < utf8.RuneSelf
	}
	if ascii || utf8.Valid(inner) {
		return inner, true
	}
	return unescape(raw)
}

func unescape(raw []byte) ([]byte, bool) {
	var s string
	if json.Unmarshal(raw, &s) != nil {
		return nil, false
	}
	return []byte(s), true
}
