package messages

import (
	"fmt"
	"strconv"
	"strings"
)

// maxListedFields is how many bad fields one ValidationError lists.
const maxListedFields = 100

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

// fieldParent is where a field is found: in the body itself, or in an element of one of its lists. It is
// spelled out for errors only.
type fieldParent struct {
	list  string // "" for the body itself
	index int
}

func (p fieldParent) name(field string) string {
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
	fields        []FieldError
	unlisted      int
	firstTooLarge *TooLargeError
}

// add notes a problem, unless the field has one already that this may only follow from. The
// format's arguments are limits, never values that were sent.
func (p *problems) add(at fieldParent, field, format string, args ...any) {
	if len(p.fields) == maxListedFields {
		p.unlisted++
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

func (p *problems) addTooLarge(at fieldParent, field string, size, limit int) {
	if p.firstTooLarge != nil {
		p.firstTooLarge.More++
		return
	}
	p.firstTooLarge = &TooLargeError{Field: at.name(field), Limit: limit, Size: size}
}

func (p *problems) isEmpty() bool { return p.firstTooLarge == nil && len(p.fields) == 0 }

func (p *problems) err() error {
	switch {
	case p.firstTooLarge != nil:
		return p.firstTooLarge
	case len(p.fields) > 0:
		return &ValidationError{Fields: p.fields, More: p.unlisted}
	}
	return nil
}
