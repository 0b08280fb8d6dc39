package messages_test

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

var (
	now     = time.Date(2026, 1, 31, 9, 0, 0, 0, time.UTC)
	decoder = messages.Decoder{Ops: map[string]bool{"median": true}, Now: func() time.Time { return now }}
)

func ptr[T any](v T) *T { return &v }

func TestDecodeSubmitReadsEverything(t *testing.T) {
	got, err := decoder.DecodeSubmit([]byte(` {
		"id": "promo-1", "tenant": "acme", "name": "Fr\u00fchling \"26\"", "type": "SEND_EMAIL", "priority": "high",
		"tags": {"campaign": "spr\u0069ng=26", "env": "prod"},
		"base_priority": -1.5e3, "max_retries": 3, "job_timeout": "1m30s", "run_at": "2026-02-01T10:00:00+01:00",
		"failure_threshold": 0.25, "total": 3, "seal": true, "callback_url": "",
		"aggregate": [{"as": "n", "op": "count"}, {"as": "cost", "op": "sum", "field": "data.cost"},
			{"as": "mid", "op": "median", "field": "duration_ms"}],
		"jobs": [
			{"payload": {"to": "a@example.com", "n": [1, {"x": "}]"}]}},
			{"payload": null, "type": "HTTP", "run_at": "2026-01-31T10:00:00Z", "traceparent": "` + traceParent + `"},
			{"p\u0061yload": "x"}
		]
	}
`))
	require.NoError(t, err)
	require.Equal(t, &messages.SubmitGroup{
		ID: "promo-1", Tenant: "acme", Name: `Frühling "26"`, Type: "SEND_EMAIL", Priority: messages.LaneHigh,
		Tags:         api.Tags{"campaign": "spring=26", "env": "prod"},
		BasePriority: -1500, MaxRetries: ptr(3), JobTimeout: messages.Duration(90 * time.Second),
		RunAt: ptr(now.Add(24 * time.Hour)), FailureThreshold: ptr(0.25), Total: ptr(int64(3)), Seal: true,
		Aggregate: []messages.Aggregate{
			{As: "n", Op: "count"},
			{As: "cost", Op: "sum", Field: "data.cost"},
			{As: "mid", Op: "median", Field: "duration_ms"},
		},
		Jobs: []messages.Job{
			{Payload: json.RawMessage(`{"to": "a@example.com", "n": [1, {"x": "}]"}]}`)},
			{Payload: json.RawMessage(`null`), Type: "HTTP", RunAt: ptr(now.Add(time.Hour)), TraceParent: traceParent},
			{Payload: json.RawMessage(`"x"`)},
		},
	}, got)
}

func TestDecodeSubmitTreatsNullAndEmptyAsAbsent(t *testing.T) {
	want := &messages.SubmitGroup{Type: "T"}
	for _, body := range []string{
		`{"type":"T"}`,
		`{"type":"T","id":null,"tenant":null,"name":null,"priority":null,"base_priority":null,"max_retries":null,
			"job_timeout":null,"run_at":null,"failure_threshold":null,"aggregate":null,"callback_url":null,"total":null,
			"jobs":null,"seal":null,"tags":null}`,
		`{"type":"T","tags":{ }}`,
		`{"type":"T","id":"","tenant":"","name":"","priority":"","run_at":"","base_priority":-0,"job_timeout":0,"seal":false}`,
	} {
		got, err := decoder.DecodeSubmit([]byte(body))
		require.NoError(t, err, body)
		require.Equal(t, want, got, body)
	}
}

