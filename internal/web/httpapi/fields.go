package httpapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

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

// object reads the fields of a field that must be an object. Their problems become those of f, with
// the name of the object and a dot before that of the field.
func (f *fields) object(name string, read func(*fields)) {
	v, given := f.values[name]
	f.take(name)
	switch {
	case !given:
		return
	case v[0] != '{':
		f.problem(name, "must be an object")
		return
	}
	in, err := parseFields(v)
	if bad, ok := errors.AsType[*messages.ValidationError](err); ok {
		in = &fields{problems: map[string]string{bad.Fields[0].Field: bad.Fields[0].Problem}}
	} else {
		read(in)
	}
	in.refuseUnknown()
	for field, problem := range in.problems {
		f.problem(name+"."+field, problem)
	}
}

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
		Preset:     f.text("preset"),
		Mode:       f.text("mode"),
		ReturnURL:  f.text("return_url"),
		Retention:  f.duration("retention"),
	}
	if burst := f.count("burst"); burst != nil {
		set.Burst = *burst
	}
	return set
}

// refuseUnknown adds a problem for each field that no method has read.
func (f *fields) refuseUnknown() {
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
}

// err returns an error for the problems of all fields, or nil if no field has one. The error lists
// at most maxListed of them. A field that no method has read is unknown, which is a problem, too.
func (f *fields) err() error {
	f.refuseUnknown()
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

// groupFilters are the query parameters that select groups.
var groupFilters = []string{"tenant", "status", "type", "paused", "failed_jobs", "tag", "prefix", "name", "since"}

func (s *server) listGroups(r *http.Request) (l api.GroupList, err error) {
	query, err := groupQuery(r)
	if err != nil {
		return l, err
	}
	l, err = s.Backend.Groups(r.Context(), query)
	l.Groups = orEmpty(l.Groups)
	for i, g := range l.Groups {
		l.Groups[i] = withEmptyMaps(g)
	}
	return l, err
}

// groupQuery parses the query parameters of the list of groups.
func groupQuery(r *http.Request) (q messages.ListQuery, err error) {
	v := r.URL.Query()
	q = messages.ListQuery{
		Tenant: v.Get("tenant"), Status: api.Status(strings.ToUpper(v.Get("status"))),
		Type: v.Get("type"), Prefix: v.Get("prefix"), Name: v.Get("name"),
	}
	if q.Cursor, q.Limit, err = pageParams(r); err != nil {
		return q, err
	}
	for _, name := range []string{"tenant", "type", "prefix"} {
		if id := v.Get(name); id != "" && !api.ValidID(id) {
			return q, invalidField(name, idProblem)
		}
	}
	if len(q.Name) > messages.MaxNameLength {
		return q, invalidField("name", fmt.Sprintf("must be at most %d bytes", messages.MaxNameLength))
	}
	if q.Status != "" && rank(q.Status) == 0 {
		return q, invalidField("status",
			"must be CREATED, DISPATCHED, RUNNING, AGGREGATING, COMPLETED, FAILED or CANCELLED")
	}
	for name, to := range map[string]**bool{"paused": &q.Paused, "failed_jobs": &q.FailedJobs} {
		if v.Get(name) == "" {
			continue
		}
		yes, err := boolParam(r, name)
		if err != nil {
			return q, err
		}
		*to = &yes
	}
	if q.Tags, err = api.ParseTags(v["tag"]); err != nil {
		return q, invalidField("tag", err.Error())
	}
	q.Since, err = sinceParam(v)
	return q, err
}

// sinceParam returns the query parameter since, a time; the zero time if it is absent.
func sinceParam(q url.Values) (since time.Time, err error) {
	text := q.Get("since")
	if text == "" {
		return since, nil
	}
	if since, err = time.Parse(time.RFC3339, text); err != nil || since.UnixMilli() < 0 {
		return since, invalidField("since", "must be a time such as 2026-01-02T15:04:05Z, from 1970 on")
	}
	return since, nil
}

// listJobs returns the function that reads the list of a group's jobs: a page, or only the job with
// a given key, if there is one.
func listJobs(b Backend) func(*http.Request) (api.JobList, error) {
	return func(r *http.Request) (l api.JobList, err error) {
		id, err := pathID(r)
		if err != nil {
			return l, err
		}
		q := r.URL.Query()
		query := messages.JobQuery{State: q.Get("state"), Key: q.Get("key"), Code: q.Get("code")}
		if query.Cursor, query.Limit, err = pageParams(r); err != nil {
			return l, err
		}
		if query.State != "" && !slices.Contains(api.JobStates, query.State) {
			return l, invalidField("state", "must be one of "+strings.Join(api.JobStates, ", "))
		}
		if len(query.Code) > MaxCodeLength {
			return l, invalidField("code", fmt.Sprintf("must be at most %d bytes", MaxCodeLength))
		}
		if q.Has("key") && !messages.ValidJobKey(query.Key) {
			return l, invalidField("key", "must "+messages.JobKeyRule)
		}
		l, err = b.Jobs(r.Context(), id, query)
		l.Jobs = orEmpty(l.Jobs)
		return l, err
	}
}

// listRejected returns the function that reads a page of the messages that ingest has rejected. The
// page has their data only with data=true, because the data may be personal, and a page of it is
// large.
func listRejected(b Backend) func(*http.Request) (api.RejectedList, error) {
	return func(r *http.Request) (l api.RejectedList, err error) {
		cursor, limit, err := pageParams(r)
		if err != nil {
			return l, err
		}
		data, err := boolParam(r, "data")
		if err != nil {
			return l, err
		}
		l, err = b.Rejected(r.Context(), cursor, limit, data)
		l.Rejected = orEmpty(l.Rejected)
		return l, err
	}
}

// boolParam returns a query parameter that is true or false; false if it is absent.
func boolParam(r *http.Request, name string) (bool, error) {
	v := r.URL.Query().Get(name)
	if v != "" && v != "true" && v != "false" {
		return false, invalidField(name, "must be true or false")
	}
	return v == "true", nil
}

// SubmitOptions is the data of a submission beside its body.
type SubmitOptions struct {
	GeneratedID bool // the client gave no id; the API has generated one
	// IdempotencyKey is the request's header; "" when it is absent, else 1 to 255 bytes of visible
	// ASCII. Hash it before it becomes part of a Redis key.
	IdempotencyKey string
	TraceParent    string // W3C traceparent of the request; "" when it is absent or malformed
}
