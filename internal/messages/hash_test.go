package messages_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/messages"
)

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
