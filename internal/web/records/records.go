// Package records splits a body of NDJSON or CSV into records while it arrives, and turns the rows
// of CSV into payloads. The server, its Go client and the command line use it, so that all see the
// same records. It hides how a record of any length is read in bounded memory.
package records

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Format says where a record ends.
type Format int

// The formats of a body. In CSV (RFC 4180) a field in quotes may have line breaks.
const (
	NDJSON Format = iota
	CSV
)

// Record is a line of NDJSON or a row of CSV.
type Record struct {
	Data      []byte // without the line break that ends the record; valid until the next call of Next
	Line      int64  // the line at which the record begins, from 1
	Lines     int64  // the number of lines that the record has
	Truncated bool   // the end of Data is missing, because the record is longer than the limit
	Open      bool   // CSV only: a quoted field is not closed before the end of the body
}

// ErrTooLong is the error of a record with more than [Reader.Longest] bytes.
var ErrTooLong = errors.New("record is too long")

// Reader reads records. It keeps at most limit bytes of one.
type Reader struct {
	// Longest is the number of bytes of a record after which Next returns [ErrTooLong]. 0 means no
	// bound: then Next reads a record without an end for ever.
	Longest int

	in        *bufio.Reader
	format    Format
	delimiter byte // CSV only: between two fields
	limit     int
	line      int64 // the line at which the next record begins
	buf       []byte
	notText   error // by its first bytes the body is no text
}

// SetDelimiter sets the character between two fields of CSV, instead of a comma. It must be called
// before Next.
func (r *Reader) SetDelimiter(d byte) { r.delimiter = d }

// TextError says why a whole body can't be read.
type TextError struct{ Problem string }

func (e *TextError) Error() string { return "the text " + e.Problem }

const (
	saveUTF8    = ": save the file as UTF-8"
	exportTable = ": export the table as CSV in UTF-8"
)

// notText says what bodies are that begin with these bytes.
var notText = []struct{ begin, problem string }{
	{"PK\x03\x04", "is a ZIP archive, such as a workbook (.xlsx, .ods)" + exportTable},
	{"\xd0\xcf\x11\xe0", "is a workbook (.xls)" + exportTable},
	{"\x1f\x8b", "is compressed by gzip: decompress it"},
	{"\xff\xfe", "is in UTF-16" + saveUTF8},
	{"\xfe\xff", "is in UTF-16" + saveUTF8},
}

// checkStart returns a [*TextError] if a body with these first bytes is no text in UTF-8.
func checkStart(head []byte) error {
	for _, no := range notText {
		if bytes.HasPrefix(head, []byte(no.begin)) {
			return &TextError{no.problem}
		}
	}
	if bytes.IndexByte(head[:min(2, len(head))], 0) >= 0 {
		return &TextError{"has a NUL character, as UTF-16 has" + saveUTF8}
	}
	return nil
}

// NewReader returns a reader of the records of in. A record with its line break may have limit
// bytes; a longer one is truncated. NewReader skips a byte order mark, which spreadsheet programs
// write before UTF-8. If the first bytes are those of no text, Next returns a [*TextError].
func NewReader(in *bufio.Reader, format Format, limit int) *Reader {
	const mark = "\xef\xbb\xbf"
	if head, _ := in.Peek(len(mark)); string(head) == mark { // if reading fails, Next returns the error
		_, _ = in.Discard(len(mark))
	}
	head, _ := in.Peek(4)
	return &Reader{in: in, format: format, delimiter: ',', limit: limit, line: 1, notText: checkStart(head)}
}

// Next returns the next record. At the end of the body it returns io.EOF and a record without data,
// whose Line is one more than the number of the last line. After an error it must not be called
// again.
func (r *Reader) Next() (Record, error) {
	rec := Record{Line: r.line}
	if r.notText != nil {
		return rec, r.notText
	}
	r.buf = r.buf[:0]
	size := 0
	for state := fieldStart; ; {
		part, err := r.in.ReadSlice('\n')
		if size += len(part); r.Longest > 0 && size > r.Longest {
			return rec, ErrTooLong
		}
		full, end := errors.Is(err, bufio.ErrBufferFull), errors.Is(err, io.EOF)
		if err != nil && !full && !end || end && len(part) == 0 && len(r.buf) == 0 {
			return rec, err
		}
		if r.format == CSV {
			state = state.after(part, r.delimiter)
		}
		kept := min(len(part), r.limit-len(r.buf))
		r.buf = append(r.buf, part[:kept]...)
		rec.Truncated = rec.Truncated || kept < len(part)
		if full {
			continue
		}
		rec.Lines++
		if state == inQuotes && !end {
			continue
		}
		rec.Data, rec.Open = r.buf, state == inQuotes
		if !end && !rec.Truncated {
			rec.Data = r.buf[:len(r.buf)-1]
		}
		r.line += rec.Lines
		return rec, nil
	}
}