func TestDecodeSubmitLimits(t *testing.T) {
	const (
		badTime      = "run_at: must be a time of RFC 3339 such as 2030-01-31T09:00:00Z, from the year 2000 to 10 years ahead"
		badTimeout   = `job_timeout: must be a duration such as "1m30s" or a number of seconds, from 1ms to 24h0m0s`
		badThreshold = "failure_threshold: must be a number above 0, to 1"
		badName      = "name: must be at most 256 bytes of UTF-8 without control characters"
		badID        = "must match ^[A-Za-z0-9._-]{1,128}$ (except . and ..)"
		badRetries   = "max_retries: must be a whole number from 0 to 1000"
		badTotal     = "total: must be a whole number from 0 to 10000000"
		badBase      = "base_priority: must be a number from -1e+15 to 1e+15"
		badTag       = "must be KEY=VALUE with a key that matches ^[A-Za-z0-9._-]{1,64}$ (except . and ..) and a value of 1 to 128 bytes of UTF-8 without control characters"
		eightTags    = `"k1":"v","k2":"v","k3":"v","k4":"v","k5":"v","k6":"v","k7":"v","k8":"v",`
		badPath      = "aggregate[0].field: must be duration_ms, or a path such as data.cost or data.items.0.price, of at most 256 bytes"
		repeated     = ": is repeated; must be given once"
		unknown      = ": not a known field; correct its spelling or leave it out"
	)
	path := func(s string) string { return `"aggregate":[{"as":"a","op":"sum","field":"` + s + `"}]` }
	tests := []struct{ fields, want string }{ // want is "" for a valid body
		{`"id":"` + strings.Repeat("a", 128) + `"`, ""},
		{`"id":"` + strings.Repeat("a", 129) + `"`, "id: " + badID},
		{`"id":"a:b"`, "id: " + badID},
		{`"id":"a\n"`, "id: " + badID},
		{`"id":"."`, "id: " + badID},
		{`"tenant":".."`, "tenant: " + badID},
		{`"type":"..."`, ""},
		{`"id":5`, "id: must be a string, not a number"},
		{`"tenant":"{0}"`, "tenant: " + badID},
		{`"tenant":["x"]`, "tenant: must be a string, not an array"},
		{`"type":"ä"`, "type: " + badID},
		{`"type":{}`, "type: must be a string, not an object"},
		{`"type":""`, "type: required"},
		{`"name":"` + strings.Repeat("ü", 128) + `"`, ""},
		{`"name":"` + strings.Repeat("ü", 128) + `x"`, badName},
		{`"name":"a\u0000"`, badName},
		{`"name":"a\u009f"`, badName},
		{`"name":true`, "name: must be a string, not a boolean"},
		{`"priority":"urgent"`, "priority: must be high, normal or low"},
		{`"priority":"low"`, ""},
		{`"base_priority":1e15`, ""},
		{`"base_priority":-1000000000000001`, badBase},
		{`"base_priority":1e999`, badBase},
		{`"base_priority":"5"`, badBase},
		{`"max_retries":1000`, ""},
		{`"max_retries":1001`, badRetries},
		{`"max_retries":-1`, badRetries},
		{`"max_retries":1.5`, badRetries},
		{`"max_retries":"3"`, badRetries},
		{`"job_timeout":0.001`, ""},
		{`"job_timeout":"24h"`, ""},
		{`"job_timeout":"24h1ns"`, badTimeout},
		{`"job_timeout":"999us"`, badTimeout},
		{`"job_timeout":-1`, badTimeout},
		{`"job_timeout":1e300`, badTimeout},
		{`"job_timeout":"soon"`, badTimeout},
		{`"job_timeout":[]`, badTimeout},
		{`"run_at":"2000-01-01T00:00:00Z"`, ""},
		{`"run_at":"1999-12-31T23:59:59Z"`, badTime},
		{`"run_at":"2036-01-31T09:00:00Z"`, ""},
		{`"run_at":"2036-01-31T09:00:00.000000001Z"`, badTime},
		{`"run_at":"2026-02-01"`, badTime},
		{`"run_at":"2026-02-01 09:00:00Z"`, badTime},
		{`"run_at":1790000000`, "run_at: must be a string, not a number"},
		{`"failure_threshold":1`, ""},
		{`"failure_threshold":1e-9`, ""},
		{`"failure_threshold":0`, badThreshold},
		{`"failure_threshold":1.0000001`, badThreshold},
		{`"failure_threshold":"1"`, badThreshold},
		{`"total":10000000`, ""},
		{`"total":10000001`, badTotal},
		{`"total":-1`, badTotal},
		{`"total":99999999999999999999`, badTotal},
		{`"total":2,"jobs":[{"payload":1},{"payload":2}]`, ""},
		{`"jobs":[{"payload":1},{"payload":2}],"total":1`, "jobs: must be no more than total, which is 1"},
		{`"jobs":[{"payload":1,"key":"a"},{"payload":2,"key":"a"}]`, ""},
		{`"unique_keys":true,"jobs":[{"payload":1,"key":"a"},{"payload":2},{"payload":3},{"payload":4,"key":"b"}]`, ""},
		{
			`"jobs":[{"payload":1,"key":"a"},{"payload":2},{"payload":3,"key":"a"}],"unique_keys":true`,
			"jobs[2].key: is also the key of jobs[0]; leave out one of the two, or unique_keys",
		},
		{`"tags":{"a":"1","` + strings.Repeat("k", 64) + `":"` + strings.Repeat("v", 128) + `","c":"x}y:z= \u00fc"}`, ""},
		{`"tags":{` + strings.TrimSuffix(eightTags, ",") + `}`, ""},
		{`"tags":{` + eightTags + `"a":"1"}`, "tags: must have at most 8 tags, not 9"},
		{`"tags":{"a":"1","\u0061":"1"}`, "tags.a" + repeated},
		{`"tags":["a=1"]`, "tags: must be an object of texts, not an array"},
		{`"tags":{"a":1,"b":{"c":"d"}}`, "2 fields are wrong: tags.a: must be a string, not a number; tags.b: must be a string, not an object"},
		{`"tags":{"a":null}`, "tags.a: " + badTag},
		{`"tags":{"a":""}`, "tags.a: " + badTag},
		{`"tags":{"a":"` + strings.Repeat("v", 129) + `"}`, "tags.a: " + badTag},
		{`"tags":{"a":"x\ny"}`, "tags.a: " + badTag},
		{`"tags":{"":"x"}`, `tags."": ` + badTag},
		{`"tags":{"a=b":"x"}`, `tags."a=b": ` + badTag},
		{`"tags":{"` + strings.Repeat("k", 65) + `":"x"}`, `tags."` + strings.Repeat("k", 64) + `"…: ` + badTag},
		{`"unique_keys":1`, "unique_keys: must be true or false, not a number"},
		{`"jobs":{}`, "jobs: must be an array of jobs, not an object"},
		{`"jobs":[{"payload":1},5]`, "jobs[1]: must be an object, not a number"},
		{`"jobs":[null]`, "jobs[0]: must be an object, not null"},
		{`"jobs":[{}]`, "jobs[0].payload: required; may be any JSON, null too"},
		{`"jobs":[{"payload":1,"type":"a b"}]`, "jobs[0].type: " + badID},
		{`"jobs":[{"payload":1,"run_at":"x"}]`, "jobs[0]." + badTime},
		{`"jobs":[{"payload":1,"traceparent":1}]`, "jobs[0].traceparent: must be a string, not a number"},
		{`"jobs":[{"payload":1,"Type":"x"}]`, "jobs[0].Type" + unknown},
		{`"name":"a","seal":true,"name":"b"`, "name" + repeated},
		{`"name":null,"name":"b"`, "name" + repeated},
		{`"name":"a","n\u0061me":"b"`, "name" + repeated},
		{`"jobs":[],"jobs":[]`, "jobs" + repeated},
		{`"jobs":[{"payload":1},{"payload":1,"payload":1}]`, "jobs[1].payload" + repeated},
		{`"jobs":[{"payload":1,"traceparent":"x","traceparent":"x"}]`, "jobs[0].traceparent" + repeated},
		{`"jobs":[{"payload":{"a":1,"a":2}}]`, ""},
		{`"aggregate":[{"as":"a","op":"count","op":"count"}]`, "aggregate[0].op" + repeated},
		{`"seal":"yes"`, "seal: must be true or false, not a string"},
		{`"seal":1`, "seal: must be true or false, not a number"},
		{`"Seal":true`, "Seal" + unknown},
		{`"a\nb":null`, `"a\nb"` + unknown},
		{`"` + strings.Repeat("x", 65) + `":1`, `"` + strings.Repeat("x", 64) + `"…` + unknown},
		{`"callback_url":1`, "callback_url: must be a string, not a number"},
		{`"aggregate":"sum"`, "aggregate: must be an array of aggregates, not a string"},
		{`"aggregate":["sum"]`, "aggregate[0]: must be an object, not a string"},
		{`"aggregate":[{"as":"a","op":"count","feild":"x"}]`, "aggregate[0].feild" + unknown},
		{`"aggregate":[{"op":"count"}]`, "aggregate[0].as: required"},
		{`"aggregate":[{"as":"` + strings.Repeat("a", 64) + `","op":"count"}]`, ""},
		{`"aggregate":[{"as":"` + strings.Repeat("a", 65) + `","op":"count"}]`, "aggregate[0].as: must be at most 64 bytes"},
		{`"aggregate":[{"as":"a b","op":"count"}]`, "aggregate[0].as: " + badID},
		{`"aggregate":[{"as":"a","op":"count"},{"as":"a","op":"count"}]`, "aggregate[1].as: must be unique among the group's aggregates"},
		{`"aggregate":[{"as":"a","op":"avg","field":"data"}]`, "aggregate[0].op: must be one of count, sum, min, max, mean, distribution, count_by, collect, median"},
		{`"aggregate":[{"as":"a"}]`, "2 fields are wrong: aggregate[0].op: required; aggregate[0].field: required"},
		{`"aggregate":[{"as":"a","op":"sum"}]`, "aggregate[0].field: required"},
		{`"aggregate":[` + strings.Repeat(`1,`, 32) + `1]`, "aggregate: must have at most 32 aggregates, not 33"},
		{`"aggregate":[{"as":"a","op":"count","over":"all"}]`, "aggregate[0].over: must be done, failed or ended"},
		{`"aggregate":[{"as":"a","op":"count","over":"ended"}]`, ""},
		{path("data"), ""},
		{path("data.items.0.price"), ""},
		{path("duration_ms"), ""},
		{path("data." + strings.Repeat("x", 251)), ""},
		{path("data." + strings.Repeat("x", 252)), badPath},
		{path("database.x"), badPath},
		{path("data..x"), badPath},
		{path("data."), badPath},
		{path("duration_ms.x"), badPath},
		{path(`data.\u0007`), badPath},
	}
	for _, tt := range tests {
		t.Run(tt.fields[:min(len(tt.fields), 60)], func(t *testing.T) {
			body := `{"type":"T",` + tt.fields + `}`
			if strings.HasPrefix(tt.fields, `"type"`) {
				body = `{` + tt.fields + `}`
			}
			g, err := decoder.DecodeSubmit([]byte(body))
			if tt.want == "" {
				require.NoError(t, err)
				return
			}
			require.EqualError(t, err, tt.want)
			require.Nil(t, g)
		})
	}
}

