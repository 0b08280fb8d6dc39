package messages

import (
	"bytes"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

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

// DecodeJob decodes one line of NDJSON. An error about the whole line names no field. The job's
// payload is a copy: the caller may reuse the line's memory.
func (d Decoder) DecodeJob(line []byte) (Job, error) {
	if job, end := fastDecodeJob(line, 0); end == len(line) && utf8.Valid(line) {
		job.Payload = bytes.Clone(job.Payload)
		return job, nil
	}
	job, err := decode(d, "", line, (*bodyDecoder).readLine)
	job.Payload = bytes.Clone(job.Payload)
	return job, err
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
const maxFields = 16

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
			if f.text() != "" {
				f.problem("not supported yet; leave it out and read /v1/groups/{id}/events instead")
			}
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

// requireUniqueKeys records a problem for each job whose key an earlier job of the body has.
func (r *bodyDecoder) requireUniqueKeys(jobs []Job) {
	first := make(map[string]int, len(jobs))
	for i := range jobs {
		key := jobs[i].Key
		if key == "" {
			continue
		}
		before, repeated := first[key]
		if !repeated {
			first[key] = i
			continue
		}
		r.problems.add(fieldParent{"jobs", i}, "key",
			"is also the key of jobs[%d]; leave out one of the two, or unique_keys", before)
	}
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

func (r *bodyDecoder) readLine(object []byte) Job { return r.readJob(fieldParent{}, object) }

// readJobs decodes an array of jobs and returns how many elements it has, invalid ones included.
// After the first bad field of the body it still checks elements, but adds no more of them to jobs.
// jobs is nil only if the value is null or no array.
func (r *bodyDecoder) readJobs(f field) (jobs []Job, n int) {
	if !f.hasType('[', "an array of jobs") {
		return nil, 0
	}
	if jobs, end := fastDecodeJobs(f.value, 0); end == len(f.value) {
		return jobs, len(jobs)
	}
	// Allocate no more jobs than data of this length can contain, so that an array of many short
	// elements that are no jobs gets little memory.
	jobs = make([]Job, 0, min(countElements(f.value), 1+len(f.value)/len(`{"payload":0},`)))
	for i, element := range elements(f.value) {
		n++
		at := fieldParent{"jobs", i}
		if !r.isObject(at, element) {
			continue
		}
		if job := r.readJob(at, element); r.problems.isEmpty() {
			jobs = append(jobs, job)
		}
	}
	return jobs, n
}

func (r *bodyDecoder) readJob(at fieldParent, object []byte) (job Job) {
	for f := range r.fields(at, object) {
		switch string(f.key) {
		case "payload":
			job.Payload = f.value
		case "type":
			job.Type = f.id()
		case "run_at":
			job.RunAt = f.runAt(r.Now)
		case "traceparent":
			job.TraceParent = normalizeTraceParent(f.text())
		case "key":
			job.Key = f.jobKey()
		default:
			f.unknown()
		}
	}
	switch size := len(job.Payload); {
	case size == 0:
		r.problems.add(at, "payload", "required; may be any JSON, null too")
	case size > MaxPayloadBytes:
		r.problems.addTooLarge(at, "payload", size, MaxPayloadBytes)
	}
	return job
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
