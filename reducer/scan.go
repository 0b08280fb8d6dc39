package reducer

import (
	"bytes"

	"github.com/bulkaction/bulkaction/internal/jsonscan"
)

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
