package messages_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
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

func contentHash(t *testing.T, body string) string {
	t.Helper()
	g, err := decoder.DecodeSubmit([]byte(body))
	require.NoError(t, err, body)
	return messages.ContentHash(g)
}

const hashed = `{"id":"g","tenant":"acme","type":"T","run_at":"2026-02-01T09:00:00Z","job_timeout":60,"jobs":[{"payload":{"b":[1,{"y":"/","x":2}],"a":"ü"},"type":"U"},{"payload":1}],"aggregate":[{"as":"n","op":"count"}]}`

func TestContentHashOfEqualContent(t *testing.T) {
	want := contentHash(t, hashed)
	require.Regexp(t, "^[0-9a-f]{32}$", want)
	for name, body := range map[string]string{
		"order of fields": `{"aggregate":[{"op":"count","as":"n"}],"jobs":[{"type":"U","payload":{"a":"ü","b":[1,{"x":2,"y":"/"}]}},{"payload":1}],"job_timeout":60,"run_at":"2026-02-01T09:00:00Z","type":"T","tenant":"acme","id":"g"}`,
		"white space":     "\r\n" + strings.NewReplacer(`":`, `" : `, `,"`, ",\n\t\"", "[", "[ ", "}", " }", "2}", "2\t}").Replace(hashed),
		"escapes":         strings.NewReplacer("ü", `\u00fc`, "/", `\/`, `"a"`, `"\u0061"`).Replace(hashed),
		"notation":        strings.NewReplacer(`"2026-02-01T09:00:00Z"`, `"2026-02-01T10:00:00.000+01:00"`, "60", `"1m"`).Replace(hashed),
		"defaults":        strings.Replace(hashed, "{", `{"priority":"normal","failure_threshold":1,"base_priority":0,"seal":false,"name":"","max_retries":null,`, 1),
		"type of a job":   strings.Replace(hashed, `{"payload":1}`, `{"payload":1,"type":"T"}`, 1),
		"id":              strings.Replace(hashed, `"id":"g"`, `"id":"other"`, 1),
		"traceparent":     strings.Replace(hashed, `{"payload":1}`, `{"payload":1,"traceparent":"`+traceParent+`"}`, 1),
	} {
		require.Equal(t, want, contentHash(t, body), name)
	}
	require.Equal(t, contentHash(t, `{"id":"g","type":"T"}`), contentHash(t, `{"id":"g","tenant":"g","type":"T"}`))
}

func TestContentHashOfOtherContent(t *testing.T) {
	seen := map[string]string{contentHash(t, hashed): "the first"}
	for name, edit := range map[string][2]string{
		"tenant":          {`"acme"`, `"acne"`},
		"tag":             {`"id":"g"`, `"tags":{"a":"b"}`},
		"other tag":       {`"id":"g"`, `"tags":{"a":"c"}`},
		"two tags":        {`"id":"g"`, `"tags":{"a":"b","c":"d"}`},
		"tag and keys":    {`"id":"g"`, `"tags":{"a":"b"},"unique_keys":true`},
		"no tenant":       {`"tenant":"acme",`, ``},
		"type":            {`"T"`, `"V"`},
		"name":            {`"id":"g"`, `"name":"g"`},
		"priority":        {`"id":"g"`, `"priority":"low"`},
		"base_priority":   {`"id":"g"`, `"base_priority":1`},
		"max_retries":     {`"id":"g"`, `"max_retries":1`},
		"max_retries 0":   {`"id":"g"`, `"max_retries":0`},
		"threshold":       {`"id":"g"`, `"failure_threshold":0.5`},
		"total":           {`"id":"g"`, `"total":2`},
		"seal":            {`"id":"g"`, `"seal":true`},
		"timeout":         {`60`, `61`},
		"run_at":          {`09:00:00Z`, `09:00:00.000000001Z`},
		"aggregate as":    {`"n"`, `"m"`},
		"aggregate field": {`"count"`, `"count","field":"data"`},
		"aggregate op":    {`"count"`, `"collect","field":"data"`},
		"one more":        {`{"as":"n","op":"count"}`, `{"as":"n","op":"count"},{"as":"m","op":"count"}`},
		"job's type":      {`"U"`, `"V"`},
		"job's run_at":    {`{"payload":1}`, `{"payload":1,"run_at":"2026-02-01T09:00:00Z"}`},
		"order of jobs":   {`"jobs":[`, `"jobs":[{"payload":1},`},
		"no last job":     {`,{"payload":1}`, ``},
		"kind":            {`"payload":1`, `"payload":"1"`},
		"null":            {`"payload":1`, `"payload":null`},
		"notation":        {`"payload":1`, `"payload":1.0`},
		"array":           {`"payload":1`, `"payload":[1]`},
		"nested array":    {`"payload":1`, `"payload":[[1]]`},
		"empty array":     {`"payload":1`, `"payload":[]`},
		"empty object":    {`"payload":1`, `"payload":{}`},
		"nesting":         {`"payload":1`, `"payload":[[],1]`},
		"nesting 2":       {`"payload":1`, `"payload":[[1],[]]`},
		"run together":    {`"payload":1`, `"payload":["a","b"]`},
		"run together 2":  {`"payload":1`, `"payload":["ab",""]`},
		"moved":           {`[1,{"y":"/","x":2}]`, `[1,{"y":"/"},{"x":2}]`},
		"swapped":         {`"y":"/","x":2`, `"y":2,"x":"/"`},
		"repeated":        {`"x":2`, `"x":2,"x":3`},
		"repeated 2":      {`"x":2`, `"x":3,"x":2`},
		"half a pair":     {`"/"`, `"\ud800"`},
		"the other half":  {`"/"`, `"\udc00"`},
		"replacement":     {`"/"`, `"\ufffd"`},
		"content":         {`ü`, `u`},
	} {
		body := strings.Replace(hashed, edit[0], edit[1], 1)
		require.NotEqual(t, hashed, body, name)
		h := contentHash(t, body)
		require.NotContains(t, seen, h, "%s is as %s", name, seen[h])
		seen[h] = name
	}
}

