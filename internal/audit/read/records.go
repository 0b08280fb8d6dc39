package read

import (
	"encoding/json"
	"strconv"
	"strings"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// ParseFailure returns the ordinal and the attempt of the job in the record of a failure. A record
// is the error, a line break, and the job in the form in which the next round can run it. field is
// the record's field in the hash of failures. ok is false if the record is no failure of this
// group, or not of the job that the field names.
func ParseFailure(group, field, record string) (ordinal int64, attempt int, ok bool) {
	_, blob, ok := strings.Cut(record, "\n")
	d, err := ledger.ParseJob(blob)
	return d.Ordinal, d.Attempt, ok && err == nil && d.Group == group && strconv.FormatInt(d.Ordinal, 10) == field
}

// ParseResultLine returns the ordinal of a result line; ok is false if the line is no result.
func ParseResultLine(line string) (int64, bool) {
	if rest, ok := strings.CutPrefix(line, `{"ordinal":`); ok { // the form that workers write
		if end := strings.IndexAny(rest, ",}"); end > 0 {
			if n, err := strconv.ParseInt(rest[:end], 10, 64); err == nil && n >= 0 {
				return n, true
			}
		}
	}
	var r struct{ Ordinal *int64 }
	if json.Unmarshal([]byte(line), &r) != nil || r.Ordinal == nil || *r.Ordinal < 0 {
		return 0, false
	}
	return *r.Ordinal, true
}

// ErrorCode returns the error code in a failure's record; "" if the record can't be read.
func ErrorCode(record string) string {
	head, _, _ := strings.Cut(record, "\n")
	var e struct{ Code string }
	if json.Unmarshal([]byte(head), &e) != nil {
		return ""
	}
	return e.Code
}

// Text returns a value of a Redis reply as a string; "" if it is nil or no string.
func Text(v any) string { s, _ := v.(string); return s }

// Int returns a value of a Redis reply as a number; 0 if it is missing or not a number.
func Int(v any) int64 {
	n, _ := strconv.ParseInt(Text(v), 10, 64)
	return n
}
