package messages

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"hash"
	"math"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/internal/jsonscan"
)

// Job is one unit of work, as its producer sends it. readJob and fastDecodeJob decode its JSON; the
// tags are only for other code that encodes or decodes it.
type Job struct {
	Payload     json.RawMessage `json:"payload"`
	Type        string          `json:"type,omitempty"`        // the group's type when empty
	RunAt       *time.Time      `json:"run_at,omitempty"`      // the job does not start before this time; RFC 3339
	TraceParent string          `json:"traceparent,omitempty"` // the job continues this trace
	Key         string          `json:"key,omitempty"`         // the producer's own name of the job
}

const maxJobKeyLength = 128 // bytes

// JobKeyRule describes a valid key of a job, for error messages: it follows the word "must".
const JobKeyRule = "be 1 to 128 bytes of UTF-8 without control characters"

// ValidJobKey reports whether key follows JobKeyRule.
func ValidJobKey(key string) bool {
	return key != "" && len(key) <= maxJobKeyLength && utf8.ValidString(key) &&
		!strings.ContainsFunc(key, unicode.IsControl)
}

func (f field) jobKey() string {
	key := f.text()
	if key != "" && !ValidJobKey(key) {
		f.problem("must " + JobKeyRule)
	}
	return key
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

// fastMaxPrealloc is the most jobs for which the fast path allocates memory before it has read them.
const fastMaxPrealloc = 8192

// fastDecodeJobs decodes an array of at least one job.
func fastDecodeJobs(b []byte, i int) (jobs []Job, end int) {
	i = jsonscan.Token(b, i, '[')
	for more := true; more; {
		start := i
		var job Job
		if job, i = fastDecodeJob(b, i); i < 0 {
			return nil, -1
		}
		// Estimate the number of jobs from the size of the first one: jobs of a message usually
		// have similar sizes.
		if jobs == nil {
			jobs = make([]Job, 0, min(1+(len(b)-i)/(i-start), fastMaxPrealloc))
		}
		jobs = append(jobs, job)
		if i, more = jsonscan.Next(b, i, ']'); i < 0 {
			return nil, -1
		}
	}
	return jobs, i
}

// fastDecodeJob decodes a job that has a payload and, optionally, a type, a traceparent and a key.
// If the job has any other field, it returns -1.
func fastDecodeJob(b []byte, i int) (job Job, end int) {
	i = jsonscan.Token(b, i, '{')
	traced := false
	for more := true; more; {
		var key []byte
		key, i = fastKey(b, i)
		switch {
		case string(key) == "payload" && job.Payload == nil:
			start := i
			if i = jsonscan.Value(b, i, fastMaxDepth); i < 0 || i-start > MaxPayloadBytes {
				return Job{}, -1
			}
			job.Payload = b[start:i:i]
		case string(key) == "type" && job.Type == "":
			job.Type, i = fastID(b, i)
		case string(key) == "traceparent" && !traced:
			var text []byte
			text, i = fastString(b, i)
			job.TraceParent, traced = normalizeTraceParent(string(text)), true
		case string(key) == "key" && job.Key == "":
			var text []byte
			if text, i = fastString(b, i); i >= 0 {
				job.Key = string(text)
			}
			if !ValidJobKey(job.Key) {
				return Job{}, -1
			}
		default:
			return Job{}, -1
		}
		if i, more = jsonscan.Next(b, i, '}'); i < 0 {
			return Job{}, -1
		}
	}
	if job.Payload == nil {
		return Job{}, -1
	}
	return job, i
}

// job adds a job of a group of the given type. A field that a later version adds to jobs is hashed
// only if it is set, after a tag byte that begins nothing else. Otherwise the hash of a job without
// it would change with the upgrade, and a submission repeated after it would be refused.
func (d *digest) job(j *Job, groupType string) {
	d.value(j.Payload, 0)
	typ := j.Type
	if typ == groupType {
		typ = "" // the default
	}
	d.text(typ)
	d.time(j.RunAt)
	if j.Key != "" {
		d.tagged('k', []byte(j.Key))
	}
}

// ContentHash returns a hash of a submission, 32 hexadecimal digits. Two submissions that ask for
// the same work have the same hash, even if their JSON differs in the order of fields (in payloads
// too), white space, escapes in strings, or in defaults of the API given or left out. Numbers
// within payloads are compared as text, and so is everything nested deeper than 32 levels.
//
// The hash does not cover the group's id, which the server may have made up, nor traceparents,
// which differ when a request is repeated.
func ContentHash(g *SubmitGroup) string {
	d := digest{hash: sha256.New()}
	tenant, lane, threshold := g.Tenant, g.Priority, 1.0
	if tenant == g.ID {
		tenant = "" // the default
	}
	if lane == "" {
		lane = LaneNormal
	}
	if g.FailureThreshold != nil {
		threshold = *g.FailureThreshold
	}
	d.text(tenant)
	d.text(g.Name)
	d.text(g.Type)
	d.text(string(lane))
	d.float(g.BasePriority)
	optional(&d, g.MaxRetries)
	d.number(uint64(g.JobTimeout))
	d.time(g.RunAt)
	d.float(threshold)
	d.number(uint64(len(g.Aggregate)))
	for _, a := range g.Aggregate {
		d.text(a.As)
		d.text(a.Op)
		d.text(a.Field)
		d.text(a.Over)
	}
	d.text(g.CallbackURL)
	optional(&d, g.Total)
	d.flag(g.Seal)
	d.number(uint64(len(g.Jobs)))
	for i := range g.Jobs {
		d.job(&g.Jobs[i], g.Type)
	}
	if g.UniqueKeys { // tagged as a field of jobs is
		d.tagged('u', nil)
	}
	if len(g.Tags) > 0 {
		d.tagged('t', []byte(strings.Join(g.Tags.Pairs(), "\n")))
	}
	return d.hex()
}

// digest computes a hash over a list of values. Two different lists never give the same input to
// the hash function, because each value is written with its length or an end mark.
type digest struct {
	hash    hash.Hash
	buffer  []byte       // not hashed yet
	members []jsonMember // of the objects that are being hashed; those of the innermost object are last
}

type jsonMember struct{ key, value []byte }

const (
	digestChunk = 4 << 10 // bytes that are hashed at once
	// digestDepth is the number of nested levels that are hashed in canonical form. Each level is
	// scanned again for the next one, so this bounds the work on a payload.
	digestDepth = 32
)

func (d *digest) bytes(b []byte) {
	d.number(uint64(len(b)))
	if len(b) >= digestChunk {
		d.flush()
		d.hash.Write(b)
		return
	}
	d.buffer = append(d.buffer, b...)
	if len(d.buffer) >= digestChunk {
		d.flush()
	}
}

func (d *digest) flush() {
	d.hash.Write(d.buffer)
	d.buffer = d.buffer[:0]
}

func (d *digest) hex() string {
	d.flush()
	return hex.EncodeToString(d.hash.Sum(nil)[:16])
}

func (d *digest) number(n uint64) { d.buffer = binary.AppendUvarint(d.buffer, n) }

func (d *digest) float(x float64) { d.number(math.Float64bits(x)) }

func (d *digest) text(s string) { d.bytes([]byte(s)) }

func (d *digest) flag(set bool) {
	if set {
		d.number(1)
		return
	}
	d.number(0)
}

func (d *digest) time(t *time.Time) {
	d.flag(t != nil)
	if t != nil {
		d.number(uint64(t.Unix()))
		d.number(uint64(t.Nanosecond()))
	}
}

func optional[T int | int64](d *digest, n *T) {
	d.flag(n != nil)
	if n != nil {
		d.number(uint64(*n))
	}
}

// value adds a JSON value, given as text, to the hash: its type, its content and, for an object or
// array, an end mark. Members of objects are in the order of their names, and white space does not
// count. Numbers, and what is nested deeper than digestDepth, are added as they are written.
func (d *digest) value(v []byte, depth int) {
	v = bytes.Trim(v, whiteSpace)
	switch {
	case len(v) == 0, depth > digestDepth:
		d.tagged('?', v)
	case v[0] == '"':
		d.tagged('"', canonicalString(v))
	case v[0] == '[':
		d.buffer = append(d.buffer, '[')
		for _, element := range elements(v) {
			d.value(element, depth+1)
		}
		d.buffer = append(d.buffer, ']')
	case v[0] == '{':
		d.object(v, depth)
	default:
		d.tagged('=', v)
	}
}

func (d *digest) tagged(tag byte, v []byte) {
	d.buffer = append(d.buffer, tag)
	d.bytes(v)
}

func (d *digest) object(v []byte, depth int) {
	first := len(d.members)
	c := openContainer(v)
	for {
		key, value := c.member()
		if len(value) == 0 {
			break
		}
		d.members = append(d.members, jsonMember{canonicalString(key), value})
	}
	last := len(d.members)
	// Sort stably: the order of members with the same key matters, because decoders use the last
	// one.
	slices.SortStableFunc(d.members[first:last], func(a, b jsonMember) int { return bytes.Compare(a.key, b.key) })
	d.buffer = append(d.buffer, '{')
	for i := first; i < last; i++ {
		m := d.members[i] // indexed each time, because nested objects may reallocate the slice
		d.bytes(m.key)
		d.value(m.value, depth+1)
	}
	d.buffer = append(d.buffer, '}')
	d.members = d.members[:first]
}

// canonicalString returns the text of a string literal. If the text contains the replacement
// character U+FFFD, it returns the literal itself, because different invalid literals, such as
// halves of surrogate pairs, decode to that character.
func canonicalString(literal []byte) []byte {
	s := unquote(literal)
	if bytes.ContainsRune(s, utf8.RuneError) {
		return literal
	}
	return s
}
