package messages

import "unsafe"

// Fields of a stream entry.
const (
	fieldType        = "type"
	fieldData        = "data"
	fieldID          = "id"
	fieldTraceParent = "traceparent"
)

// ParseEntry reads a flat entry of the ingest stream, whose own id is entryID. Fields that it does
// not know are ignored, as is a malformed traceparent (as W3C has it); an empty id counts as
// absent. What the data says is left to a Decoder; here it need only be a JSON object. Data that is
// given as bytes is not copied.
//
// The error is a *ValidationError or, for data over MaxMessageBytes, a *TooLargeError.
func ParseEntry(entryID string, values map[string]any) (Envelope, error) {
	var bad problems
	e := Envelope{
		ID:          entryText(&bad, values, fieldID),
		Type:        entryText(&bad, values, fieldType),
		TraceParent: entryText(&bad, values, fieldTraceParent),
		Data:        entryBytes(&bad, values, fieldData),
	}
	return e.check(&bad, entryID)
}

// ParseFields is ParseEntry for names and values in turn; of a repeated name the last counts. The
// data shares their memory, so that it must not be changed.
func ParseFields(entryID string, fields []string) (Envelope, error) {
	var e Envelope
	for i := 0; i+1 < len(fields); i += 2 {
		switch value := fields[i+1]; fields[i] {
		case fieldID:
			e.ID = value
		case fieldType:
			e.Type = value
		case fieldTraceParent:
			e.TraceParent = value
		case fieldData:
			e.Data = unsafe.Slice(unsafe.StringData(value), len(value)) // #nosec G103: large, and only read
		}
	}
	return e.check(new(problems), entryID)
}

func (e Envelope) check(bad *problems, entryID string) (Envelope, error) {
	e.TraceParent = normalizeTraceParent(e.TraceParent)
	if e.ID == "" {
		e.ID = entryID
	}
	if !ValidID(e.ID) {
		bad.add(fieldParent{}, fieldID, problemID)
	}
	switch e.Type {
	case TypeJobsAppend:
		e.decoded = fastDecodeAppend(e.Data)
	case TypeGroupSubmit, TypeGroupSeal, TypeGroupCancel:
	default:
		bad.add(fieldParent{}, fieldType, "must be one of "+
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
	} else if _, problem := checkObject(fieldData, e.Data); problem != nil {
		// A field within the data is no field of the entry, so the problem is the data's.
		bad.add(fieldParent{}, fieldData, "%s", problem.Problem)
	}
}

// Values are the fields to write to the stream: those that are set.
func (e Envelope) Values() map[string]any {
	values := map[string]any{fieldType: e.Type, fieldData: e.Data}
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
