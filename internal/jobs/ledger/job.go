package ledger

import (
	"errors"
	"strconv"
	"strings"
	"time"
)

// Job is a job as its moving blob describes it. In Redis a job is a blob: text that moves from the
// fair queue to a ready stream and, when it has to wait, to a sorted set and back.
//
//	queued = ordinal|accepted_ms|trace|payload
//	moving = group|type|attempt|retries|throttles|losses|WAITS|since_ms|reason|queued
//	WAITS  = wait_fair|wait_rate|wait_congestion, in ms
//
// The fair queue holds queued blobs, the sorted sets moving ones. An entry of a ready stream
// holds a moving blob in one of two forms: as the value of the field [BlobField], or divided
// before the ordinal: the field's name is the first part and its value is the queued blob, which
// a script can then pass on without a copy.
//
// The payload is JSON. It is empty when the payload is stored in the group's payloads, because
// it is large. A job that has a key has it behind the payload, between two marks (the byte 31):
//
//	queued = ordinal|accepted_ms|trace|payload^_key^_
//
// JSON text contains no such byte, so the last byte of a blob says whether something follows the
// payload: a job without a key costs one comparison and no byte. A key contains no control
// character and no newline. Another field of a job has its place, with a mark behind it, after the
// key: scripts pass on what follows the payload as it is, and only what shows a payload to others
// divides it (payload_and_key in lua/parts/blob.lua).
type Job struct {
	Group, Type                string
	Attempt                    int
	Retries, Throttles, Losses int
	Waits                      string // wait_fair|wait_rate|wait_congestion in ms, as text
	SinceMS                    int64  // Redis ms at which the present wait began
	Reason                     Reason // why the job is non-ready
	Ordinal                    int64
	Accepted                   time.Time
	Trace                      string // traceparent; "" when the job is not sampled
	Payload                    string // "": it is stored in the group's payloads
	Queued                     string // the queued blob
}

// BlobField is the field name of a ready entry that holds the whole moving blob as its value.
const BlobField = "j"

// fieldMark is the byte that ends the payload and each field behind it.
const fieldMark = '\x1f'

// Reason says why a job is non-ready. It is 0 for a job in a ready stream, and for a job that a
// worker released.
type Reason byte

// Reasons of non-ready jobs.
const (
	ReasonRate      Reason = 'R' // its tenant has no permit: the job is the tenant's marker
	ReasonThrottled Reason = 'A' // the downstream API asked to wait
	ReasonError     Reason = 'E' // its last attempt ended with a transient error, or it was reclaimed
	ReasonScheduled Reason = 'S' // it was submitted with a RunAt of its own
	ReasonPaused    Reason = 'P' // it was suspended when it was ready
	ReasonResource  Reason = 'G' // it was deferred because what it needs is busy
)

var errBlob = errors.New(
	"not a job: group|type|attempt|retries|throttles|losses|wait|wait|wait|since|reason|" +
		"ordinal|accepted|trace|payload is expected",
)

// ParseJob reads a moving blob.
func ParseJob(blob string) (Job, error) {
	var j Job
	if err := j.Parse(blob); err != nil {
		return Job{}, err
	}
	return j, nil
}

// Parse reads a moving blob into an empty j. After an error j must not be used. It allocates
// nothing, because the fields are parts of the blob; BenchmarkParseJob compares it with
// strings.SplitN.
func (j *Job) Parse(blob string) error {
	c := cutter{rest: blob}
	c.head(j)
	c.queued(j)
	return c.err(j)
}

// Parser is what its method Parse remembers from one entry of a ready stream to the next. Jobs that
// were admitted together have the same head, which it reads once; BenchmarkParseJob compares it
// with Job.Parse.
type Parser struct {
	head string
	job  Job
}

// Parse reads the fields of a ready entry into an empty j. After an error j must not be used.
func (p *Parser) Parse(fields []string, j *Job) error {
	if len(fields) != 2 || fields[0] == "" || fields[0] == BlobField {
		return j.Parse(EntryBlob(fields))
	}
	if fields[0] != p.head {
		c := cutter{rest: fields[0]}
		p.head, p.job = "", Job{}
		if c.head(&p.job); c.bad || c.rest != "" {
			return j.Parse(fields[0] + fields[1])
		}
		p.head = fields[0]
	}
	*j = p.job
	c := cutter{rest: fields[1]}
	c.queued(j)
	return c.err(j)
}

// QueuedOrdinal reads the ordinal of a queued blob.
func QueuedOrdinal(blob string) (int64, bool) {
	c := cutter{rest: blob}
	n := c.num()
	return n, !c.bad
}

