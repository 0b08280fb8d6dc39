package api

import "encoding/hex"

// TraceParent has the parts of a W3C traceparent, which names the trace that a job or request
// belongs to (https://www.w3.org/TR/trace-context/).
type TraceParent struct {
	TraceID [16]byte // not all 0
	SpanID  [8]byte  // not all 0
	Flags   byte     // those of traceFlags
}

// Offsets in the text of a traceparent, version-traceid-spanid-flags in lower-case hex, and its
// length.
const (
	traceIDAt   = 3
	spanIDAt    = 36
	flagsAt     = 53
	parentBytes = 55
	// traceFlags are the flags that version 00 defines: sampled, and random trace id.
	traceFlags = 0x03
)

// ParseTraceParent parses a traceparent without allocating. ok is false if it is malformed. Of a
// later version than 00 it reads the part that version 00 defines.
// https://www.w3.org/TR/trace-context/#versioning-of-traceparent
func ParseTraceParent(s string) (t TraceParent, ok bool) {
	if len(s) < parentBytes || s[traceIDAt-1] != '-' || s[spanIDAt-1] != '-' || s[flagsAt-1] != '-' {
		return TraceParent{}, false
	}
	var version, flags [1]byte
	if !unhex(version[:], s) || !unhex(t.TraceID[:], s[traceIDAt:]) || !unhex(t.SpanID[:], s[spanIDAt:]) ||
		!unhex(flags[:], s[flagsAt:]) {
		return TraceParent{}, false
	}
	t.Flags = flags[0] & traceFlags
	switch longer := len(s) > parentBytes; {
	case t.TraceID == [16]byte{}, t.SpanID == [8]byte{}, version[0] == 0xff,
		// Only version 00 is checked for its exact form: later versions may have more fields behind
		// another dash, and more flags.
		version[0] == 0 && (longer || flags[0] != t.Flags), longer && s[parentBytes] != '-':
		return TraceParent{}, false
	}
	return t, true
}

// String returns the text of version 00, of 55 bytes.
func (t TraceParent) String() string {
	var b [parentBytes]byte
	copy(b[:], "00-")
	hex.Encode(b[traceIDAt:], t.TraceID[:])
	b[spanIDAt-1] = '-'
	hex.Encode(b[spanIDAt:], t.SpanID[:])
	b[flagsAt-1] = '-'
	hex.Encode(b[flagsAt:], []byte{t.Flags & traceFlags})
	return string(b[:])
}

// unhex fills dst from the beginning of s, which has two lower-case hex digits for each byte. s
// must have at least 2·len(dst) characters. unhex returns false if one of them is not such a digit.
func unhex(dst []byte, s string) bool {
	for i := range dst {
		hi, lo := nibble(s[2*i]), nibble(s[2*i+1])
		if hi|lo > 0xf {
			return false
		}
		dst[i] = hi<<4 | lo
	}
	return true
}

func nibble(c byte) byte {
	switch {
	case '0' <= c && c <= '9':
		return c - '0'
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10
	}
	return 0xff
}
