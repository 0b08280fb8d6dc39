package messages

import (
	"fmt"
	"strconv"
	"strings"
)

// maxListedFields is the most bad fields that a ValidationError lists.
const maxListedFields = 100

// FieldError names a bad field, such as jobs[3].payload, and says what is wrong with it and which
// limit it breaks. It never contains the field's value.
type FieldError struct {
	Field   string
	Problem string
}

// ValidationError lists the bad fields of a request or message.
type ValidationError struct {
	Fields []FieldError // the first 100 bad fields
	More   int          // number of further bad fields
	// Malformed: the data is not JSON, or not in UTF-8.
	Malformed bool
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
		b.WriteString(ofField(f.Field, f.Problem))
	}
	if e.More > 0 {
		fmt.Fprintf(&b, "; and %d more", e.More)
	}
	return b.String()
}

// ofField returns a text about a field; field is "" for a whole line, which the caller names.
func ofField(field, text string) string {
	if field == "" {
		return text
	}
	return field + ": " + text
}

// TooLargeError says that a payload, or the whole body, has too many bytes. It is returned instead
// of an error about other bad fields.
type TooLargeError struct {
	Field string // the first field that is too large
	Limit int    // in bytes
	Size  int    // in bytes
	More  int    // number of further fields that are too large
}

func (e *TooLargeError) Error() string {
	s := ofField(e.Field, fmt.Sprintf("is %d bytes; at most %d are accepted", e.Size, e.Limit))
	if e.More > 0 {
		s += fmt.Sprintf("; and %d more", e.More)
	}
	return s
}

// fieldParent is the place of a field: the body itself, or an element of one of the body's lists.
// It is converted to text only for an error.
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

// problems collects the bad fields of one body.
type problems struct {
	fields        []FieldError
	unlisted      int
	firstTooLarge *TooLargeError
}

// add records a problem of a field. It ignores a second problem of the same field, which may only
// follow from the first one. After maxListedFields problems it only counts further ones. args must
// be numbers or fixed texts, never texts from the body.
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