// EntryBlob puts the moving blob of a ready entry together from the entry's fields. Any single
// field other than BlobField counts as a head, whatever it holds; of an entry with more fields,
// EntryBlob returns text that can't be read as a job.
func EntryBlob(fields []string) string {
	switch {
	case len(fields) != 2:
		return strings.ReplaceAll(strings.Join(fields, " "), "|", "¦")
	case fields[0] == BlobField:
		return fields[1]
	}
	return fields[0] + fields[1]
}

// MessageBlob does the same as EntryBlob for an entry as go-redis returns it; of an entry with more
// fields it returns "".
func MessageBlob(values map[string]any) string {
	if len(values) != 1 {
		return ""
	}
	for field, value := range values {
		text, _ := value.(string)
		return EntryBlob([]string{field, text})
	}
	return ""
}

// Blob composes the moving blob.
func (j *Job) Blob() string { return string(append(j.appendHead(nil), j.Queued...)) }

// Entry composes the fields of a divided ready entry.
func (j *Job) Entry() []string { return []string{string(j.appendHead(nil)), j.Queued} }

func (j *Job) appendHead(to []byte) []byte {
	to = append(append(to, j.Group...), '|')
	to = append(append(to, j.Type...), '|')
	for _, n := range [...]int{j.Attempt, j.Retries, j.Throttles, j.Losses} {
		to = append(strconv.AppendInt(to, int64(n), 10), '|')
	}
	to = append(append(to, j.Waits...), '|')
	to = append(strconv.AppendInt(to, j.SinceMS, 10), '|')
	if j.Reason != 0 {
		to = append(to, byte(j.Reason))
	}
	return append(to, '|')
}

// Waited returns how long the job has waited for the fair queue, the rate limit and congestion,
// without the present wait.
func (j *Job) Waited() (fair, rate, congestion time.Duration) {
	a, rest, _ := strings.Cut(j.Waits, "|")
	b, c, _ := strings.Cut(rest, "|")
	return millis(a), millis(b), millis(c)
}

func millis(s string) time.Duration {
	n, _ := number(s)
	return time.Duration(n) * time.Millisecond
}

// Key returns the job's key, "" when it has none.
func (j *Job) Key() string {
	if n := len(j.Queued); n == 0 || j.Queued[n-1] != fieldMark {
		return "" // most jobs have no key
	}
	_, key := cutKey(j.end())
	return key
}

// end returns the part of the queued blob behind the trace: the payload and, if the job has one,
// the key.
func (j *Job) end() string {
	c := cutter{rest: j.Queued}
	_, _, _ = c.text(), c.text(), c.text()
	return c.rest
}

// QueuedWithTrace returns the queued blob with the given trace context instead of its own.
func (j *Job) QueuedWithTrace(trace string) string {
	if trace == j.Trace {
		return j.Queued
	}
	end := j.end()
	return j.Queued[:len(j.Queued)-len(end)-1-len(j.Trace)] + trace + "|" + end
}

func cutKey(text string) (payload, key string) {
	if n := len(text); n == 0 || text[n-1] != fieldMark {
		return text, ""
	}
	payload, fields, _ := strings.Cut(text, string(fieldMark))
	key, _, _ = strings.Cut(fields, string(fieldMark))
	return payload, key
}

// appendFields appends the fields that follow a job's payload in its blob.
func appendFields(to []byte, job *NewJob) []byte {
	if job.Key == "" {
		return to
	}
	to = append(append(to, fieldMark), job.Key...)
	return append(to, fieldMark)
}

// queuedSize is about the size of a job's queued blob.
func queuedSize(job *NewJob) int { return 32 + len(job.TraceParent) + len(job.Payload) + len(job.Key) }

// composer is what its method append needs to compose the queued blobs of jobs that all get the
// same acceptance time.
type composer struct{ accepted []byte } // the acceptance time, ms, between two bars

func newComposer(now time.Time) composer {
	return composer{append(strconv.AppendInt([]byte("|"), now.UnixMilli(), 10), '|')}
}

func (c composer) append(to []byte, ordinal int64, job *NewJob) []byte {
	to = append(strconv.AppendInt(to, ordinal, 10), c.accepted...)
	to = append(append(to, job.TraceParent...), '|')
	return appendFields(append(to, job.Payload...), job)
}

// cutter is a blob whose fields its methods read one by one from the front; bad says that a field
// was missing, was not a number, or was a reason of more than one character.
type cutter struct {
	rest string
	bad  bool
}

// head reads the part before the ordinal.
func (c *cutter) head(j *Job) {
	j.Group, j.Type = c.text(), c.text()
	j.Attempt, j.Retries, j.Throttles, j.Losses = int(c.num()), int(c.num()), int(c.num()), int(c.num())
	at := c.rest
	_, _, _ = c.num(), c.num(), c.num()
	if !c.bad {
		j.Waits = at[:len(at)-len(c.rest)-1]
	}
	j.SinceMS = c.num()
	switch reason := c.text(); {
	case len(reason) == 1:
		j.Reason = Reason(reason[0])
	case reason != "":
		c.bad = true
	}
}

