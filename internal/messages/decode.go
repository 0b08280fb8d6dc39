package messages

import (
	"bytes"
	"slices"
	"time"
	"unicode/utf8"
)

// Decoder decodes and validates the bodies of requests and messages. Its zero value is ready to
// use. It refuses unknown fields. null and the empty string count as absent, except in a payload,
// which may be any JSON. When a key is repeated, its last value counts.
//
// An error is a *ValidationError that lists every bad field, or a *TooLargeError.
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

// DecodeAppendEntry is DecodeAppend for an entry from ParseEntry or ParseFields, which may have
// decoded it already.
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

// DecodeJob decodes one line of NDJSON. The job's payload is a copy: the caller may reuse the
// line's memory.
func (d Decoder) DecodeJob(line []byte) (Job, error) {
	if job, end := fastDecodeJob(line, 0); end == len(line) && utf8.Valid(line) {
		job.Payload = bytes.Clone(job.Payload)
		return job, nil
	}
	job, err := decode(d, "line", line, func(r *bodyDecoder, object []byte) Job {
		return r.readJob(fieldParent{}, object)
	})
	job.Payload = bytes.Clone(job.Payload)
	return job, err
}

func decode[T any](d Decoder, root string, data []byte, read func(*bodyDecoder, []byte) T) (body T, err error) {
	if len(data) > MaxMessageBytes {
		return body, &TooLargeError{Field: root, Limit: MaxMessageBytes, Size: len(data)}
	}
	object, bad := checkObject(root, data)
	if bad != nil {
		return body, &ValidationError{Fields: []FieldError{*bad}}
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

func (r *bodyDecoder) readSubmit(object []byte) *SubmitGroup {
	g := new(SubmitGroup)
	var at fieldParent
	jobs := 0
	for key, v := range members(object) {
		switch string(key) {
		case "id":
			g.ID = r.id(at, "id", v)
		case "tenant":
			g.Tenant = r.id(at, "tenant", v)
		case "name":
			g.Name = r.groupName(at, "name", v)
		case "type":
			g.Type = r.id(at, "type", v)
		case "priority":
			g.Priority = r.lane(at, "priority", v)
		case "base_priority":
			g.BasePriority = r.basePriority(at, "base_priority", v)
		case "max_retries":
			g.MaxRetries = r.maxRetries(at, "max_retries", v)
		case "job_timeout":
			g.JobTimeout = r.jobTimeout(at, "job_timeout", v)
		case "run_at":
			g.RunAt = r.runAt(at, "run_at", v)
		case "failure_threshold":
			g.FailureThreshold = r.failureThreshold(at, "failure_threshold", v)
		case "aggregate":
			g.Aggregate = r.readAggregates("aggregate", v)
		case "callback_url":
			if r.text(at, "callback_url", v) != "" {
				r.problems.add(at, "callback_url",
					"not supported yet; leave it out and read /v1/groups/{id}/events instead")
			}
		case "total":
			g.Total = r.integer(at, "total", v, MaxTotal)
		case "jobs":
			g.Jobs, jobs = r.readJobs("jobs", v)
		case "seal":
			g.Seal = r.boolean(at, "seal", v)
		default:
			r.addUnknown(at, key)
		}
	}
	r.require(at, "type", g.Type)
	if g.Total != nil && int64(jobs) > *g.Total {
		r.problems.add(at, "jobs", "must be no more than total, which is %d", *g.Total)
	}
	return g
}

func (r *bodyDecoder) readAppend(object []byte) *AppendJobs {
	a := new(AppendJobs)
	var at fieldParent
	for key, v := range members(object) {
		switch string(key) {
		case "group":
			a.Group = r.id(at, "group", v)
		case "jobs":
			a.Jobs, _ = r.readJobs("jobs", v)
		default:
			r.addUnknown(at, key)
		}
	}
	r.require(at, "group", a.Group)
	if a.Jobs == nil {
		r.problems.add(at, "jobs", problemRequired)
	}
	return a
}

func (r *bodyDecoder) readSeal(object []byte) *SealGroup {
	s := new(SealGroup)
	var at fieldParent
	for key, v := range members(object) {
		switch string(key) {
		case "group":
			s.Group = r.id(at, "group", v)
		case "total":
			s.Total = r.integer(at, "total", v, MaxTotal)
		default:
			r.addUnknown(at, key)
		}
	}
	r.require(at, "group", s.Group)
	return s
}

func (r *bodyDecoder) readCancel(object []byte) *CancelGroup {
	g := new(CancelGroup)
	var at fieldParent
	for key, v := range members(object) {
		switch string(key) {
		case "group":
			g.Group = r.id(at, "group", v)
		default:
			r.addUnknown(at, key)
		}
	}
	r.require(at, "group", g.Group)
	return g
}

// readJobs decodes an array of jobs and counts its elements, bad ones included. After the body's
// first bad field it adds no more jobs. jobs is nil only when the array is absent.
func (r *bodyDecoder) readJobs(list string, v []byte) (jobs []Job, n int) {
	if !r.hasType('[', "an array of jobs", fieldParent{}, list, v) {
		return nil, 0
	}
	if jobs, end := fastDecodeJobs(v, 0); end == len(v) {
		return jobs, len(jobs)
	}
	// Bound the allocation by the smallest size of a job, so that an array of other short elements
	// gets no memory for jobs.
	jobs = make([]Job, 0, min(countElements(v), 1+len(v)/len(`{"payload":0},`)))
	for i, element := range elements(v) {
		n++
		at := fieldParent{list, i}
		if element[0] != '{' {
			r.problems.add(at, "", "must be an object, not %s", jsonType(element))
			continue
		}
		if job := r.readJob(at, element); r.problems.isEmpty() {
			jobs = append(jobs, job)
		}
	}
	return jobs, n
}

func (r *bodyDecoder) readJob(at fieldParent, object []byte) (job Job) {
	for key, v := range members(object) {
		switch string(key) {
		case "payload":
			job.Payload = v
		case "type":
			job.Type = r.id(at, "type", v)
		case "run_at":
			job.RunAt = r.runAt(at, "run_at", v)
		case "traceparent":
			job.TraceParent = normalizeTraceParent(r.text(at, "traceparent", v))
		default:
			r.addUnknown(at, key)
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

func (r *bodyDecoder) readAggregates(list string, v []byte) (all []Aggregate) {
	if !r.hasType('[', "an array of aggregates", fieldParent{}, list, v) {
		return nil
	}
	if n := countElements(v); n > MaxAggregates {
		r.problems.add(fieldParent{}, list, "must have at most %d aggregates, not %d", MaxAggregates, n)
		return nil
	}
	for i, element := range elements(v) {
		at := fieldParent{list, i}
		if element[0] != '{' {
			r.problems.add(at, "", "must be an object, not %s", jsonType(element))
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
	for key, v := range members(object) {
		switch string(key) {
		case "as":
			if a.As = r.id(at, "as", v); len(a.As) > maxAsLength {
				r.problems.add(at, "as", "must be at most %d bytes", maxAsLength)
			}
		case "op":
			a.Op = r.text(at, "op", v)
		case "field":
			a.Field = r.resultPath(at, "field", v)
		default:
			r.addUnknown(at, key)
		}
	}
	r.require(at, "as", a.As)
	r.require(at, "op", a.Op)
	if a.Op != "" && !slices.Contains(AggregateOps, a.Op) && !r.Ops[a.Op] {
		r.problems.add(at, "op", "must be one of %s", r.opNames())
	}
	// a custom reducer checks its field itself
	if custom := r.Ops[a.Op] && !slices.Contains(AggregateOps, a.Op); a.Op != "count" && !custom {
		r.require(at, "field", a.Field)
	}
	return a
}
