package messages

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"math"
	"slices"
	"time"
	"unicode/utf8"
)

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
