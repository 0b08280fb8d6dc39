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

// ContentHash is the same for two submissions that ask for the same work, however their JSON is
// written: order of fields (in payloads too), white space, escapes in strings, and defaults that
// are spelled out or left out make no difference. Within payloads numbers count as they are
// written, and so does all that lies deeper than 32 levels.
//
// It leaves out the group's id, which the server may have made up, and traceparents, which differ
// when a request is repeated. It has 32 hexadecimal digits.
func ContentHash(g *SubmitGroup) string {
	d := digest{hash: sha256.New()}
	tenant, lane, threshold := g.Tenant, g.Priority, 1.0
	if tenant == g.ID {
		tenant = "" // its default
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
	}
	d.text(g.CallbackURL)
	optional(&d, g.Total)
	d.flag(g.Seal)
	d.number(uint64(len(g.Jobs)))
	for _, j := range g.Jobs {
		d.value(j.Payload, 0)
		if j.Type == g.Type {
			j.Type = "" // its default
		}
		d.text(j.Type)
		d.time(j.RunAt)
	}
	return d.hex()
}

// digest hashes values so that no two lists of them look the same: each says how long it is or
// where it ends.
type digest struct {
	hash    hash.Hash
	buffer  []byte       // not summed yet
	members []jsonMember // of the objects being hashed, the innermost last
}

type jsonMember struct{ key, value []byte }

const (
	digestChunk = 4 << 10 // bytes summed at once
	digestDepth = 32      // each level is read again by the next, so this bounds the work on nested payloads
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

// value hashes JSON in a canonical form: the kind, what is within, and for containers their end.
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
	// Stable: of a repeated key the order matters.
	slices.SortStableFunc(d.members[first:last], func(a, b jsonMember) int { return bytes.Compare(a.key, b.key) })
	d.buffer = append(d.buffer, '{')
	for i := first; i < last; i++ {
		m := d.members[i] // by index: nested objects may move the slice
		d.bytes(m.key)
		d.value(m.value, depth+1)
	}
	d.buffer = append(d.buffer, '}')
	d.members = d.members[:first]
}

// canonicalString is what a string stands for, but as it is written when that cannot be told from a
// replacement character, as with half a surrogate pair.
func canonicalString(literal []byte) []byte {
	s := unquote(literal)
	if bytes.ContainsRune(s, utf8.RuneError) {
		return literal
	}
	return s
}