func TestAllBadFieldsAreListed(t *testing.T) {
	_, err := decoder.DecodeSubmit([]byte(`{"id":"?","max_retries":-1,"colour":1,"jobs":[{"payload":1},{"type":"?"},{"payload":1,"x":1}]}`))
	var invalid *messages.ValidationError
	require.ErrorAs(t, err, &invalid)
	var fields []string
	for _, f := range invalid.Fields {
		fields = append(fields, f.Field)
	}
	require.Equal(t, []string{"id", "max_retries", "colour", "jobs[1].type", "jobs[1].payload", "jobs[2].x", "type"}, fields)
	require.Zero(t, invalid.More)
}

func TestOnlyAHundredBadFieldsAreListed(t *testing.T) {
	_, err := decoder.DecodeAppend([]byte(`{"group":"g","jobs":[{}` + strings.Repeat(",{}", 249) + `]}`))
	var invalid *messages.ValidationError
	require.ErrorAs(t, err, &invalid)
	require.Len(t, invalid.Fields, 100)
	require.Equal(t, "jobs[99].payload", invalid.Fields[99].Field)
	require.Equal(t, 150, invalid.More)
	require.True(t, strings.HasPrefix(err.Error(), "250 fields are wrong: jobs[0].payload: required"), err.Error())
	require.True(t, strings.HasSuffix(err.Error(), "; and 150 more"), err.Error())
}

