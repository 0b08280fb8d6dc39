package messages

import (
	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jsonscan"
)

// The fields of an entry of the ingest stream.
const (
	FieldType        = "type"
	fieldData        = "data"
	fieldID          = "id"
	fieldTraceParent = "traceparent"
)

// The types of messages on the ingest stream.
const (
	TypeGroupSubmit = "group.submit"
	TypeJobsAppend  = "jobs.append"
	TypeGroupSeal   = "group.seal"
	TypeGroupCancel = "group.cancel"
)

// Envelope is one entry of the ingest stream. Its fields are type and data, and optionally id and
// traceparent.
type Envelope struct {
	ID          string // the message id; the stream entry's id when the producer gave none
	Type        string
	TraceParent string // W3C traceparent; "" when the producer is not traced
	Data        []byte // JSON

	decoded *AppendJobs // the decoded Data, when the fast path could decode it
}

// ParseEntry reads an entry of the ingest stream. entryID is the id that the stream gave it; it
// becomes the message id when the entry has none of its own. ParseEntry ignores unknown fields and,
// as W3C asks, a malformed traceparent. Of the data it checks only the size, and that it is a JSON
// object; a Decoder checks what it contains. Data of type []byte is not copied.
//
// An error is a *ValidationError or, for data over MaxMessageBytes, a *TooLargeError.
func ParseEntry(entryID string, values map[string]any) (Envelope, error) {
	var bad problems
	e := Envelope{
		ID:          entryText(&bad, values, fieldID),
		Type:        entryText(&bad, values, FieldType),
		TraceParent: entryText(&bad, values, fieldTraceParent),
		Data:        entryBytes(&bad, values, fieldData),
	}
	return e.check(&bad, entryID)
}

// ParseFields is ParseEntry for a list in which field names and values alternate. If a name is
// repeated, its last value counts. The envelope's data shares memory with that value: the caller
// must not change it.
func ParseFields(entryID string, fields []string) (Envelope, error) {
	var e Envelope
	for i := 0; i+1 < len(fields); i += 2 {
		switch value := fields[i+1]; fields[i] {
		case fieldID:
			e.ID = value
		case FieldType:
			e.Type = value
		case fieldTraceParent:
			e.TraceParent = value
		case fieldData:
			e.Data = jsonscan.Bytes(value) // not copied, because it is large
		}
	}
	return e.check(new(problems), entryID)
}

func (e Envelope) check(bad *problems, entryID string) (Envelope, error) {
	e.TraceParent = normalizeTraceParent(e.TraceParent)
	if e.ID == "" {
		e.ID = entryID
	}
	if !api.ValidID(e.ID) {
		bad.add(fieldParent{}, fieldID, problemID)
	}
	switch e.Type {
	case TypeJobsAppend:
		e.decoded = fastDecodeAppend(e.Data)
	case TypeGroupSubmit, TypeGroupSeal, TypeGroupCancel:
	default:
		bad.add(fieldParent{}, FieldType, "must be one of "+
			TypeGroupSubmit+", "+TypeJobsAppend+", "+TypeGroupSeal+", "+TypeGroupCancel)
	}
	if e.decoded == nil {
		e.checkData(bad)
	}
	if err := bad.err(); err != nil {
		return Envelope{}, err
	}
	return e, nil
}

func (e Envelope) checkData(bad *problems) {
	if len(e.Data) > MaxMessageBytes {
		bad.addTooLarge(fieldParent{}, fieldData, len(e.Data), MaxMessageBytes)
	} else if _, err := checkObject(fieldData, e.Data); err != nil {
		// Report the problem for the entry's field data as a whole, not for a field inside the
		// JSON.
		bad.add(fieldParent{}, fieldData, "%s", err.Fields[0].Problem)
	}
}

// Values returns the names and values of the fields with which the entry is written to a stream. An
// empty id or traceparent is left out.
func (e Envelope) Values() map[string]any {
	values := map[string]any{FieldType: e.Type, fieldData: e.Data}
	if e.ID != "" {
		values[fieldID] = e.ID
	}
	if e.TraceParent != "" {
		values[fieldTraceParent] = e.TraceParent
	}
	return values
}

func entryText(bad *problems, values map[string]any, field string) string {
	if s, ok := values[field].(string); ok {
		return s
	}
	return string(entryBytes(bad, values, field))
}

func entryBytes(bad *problems, values map[string]any, field string) []byte {
	switch v := values[field].(type) {
	case nil:
	case string:
		return []byte(v)
	case []byte:
		return v
	default:
		bad.add(fieldParent{}, field, "must be text")
	}
	return nil
}
