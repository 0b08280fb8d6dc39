package messages_test

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// encode returns v as JSON, without escaping HTML characters.
func encode(t *testing.T, v any) []byte {
	t.Helper()
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	require.NoError(t, enc.Encode(v))
	return b.Bytes()
}

// check decodes data and returns whether the decoder accepted it. It requires that accepted data,
// after it was encoded again, decodes to the same value by this package and by encoding/json.
func check[T any](t *testing.T, data []byte, decode func([]byte) (T, error)) (first, again T, ok bool) {
	t.Helper()
	before := bytes.Clone(data)
	first, err := decode(data)
	require.Equal(t, before, data, "decoding changed its input")
	if err != nil {
		require.NotEmpty(t, err.Error())
		return first, first, false
	}
	encoded := encode(t, first)
	again, err = decode(encoded)
	require.NoError(t, err, "%s", encoded)
	require.Equal(t, encoded, encode(t, again))

	var std T
	dec := json.NewDecoder(bytes.NewReader(encoded))
	dec.DisallowUnknownFields()
	require.NoError(t, dec.Decode(&std))
	require.Equal(t, encoded, encode(t, std))
	return first, again, true
}

var jobSeeds = []string{
	`{"payload":{"to":"a@example.com"}}`,
	` {"payload" : null , "type":"HTTP","run_at":"2026-02-01T10:00:00+01:00","traceparent":"` + traceParent + `"} `,
	`{"payload":"<\u2028\ud800>","payload":[1e400,-0,{"a":1,"a":2}]}`,
	`{"p\u0061yload":[[[{"}":"]\"\\"}]]]}`,
	`{"payload":1,"Type":"x"}`, `{"payload":`, `{}`, `[]`, ``, "{\"payload\":\"\xff\"}",
}

func seed(f *testing.F, before, after string, others ...string) {
	for _, j := range jobSeeds {
		f.Add([]byte(before + j + after))
	}
	for _, s := range others {
		f.Add([]byte(s))
	}
}

func FuzzDecodeSubmit(f *testing.F) {
	seed(f, `{"type":"T","jobs":[`, `]}`, hashed,
		`{"id":"g","tenant":"t","name":"\u00fc\"<","type":"T","priority":"high","base_priority":-1.5e3,"max_retries":0,"job_timeout":0.5}`,
		`{"type":"T","failure_threshold":0.25,"total":0,"seal":true,"callback_url":"","aggregate":[{"as":"a","op":"median","field":"data.x"}]}`,
		`{"type":"T","jobs":[{"payload":1}],"jobs":null,"base_priority":-0,"run_at":"2000-01-01T00:00:00.5Z"}`)
	f.Fuzz(func(t *testing.T, data []byte) {
		first, again, ok := check(t, data, decoder.DecodeSubmit)
		if !ok {
			return
		}
		require.Equal(t, messages.ContentHash(first), messages.ContentHash(again))
		require.Len(t, again.Jobs, len(first.Jobs))
	})
}

func FuzzDecodeAppend(f *testing.F) {
	seed(f, `{"group":"g","jobs":[`, `]}`, `{"group":"g","jobs":[]}`, `{"jobs":[{"payload":1},{"payload":2}],"group":"g"}`)
	f.Fuzz(func(t *testing.T, data []byte) {
		first, again, ok := check(t, data, decoder.DecodeAppend)
		if !ok {
			return
		}
		require.Equal(t, first.Group, again.Group)
		require.Len(t, again.Jobs, len(first.Jobs))
	})
}

func FuzzDecodeSeal(f *testing.F) {
	seed(f, ``, ``, `{"group":"g","total":0}`, `{"group":"g","total":1.0}`, `{"total":null,"group":"\u0067"}`)
	f.Fuzz(func(t *testing.T, data []byte) {
		first, again, ok := check(t, data, decoder.DecodeSeal)
		if !ok {
			return
		}
		require.Equal(t, first, again)
	})
}

func FuzzDecodeCancel(f *testing.F) {
	seed(f, ``, ``, `{"group":"g"}`, `{"group":"g","group":"h"}`, `{"group":5}`)
	f.Fuzz(func(t *testing.T, data []byte) {
		first, again, ok := check(t, data, decoder.DecodeCancel)
		if !ok {
			return
		}
		require.Equal(t, first, again)
	})
}

func FuzzDecodeJob(f *testing.F) {
	seed(f, ``, ``)
	f.Fuzz(func(t *testing.T, data []byte) {
		first, again, ok := check(t, data, decoder.DecodeJob)
		if !ok {
			return
		}
		require.True(t, json.Valid(first.Payload))
		require.LessOrEqual(t, len(first.Payload), messages.MaxPayloadBytes)
		require.Equal(t, first.RunAt, again.RunAt)
	})
}

func FuzzDuration(f *testing.F) {
	for _, s := range []string{`"1m30s"`, `90`, `-0.5`, `1e-9`, `9223372036.854775`, `"-2562047h47m16.854775808s"`, `null`, `"`, `NaN`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var d, again messages.Duration
		if d.UnmarshalJSON(data) != nil {
			return
		}
		b, err := d.MarshalJSON()
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(b, &again))
		require.Equal(t, time.Duration(d), time.Duration(again))
	})
}

func FuzzParseEntry(f *testing.F) {
	f.Add(entryID, "", messages.TypeGroupCancel, traceParent, []byte(`{"group":"g"}`))
	f.Add(entryID, "m-1", messages.TypeGroupSubmit, "cc"+traceParent[2:]+"-x", []byte(" {}\n"))
	f.Add("", "ä", "x", "00-", []byte("{\"a\":\"\xff\"}"))
	f.Add(entryID, "a b", messages.TypeGroupSeal, "", []byte(`[{`))
	f.Fuzz(func(t *testing.T, entryID, id, typ, traceParent string, data []byte) {
		e, err := messages.ParseEntry(entryID, map[string]any{"id": id, "type": typ, "traceparent": traceParent, "data": data})
		if err != nil {
			require.NotEmpty(t, err.Error())
			require.Zero(t, e)
			return
		}
		require.True(t, api.ValidID(e.ID))
		require.True(t, json.Valid(e.Data))
		again, err := messages.ParseEntry("0-0", e.Values())
		require.NoError(t, err)
		require.Equal(t, e, again)
	})
}
