package messages_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/messages"
)

const (
	entryID     = "1700000000000-0"
	traceParent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
)

func TestParseEntry(t *testing.T) {
	tests := map[string]struct {
		values map[string]any
		want   messages.Envelope
	}{
		"least": {
			map[string]any{"type": "group.cancel", "data": `{"group":"g"}`},
			messages.Envelope{ID: entryID, Type: "group.cancel", Data: []byte(`{"group":"g"}`)},
		},
		"everything, and a field that is not ours": {
			map[string]any{"colour": "red", "data": "{}", "id": "m-1", "traceparent": traceParent, "type": "group.submit"},
			messages.Envelope{ID: "m-1", Type: "group.submit", TraceParent: traceParent, Data: []byte("{}")},
		},
		"bytes": {
			map[string]any{"type": []byte("jobs.append"), "data": []byte(" {}\n"), "id": []byte("m")},
			messages.Envelope{ID: "m", Type: "jobs.append", Data: []byte(" {}\n")},
		},
		"empty options": {
			map[string]any{"type": "group.seal", "data": "{}", "id": "", "traceparent": ""},
			messages.Envelope{ID: entryID, Type: "group.seal", Data: []byte("{}")},
		},
		"malformed traceparent is dropped": {
			map[string]any{"type": "group.seal", "data": "{}", "traceparent": "00-abc"},
			messages.Envelope{ID: entryID, Type: "group.seal", Data: []byte("{}")},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := messages.ParseEntry(entryID, tt.values)
			require.NoError(t, err)
			require.Equal(t, tt.want, got)

			again, err := messages.ParseEntry(entryID, got.Values())
			require.NoError(t, err)
			require.Equal(t, got, again)
		})
	}
}

func TestParseEntryNamesEveryBadField(t *testing.T) {
	const (
		badID   = "id: must match ^[A-Za-z0-9._-]{1,128}$ (except . and ..)"
		badType = "type: must be one of group.submit, jobs.append, group.seal, group.cancel"
	)
	tests := map[string]struct {
		entryID string
		values  map[string]any
		want    string
	}{
		"nothing":      {entryID, nil, "2 fields are wrong: " + badType + "; data: required; must be a JSON object"},
		"all":          {"", map[string]any{"type": "x", "data": "["}, "3 fields are wrong: " + badID + "; " + badType + "; data: must be valid JSON; breaks at byte 1: unexpected end of JSON input"},
		"id":           {entryID, entry("{}", "id", "a b"), badID},
		"long id":      {entryID, entry("{}", "id", strings.Repeat("a", 129)), badID},
		"entry's id":   {"a:b", entry("{}"), badID},
		"id no text":   {entryID, entry("{}", "id", 5), "id: must be text"},
		"type no text": {entryID, map[string]any{"type": 5, "data": "{}"}, "type: must be text"},
		"array":        {entryID, entry("[]"), "data: must be a JSON object, not an array"},
		"broken":       {entryID, entry(`{"group":x}`), "data: must be valid JSON; breaks at byte 10: invalid character 'x' looking for beginning of value"},
		"two objects":  {entryID, entry(`{} {}`), "data: must be valid JSON; breaks at byte 4: invalid character '{' after top-level value"},
		"no UTF-8":     {entryID, entry("{\"a\":\"é\xff\"}"), "data: must be UTF-8; is not at byte 8"},
		"deep":         {entryID, entry(`{"a":` + strings.Repeat("[", 1<<20)), "data: must be valid JSON; breaks at byte 10005: invalid character '[' exceeded max depth"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := messages.ParseEntry(tt.entryID, tt.values)
			var invalid *messages.ValidationError
			require.ErrorAs(t, err, &invalid)
			require.EqualError(t, err, tt.want)
			require.Zero(t, got)
		})
	}
}

func TestParseEntryRefusesTooMuchData(t *testing.T) {
	fits := "{}" + strings.Repeat(" ", messages.MaxMessageBytes-2)
	_, err := messages.ParseEntry(entryID, entry(fits))
	require.NoError(t, err)

	_, err = messages.ParseEntry(entryID, entry(fits+" "))
	require.Equal(t, &messages.TooLargeError{Field: "data", Limit: messages.MaxMessageBytes, Size: messages.MaxMessageBytes + 1}, err)
}

// entry returns the fields of an entry with a cancel message. others are names and values, in turn,
// that replace or add fields.
func entry(data string, others ...any) map[string]any {
	values := map[string]any{"type": messages.TypeGroupCancel, "data": data}
	for i := 0; i < len(others); i += 2 {
		values[others[i].(string)] = others[i+1]
	}
	return values
}

func TestTraceParents(t *testing.T) {
	tests := map[string]struct{ in, want string }{
		"version 00":              {traceParent, traceParent},
		"other flags":             {traceParent[:53] + "03", traceParent[:53] + "03"},
		"later version":           {"cc" + traceParent[2:], traceParent},
		"later version, more":     {"cc" + traceParent[2:] + "-what-else", traceParent},
		"later version, run-on":   {"cc" + traceParent[2:] + "what-else", ""},
		"version 00, more":        {traceParent + "-01", ""},
		"version 00, new flags":   {traceParent[:53] + "05", ""},
		"later version, flags":    {"cc" + traceParent[2:53] + "05", traceParent[:53] + "01"},
		"forbidden version":       {"ff" + traceParent[2:], ""},
		"upper case":              {strings.ToUpper(traceParent), ""},
		"no trace":                {"00-" + strings.Repeat("0", 32) + traceParent[35:], ""},
		"no parent":               {traceParent[:36] + strings.Repeat("0", 16) + "-01", ""},
		"short":                   {traceParent[:54], ""},
		"other separators":        {strings.ReplaceAll(traceParent, "-", "_"), ""},
		"something else entirely": {"hello", ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			e, err := messages.ParseEntry(entryID, entry("{}", "traceparent", tt.in))
			require.NoError(t, err)
			require.Equal(t, tt.want, e.TraceParent)

			j, err := messages.Decoder{}.DecodeJob([]byte(`{"payload":1,"traceparent":"` + tt.in + `"}`))
			require.NoError(t, err)
			require.Equal(t, tt.want, j.TraceParent)
		})
	}
}
