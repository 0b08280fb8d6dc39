package messages

import (
	"fmt"
	"strconv"
	"strings"
)

// maxListed is how many bad fields one ValidationError lists.
const maxListed = 100

// FieldError names one bad field, say jobs[3].payload, and what is wrong with it, with the limit
// that it breaks. Neither repeats the field's value.
type FieldError struct {
	Field   string
	Problem string
}

// ValidationError lists every bad field of what was sent.
type ValidationError struct {
	Fields []FieldError // the first hundred
	More   int          // how many there are beyond those
}

func (e *ValidationError) Error() string {
	var b strings.Builder
	if n := len(e.Fields) + e.More; n > 1 {
		fmt.Fprintf(&b, "%d fields are wrong: ", n)
	}
	for i, f := range e.Fields {
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(f.Field + ": " + f.Problem)
	}
	if e.More > 0 {
		fmt.Fprintf(&b, "; and %d more", e.More)
	}
	return b.String()
}

// TooLargeError says that a payload, or the whole of what was sent, has too many bytes. It comes
// alone: other bad fields are told once the size is right.
type TooLargeError struct {
	Field string // the first that is too large
	Limit int    // bytes
	Size  int    // bytes
	More  int    // how many others are too large
}

func (e *TooLargeError) Error() string {
	s := fmt.Sprintf("%s: too large: %d bytes, at most %d are taken", e.Field, e.Size, e.Limit)
	if e.More > 0 {
		s += fmt.Sprintf("; and %d more", e.More)
	}
	return s
}

// place is where a field is found: in the body itself, or in an element of one of its lists. It is
// spelled out for errors only.
type place struct {
	list  string // "" for the body itself
	index int
}

func (p place) name(field string) string {
	if p.list == "" {
		return field
	}
	element := p.list + "[" + strconv.Itoa(p.index) + "]"
	if field == "" {
		return element
	}
	return element + "." + field
}

// problems collects what is wrong with one body.
type problems struct {
	fields []FieldError
	more   int
	large  *TooLargeError
}

// add notes a problem, unless the field has one already that this may only follow from. The
// format's arguments are limits, never values that were sent.
func (p *problems) add(at place, field, format string, args ...any) {
	if len(p.fields) == maxListed {
		p.more++
		return
	}
	name := at.name(field)
	for _, f := range p.fields {
		if f.Field == name {
			return
		}
	}
	p.fields = append(p.fields, FieldError{name, fmt.Sprintf(format, args...)})
}

func (p *problems) tooLarge(at place, field string, size, limit int) {
	if p.large != nil {
		p.large.More++
		return
	}
	p.large = &TooLargeError{Field: at.name(field), Limit: limit, Size: size}
}

func (p *problems) none() bool { return p.large == nil && len(p.fields) == 0 }

func (p *problems) err() error {
	switch {
	case p.large != nil:
		return p.large
	case len(p.fields) > 0:
		return &ValidationError{Fields: p.fields, More: p.more}
	}
	return nil
}
