package messages

import (
	"encoding/binary"
	"encoding/json"
	"math/bits"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/api"
)

// The functions of this file are the fast path: most messages are valid and simple, and these
// functions check and slice them in one pass. A function that is not certain that a text is valid
// fails. Its caller then uses the complete decoder, which also reports what is wrong. FuzzFastPath
// checks that both give the same results.

const (
	fastMaxDepth    = 32   // nested levels that the fast path reads
	fastMaxPrealloc = 8192 // most jobs for which memory is allocated before they are read
)

// validJSON is a faster json.Valid.
func validJSON(text []byte) bool {
	if end := skipValue(text, 0, fastMaxDepth); end > 0 && skipSpace(text, end) == len(text) {
		return true
	}
	return json.Valid(text)
}

// Each skip function takes the offset at which to start and returns the offset behind the JSON that
// it has read. It returns -1 when it is not certain that the JSON is valid.

// skipSpace skips white space. It never fails.
func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// skipChar skips one character and the white space around it.
func skipChar(b []byte, i int, c byte) int {
	if i = skipSpace(b, i); i >= len(b) || b[i] != c {
		return -1
	}
	return skipSpace(b, i+1)
}

func skipValue(b []byte, i, depth int) int {
	if i = skipSpace(b, i); i >= len(b) {
		return -1
	}
	switch c := b[i]; c {
	case '"':
		return skipString(b, i)
	case '{':
		return skipObject(b, i, depth)
	case '[':
		return skipArray(b, i, depth)
	case 't':
		return skipWord(b, i, "true")
	case 'f':
		return skipWord(b, i, "false")
	case 'n':
		return skipWord(b, i, "null")
	}
	return skipNumber(b, i)
}

func skipWord(b []byte, i int, word string) int {
	if end := i + len(word); end <= len(b) && string(b[i:end]) == word {
		return end
	}
	return -1
}

func skipObject(b []byte, i, depth int) int {
	if i = skipSpace(b, i+1); i < len(b) && b[i] == '}' {
		return i + 1
	}
	for depth > 0 && i < len(b) && b[i] == '"' {
		if i = skipString(b, i); i < 0 {
			return -1
		}
		if i = skipChar(b, i, ':'); i < 0 {
			return -1
		}
		if i = skipValue(b, i, depth-1); i < 0 {
			return -1
		}
		if i = skipSpace(b, i); i < len(b) && b[i] == '}' {
			return i + 1
		}
		if i = skipChar(b, i, ','); i < 0 {
			return -1
		}
	}
	return -1
}

func skipArray(b []byte, i, depth int) int {
	if i = skipSpace(b, i+1); i < len(b) && b[i] == ']' {
		return i + 1
	}
	for depth > 0 {
		if i = skipValue(b, i, depth-1); i < 0 {
			return -1
		}
		if i = skipSpace(b, i); i < len(b) && b[i] == ']' {
			return i + 1
		}
		if i = skipChar(b, i, ','); i < 0 {
			return -1
		}
	}
	return -1
}

func skipNumber(b []byte, i int) int {
	if b[i] == '-' {
		i++
	}
	switch {
	case i < len(b) && b[i] == '0':
		i++
	default:
		if i = skipDigits(b, i); i < 0 {
			return -1
		}
	}
	if i < len(b) && b[i] == '.' {
		if i = skipDigits(b, i+1); i < 0 {
			return -1
		}
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		if i++; i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		return skipDigits(b, i)
	}
	return i
}

// skipDigits skips at least one digit.
func skipDigits(b []byte, i int) int {
	start := i
	for i < len(b) && '0' <= b[i] && b[i] <= '9' {
		i++
	}
	if i == start {
		return -1
	}
	return i
}

// skipString skips a string literal. It does not check that the text is UTF-8.
func skipString(b []byte, i int) int {
	for i++; ; {
		i = skipPlain(b, i)
		switch {
		case i >= len(b) || b[i] < ' ':
			return -1
		case b[i] == '"':
			return i + 1
		case i+1 >= len(b):
			return -1
		}
		switch b[i+1] {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			i += 2
		case 'u':
			if i+6 > len(b) || !isAnyHex(b[i+2:i+6]) {
				return -1
			}
			i += 6
		default:
			return -1
		}
	}
}

func isAnyHex(digits []byte) bool {
	for _, c := range digits {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') && (c < 'A' || c > 'F') {
			return false
		}
	}
	return true
}