// queued reads the part from the ordinal on.
func (c *cutter) queued(j *Job) {
	j.Queued = c.rest
	j.Ordinal = c.num()
	j.Accepted = time.UnixMilli(c.num())
	j.Trace = c.text()
	j.Payload, _ = cutKey(c.rest)
}

func (c *cutter) err(j *Job) error {
	if c.bad || j.Group == "" || j.Type == "" {
		return errBlob
	}
	return nil
}

func (c *cutter) text() string {
	end := strings.IndexByte(c.rest, '|')
	if end < 0 {
		c.bad = true
		return ""
	}
	v := c.rest[:end]
	c.rest = c.rest[end+1:]
	return v
}

func (c *cutter) num() int64 {
	n, ok := number(c.text())
	c.bad = c.bad || !ok
	return n
}

// number reads a number as scripts do: digits only. A blob has ten numbers, nearly all of them
// short, so these are read without strconv; BenchmarkParseJob measures it.
func number(s string) (n int64, ok bool) {
	if len(s) == 0 || len(s) > 18 {
		long, err := strconv.ParseUint(s, 10, 63)
		return int64(long), err == nil
	}
	for i := range len(s) {
		c := s[i] - '0'
		if c > 9 {
			return 0, false
		}
		n = 10*n + int64(c)
	}
	return n, true
}

// This file encodes and decodes states. A job's state is two bytes in the string states:GROUP, at
// twice its ordinal: the state letter and the mark of its attempt. A report of another attempt is
// stale. A person can read the string in redis-cli.

// Letter is the state letter of a job: the first byte of its state.
type Letter byte

// Letters of a job's state.
const (
	Waiting   Letter = 'W' // in the fair queue
	NonReady  Letter = 'N' // in a sorted set, until it is due or resumed
	Ready     Letter = 'R' // in a ready stream
	InFlight  Letter = 'I' // in a ready stream; a worker has started it
	Done      Letter = 'D' // and its result is not reduced yet
	Reduced   Letter = 'A' // done, and its result is part of the group's aggregate
	Failed    Letter = 'F'
	Cancelled Letter = 'C'
)

// words are the names of the states in the API.
var words = map[Letter]string{
	Waiting: "waiting", NonReady: "non_ready", Ready: "ready", InFlight: "in_flight",
	Done: "done", Reduced: "done", Failed: "failed", Cancelled: "cancelled",
}

// Word returns the state's name in the API; "" for a byte that is no letter.
func (l Letter) Word() string { return words[l] }

// letterOf returns the letter at the beginning of a state; 0 for "".
func letterOf(state string) Letter {
	if state == "" {
		return 0
	}
	return Letter(state[0])
}

// StateBytes is the length of a [State].
const StateBytes = 2

// State is a job's state: its letter and the mark of its attempt.
type State string

// StateAt returns the i-th state, from 0, of a string of states. It panics if the string is too
// short.
func StateAt(states string, i int64) State { return State(states[StateBytes*i : StateBytes*(i+1)]) }

// Letter returns the state letter.
func (s State) Letter() Letter { return Letter(s[0]) }

// Attempt returns the number of the job's attempt, modulo 90.
func (s State) Attempt() int { return int(s[1]) - firstMark }

// IsOf says whether the state's mark is that of an attempt.
func (s State) IsOf(attempt int) bool { return s[1] == mark(attempt) }

// The marks of attempts are printable bytes from '!' on, so that a person can read states.
const (
	firstMark = '!'
	marks     = 90
)

func mark(attempt int) byte { return byte(firstMark + attempt%marks) }

// jobRanges builds the argument with which scripts get jobs of one group: each range of consecutive
// ordinals with the same attempt as 'first n attempt', joined by spaces.
type jobRanges struct {
	b       []byte
	lo, n   int64
	attempt int
}

// add adds a job. Its ordinal is higher than those before.
func (r *jobRanges) add(ordinal int64, attempt int) {
	if r.n > 0 && ordinal == r.lo+r.n && attempt == r.attempt {
		r.n++
		return
	}
	r.flush()
	r.lo, r.n, r.attempt = ordinal, 1, attempt
}

func (r *jobRanges) flush() {
	if r.n == 0 {
		return
	}
	if len(r.b) > 0 {
		r.b = append(r.b, ' ')
	}
	r.b = strconv.AppendInt(r.b, r.lo, 10)
	r.b = strconv.AppendInt(append(r.b, ' '), r.n, 10)
	r.b = strconv.AppendInt(append(r.b, ' '), int64(r.attempt), 10)
	r.n = 0
}

// text returns the encoded ranges.
func (r *jobRanges) text() []byte {
	r.flush()
	return r.b
}
