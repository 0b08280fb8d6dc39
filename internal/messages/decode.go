// Package messages decodes and validates what producers send: requests to the HTTP API and messages
// on the ingest stream. Its errors name the bad fields, the first 100, with the limit that each
// breaks. Of this module it imports only packages api and jsonscan.
package messages

import (
	"bytes"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jsonscan"
)

// These limits bound what a submission may contain.
const (
	MaxNameLength   = 256        // bytes of a group's name
	MaxPayloadBytes = 256 << 10  // bytes of one job's payload
	MaxMessageBytes = 32 << 20   // bytes of one message's data, or of one request body that is not streamed
	MaxAggregates   = 32         // aggregates of one group
	MaxTotal        = 10_000_000 // jobs of one group
	MaxRetriesLimit = 1000       // max_retries of a group
	MaxJobTimeout   = 24 * time.Hour
)

// Lane names the queue of one priority.
type Lane string

// The lanes, from the highest priority to the lowest.
const (
	LaneHigh   Lane = "high"
	LaneNormal Lane = "normal"
	LaneLow    Lane = "low"
)

// Aggregate asks the system to compute one value from the results of the group's done jobs, from
// the errors of its failed jobs, or from both.
type Aggregate struct {
	As    string `json:"as"`
	Op    string `json:"op"`
	Field string `json:"field,omitempty"` // path into {data, duration_ms} of a job's result
	Over  string `json:"over,omitempty"`  // failed or ended; done when empty
}

// SubmitGroup is the body of POST /v1/groups and the data of a group.submit message.
type SubmitGroup struct {
	ID               string      `json:"id,omitempty"`
	Tenant           string      `json:"tenant,omitempty"` // the group's own id when empty
	Name             string      `json:"name,omitempty"`
	Tags             api.Tags    `json:"tags,omitempty"`
	Type             string      `json:"type"`
	Priority         Lane        `json:"priority,omitempty"` // normal when empty
	BasePriority     float64     `json:"base_priority,omitempty"`
	MaxRetries       *int        `json:"max_retries,omitempty"` // the workers' default when nil
	JobTimeout       Duration    `json:"job_timeout,omitempty"` // the workers' default when 0
	RunAt            *time.Time  `json:"run_at,omitempty"`
	FailureThreshold *float64    `json:"failure_threshold,omitempty"` // above 0, to 1; 1 when nil
	Aggregate        []Aggregate `json:"aggregate,omitempty"`
	CallbackURL      string      `json:"callback_url,omitempty"`
	Total            *int64      `json:"total,omitempty"`
	Jobs             []Job       `json:"jobs,omitempty"`
	Seal             bool        `json:"seal,omitempty"`
	UniqueKeys       bool        `json:"unique_keys,omitempty"` // no two jobs of the group have the same key
}

// AppendJobs is the data of a jobs.append message.
type AppendJobs struct {
	Group string `json:"group"`
	Jobs  []Job  `json:"jobs"`
}

// SealGroup is the data of a group.seal message, by which a producer says that the group gets no
// more jobs: at once, or with Total as soon as it has so many.
type SealGroup struct {
	Group string `json:"group"`
	Total *int64 `json:"total,omitempty"`
}

// CancelGroup is the data of a group.cancel message.
type CancelGroup struct {
	Group string `json:"group"`
}

// Decoder decodes and validates the bodies of requests and messages. Its zero value is ready to
// use. It refuses unknown fields. null, and in a field for text or a time the empty string, count
// as absent, except in a payload, which may be any JSON. It refuses repeated keys, but does not
// look for them inside of a payload.
//
// An error is a *ValidationError that lists the bad fields, the first 100 of them, or a
// *TooLargeError.
type Decoder struct {
	Ops map[string]bool  // custom reducers that a group may ask for beside AggregateOps
	Now func() time.Time // time.Now when nil
}

// DecodeSubmit decodes the body of POST /v1/groups or the data of a group.submit message. The
// payloads share data's memory.
func (d Decoder) DecodeSubmit(data []byte) (*SubmitGroup, error) {
	return decode(d, "body", data, (*bodyDecoder).readSubmit)
}

// DecodeAppend decodes the data of a jobs.append message. The payloads share data's memory.
func (d Decoder) DecodeAppend(data []byte) (*AppendJobs, error) {
	if a := fastDecodeAppend(data); a != nil {
		return a, nil
	}
	return decode(d, "body", data, (*bodyDecoder).readAppend)
}

