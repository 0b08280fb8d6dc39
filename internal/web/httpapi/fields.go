package httpapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// maxListed is the largest number of bad fields that an answer lists.
const maxListed = 100

// fields has the fields of a JSON object, and collects their problems, so that one answer names all
// bad fields. A field that is null counts as absent. Field names are case-sensitive. For a value of
// the wrong type, a method notes the problem and returns a valid value, so that later checks add no
// second problem; nobody uses this value, because the body is refused.
type fields struct {
	values   map[string]json.RawMessage // those that were not read yet
	known    []string
	problems map[string]string // by field
}

// readFields reads the body of a request, a JSON object of at most smallBody bytes.
func readFields(s *server, r *http.Request) (*fields, error) {
	if _, err := mediaType(r, "application/json"); err != nil {
		return nil, err
	}
	body, release, err := s.readBody(r, smallBody)
	defer release()
	if err != nil {
		return nil, err
	}
	return parseFields(body)
}

// readOptionalFields reads the body of a command, a JSON object. Without a body it returns no
// fields.
func readOptionalFields(s *server, r *http.Request) (*fields, error) {
	body, release, err := s.readBody(r, smallBody)
	defer release()
	if err != nil {
		return nil, err
	}
	if len(bytes.TrimSpace(body)) == 0 {
		return &fields{problems: map[string]string{}}, nil
	}
	if _, err := mediaType(r, "application/json"); err != nil {
		return nil, err
	}
	return parseFields(body)
}

func parseFields(body []byte) (*fields, error) {
	f := &fields{problems: map[string]string{}}
	if b := bytes.TrimSpace(body); len(b) == 0 || b[0] != '{' {
		return nil, invalidField("body", "must be a JSON object")
	}
	if err := json.Unmarshal(body, &f.values); err != nil {
		return nil, malformedJSON(err)
	}
	return f, messages.RepeatedKey(body)
}

// noFields refuses a body with fields.
func noFields(s *server, r *http.Request) error {
	f, err := readOptionalFields(s, r)
	if err != nil {
		return err
	}
	return f.err()
}

func (f *fields) problem(name, text string) {
	if _, ok := f.problems[name]; !ok {
		f.problems[name] = text
	}
}

// check adds problems that the caller has found, except for fields that already have a problem.
func (f *fields) check(bad []api.FieldError) {
	for _, b := range bad {
		f.problem(b.Field, b.Problem)
	}
}

// take returns the JSON of a field, and marks the field as known; nil if it is absent or null.
func (f *fields) take(name string) json.RawMessage {
	f.known = append(f.known, name)
	v := f.values[name]
	delete(f.values, name)
	if string(v) == "null" {
		return nil
	}
	return v
}

// count reads a field that must be a whole number. A number outside of int64 becomes the nearest
// int64, so that the later check of the range refuses it.
func (f *fields) count(name string) *int64 {
	n := f.number(name)
	if n == nil {
		return nil
	}
	if *n != math.Trunc(*n) {
		f.problem(name, "must be a whole number")
		return new(int64(0))
	}
	whole := int64(math.MaxInt64)
	if *n < math.MaxInt64 {
		whole = int64(max(*n, math.MinInt64))
	}
	return &whole
}

func (f *fields) number(name string) *float64 {
	v := f.take(name)
	if v == nil {
		return nil
	}
	var n float64
	if c := v[0]; c != '-' && (c < '0' || c > '9') {
		f.problem(name, "must be a number")
		return new(1.0)
	}
	if err := json.Unmarshal(v, &n); err != nil {
		n = math.MaxFloat64 // 1e999, which is valid JSON
		if v[0] == '-' {
			n = -n
		}
	}
	return &n
}

// upTo reads a field that must be a whole number from 0 to limit; nil if it is absent.
func (f *fields) upTo(name string, limit int64) *int64 {
	v := f.take(name)
	if v == nil {
		return nil
	}
	n, err := strconv.ParseInt(string(v), 10, 64)
	if err != nil || n < 0 || n > limit {
		f.problem(name, fmt.Sprintf("must be a whole number from 0 to %d", limit))
	}
	return &n
}

// listOf reads a field that must be an array. If it is not, listOf adds a problem to f, in which
// the text elements says what the elements must be. It returns nil if the field is absent.
func listOf[T any](f *fields, name, elements string) (all []T) {
	if v := f.take(name); v != nil && json.Unmarshal(v, &all) != nil {
		f.problem(name, "must be an array of "+elements)
	}
	return all
}

func (f *fields) text(name string) (s string) {
	if v := f.take(name); v != nil && json.Unmarshal(v, &s) != nil {
		f.problem(name, "must be a string")
	}
	return s
}

func (f *fields) boolean(name string) bool {
	b := f.optionalBoolean(name)
	return b != nil && *b
}

func (f *fields) optionalBoolean(name string) *bool {
	b, v := true, f.take(name)
	if v == nil {
		return nil
	}
	if json.Unmarshal(v, &b) != nil {
		f.problem(name, "must be true or false")
	}
	return &b
}

func (f *fields) duration(name string) *api.Duration {
	v := f.take(name)
	if v == nil {
		return nil
	}
	var d api.Duration
	if json.Unmarshal(v, &d) != nil {
		f.problem(name, `must be a duration such as "1m30s", or a whole number of milliseconds`)
		return nil
	}
	return &d
}

// eventSettings reads all fields of the settings of an event.
func (f *fields) eventSettings() api.EventSettings {
	set := api.EventSettings{
		Capacity:   f.count("capacity"),
		Stock:      f.count("stock"),
		Rate:       f.number("rate"),
		MaxWaiting: f.count("max_waiting"),
		TokenTTL:   f.duration("token_ttl"),
		Leeway:     f.duration("leeway"),
		MaxSession: f.duration("max_session"),
		Ready:      f.duration("ready"),
		Grace:      f.duration("grace"),
		OnClose:    f.text("on_close"),
		NoShow:     f.text("no_show"),
		Mode:       f.text("mode"),
		ReturnURL:  f.text("return_url"),
		Retention:  f.duration("retention"),
	}
	if burst := f.count("burst"); burst != nil {
		set.Burst = *burst
	}
	return set
}

// err returns an error for the problems of all fields, or nil if no field has one. The error lists
// at most maxListed of them. A field that no method has read is unknown, which is a problem, too.
func (f *fields) err() error {
	slices.Sort(f.known)
	for name := range f.values {
		switch len(f.known) {
		case 0:
			f.problem(name, "not a known field; the body has none")
		case 1:
			f.problem(name, "not a known field; known is "+f.known[0])
		default:
			f.problem(name, "not a known field; known are "+list(f.known))
		}
	}
	if len(f.problems) == 0 {
		return nil
	}
	bad := &messages.ValidationError{More: max(0, len(f.problems)-maxListed)}
	for _, name := range slices.Sorted(maps.Keys(f.problems))[:len(f.problems)-bad.More] {
		bad.Fields = append(bad.Fields, messages.FieldError{Field: truncate(name), Problem: f.problems[name]})
	}
	return bad
}

// list joins words by commas, the last two by "and".
func list(words []string) string {
	var b bytes.Buffer
	for i, w := range words {
		switch {
		case i > 0 && i == len(words)-1:
			b.WriteString(" and ")
		case i > 0:
			b.WriteString(", ")
		}
		b.WriteString(w)
	}
	return b.String()
}