// skipPlain returns the offset of the next quote, backslash or control character. It tests eight
// bytes at a time.
// https://graphics.stanford.edu/~seander/bithacks.html#HasLessInWord
func skipPlain(b []byte, i int) int {
	const (
		ones  = 0x0101010101010101
		highs = 0x80 * ones
	)
	for ; i+8 <= len(b); i += 8 {
		w := binary.LittleEndian.Uint64(b[i:])
		quote, slash := w^('"'*ones), w^('\\'*ones)
		// The lowest bit that is set is right. Bits above it may be wrong.
		if found := ((w-' '*ones)&^w | (quote-ones)&^quote | (slash-ones)&^slash) & highs; found != 0 {
			return i + bits.TrailingZeros64(found)/8
		}
	}
	for i < len(b) && b[i] >= ' ' && b[i] != '"' && b[i] != '\\' {
		i++
	}
	return i
}

// fastString reads a string without escapes.
func fastString(b []byte, i int) (text []byte, end int) {
	if i >= len(b) || b[i] != '"' {
		return nil, -1
	}
	end = skipPlain(b, i+1)
	if end >= len(b) || b[end] != '"' {
		return nil, -1
	}
	return b[i+1 : end], end + 1
}

func fastID(b []byte, i int) (id string, end int) {
	text, end := fastString(b, i)
	if id = string(text); end < 0 || !api.ValidID(id) {
		return "", -1
	}
	return id, end
}

// fastDecodeAppend decodes the data of a jobs.append message. It returns nil when it is not certain
// that the data is valid.
func fastDecodeAppend(data []byte) *AppendJobs {
	if len(data) > MaxMessageBytes || !utf8.Valid(data) {
		return nil
	}
	a := new(AppendJobs)
	i := skipChar(data, 0, '{')
	for more := true; more; {
		var key []byte
		if key, i = fastKey(data, i); i < 0 {
			return nil
		}
		switch {
		case string(key) == "group" && a.Group == "":
			a.Group, i = fastID(data, i)
		case string(key) == "jobs" && a.Jobs == nil:
			a.Jobs, i = fastDecodeJobs(data, i)
		default:
			return nil
		}
		if i, more = fastNext(data, i, '}'); i < 0 {
			return nil
		}
	}
	if i < len(data) || a.Group == "" || a.Jobs == nil {
		return nil
	}
	return a
}

// fastKey reads a key of an object, and the colon.
func fastKey(b []byte, i int) (key []byte, value int) {
	if i < 0 {
		return nil, -1
	}
	key, i = fastString(b, i)
	if i < 0 {
		return nil, -1
	}
	return key, skipChar(b, i, ':')
}

// fastNext skips what follows an element: a comma, or the end of the object or array. more reports
// a comma.
func fastNext(b []byte, i int, closing byte) (next int, more bool) {
	if i < 0 {
		return -1, false
	}
	if i = skipSpace(b, i); i >= len(b) {
		return -1, false
	}
	switch b[i] {
	case closing:
		return skipSpace(b, i+1), false
	case ',':
		return skipSpace(b, i+1), true
	}
	return -1, false
}

// fastDecodeJobs decodes an array of at least one job.
func fastDecodeJobs(b []byte, i int) (jobs []Job, end int) {
	i = skipChar(b, i, '[')
	for more := true; more; {
		start := i
		var job Job
		if job, i = fastDecodeJob(b, i); i < 0 {
			return nil, -1
		}
		// The jobs of one message usually have similar sizes; estimate their number from the first.
		if jobs == nil {
			jobs = make([]Job, 0, min(1+(len(b)-i)/(i-start), fastMaxPrealloc))
		}
		jobs = append(jobs, job)
		if i, more = fastNext(b, i, ']'); i < 0 {
			return nil, -1
		}
	}
	return jobs, i
}

// fastDecodeJob decodes a job with a payload and, if present, a type and a traceparent. It fails
// for other fields.
func fastDecodeJob(b []byte, i int) (job Job, end int) {
	if i < 0 {
		return Job{}, -1
	}
	i = skipChar(b, i, '{')
	for more := true; more; {
		var key []byte
		if key, i = fastKey(b, i); i < 0 {
			return Job{}, -1
		}
		switch {
		case string(key) == "payload" && job.Payload == nil:
			start := i
			if i = skipValue(b, i, fastMaxDepth); i < 0 || i-start > MaxPayloadBytes {
				return Job{}, -1
			}
			job.Payload = b[start:i:i]
		case string(key) == "type" && job.Type == "":
			job.Type, i = fastID(b, i)
		case string(key) == "traceparent" && job.TraceParent == "":
			var text []byte
			text, i = fastString(b, i)
			job.TraceParent = normalizeTraceParent(string(text))
		default:
			return Job{}, -1
		}
		if i < 0 {
			return Job{}, -1
		}
		if i, more = fastNext(b, i, '}'); i < 0 {
			return Job{}, -1
		}
	}
	if job.Payload == nil {
		return Job{}, -1
	}
	return job, i
}