// DecodeAppendEntry decodes the data of an entry as DecodeAppend does. If ParseEntry or ParseFields
// has decoded the data already, it uses that.
func (d Decoder) DecodeAppendEntry(e Envelope) (*AppendJobs, error) {
	if e.decoded != nil {
		return e.decoded, nil
	}
	return d.DecodeAppend(e.Data)
}

// DecodeSeal decodes the data of a group.seal message.
func (d Decoder) DecodeSeal(data []byte) (*SealGroup, error) {
	return decode(d, "body", data, (*bodyDecoder).readSeal)
}

// DecodeCancel decodes the data of a group.cancel message.
func (d Decoder) DecodeCancel(data []byte) (*CancelGroup, error) {
	return decode(d, "body", data, (*bodyDecoder).readCancel)
}

func fastDecodeAppend(data []byte) *AppendJobs {
	if len(data) > MaxMessageBytes || !utf8.Valid(data) {
		return nil
	}
	a := new(AppendJobs)
	i := jsonscan.Token(data, 0, '{')
	for more := true; more; {
		var key []byte
		key, i = fastKey(data, i)
		switch {
		case string(key) == "group" && a.Group == "":
			a.Group, i = fastID(data, i)
		case string(key) == "jobs" && a.Jobs == nil:
			a.Jobs, i = fastDecodeJobs(data, i)
		default:
			return nil
		}
		i, more = jsonscan.Next(data, i, '}')
	}
	if i < len(data) || a.Group == "" || a.Jobs == nil {
		return nil
	}
	return a
}

func decode[T any](d Decoder, root string, data []byte, read func(*bodyDecoder, []byte) T) (body T, err error) {
	if len(data) > MaxMessageBytes {
		return body, &TooLargeError{Field: root, Limit: MaxMessageBytes, Size: len(data)}
	}
	object, bad := checkObject(root, data)
	if bad != nil {
		return body, bad
	}
	r := bodyDecoder{Decoder: d}
	body = read(&r, object)
	if err := r.problems.err(); err != nil {
		var none T
		return none, err
	}
	return body, nil
}

// bodyDecoder decodes one body. After a bad field it continues, so that all bad fields are found.
type bodyDecoder struct {
	Decoder
	problems problems
}

// maxFields is the number of fields of a group.submit, the body with the most fields.
const maxFields = 17

// fields iterates over the fields of an object. It reports a repeated field instead of yielding it
// again. It stores only maxFields names: an object with more has an unknown one and is refused
// anyway.
func (r *bodyDecoder) fields(at fieldParent, object []byte) iter.Seq[field] {
	return func(yield func(field) bool) {
		var array [maxFields][]byte
		seen := array[:0]
		for key, value := range members(object) {
			f := field{&r.problems, at, key, value}
			if slices.ContainsFunc(seen, func(k []byte) bool { return bytes.Equal(k, key) }) {
				f.problem(problemRepeated)
				continue
			}
			if len(seen) < maxFields {
				seen = append(seen, key)
			}
			if !yield(f) {
				return
			}
		}
	}
}

// RepeatedKey returns an error that names the first repeated key of a valid JSON object; nil if
// there is none. It does not look into the values.
func RepeatedKey(object []byte) error {
	seen := map[string]bool{}
	for key := range members(bytes.Trim(object, whiteSpace)) {
		if seen[string(key)] {
			return &ValidationError{Fields: []FieldError{{fieldName(key), problemRepeated}}}
		}
		seen[string(key)] = true
	}
	return nil
}

func (r *bodyDecoder) readSubmit(object []byte) *SubmitGroup {
	g := new(SubmitGroup)
	var top fieldParent
	jobs := 0
	for f := range r.fields(top, object) {
		switch string(f.key) {
		case "id":
			g.ID = f.id()
		case "tenant":
			g.Tenant = f.id()
		case "name":
			g.Name = f.groupName()
		case "tags":
			g.Tags = r.readTags(f)
		case "type":
			g.Type = f.id()
		case "priority":
			g.Priority = f.lane()
		case "base_priority":
			g.BasePriority = f.basePriority()
		case "max_retries":
			g.MaxRetries = f.maxRetries()
		case "job_timeout":
			g.JobTimeout = f.jobTimeout()
		case "run_at":
			g.RunAt = f.runAt(r.Now)
		case "failure_threshold":
			g.FailureThreshold = f.failureThreshold()
		case "aggregate":
			g.Aggregate = r.readAggregates(f)
		case "callback_url":
			g.CallbackURL = f.text()
		case "total":
			g.Total = f.integer(MaxTotal)
		case "jobs":
			g.Jobs, jobs = r.readJobs(f)
		case "seal":
			g.Seal = f.boolean()
		case "unique_keys":
			g.UniqueKeys = f.boolean()
		default:
			f.unknown()
		}
	}
	r.require(top, "type", g.Type)
	if g.Total != nil && int64(jobs) > *g.Total {
		r.problems.add(top, "jobs", "must be no more than total, which is %d", *g.Total)
	}
	if g.UniqueKeys {
		r.requireUniqueKeys(g.Jobs)
	}
	return g
}