// csvState says where in a row of CSV the reader is. A quote opens a quoted field only at the start
// of a field. A line break inside of quotes does not end the row.
type csvState int

const (
	fieldStart csvState = iota
	inField
	inQuotes
	afterQuote // after a closing quote, or after the first of two quotes that stand for one
)

func (s csvState) after(text []byte, delimiter byte) csvState {
	for _, b := range text {
		switch {
		case s == inQuotes && b != '"':
		case s == inQuotes:
			s = afterQuote
		case b == delimiter:
			s = fieldStart
		case b == '"' && (s == fieldStart || s == afterQuote):
			s = inQuotes
		default:
			s = inField
		}
	}
	return s
}

// RowOverhead is how many bytes the text of a CSV row may have more than the longest payload.
const RowOverhead = 64 << 10

// RowError says why one row of a table is refused. The rows after it can still be read.
type RowError struct{ Problem string }

func (e *RowError) Error() string { return e.Problem }

// ErrLongRow is the [*RowError] of a row whose text or payload is too long.
var ErrLongRow = &RowError{"is too long"}

// ErrNoHeader is the [*HeaderError] of a table without rows.
var ErrNoHeader = &HeaderError{Line: 1, Problem: "is missing: the first row names the payload's fields"}

// HeaderError says why the header of a table, or an option that does not fit the header, is
// refused.
type HeaderError struct {
	Line   int64  // where the header begins; 0 if an option is wrong
	Column int    // the column, from 1; 0 if the error concerns no single column
	Option string // the option that does not fit: "types" or "key_column"; "" if the header is wrong
	// Problem is text that follows the name of the header, the column or the option, such as "is
	// empty".
	Problem string
	// Looks is the character that seems to separate the columns, if the header has one column and
	// the caller named no delimiter. With Excel, it is the one that Excel's line "sep=;" names.
	Looks byte
	Excel bool // the header is such a line, and no header
}

// Error names the line and the column, or the option.
func (e *HeaderError) Error() string {
	switch {
	case e.Option != "":
		return e.Option + " " + e.Problem
	case e.Column > 0:
		return fmt.Sprintf("line %d, column %d %s", e.Line, e.Column, e.Problem)
	}
	return fmt.Sprintf("line %d: the header %s", e.Line, e.Problem)
}

// TableOptions say how a table is read.
type TableOptions struct {
	Delimiter  byte                  // between two fields; 0: a comma
	Types      map[string]ColumnType // of columns whose values are not strings, by name
	Key        string                // name of the column with the jobs' keys; "": there is none
	MaxPayload int                   // most bytes of a payload
}

// Table reads the rows of CSV (RFC 4180) as JSON objects, whose keys are the names of the columns
// in the header. Unlike encoding/csv, it continues after a malformed row.
type Table struct {
	rows    *Reader
	row     csvRow
	max     int
	line    int64  // where the header begins
	raw     []byte // the text of the current row
	columns []column
	key     int // number of the column with the jobs' keys; -1: there is none
}

type column struct {
	name string
	key  string // as it is written in the payload: `{"a":`, `,"b":`, …
	typ  ColumnType
}

// NewTable reads the header row of a table, and returns the line at which it begins. rows must be a
// reader of CSV; NewTable sets its delimiter. The error is a [*HeaderError] or an error of rows.
func NewTable(rows *Reader, o TableOptions) (t *Table, line int64, err error) {
	rows.delimiter = o.Delimiter
	if o.Delimiter == 0 {
		rows.delimiter = ','
	}
	t = &Table{rows: rows, row: csvRow{delimiter: []byte{rows.delimiter}}, max: o.MaxPayload, key: -1}
	for blank := true; blank; { // rows of white space may come before the header
		t.line, err = t.nextRow()
		blank = err == nil && t.row.fields() == 1 && len(bytes.TrimSpace(t.row.field(0))) == 0
	}
	var bad *RowError
	switch {
	case errors.Is(err, io.EOF):
		return nil, t.line, ErrNoHeader
	case errors.As(err, &bad):
		return nil, t.line, &HeaderError{Line: t.line, Problem: bad.Problem}
	case err != nil:
		return nil, t.line, err
	}
	return t, t.line, t.readHeader(o)
}