func TestBrokenBodies(t *testing.T) {
	tests := []struct{ body, field, problem string }{
		{``, "body", "required; must be a JSON object"},
		{" \n", "body", "required; must be a JSON object"},
		{`null`, "body", "must be a JSON object, not null"},
		{`[{}]`, "body", "must be a JSON object, not an array"},
		{`"x"`, "body", "must be a JSON object, not a string"},
		{`{} x`, "body", "breaks at byte 4: invalid character 'x' after top-level value"},
		{`{`, "body", "breaks at byte 1: unexpected end of JSON input"},
		{`{"type":"T","na`, "body", "breaks at byte 15: unexpected end of JSON input"},
		{`{"type":"T" "name":1}`, "type", "after object key:value pair"},
		{`{"type":x}`, "type", "invalid character 'x' looking for beginning of value"},
		{`{"type":"T","jobs":[{"payload":1},{"payload":{"secret":["tru`, "jobs[1].payload", "unexpected end of JSON input"},
		{`{"type":"T","jobs":[{"payload":1},{"payload":{"secret":[try`, "jobs[1].payload", "in literal true"},
		{`{"type":"T","jobs":[{"payload":1},{"payload":{"secret":[tru`, "jobs[1].payload", "breaks at byte 59"},
		{`{"type":"T","jobs":[{"payload":1},`, "jobs[0]", "unexpected end"},
		{`{"type":"T","jobs":[`, "jobs", "unexpected end"},
		{`{"type":"T","jobs":[{`, "jobs", "unexpected end"},
		{`{"type":"T","jobs":[x`, "jobs", "invalid character 'x'"},
		{`{"a\"b":x`, `"a\"b"`, "invalid character 'x'"},
		{"{\"type\":\"\xc3\x28\"}", "body", "must be UTF-8; is not at byte 9"},
		{"\xef\xbb\xbf{}", "body", "invalid character"},
		{`{"type":"T","jobs":[{"payload":` + strings.Repeat(`{"a":`, 1<<18), "jobs[0].payload", "exceeded max depth"},
		{strings.Repeat(`[`, 1<<20), "body", "exceeded max depth"},
	}
	for _, tt := range tests {
		t.Run(tt.body[:min(len(tt.body), 60)], func(t *testing.T) {
			_, err := decoder.DecodeSubmit([]byte(tt.body))
			var invalid *messages.ValidationError
			require.ErrorAs(t, err, &invalid)
			require.Len(t, invalid.Fields, 1)
			require.Equal(t, tt.field, invalid.Fields[0].Field)
			require.Contains(t, invalid.Fields[0].Problem, tt.problem)
		})
	}
}

