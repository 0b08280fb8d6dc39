package records

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// otherDelimiters are the delimiters that ParseDelimiter accepts beside the comma.
const otherDelimiters = ";|\t"

// ParseDelimiter reads the name of a delimiter of CSV: the character itself, or \t or tab for a
// tab. The result 0 for an empty text means that the caller chooses none.
func ParseDelimiter(text string) (byte, error) {
	switch text {
	case "":
		return 0, nil
	case `\t`, "tab":
		return '\t', nil
	}
	if len(text) == 1 && strings.Contains(","+otherDelimiters, text) {
		return text[0], nil
	}
	return 0, fmt.Errorf(`%q: must be a comma, a semicolon, | or \t`, text)
}

// delimiterName returns a delimiter as a message shows it.
func delimiterName(d byte) string {
	switch d {
	case ',':
		return "a comma"
	case ';':
		return "a semicolon"
	case '\t':
		return "a tab"
	}
	return string(d)
}

// ColumnType says as which JSON type the values of a CSV column are written in a payload.
type ColumnType int

// The types of columns. A number must be written as in JSON, a boolean as true or false in any
// case; white space around these two is ignored, and an empty field of their columns becomes null.
// A string stays as it is.
const (
	String ColumnType = iota
	Number
	Boolean
)

var columnTypes = map[string]ColumnType{"string": String, "number": Number, "boolean": Boolean}

// ParseColumnTypes reads the types of columns from text of the form name:number,name:boolean,… A
// name in it can't contain a comma; it may contain a colon, because the last colon of a part
// separates the type.
func ParseColumnTypes(text string) (map[string]ColumnType, error) {
	if text == "" {
		return nil, nil
	}
	types := map[string]ColumnType{}
	for part := range strings.SplitSeq(text, ",") {
		i := strings.LastIndexByte(part, ':')
		if i <= 0 {
			return nil, fmt.Errorf("%q: write it as name:type with a comma between two of them", part)
		}
		name := part[:i]
		typ, ok := columnTypes[part[i+1:]]
		if _, twice := types[name]; twice {
			return nil, fmt.Errorf("%q: the column %q has a type already", part, name)
		}
		if !ok {
			return nil, fmt.Errorf("%q: the type must be string, number or boolean", part)
		}
		types[name] = typ
	}
	return types, nil
}

// rule says which values are valid, after "must be".
func (c ColumnType) rule() string {
	if c == Boolean {
		return "true or false, or empty"
	}
	return "a number such as 12 or -0.5, or empty"
}

// appendValue appends a field of a column of numbers or booleans to dst as JSON: a number, a
// boolean or null. It returns false if the field is not valid for the type.
func (c ColumnType) appendValue(dst, field []byte) ([]byte, bool) {
	field = bytes.TrimSpace(field)
	switch {
	case len(field) == 0:
		return append(dst, "null"...), true
	case c == Boolean && bytes.EqualFold(field, []byte("true")):
		return append(dst, "true"...), true
	case c == Boolean && bytes.EqualFold(field, []byte("false")):
		return append(dst, "false"...), true
	case c == Number && (field[0] == '-' || field[0] >= '0' && field[0] <= '9') && json.Valid(field):
		return append(dst, field...), true
	}
	return dst, false
}
