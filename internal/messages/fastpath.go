package messages

import (
	"encoding/json"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jsonscan"
)

// The functions of this file are the fast path of decoding, for valid and simple messages, as most
// are: they check and slice a message in one pass. BenchmarkAppend and BenchmarkDecodeJob measure
// them. If a function is not certain that a text is valid, it returns the offset -1, or nil, and
// its caller uses the complete decoder, which also reports what is wrong. FuzzFastPath checks that
// both give the same results.

const (
	fastMaxDepth    = 32   // nested levels that the fast path reads
	fastMaxPrealloc = 8192 // most jobs for which memory is allocated before they are read
)

// validJSON is a faster json.Valid.
func validJSON(text []byte) bool {
	end := jsonscan.Value(text, jsonscan.Space(text, 0), fastMaxDepth)
	return jsonscan.Space(text, end) == len(text) || json.Valid(text)
}

// fastString reads a string without escapes.
func fastString(b []byte, i int) (text []byte, end int) {
	if !jsonscan.Is(b, i, '"') {
		return nil, -1
	}
	end = jsonscan.Plain(b, i+1)
	if !jsonscan.Is(b, end, '"') {
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

// fastKey reads a key of an object, and the colon.
func fastKey(b []byte, i int) (key []byte, value int) {
	key, i = fastString(b, i)
	return key, jsonscan.Token(b, i, ':')
}

// fastDecodeAppend decodes the data of a jobs.append message.
func fastDecodeAppend(data []byte) *AppendJobs {
	if len(data) > MaxMessageBytes || !utf8.Valid(data) {
		return nil
	}
	a := new(AppendJobs)
	i := jsonscan.Token(data, 0, '{')
	for more := true; more; {
		var key []byte
		key, i = fastKey(data, i)
		switch {
		case string(key) == "group" && a.Group == "":
			a.Group, i = fastID(data, i)
		case string(key) == "jobs" && a.Jobs == nil:
			a.Jobs, i = fastDecodeJobs(data, i)
		default:
			return nil
		}
		i, more = jsonscan.Next(data, i, '}')
	}
	if i < len(data) || a.Group == "" || a.Jobs == nil {
		return nil
	}
	return a
}

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