func TestDeepPayloadIsAccepted(t *testing.T) {
	payload := strings.Repeat("[", 9000) + strings.Repeat("]", 9000)
	j, err := decoder.DecodeJob([]byte(`{"payload":` + payload + `}`))
	require.NoError(t, err)
	require.Equal(t, payload, string(j.Payload))
}

func TestPayloadLimit(t *testing.T) {
	fits := `"` + strings.Repeat("x", messages.MaxPayloadBytes-2) + `"`
	over := `"` + strings.Repeat("x", messages.MaxPayloadBytes-1) + `"`

	_, err := decoder.DecodeJob([]byte(`{"payload": ` + fits + ` }`))
	require.NoError(t, err)

	_, err = decoder.DecodeJob([]byte(`{"payload":` + over + `}`))
	require.Equal(t, &messages.TooLargeError{Field: "payload", Limit: messages.MaxPayloadBytes, Size: messages.MaxPayloadBytes + 1}, err)

	_, err = decoder.DecodeSubmit(fmt.Appendf(nil, `{"jobs":[{"payload":1},{"payload":%s},{"payload":%s}],"colour":1}`, over, over))
	require.Equal(t, &messages.TooLargeError{
		Field: "jobs[1].payload", Limit: messages.MaxPayloadBytes, Size: messages.MaxPayloadBytes + 1, More: 1,
	}, err)
	require.EqualError(t, err, "jobs[1].payload: is 262145 bytes; at most 262144 are accepted; and 1 more")
}

