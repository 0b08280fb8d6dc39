package messages

import (
	"maps"
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
	problemID       = "must match " + api.IDPattern
	problemRequired = "required"
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
// https://www.w3.org/TR/trace-context/#versioning-of-traceparent
func normalizeTraceParent(s string) string {
	const size = len("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	if len(s) < size || s[2] != '-' || s[35] != '-' || s[52] != '-' {
		return ""
	}
	version, traceID, parentID, flags := s[:2], s[3:35], s[36:52], s[53:size]
	switch {
	case !isHex(version) || !isHex(traceID) || !isHex(parentID) || !isHex(flags), version == "ff":
		return ""
	case strings.Trim(traceID, "0") == "", strings.Trim(parentID, "0") == "":
		return ""
	case version == "00" && len(s) > size, len(s) > size && s[size] != '-':
		return ""
	case version == "00":
		return s
	}
	return "00" + s[2:size]
}

// isHex reports whether s has lower-case hexadecimal digits only.
func isHex(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// Each method below reads the value of one field. It returns the zero value for null. For a bad
// value it records the problem; what it then returns is dropped with the body.

// hasType reports whether v is of the JSON type whose values begin with the byte first. want names
// this type in the problem that hasType records otherwise; null is no problem.
func (r *bodyDecoder) hasType(first byte, want string, at fieldParent, field string, v []byte) bool {
	if v[0] != first && v[0] != 'n' {
		r.problems.add(at, field, "must be %s, not %s", want, jsonType(v))
	}
	return v[0] == first
}

func (r *bodyDecoder) require(at fieldParent, field, value string) {
	if value == "" {
		r.problems.add(at, field, problemRequired)
	}
}

func (r *bodyDecoder) addUnknown(at fieldParent, key []byte) {
	r.problems.add(at, fieldName(key), "not a known field; correct its spelling or leave it out")
}

func (r *bodyDecoder) text(at fieldParent, field string, v []byte) string {
	if !r.hasType('"', "a string", at, field, v) {
		return ""
	}
	return string(unquote(v))
}

func (r *bodyDecoder) boolean(at fieldParent, field string, v []byte) bool {
	if v[0] != 't' && v[0] != 'f' {
		r.hasType('t', "true or false", at, field, v)
	}
	return v[0] == 't'
}

func (r *bodyDecoder) id(at fieldParent, field string, v []byte) string {
	id := r.text(at, field, v)
	if id != "" && !api.ValidID(id) {
		r.problems.add(at, field, problemID)
	}
	return id
}

func (r *bodyDecoder) groupName(at fieldParent, field string, v []byte) string {
	name := r.text(at, field, v)
	if len(name) > MaxNameLength || strings.ContainsFunc(name, unicode.IsControl) {
		r.problems.add(at, field, "must be at most %d bytes of UTF-8 without control characters", MaxNameLength)
	}
	return name
}

func (r *bodyDecoder) lane(at fieldParent, field string, v []byte) Lane {
	lane := Lane(r.text(at, field, v))
	switch lane {
	case "", LaneHigh, LaneNormal, LaneLow:
	default:
		r.problems.add(at, field, "must be %s, %s or %s", LaneHigh, LaneNormal, LaneLow)
	}
	return lane
}

// integer reads an integer from 0 to limit. It returns nil for null.
func (r *bodyDecoder) integer(at fieldParent, field string, v []byte, limit int64) *int64 {
	if v[0] == 'n' {
		return nil
	}
	n, err := strconv.ParseInt(string(v), 10, 64)
	if err != nil || n < 0 || n > limit {
		r.problems.add(at, field, "must be a whole number from 0 to %d", limit)
		return nil
	}
	return &n
}

func (r *bodyDecoder) maxRetries(at fieldParent, field string, v []byte) *int {
	n := r.integer(at, field, v, MaxRetriesLimit)
	if n == nil {
		return nil
	}
	retries := int(*n)
	return &retries
}

func (r *bodyDecoder) basePriority(at fieldParent, field string, v []byte) float64 {
	if v[0] == 'n' {
		return 0
	}
	x, err := strconv.ParseFloat(string(v), 64)
	if err != nil || x < -maxBasePriority || x > maxBasePriority {
		r.problems.add(at, field, "must be a number from %g to %g", -maxBasePriority, maxBasePriority)
		return 0
	}
	if x == 0 {
		return 0 // returns 0 also for -0
	}
	return x
}

func (r *bodyDecoder) failureThreshold(at fieldParent, field string, v []byte) *float64 {
	if v[0] == 'n' {
		return nil
	}
	x, err := strconv.ParseFloat(string(v), 64)
	if err != nil || x <= 0 || x > 1 {
		r.problems.add(at, field, "must be a number above 0, to 1")
		return nil
	}
	return &x
}

func (r *bodyDecoder) jobTimeout(at fieldParent, field string, v []byte) Duration {
	var d Duration
	err := d.UnmarshalJSON(v)
	if err != nil || d != 0 && (d < Duration(time.Millisecond) || d > Duration(MaxJobTimeout)) {
		r.problems.add(at, field, `must be a duration such as "1m30s" or a number of seconds, from 1ms to %s`,
			Duration(MaxJobTimeout))
		return 0
	}
	return d
}

func (r *bodyDecoder) runAt(at fieldParent, field string, v []byte) *time.Time {
	s := r.text(at, field, v)
	if s == "" {
		return nil
	}
	now := time.Now
	if r.Now != nil {
		now = r.Now
	}
	var t time.Time
	err := t.UnmarshalText([]byte(s))
	if t = t.UTC(); err != nil || t.Year() < firstYear || t.After(now().AddDate(maxYearsAhead, 0, 0)) {
		r.problems.add(at, field,
			"must be a time of RFC 3339 such as 2030-01-31T09:00:00Z, from the year %d to %d years ahead",
			firstYear, maxYearsAhead)
		return nil
	}
	return &t
}

// resultPath reads a path into {data, duration_ms} of a job's result.
func (r *bodyDecoder) resultPath(at fieldParent, field string, v []byte) string {
	path := r.text(at, field, v)
	steps := strings.Split(path, ".")
	switch {
	case path == "", path == "duration_ms":
	case len(path) > maxFieldLength, steps[0] != "data", slices.Contains(steps, ""),
		strings.ContainsFunc(path, unicode.IsControl):
		r.problems.add(at, field,
			"must be duration_ms, or a path such as data.cost or data.items.0.price, of at most %d bytes",
			maxFieldLength)
	}
	return path
}

// opNames lists the reducers that an aggregate may ask for.
func (r *bodyDecoder) opNames() string {
	names := slices.Clone(AggregateOps)
	for _, op := range slices.Sorted(maps.Keys(r.Ops)) {
		if r.Ops[op] && !slices.Contains(names, op) {
			names = append(names, op)
		}
	}
	return strings.Join(names, ", ")
}
