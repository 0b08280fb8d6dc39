package stream

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

type rawReply struct{ b []byte }

var rawReplies = sync.Pool{New: func() any { return new(rawReply) }}

// maxRawReply is the largest buffer, in bytes, that is reused for later replies. Larger ones are
// left to the garbage collector.
const maxRawReply = 256 << 10

func (w *rawReply) release() {
	if cap(w.b) <= maxRawReply {
		w.b = w.b[:0]
		rawReplies.Put(w)
	}
}

func (w *rawReply) Write(p []byte) (int, error) {
	w.b = append(w.b, p...)
	return len(p), nil
}

// ReadFrom reads a string of known length directly into the buffer: go-redis copies the string with
// [io.CopyN], which calls ReadFrom with an [io.LimitedReader].
func (w *rawReply) ReadFrom(r io.Reader) (int64, error) {
	limited, ok := r.(*io.LimitedReader)
	if !ok {
		b, err := io.ReadAll(r)
		w.b = append(w.b, b...)
		return int64(len(b)), err
	}
	at, n := len(w.b), int(limited.N)
	w.b = slices.Grow(w.b, n)[:at+n]
	read, err := io.ReadFull(limited, w.b[at:])
	w.b = w.b[:at+read]
	return int64(read), err
}

// decodeRaw decodes the RESP2 reply of XREADGROUP; a nil reply is the error redis.Nil. The id and
// the fields of an entry are substrings of one string, so a kept string keeps no other entry in
// memory. The Fields slices of all entries of a stream share one array, so a kept Fields slice
// keeps all of them. It is written by hand because go-redis allocates each value of a reply;
// BenchmarkDecode compares it ("small") with go-redis's values ("ours") and types ("typed").
func decodeRaw(reply []byte) ([]Batch, error) {
	r := resp{rest: reply}
	streams := r.head('*')
	if streams < 0 && !r.bad {
		return nil, redis.Nil
	}
	var batches []Batch
	var fields []string
	for ; streams > 0 && !r.bad; streams-- {
		r.expect(2)
		b := Batch{Stream: string(r.bulk())}
		n := r.head('*')
		if n > 0 && n <= len(r.rest) { // a wrong number must not allocate unlimited memory
			b.Entries = make([]Entry, 0, n)
			fields = make([]string, 0, 2*n)
		}
		for ; n > 0 && !r.bad; n-- {
			var e Entry
			e, fields = r.entry(fields)
			b.Entries = append(b.Entries, e)
		}
		batches = append(batches, b)
	}
	if r.bad || len(r.rest) > 0 {
		return nil, errMalformed
	}
	return batches, nil
}

// entry decodes an entry of a stream, and appends the names and values of its fields to fields.
func (r *resp) entry(fields []string) (Entry, []string) {
	r.expect(2)
	id := r.bulk()
	n, size := r.head('*'), len(id)
	r.parts = r.parts[:0]
	for ; n > 0 && !r.bad; n-- {
		v := r.bulk()
		r.parts = append(r.parts, v)
		size += len(v)
	}
	if n < 0 {
		r.bad = true
	}
	var whole strings.Builder
	whole.Grow(size)
	whole.Write(id)
	first := len(fields)
	for _, v := range r.parts {
		at := whole.Len()
		whole.Write(v)
		fields = append(fields, whole.String()[at:])
	}
	return Entry{ID: whole.String()[:len(id)], Fields: fields[first:len(fields):len(fields)]}, fields
}

// resp decodes values one by one from the beginning of the rest of a RESP2 reply. It sets bad if
// the reply has another form than expected.
type resp struct {
	rest  []byte
	bad   bool
	parts [][]byte // parts of the entry that is being decoded
}

// head decodes the number after the type byte kind: the length of an array or string, -1 for nil.
func (r *resp) head(kind byte) int {
	end := bytes.IndexByte(r.rest, '\n')
	if r.bad || end < 3 || r.rest[0] != kind || r.rest[end-1] != '\r' {
		r.bad = true
		return 0
	}
	digits, n := r.rest[1:end-1], 0
	r.rest = r.rest[end+1:]
	if string(digits) == "-1" {
		return -1
	}
	for _, c := range digits {
		if c < '0' || c > '9' || len(digits) > 10 {
			r.bad = true
			return 0
		}
		n = 10*n + int(c-'0')
	}
	return n
}

// expect decodes the head of an array, and sets bad unless the array has n elements.
func (r *resp) expect(n int) {
	if r.head('*') != n {
		r.bad = true
	}
}

// bulk decodes a string.
func (r *resp) bulk() []byte {
	n := r.head('$')
	if r.bad || n < 0 || n > len(r.rest)-2 || r.rest[n] != '\r' || r.rest[n+1] != '\n' {
		r.bad = true
		return nil
	}
	v := r.rest[:n]
	r.rest = r.rest[n+2:]
	return v
}

// ID is the id of an entry of a stream: a time in ms since 1970, and a number that tells the entries
// of the same ms apart. The zero ID comes before every entry.
type ID struct{ MS, Seq uint64 }

// ParseID reads an id in the complete form MS-SEQ, as Redis returns it.
func ParseID(text string) (ID, error) {
	ms, seq, _ := strings.Cut(text, "-")
	a, errMS := strconv.ParseUint(ms, 10, 64)
	b, errSeq := strconv.ParseUint(seq, 10, 64)
	if errMS != nil || errSeq != nil {
		return ID{}, fmt.Errorf("%.100q is not the id of a stream entry", text)
	}
	return ID{a, b}, nil
}

func (id ID) String() string {
	return strconv.FormatUint(id.MS, 10) + "-" + strconv.FormatUint(id.Seq, 10)
}

// After says whether the entry id comes after other.
func (id ID) After(other ID) bool {
	return cmp.Or(cmp.Compare(id.MS, other.MS), cmp.Compare(id.Seq, other.Seq)) > 0
}

// InFuture says whether the id is more than futureAge in the future, so that a program and not
// Redis's clock has made it.
func (id ID) InFuture() bool { return id.MS > uint64(time.Now().Add(futureAge).UnixMilli()) }