func TestBodyLimit(t *testing.T) {
	body := `{"group":"g"}`
	body += strings.Repeat(" ", messages.MaxMessageBytes-len(body))
	_, err := decoder.DecodeCancel([]byte(body))
	require.NoError(t, err)
	_, err = decoder.DecodeCancel([]byte(body + " "))
	require.Equal(t, &messages.TooLargeError{Field: "body", Limit: messages.MaxMessageBytes, Size: messages.MaxMessageBytes + 1}, err)
}

func TestDecodeAppend(t *testing.T) {
	got, err := decoder.DecodeAppend([]byte(`{"jobs":[{"payload":1,"type":"HTTP"}],"group":"g"}`))
	require.NoError(t, err)
	require.Equal(t, &messages.AppendJobs{Group: "g", Jobs: []messages.Job{{Payload: json.RawMessage("1"), Type: "HTTP"}}}, got)

	_, err = decoder.DecodeAppend([]byte(`{"jobs":[],"group":"g"}`))
	require.NoError(t, err)

	_, err = decoder.DecodeAppend([]byte(`{"job":[]}`))
	require.EqualError(t, err, "3 fields are wrong: job: not a known field; correct its spelling or leave it out; group: required; jobs: required")
}

func TestDecodeSeal(t *testing.T) {
	got, err := decoder.DecodeSeal([]byte(`{"group":"g","total":0}`))
	require.NoError(t, err)
	require.Equal(t, &messages.SealGroup{Group: "g", Total: ptr(int64(0))}, got)

	got, err = decoder.DecodeSeal([]byte(`{"group":"g"}`))
	require.NoError(t, err)
	require.Equal(t, &messages.SealGroup{Group: "g"}, got)

	_, err = decoder.DecodeSeal([]byte(`{"group":"?","total":-1,"x":1}`))
	require.EqualError(t, err, "3 fields are wrong: group: must match ^[A-Za-z0-9._-]{1,128}$ (except . and ..); "+
		"total: must be a whole number from 0 to 10000000; x: not a known field; correct its spelling or leave it out")
}

func TestDecodeCancel(t *testing.T) {
	got, err := decoder.DecodeCancel([]byte(`{"group":"g"}`))
	require.NoError(t, err)
	require.Equal(t, &messages.CancelGroup{Group: "g"}, got)

	_, err = decoder.DecodeCancel([]byte(`{"group":null,"x":1}`))
	require.EqualError(t, err, "2 fields are wrong: x: not a known field; correct its spelling or leave it out; group: required")
}

func TestDecodeJobOwnsItsPayload(t *testing.T) {
	line := []byte(`{"payload":{"a":1}}`)
	j, err := decoder.DecodeJob(line)
	require.NoError(t, err)
	clear(line)
	require.Equal(t, `{"a":1}`, string(j.Payload))
}

func TestDecodeJobRefuses(t *testing.T) {
	tests := map[string]struct{ line, want string }{
		"no payload":   {`{"type":"HTTP"}`, "payload: required; may be any JSON, null too"},
		"no object":    {`5`, "must be a JSON object, not a number"},
		"empty":        {``, "required; must be a JSON object"},
		"cut off":      {`{"payload":{"a":`, "payload: must be valid JSON; breaks at byte 16: unexpected end of JSON input"},
		"cut off list": {`{"payload":[{"a":`, "payload: must be valid JSON; breaks at byte 17: unexpected end of JSON input"},
		"no JSON":      {`x`, "must be valid JSON; breaks at byte 1: invalid character 'x' looking for beginning of value"},
		"unknown":      {`{"payload":1,"runAt":"x"}`, "runAt: not a known field; correct its spelling or leave it out"},
		"two mistakes": {`{"to":"x"}`, "2 fields are wrong: to: not a known field; correct its spelling or leave it out; payload: required; may be any JSON, null too"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			j, err := decoder.DecodeJob([]byte(tt.line))
			require.EqualError(t, err, tt.want)
			require.Zero(t, j)
		})
	}
}