func (r *bodyDecoder) readAppend(object []byte) *AppendJobs {
	a := new(AppendJobs)
	var top fieldParent
	for f := range r.fields(top, object) {
		switch string(f.key) {
		case "group":
			a.Group = f.id()
		case "jobs":
			a.Jobs, _ = r.readJobs(f)
		default:
			f.unknown()
		}
	}
	r.require(top, "group", a.Group)
	if a.Jobs == nil {
		r.problems.add(top, "jobs", problemRequired)
	}
	return a
}

func (r *bodyDecoder) readSeal(object []byte) *SealGroup {
	s := new(SealGroup)
	var top fieldParent
	for f := range r.fields(top, object) {
		switch string(f.key) {
		case "group":
			s.Group = f.id()
		case "total":
			s.Total = f.integer(MaxTotal)
		default:
			f.unknown()
		}
	}
	r.require(top, "group", s.Group)
	return s
}

func (r *bodyDecoder) readCancel(object []byte) *CancelGroup {
	c := new(CancelGroup)
	var top fieldParent
	for f := range r.fields(top, object) {
		switch string(f.key) {
		case "group":
			c.Group = f.id()
		default:
			f.unknown()
		}
	}
	r.require(top, "group", c.Group)
	return c
}

func (r *bodyDecoder) readTags(f field) api.Tags {
	if !f.hasType('{', "an object of texts") {
		return nil
	}
	if n := countElements(f.value) / 2; n > api.MaxTags {
		f.problem("must have at most %d tags, not %d", api.MaxTags, n)
		return nil
	}
	tags := make(api.Tags, api.MaxTags)
	for tag := range r.fields(fieldParent{list: "tags", index: noIndex}, f.value) {
		key, value := string(tag.key), tag.text()
		if !api.ValidTag(key, value) {
			tag.problem("must " + api.TagRule)
		}
		tags[key] = value
	}
	if len(tags) == 0 {
		return nil
	}
	return tags
}

func (r *bodyDecoder) readAggregates(f field) (all []Aggregate) {
	if !f.hasType('[', "an array of aggregates") {
		return nil
	}
	if n := countElements(f.value); n > MaxAggregates {
		f.problem("must have at most %d aggregates, not %d", MaxAggregates, n)
		return nil
	}
	for i, element := range elements(f.value) {
		at := fieldParent{"aggregate", i}
		if !r.isObject(at, element) {
			continue
		}
		a := r.readAggregate(at, element)
		if a.As != "" && slices.ContainsFunc(all, func(b Aggregate) bool { return a.As == b.As }) {
			r.problems.add(at, "as", "must be unique among the group's aggregates")
		}
		all = append(all, a)
	}
	return all
}

