package ledger

import (
	"errors"
	"strconv"
	"strings"
	"time"
)

// Job is a job as it lies in a ready stream; lua/parts/blob.lua draws it.
type Job struct {
	Group, Type                string
	Attempt                    int
	Retries, Throttles, Losses int
	Waits                      string // fair|rate|congestion in ms, as the blob has them
	Since                      time.Time
	Ordinal                    int64
	Accepted                   time.Time
	Trace                      string // traceparent, "" when the job is not sampled
	Payload                    string // empty: it lies in the group's payloads
	Queued                     string // the blob from its ordinal on
}

// Field is the name of a ready entry's only field.
const Field = "j"

var errBlob = errors.New(
	"not a job: group|type|attempt|retries|throttles|losses|wait|wait|wait|since|reason|" +
		"ordinal|accepted|trace|payload is expected",
)

// ParseJob reads a ready entry's blob.
func ParseJob(blob string) (Job, error) {
	var d Job
	if err := d.Parse(blob); err != nil {
		return Job{}, err
	}
	return d, nil
}

// Parse is ParseJob into an empty d, which is of no use after an error.
func (d *Job) Parse(blob string) error {
	c := cutter{rest: blob}
	c.head(d)
	c.queued(d)
	return c.err(d)
}

// Parser reads ready entries one after the other. Those that were handed out together have one
// head, which it reads once.
type Parser struct {
	head string
	d    Job
}

// Parse reads an entry's fields into an empty d, which is of no use after an error.
func (p *Parser) Parse(fields []string, d *Job) error {
	if len(fields) != 2 || fields[0] == "" || fields[0] == Field {
		return d.Parse(EntryBlob(fields))
	}
	if fields[0] != p.head {
		c := cutter{rest: fields[0]}
		p.head, p.d = "", Job{}
		if c.head(&p.d); c.bad || c.rest != "" {
			return d.Parse(fields[0] + fields[1])
		}
		p.head = fields[0]
	}
	*d = p.d
	c := cutter{rest: fields[1]}
	c.queued(d)
	return c.err(d)
}

// Waited reads how long the job has waited for fairness, rate and congestion.
func (d *Job) Waited() (fair, rate, congestion time.Duration) {
	a, rest, _ := strings.Cut(d.Waits, "|")
	b, c, _ := strings.Cut(rest, "|")
	return millis(a), millis(b), millis(c)
}

func millis(s string) time.Duration {
	n, _ := number(s)
	return time.Duration(n) * time.Millisecond
}

// QueuedWithTrace is the blob from the ordinal on, with the trace context exchanged.
func (d *Job) QueuedWithTrace(trace string) string {
	if trace == d.Trace {
		return d.Queued
	}
	head := d.Queued[:len(d.Queued)-len(d.Payload)-1-len(d.Trace)]
	return head + trace + "|" + d.Payload
}

// cutter takes values off the front of a blob; bad says that one was missing or no number.
type cutter struct {
	rest string
	bad  bool
}

// head reads what stands in front of the ordinal.
func (c *cutter) head(d *Job) {
	d.Group, d.Type = c.text(), c.text()
	d.Attempt, d.Retries, d.Throttles, d.Losses = int(c.num()), int(c.num()), int(c.num()), int(c.num())
	at := c.rest
	_, _, _ = c.num(), c.num(), c.num()
	if !c.bad {
		d.Waits = at[:len(at)-len(c.rest)-1]
	}
	d.Since = time.UnixMilli(c.num())
	_ = c.text() // the reason, empty in a ready stream
}

// queued reads the rest.
func (c *cutter) queued(d *Job) {
	d.Queued = c.rest
	d.Ordinal = c.num()
	d.Accepted = time.UnixMilli(c.num())
	d.Trace = c.text()
	d.Payload = c.rest
}

func (c *cutter) err(d *Job) error {
	if c.bad || d.Group == "" || d.Type == "" {
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

// number reads what is not negative. Nearly all of it is digits, and few of them; the
// rest is left to strconv.
func number(s string) (n int64, ok bool) {
	if len(s) == 0 || len(s) > 18 {
		return rareNumber(s)
	}
	for i := range len(s) {
		c := s[i] - '0'
		if c > 9 {
			return rareNumber(s)
		}
		n = 10*n + int64(c)
	}
	return n, true
}

func rareNumber(s string) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return 0, false
	}
	return n, true
}