// TestContentHashStays: submissions have the hashes that the version before tags gave them, so that one
// that is repeated after an upgrade is recognized.
func TestContentHashStays(t *testing.T) {
	require.Equal(t, "f067b146cc4668cfb60dfbb521f64613", contentHash(t, hashed))
	require.Equal(t, "b66928a1bec1663a3508682036171f4c", contentHash(t, `{"id":"g","type":"T","unique_keys":true,"jobs":[{"payload":1,"key":"k"}]}`))
	require.Equal(t, contentHash(t, `{"id":"g","type":"T","tags":{"a":"1","b":"2"}}`), contentHash(t, `{"id":"g","type":"T","tags":{"b":"2","\u0061":"1"}}`))
}

func TestContentHashOfNestedAndLargePayloads(t *testing.T) {
	nest := func(levels int, inner string) string {
		return `{"type":"T","jobs":[{"payload":` + strings.Repeat("[", levels) + inner + strings.Repeat("]", levels) + `}]}`
	}
	require.Equal(t, contentHash(t, nest(30, `{"a":1,"b":2}`)), contentHash(t, nest(30, `{"b":2, "a":1}`)))
	require.NotEqual(t, contentHash(t, nest(30, `{"a":1,"b":2}`)), contentHash(t, nest(30, `{"b":1,"a":2}`)))
	require.Equal(t, contentHash(t, nest(9000, `1`)), contentHash(t, nest(9000, `1`)))
	require.NotEqual(t, contentHash(t, nest(9000, `1`)), contentHash(t, nest(9000, `2`)))

	large := strings.Repeat("x", 200<<10)
	require.NotEqual(t, contentHash(t, nest(1, `"`+large+`a"`)), contentHash(t, nest(1, `"`+large+`b"`)))
}

// TestContentHashOfInvalidJSON: for payloads that are no JSON, as Go code may build them without
// decoding, ContentHash does not panic, and returns different hashes.
func TestContentHashOfInvalidJSON(t *testing.T) {
	seen := map[string]bool{}
	for _, payload := range []string{"", "{", `{"a`, `{"a"`, `{"a":`, `{"a":1`, "[", "[1", "]", `"`, `"\`, "x", "\xff", strings.Repeat("[", 1<<20)} {
		at := time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)
		seen[messages.ContentHash(&messages.SubmitGroup{Jobs: []messages.Job{{Payload: json.RawMessage(payload), RunAt: &at}}})] = true
	}
	require.Greater(t, len(seen), 1)
}

const benchJobs = 5000

// smallJobs returns the body of a submission with many small jobs.
func smallJobs(n int) []byte {
	var b strings.Builder
	b.WriteString(`{"tenant":"acme","type":"SEND_EMAIL","seal":true,"jobs":[`)
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"payload":{"to":"user%d@example.com"}}`, i)
	}
	b.WriteString(`]}`)
	return []byte(b.String())
}

func perJob(b *testing.B, jobs int) {
	ns := float64(b.Elapsed().Nanoseconds()) / float64(b.N*jobs)
	b.ReportMetric(ns, "ns/job")
	b.ReportMetric(1e9/ns, "jobs/s")
}

func BenchmarkDecodeSubmit(b *testing.B) {
	data := smallJobs(benchJobs)
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		_, err := messages.Decoder{}.DecodeSubmit(data)
		require.NoError(b, err)
	}
	perJob(b, benchJobs)
}

func BenchmarkDecodeJob(b *testing.B) {
	line := []byte(`{"payload":{"to":"user1@example.com"},"type":"SEND_EMAIL"}`)
	b.ReportAllocs()
	for b.Loop() {
		_, err := messages.Decoder{}.DecodeJob(line)
		require.NoError(b, err)
	}
	perJob(b, 1)
}

func BenchmarkParseEntry(b *testing.B) {
	values := map[string]any{"type": messages.TypeGroupSubmit, "data": string(smallJobs(benchJobs))}
	b.ReportAllocs()
	for b.Loop() {
		_, err := messages.ParseEntry("1700000000000-0", values)
		require.NoError(b, err)
	}
	perJob(b, benchJobs)
}

// BenchmarkAppend measures how ingest parses an entry of the ingest stream with many jobs, and with
// one job.
func BenchmarkAppend(b *testing.B) {
	for _, jobs := range []int{500, 1} {
		b.Run(fmt.Sprintf("jobs=%d", jobs), func(b *testing.B) {
			job := `{"payload":{"pad":"` + strings.Repeat("x", 190) + `"}}`
			data := `{"group":"some-group","jobs":[` + strings.Repeat(job+",", jobs-1) + job + `]}`
			fields := []string{"type", messages.TypeJobsAppend, "data", data}
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			for b.Loop() {
				e, err := messages.ParseFields("1700000000000-0", fields)
				if err != nil {
					b.Fatal(err)
				}
				a, err := messages.Decoder{}.DecodeAppendEntry(e)
				if err != nil || len(a.Jobs) != jobs {
					b.Fatal(err)
				}
			}
			perJob(b, jobs)
		})
	}
}

// BenchmarkContentHash measures ContentHash, by which ingest recognizes a repeated submission.
func BenchmarkContentHash(b *testing.B) {
	g, err := messages.Decoder{}.DecodeSubmit(smallJobs(benchJobs))
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		messages.ContentHash(g)
	}
	perJob(b, benchJobs)
}

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
