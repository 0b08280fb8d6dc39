package telemetry

import (
	"encoding/hex"

	"go.opentelemetry.io/otel/trace"
)

// A traceparent is version-traceid-spanid-flags in lower-case hex
// (https://www.w3.org/TR/trace-context/).
const (
	traceIDAt   = 3
	spanIDAt    = 36
	flagsAt     = 53
	parentBytes = 55
)

const knownFlags = trace.FlagsSampled | trace.FlagsRandom

// ParseTraceParent parses a W3C traceparent into a remote span context, without allocating. It
// returns the empty context if s is not valid.
func ParseTraceParent(s string) trace.SpanContext {
	if len(s) < parentBytes || s[traceIDAt-1] != '-' || s[spanIDAt-1] != '-' || s[flagsAt-1] != '-' {
		return trace.SpanContext{}
	}
	var version, flags [1]byte
	c := trace.SpanContextConfig{Remote: true}
	if !unhex(version[:], s) || !unhex(c.TraceID[:], s[traceIDAt:]) || !unhex(c.SpanID[:], s[spanIDAt:]) ||
		!unhex(flags[:], s[flagsAt:]) {
		return trace.SpanContext{}
	}
	// Later versions may have more fields after another dash, and more flags; 0xff is
	// not a version.
	switch extra := len(s) > parentBytes; {
	case version[0] == 0xff,
		version[0] == 0 && (extra || trace.TraceFlags(flags[0])&^knownFlags != 0),
		extra && s[parentBytes] != '-':
		return trace.SpanContext{}
	}
	c.TraceFlags = trace.TraceFlags(flags[0]) & knownFlags
	sc := trace.NewSpanContext(c)
	if !sc.IsValid() {
		return trace.SpanContext{}
	}
	return sc
}

// FormatTraceParent returns a span context as a W3C traceparent of 55 bytes, or "" if the context
// is not valid.
func FormatTraceParent(sc trace.SpanContext) string {
	if !sc.IsValid() {
		return ""
	}
	tid, sid := sc.TraceID(), sc.SpanID()
	var b [parentBytes]byte
	copy(b[:], "00-")
	hex.Encode(b[traceIDAt:], tid[:])
	b[spanIDAt-1] = '-'
	hex.Encode(b[spanIDAt:], sid[:])
	b[flagsAt-1] = '-'
	hex.Encode(b[flagsAt:], []byte{byte(sc.TraceFlags() & knownFlags)})
	return string(b[:])
}

// unhex fills dst with the bytes of the lower-case hex digits at the beginning of s. It returns
// false if there are too few digits.
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
