// Package submission encodes submissions for package client, which sends them over HTTP, and for
// package client/producer, which publishes them. It hides how ids make a submission repeatable.
package submission

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"reflect"
)

// NewKey returns a random key for ID, different at each call.
func NewKey() string { return rand.Text() }

// ID returns the id of a request or message: 64 hexadecimal digits of a hash of a key and the
// content. The same content under the same key always gets the same id, so a repetition changes
// nothing. Other content under the same key gets another id, so that it is not mistaken for a
// repetition.
func ID(key string, data []byte) string {
	k, d := sha256.Sum256([]byte(key)), sha256.Sum256(data)
	sum := sha256.Sum256(append(k[:], d[:]...))
	return hex.EncodeToString(sum[:])
}

// Encode encodes v as JSON. It does not escape <, > and &: the JSON is not shown as HTML, and an
// escaped character takes six bytes.
func Encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// EncodeJob encodes a job with this payload as JSON. It refuses a payload of bytes that are JSON:
// package json writes bytes as text in base64, and no processor expects that in their place.
func EncodeJob(job, payload any) ([]byte, error) {
	v := reflect.ValueOf(payload)
	if v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	isBytes := v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Uint8
	switch payload.(type) {
	case json.Marshaler, encoding.TextMarshaler: // such as json.RawMessage
	default:
		if isBytes && json.Valid(v.Bytes()) {
			return nil, fmt.Errorf("payload: a %T of JSON would be sent as text in base64: make it a json.RawMessage", payload)
		}
	}
	return Encode(job)
}

// EncodeAll encodes each job, which has the payload payloadOf(job), by EncodeJob. The error names the
// first job that can't be encoded.
func EncodeAll[J any](jobs []J, payloadOf func(J) any) ([][]byte, error) {
	all := make([][]byte, len(jobs))
	for i, j := range jobs {
		b, err := EncodeJob(j, payloadOf(j))
		if err != nil {
			return nil, fmt.Errorf("encode job %d: %w", i, err)
		}
		all[i] = b
	}
	return all, nil
}

// WithJobs returns a JSON object with another member "jobs", the array of the encoded jobs. The
// object must have at least one member. Without jobs, WithJobs returns the object itself.
func WithJobs(object []byte, jobs [][]byte) []byte {
	if len(jobs) == 0 {
		return object
	}
	const open, end = `,"jobs":[`, `]}`
	size := len(object) + len(open) + len(end) + len(jobs)
	for _, j := range jobs {
		size += len(j)
	}
	b := make([]byte, 0, size)
	b = append(b, object[:len(object)-1]...)
	b = append(b, open...)
	for i, j := range jobs {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, j...)
	}
	return append(b, end...)
}
