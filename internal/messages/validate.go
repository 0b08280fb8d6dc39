package messages

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/bulkaction/bulkaction/api"
)

// AggregateOps are the built-in reducers.
var AggregateOps = []string{"count", "sum", "min", "max", "mean", "distribution", "count_by", "collect"}

const (
	maxAsLength     = 64  // in bytes
	maxFieldLength  = 256 // bytes of an aggregate's field
	maxKeyLength    = 255 // bytes of an idempotency key
	maxBasePriority = 1e15
	maxYearsAhead   = 10 // how far in the future a run_at may be
	firstYear       = 2000
)

const (
	problemID       = "must " + api.IDRule
	problemRequired = "required"
	problemRepeated = "is repeated; must be given once"
)

// ValidIdempotencyKey reports whether key has 1 to 255 bytes, all of them visible ASCII.
func ValidIdempotencyKey(key string) bool {
	if len(key) == 0 || len(key) > maxKeyLength {
		return false
	}
	for i := range len(key) {
		if key[i] <= ' ' || key[i] > '~' {
			return false
		}
	}
	return true
}

// normalizeTraceParent returns s as a traceparent of version 00, or "" when s is malformed. From a
// later version it keeps the part that version 00 defines.
func normalizeTraceParent(s string) string {
	t, ok := api.ParseTraceParent(s)
	switch {
	case !ok:
		return ""
	case s[:2] == "00":
		return s
	}
	return t.String()
}

// field is one field of a body, with its JSON value. Its methods read the value and return the zero
// value for null. If the value is bad, they record a problem, and what they return is not used.
type field struct {
	problems   *problems
	at         fieldParent
	key, value []byte
}

func (f field) problem(format string, args ...any) {
	f.problems.add(f.at, fieldName(f.key), format, args...)
}

func (f field) unknown() { f.problem("not a known field; correct its spelling or leave it out") }

func (f field) isNull() bool { return f.value[0] == 'n' }

// hasType reports whether the value has the JSON type whose texts begin with the byte first. If
// not, it records a problem that names want; for null it returns false without a problem.
func (f field) hasType(first byte, want string) bool {
	if f.value[0] != first && !f.isNull() {
		f.problem("must be %s, not %s", want, jsonType(f.value))
	}
	return f.value[0] == first
}

func (f field) text() string {
	if !f.hasType('"', "a string") {
		return ""
	}
	return string(unquote(f.value))
}

func (f field) boolean() bool {
	return f.value[0] != 'f' && f.hasType('t', "true or false")
}

func (f field) id() string {
	id := f.text()
	if id != "" && !api.ValidID(id) {
		f.problem(problemID)
	}
	return id
}

func (f field) groupName() string {
	name := f.text()
	if len(name) > MaxNameLength || strings.ContainsFunc(name, unicode.IsControl) {
		f.problem("must be at most %d bytes of UTF-8 without control characters", MaxNameLength)
	}
	return name
}

func (f field) lane() Lane {
	lane := Lane(f.text())
	switch lane {
	case "", LaneHigh, LaneNormal, LaneLow:
	default:
		f.problem("must be %s, %s or %s", LaneHigh, LaneNormal, LaneLow)
	}
	return lane
}

// over reads the field over of an aggregate: whether it is computed over done, failed or all ended
// jobs. It returns "" for done, the default.
func (f field) over() string {
	switch over := f.text(); over {
	case "failed", "ended":
		return over
	case "", "done":
	default:
		f.problem("must be done, failed or ended")
	}
	return ""
}

// integer reads an integer from 0 to limit. It returns nil for null.
func (f field) integer(limit int64) *int64 {
	if f.isNull() {
		return nil
	}
	n, err := strconv.ParseInt(string(f.value), 10, 64)
	if err != nil || n < 0 || n > limit {
		f.problem("must be a whole number from 0 to %d", limit)
		return nil
	}
	return &n
}

func (f field) maxRetries() *int {
	n := f.integer(MaxRetriesLimit)
	if n == nil {
		return nil
	}
	return new(int(*n))
}

func (f field) basePriority() float64 {
	if f.isNull() {
		return 0
	}
	x, err := strconv.ParseFloat(string(f.value), 64)
	if err != nil || x < -maxBasePriority || x > maxBasePriority {
		f.problem("must be a number from %g to %g", -maxBasePriority, maxBasePriority)
	}
	if x == 0 {
		return 0 // returns 0 also for -0
	}
	return x
}

func (f field) failureThreshold() *float64 {
	if f.isNull() {
		return nil
	}
	x, err := strconv.ParseFloat(string(f.value), 64)
	if err != nil || x <= 0 || x > 1 {
		f.problem("must be a number above 0, to 1")
	}
	return &x
}

func (f field) jobTimeout() (d Duration) {
	err := d.UnmarshalJSON(f.value)
	if err != nil || d != 0 && (d < Duration(time.Millisecond) || d > Duration(MaxJobTimeout)) {
		f.problem(`must be a duration such as "1m30s" or a number of seconds, from 1ms to %s`, Duration(MaxJobTimeout))
	}
	return d
}

// runAt reads a time. now is time.Now when nil.
func (f field) runAt(now func() time.Time) *time.Time {
	s := f.text()
	if s == "" {
		return nil
	}
	if now == nil {
		now = time.Now
	}
	var t time.Time
	err := t.UnmarshalText([]byte(s))
	if t = t.UTC(); err != nil || t.Year() < firstYear || t.After(now().AddDate(maxYearsAhead, 0, 0)) {
		f.problem("must be a time of RFC 3339 such as 2030-01-31T09:00:00Z, from the year %d to %d years ahead",
			firstYear, maxYearsAhead)
	}
	return &t
}

// resultPath reads a path into the object {data, duration_ms}, the form of a job's result, or of a
// failed job's error, that a reducer sees.
func (f field) resultPath() string {
	path := f.text()
	steps := strings.Split(path, ".")
	switch {
	case path == "", path == "duration_ms":
	case len(path) > maxFieldLength, steps[0] != "data", slices.Contains(steps, ""),
		strings.ContainsFunc(path, unicode.IsControl):
		f.problem("must be duration_ms, or a path such as data.cost or data.items.0.price, of at most %d bytes",
			maxFieldLength)
	}
	return path
}

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

// fieldParent is the place of a field: the body itself, an element of one of the body's lists, or one
// of its objects. It is converted to text only for an error.
type fieldParent struct {
	list  string // "" for the body itself
	index int    // noIndex: list is an object
}

const noIndex = -1

func (p fieldParent) name(field string) string {
	if p.list == "" {
		return field
	}
	element := p.list
	if p.index != noIndex {
		element += "[" + strconv.Itoa(p.index) + "]"
	}
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