func (t *Table) readHeader(o TableOptions) error {
	first := string(t.row.field(0))
	if text, ok := strings.CutPrefix(strings.ToLower(string(t.raw)), "sep="); ok && len(text) == 1 {
		return &HeaderError{
			Line: t.line, Looks: text[0], Excel: true,
			Problem: fmt.Sprintf("is the line %q, which names the delimiter for Excel", t.raw),
		}
	}
	if i := strings.IndexAny(first, otherDelimiters); o.Delimiter == 0 && t.row.fields() == 1 && i >= 0 {
		return &HeaderError{
			Line: t.line, Looks: first[i],
			Problem: fmt.Sprintf("has one column, whose name contains %s: the columns seem to be separated by it",
				delimiterName(first[i])),
		}
	}
	seen := make(map[string]int)
	for i := range t.row.fields() {
		name := string(t.row.field(i))
		before, repeated := seen[name]
		switch {
		case strings.TrimSpace(name) == "":
			return &HeaderError{Line: t.line, Column: i + 1, Problem: "is empty: each column needs a name"}
		case unseen(name) != "":
			return &HeaderError{Line: t.line, Column: i + 1, Problem: unseen(name)}
		case repeated:
			return &HeaderError{
				Line: t.line, Column: i + 1,
				Problem: fmt.Sprintf("repeats the name %q of column %d: each column needs its own name",
					name, before+1),
			}
		}
		seen[name] = i
		open := byte(',')
		if i == 0 {
			open = '{'
		}
		key := string(append(appendJSONString([]byte{open}, []byte(name)), ':'))
		t.columns = append(t.columns, column{name: name, key: key, typ: o.Types[name]})
	}
	if o.Key != "" {
		at, ok := seen[o.Key]
		if !ok {
			problem := fmt.Sprintf("names the column %q, which the header does not have", o.Key)
			return &HeaderError{Option: "key_column", Problem: problem}
		}
		t.key = at
	}
	for name := range o.Types {
		if _, ok := seen[name]; !ok {
			problem := fmt.Sprintf("names the column %q, which the header does not have", name)
			return &HeaderError{Option: "types", Problem: problem}
		}
	}
	return nil
}

// unseen says which character of a column's name is invisible, so that the payload's field would not
// have the name that people read; "" if there is none. A line break in quotes is visible, and so are
// the two joiners between letters of scripts that join.
func unseen(name string) string {
	before := ' '
	for _, r := range strings.ReplaceAll(name, "\r\n", "\n") {
		joiner := r == '\u200c' || r == '\u200d'
		switch {
		case r == '\n', joiner && before >= '\u0300':
		case unicode.IsControl(r),
			unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp, unicode.Other_Default_Ignorable_Code_Point),
			unicode.Is(unicode.Zs, r) && r != ' ' && r != '\u3000':
			return fmt.Sprintf("contains the invisible character %U: remove it", r)
		}
		before = r
	}
	if strings.TrimSpace(name) != name {
		return "begins or ends with a space: remove it"
	}
	return ""
}

const endLines = "end the lines with LF or CRLF, or put a field with line breaks in quotes"

// Next returns the next row as a payload, and the line at which it begins. It returns a [*RowError]
// for a row that is refused, and io.EOF after the last row. After an error other than a
// [*RowError] it must not be called again.
func (t *Table) Next() (payload []byte, line int64, err error) {
	if line, err = t.nextRow(); err != nil {
		return nil, line, err
	}
	if err := t.checkFields(); err != nil {
		return nil, line, err
	}
	payload = make([]byte, 0, len(t.row.text)+16*len(t.columns))
	for i, c := range t.columns {
		payload = append(payload, c.key...)
		if c.typ == String {
			payload = appendJSONString(payload, t.row.field(i))
			continue
		}
		var ok bool
		if payload, ok = c.typ.appendValue(payload, t.row.field(i)); !ok {
			return nil, line, &RowError{fmt.Sprintf("column %d (%s) must be %s", i+1, c.name, c.typ.rule())}
		}
	}
	payload = append(payload, '}')
	if len(payload) > t.max {
		return nil, line, ErrLongRow
	}
	return payload, line, nil
}