func (r *bodyDecoder) readAggregate(at fieldParent, object []byte) (a Aggregate) {
	for f := range r.fields(at, object) {
		switch string(f.key) {
		case "as":
			if a.As = f.id(); len(a.As) > maxAsLength {
				f.problem("must be at most %d bytes", maxAsLength)
			}
		case "op":
			a.Op = f.text()
		case "field":
			a.Field = f.resultPath()
		case "over":
			a.Over = f.over()
		default:
			f.unknown()
		}
	}
	r.require(at, "as", a.As)
	r.require(at, "op", a.Op)
	builtin := slices.Contains(AggregateOps, a.Op)
	if a.Op != "" && !builtin && !r.Ops[a.Op] {
		r.problems.add(at, "op", "must be one of %s", r.opNames())
	}
	// a custom reducer checks its field itself
	if custom := r.Ops[a.Op] && !builtin; a.Op != "count" && !custom {
		r.require(at, "field", a.Field)
	}
	return a
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

func (r *bodyDecoder) require(at fieldParent, field, value string) {
	if value == "" {
		r.problems.add(at, field, problemRequired)
	}
}

// isObject reports whether an element of an array is an object; otherwise it records a problem.
func (r *bodyDecoder) isObject(at fieldParent, element []byte) bool {
	if element[0] != '{' {
		r.problems.add(at, "", "must be an object, not %s", jsonType(element))
	}
	return element[0] == '{'
}

// The fields of an entry of the ingest stream.
const (
	FieldType        = "type"
	fieldData        = "data"
	fieldID          = "id"
	fieldTraceParent = "traceparent"
)

// The types of messages on the ingest stream.
const (
	TypeGroupSubmit = "group.submit"
	TypeJobsAppend  = "jobs.append"
	TypeGroupSeal   = "group.seal"
	TypeGroupCancel = "group.cancel"
)

// Envelope is one entry of the ingest stream. Its fields are type and data, and optionally id and
// traceparent.
type Envelope struct {
	ID          string // the message id; the stream entry's id when the producer gave none
	Type        string
	TraceParent string // W3C traceparent; "" when the producer is not traced
	Data        []byte // JSON

	decoded *AppendJobs // the decoded Data, when the fast path could decode it
}

// ParseEntry reads an entry of the ingest stream. entryID is the id that the stream gave it; it
// becomes the message id when the entry has none of its own. ParseEntry ignores unknown fields and,
// as W3C asks, a malformed traceparent. Of the data it checks only the size, and that it is a JSON
// object; a Decoder checks what it contains. Data of type []byte is not copied.
//
// An error is a *ValidationError or, for data over MaxMessageBytes, a *TooLargeError.
func ParseEntry(entryID string, values map[string]any) (Envelope, error) {
	var bad problems
	e := Envelope{
		ID:          entryText(&bad, values, fieldID),
		Type:        entryText(&bad, values, FieldType),
		TraceParent: entryText(&bad, values, fieldTraceParent),
		Data:        entryBytes(&bad, values, fieldData),
	}
	return e.check(&bad, entryID)
}

// ParseFields is ParseEntry for a list in which field names and values alternate. If a name is
// repeated, its last value counts. The envelope's data shares memory with that value: the caller
// must not change it.
func ParseFields(entryID string, fields []string) (Envelope, error) {
	var e Envelope
	for i := 0; i+1 < len(fields); i += 2 {
		switch value := fields[i+1]; fields[i] {
		case fieldID:
			e.ID = value
		case FieldType:
			e.Type = value
		case fieldTraceParent:
			e.TraceParent = value
		case fieldData:
			e.Data = jsonscan.Bytes(value) // not copied, because it is large
		}
	}
	return e.check(new(problems), entryID)
}

func (e Envelope) check(bad *problems, entryID string) (Envelope, error) {
	e.TraceParent = normalizeTraceParent(e.TraceParent)
	if e.ID == "" {
		e.ID = entryID
	}
	if !api.ValidID(e.ID) {
		bad.add(fieldParent{}, fieldID, problemID)
	}
	switch e.Type {
	case TypeJobsAppend:
		e.decoded = fastDecodeAppend(e.Data)
	case TypeGroupSubmit, TypeGroupSeal, TypeGroupCancel:
	default:
		bad.add(fieldParent{}, FieldType, "must be one of "+
			TypeGroupSubmit+", "+TypeJobsAppend+", "+TypeGroupSeal+", "+TypeGroupCancel)
	}
	if e.decoded == nil {
		e.checkData(bad)
	}
	if err := bad.err(); err != nil {
		return Envelope{}, err
	}
	return e, nil
}

func (e Envelope) checkData(bad *problems) {
	if len(e.Data) > MaxMessageBytes {
		bad.addTooLarge(fieldParent{}, fieldData, len(e.Data), MaxMessageBytes)
	} else if _, err := checkObject(fieldData, e.Data); err != nil {
		// Report the problem for the entry's field data as a whole, not for a field inside the
		// JSON.
		bad.add(fieldParent{}, fieldData, "%s", err.Fields[0].Problem)
	}
}

// Values returns the names and values of the fields with which the entry is written to a stream. An
// empty id or traceparent is left out.
func (e Envelope) Values() map[string]any {
	values := map[string]any{FieldType: e.Type, fieldData: e.Data}
	if e.ID != "" {
		values[fieldID] = e.ID
	}
	if e.TraceParent != "" {
		values[fieldTraceParent] = e.TraceParent
	}
	return values
}

func entryText(bad *problems, values map[string]any, field string) string {
	if s, ok := values[field].(string); ok {
		return s
	}
	return string(entryBytes(bad, values, field))
}

func entryBytes(bad *problems, values map[string]any, field string) []byte {
	switch v := values[field].(type) {
	case nil:
	case string:
		return []byte(v)
	case []byte:
		return v
	default:
		bad.add(fieldParent{}, field, "must be text")
	}
	return nil
}