// TestErrorsDoNotContainValues: the errors about a wrong value in one of 17 fields, and about a
// payload that breaks off, do not contain the value: errors may be logged.
func TestErrorsDoNotContainValues(t *testing.T) {
	const secret = "hunter2 "
	for _, field := range []string{
		"id", "tenant", "name", "type", "priority", "base_priority", "max_retries", "job_timeout", "run_at",
		"failure_threshold", "aggregate", "callback_url", "total", "jobs", "seal", "tags", "unknown",
	} {
		_, err := decoder.DecodeSubmit(fmt.Appendf(nil, `{%q:"%s\u0000"}`, field, secret))
		require.Error(t, err)
		require.NotContains(t, err.Error(), strings.TrimSpace(secret))
	}
	_, err := decoder.DecodeSubmit([]byte(`{"jobs":[{"payload":{"hunter2":"hunter2`))
	require.Error(t, err)
	require.NotContains(t, err.Error(), strings.TrimSpace(secret))
}

func TestZeroDecoderUsesTheClock(t *testing.T) {
	var d messages.Decoder
	for years, ok := range map[int]bool{9: true, 11: false} {
		at := time.Now().AddDate(years, 0, 0).Format(time.RFC3339)
		_, err := d.DecodeJob(fmt.Appendf(nil, `{"payload":1,"run_at":%q}`, at))
		require.Equal(t, ok, err == nil, at)
	}
	_, err := d.DecodeSubmit([]byte(`{"type":"T","aggregate":[{"as":"m","op":"median","field":"data"}]}`))
	require.ErrorContains(t, err, "must be one of "+strings.Join(messages.AggregateOps, ", "))
}

func TestValidIdempotencyKey(t *testing.T) {
	for key, want := range map[string]bool{
		"": false, "a": true, "~!": true, "a b": false, "a\x7f": false, "ä": false, "a\n": false,
		strings.Repeat("k", 255): true, strings.Repeat("k", 256): false,
	} {
		require.Equal(t, want, messages.ValidIdempotencyKey(key), "%q", key)
	}
}

func TestDurationReads(t *testing.T) {
	tests := map[string]time.Duration{
		`"1m30s"`:             90 * time.Second,
		`"-5ms"`:              -5 * time.Millisecond,
		`"0"`:                 0,
		`"1\u006d"`:           time.Minute,
		`90`:                  90 * time.Second,
		`1.5`:                 1500 * time.Millisecond,
		`0.001`:               time.Millisecond,
		`1e-9`:                1,
		`-2`:                  -2 * time.Second,
		`-9223372036.854775`:  -9223372036854774784,
		`"2562047h47m16.85s"`: 9223372036850000000,
		`null`:                7, // unchanged
	}
	for in, want := range tests {
		d := messages.Duration(7)
		require.NoError(t, json.Unmarshal([]byte(in), &d), in)
		require.Equal(t, want, time.Duration(d), in)
	}
}

func TestDurationRefuses(t *testing.T) {
	const want = `must be a duration such as "1m30s" or a number of seconds, of at most 292 years`
	for _, in := range []string{`""`, `"90"`, `"soon"`, `"9999999h"`, `1e10`, `-1e10`, `1e999`, `true`, `[]`, `{}`} {
		d := messages.Duration(7)
		require.EqualError(t, json.Unmarshal([]byte(in), &d), want, in)
		require.Equal(t, messages.Duration(7), d, in)
	}
	for _, in := range []string{``, `NaN`, `Inf`, `"`} { // encoding/json does not pass these on
		require.EqualError(t, new(messages.Duration).UnmarshalJSON([]byte(in)), want, in)
	}
}

func TestDurationWrites(t *testing.T) {
	for d, want := range map[messages.Duration]string{
		0:                                   `"0s"`,
		messages.Duration(90 * time.Second): `"1m30s"`,
		messages.Duration(time.Microsecond): `"1µs"`,
		math.MinInt64:                       `"-2562047h47m16.854775808s"`,
	} {
		b, err := json.Marshal(d)
		require.NoError(t, err)
		require.Equal(t, want, string(b))
		var again messages.Duration
		require.NoError(t, json.Unmarshal(b, &again))
		require.Equal(t, d, again)
	}
}