// NextWithKey does the same as Next. It also returns the value of the row in the column of the
// jobs' keys; "" if there is no such column.
func (t *Table) NextWithKey() (payload []byte, key string, line int64, err error) {
	if payload, line, err = t.Next(); err == nil && t.key >= 0 {
		key = string(t.row.field(t.key))
	}
	return payload, key, line, err
}

// checkFields returns a [*RowError] if the row has more or fewer fields than the header.
func (t *Table) checkFields() error {
	got, want := t.row.fields(), len(t.columns)
	switch {
	case got < want:
		return &RowError{fmt.Sprintf("has %d of the header's %d columns: column %d (%s) is missing",
			got, want, got+1, t.columns[got].name)}
	case got > want:
		return &RowError{fmt.Sprintf("has %d columns where the header has %d: put a field that contains %s in quotes",
			got, want, delimiterName(t.rows.delimiter))}
	}
	return nil
}

// nextRow reads the next row that is not empty, and returns the line at which it begins.
func (t *Table) nextRow() (line int64, err error) {
	for {
		rec, err := t.rows.Next()
		if err != nil {
			return rec.Line, err
		}
		text := bytes.TrimRight(rec.Data, "\r")
		switch {
		case rec.Open:
			return rec.Line, &RowError{"opens a quote that is never closed, and so takes in all lines after it"}
		case rec.Truncated, len(text) > t.max+RowOverhead:
			return rec.Line, ErrLongRow
		case len(text) > 0:
			t.raw = text
			return rec.Line, t.row.split(text)
		}
	}
}

// csvRow holds the fields of a row in one buffer, one field directly after the other, without
// quotes and delimiters.
type csvRow struct {
	delimiter []byte
	text      []byte
	ends      []int // where each field ends in text
}

func (c *csvRow) fields() int { return len(c.ends) }

func (c *csvRow) field(i int) []byte {
	if i == 0 {
		return c.text[:c.ends[0]]
	}
	return c.text[c.ends[i-1]:c.ends[i]]
}

// split divides a row into fields, or returns a [*RowError]. The caller has checked that each
// quoted field is closed.
func (c *csvRow) split(row []byte) error {
	c.text, c.ends = c.text[:0], c.ends[:0]
	for rest, more := row, true; more; {
		quoted := bytes.HasPrefix(rest, quote)
		for bytes.HasPrefix(rest, quote) {
			var text []byte
			text, rest, _ = bytes.Cut(rest[1:], quote)
			if c.text = append(c.text, text...); bytes.HasPrefix(rest, quote) {
				c.text = append(c.text, '"') // two quotes stand for one
			}
		}
		var text []byte
		text, rest, more = bytes.Cut(rest, c.delimiter)
		switch {
		case quoted && len(text) > 0:
			return &RowError{"goes on after a closing quote"}
		case bytes.Contains(text, quote):
			return &RowError{"has a quote inside a field that is not quoted"}
		case bytes.IndexByte(text, '\r') >= 0:
			return &RowError{"has a carriage return inside: " + endLines}
		case bytes.IndexByte(text, 0) >= 0:
			return &RowError{"has a NUL character, as UTF-16 has" + saveUTF8}
		}
		c.text = append(c.text, text...)
		c.ends = append(c.ends, len(c.text))
	}
	if !utf8.Valid(row) {
		return &RowError{"is not UTF-8, but perhaps Latin-1 (Windows-1252)" + saveUTF8}
	}
	return nil
}

var quote = []byte{'"'}

const hexDigits = "0123456789abcdef"

// appendJSONString appends s, which must be valid UTF-8, as a JSON string.
func appendJSONString(dst, s []byte) []byte {
	dst = append(slices.Grow(dst, len(s)+2), '"')
	for _, b := range s {
		switch {
		case b == '"' || b == '\\':
			dst = append(dst, '\\', b)
		case b == '\n':
			dst = append(dst, '\\', 'n')
		case b == '\t':
			dst = append(dst, '\\', 't')
		case b < ' ':
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[b>>4], hexDigits[b&15])
		default:
			dst = append(dst, b)
		}
	}
	return append(dst, '"')
}

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
