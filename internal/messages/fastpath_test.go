package messages

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

const plainJob = `{"payload":{"to":"a@example.com","n":[1,-0.5e+3,true,null],"text":"ä\"\u00e4 and longer than eight bytes"}}`

// TestFastPathReadsPlainMessages: the fast path accepts four plain jobs, alone and twice in an
// append.
func TestFastPathReadsPlainMessages(t *testing.T) {
	for _, job := range []string{plainJob, `{"payload":null}`, ` {"payload" : 0 , "type" : "T" } `, `{"traceparent":"00-","payload":[{}]}`} {
		_, end := fastDecodeJob([]byte(job), 0)
		require.Equal(t, len(job), end, job)
		require.NotNil(t, fastDecodeAppend([]byte(`{"group":"g","jobs":[`+job+`,`+job+`]}`)), job)
		require.NotNil(t, fastDecodeAppend([]byte(` {"jobs": [`+job+`] , "group":"g"}`+"\n")), job)
	}
}

// TestFastPathLeavesOtherMessages: fastDecodeAppend returns nil for an invalid message, and for a
// valid one that is not simple.
func TestFastPathLeavesOtherMessages(t *testing.T) {
	long := strings.Repeat("x", MaxPayloadBytes)
	deep := strings.Repeat("[", fastMaxDepth+2) + strings.Repeat("]", fastMaxDepth+2)
	for _, data := range []string{
		``, `{}`, `[]`, `{"group":"g"}`, `{"group":"g","jobs":[]}`, `{"group":"","jobs":[{"payload":1}]}`, `{"group":"a b","jobs":[{"payload":1}]}`,
		`{"group":"g","group":"h","jobs":[{"payload":1}]}`, `{"group":"g","jobs":[{"payload":1}],}`, `{"group":"g","jobs":[{"payload":1}]}}`,
		`{"group":"g","jobs":[{"payload":01}]}`, `{"group":"g","jobs":[{"payload":"` + "\n" + `"}]}`, `{"group":"g","jobs":[{"payload":"` + "\xff" + `"}]}`,
		`{"group":"g","jobs":[{"payload":"\x"}]}`, `{"group":"g","jobs":[{"type":"T"}]}`, `{"group":"g","jobs":[{"payload":1,"payload":2}]}`,
		`{"group":"g","jobs":[{"payload":1,"run_at":"2030-01-01T00:00:00Z"}]}`, `{"group":"g","jobs":[{"p\u0061yload":1}]}`,
		`{"group":"g","jobs":[{"payload":"` + long + `"}]}`, `{"group":"g","jobs":[{"payload":` + deep + `}]}`,
	} {
		require.Nil(t, fastDecodeAppend([]byte(data)), "%.80s", data)
	}
}

// FuzzFastPath checks that the complete decoder gives the same result for each message and job that
// the fast path accepts, and that ParseFields and ParseEntry do so for each message.
func FuzzFastPath(f *testing.F) {
	for _, s := range []string{
		plainJob, `{"group":"g","jobs":[` + plainJob + `,{"payload":1,"type":"T"}]}`, `{"group":"g","jobs":[{"payload":1,"traceparent":"x"}],"x":1}`,
		`{"payload":1,"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}`, `"\ud800\u12g4"`, `-`, `-0`, `00`, `1.`, `1e`, `1e+`, `tru`,
		`["12345678","1234567\"","1234567\\"]`, "\"123456\x1f\"", "\"1234567\x7f\x80\"", `{"a":1,}`, `[,]`, ` [ 1 , 2 ] `, `{"a" 1}`, `[1 2]`, `[`, `{`, `"`, `"\`, `"\u1`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		require.Equal(t, json.Valid(text), validJSON(text))
		decodeCompletely := func(data []byte) (*AppendJobs, error) {
			return decode(Decoder{}, "body", data, (*bodyDecoder).readAppend)
		}
		for _, data := range [][]byte{text, []byte(`{"group":"g","jobs":[` + string(text) + `]}`)} {
			fast := fastDecodeAppend(data)
			if fast != nil {
				complete, err := decodeCompletely(data)
				require.NoError(t, err)
				require.Equal(t, complete, fast)
			}
			one, oneErr := ParseFields("1-0", []string{FieldType, TypeJobsAppend, fieldData, string(data)})
			other, otherErr := ParseEntry("1-0", map[string]any{FieldType: TypeJobsAppend, fieldData: data})
			require.Equal(t, otherErr, oneErr)
			require.Equal(t, other.decoded, one.decoded)
			require.Equal(t, string(other.Data), string(one.Data))
		}
		if job, end := fastDecodeJob(text, 0); end == len(text) && utf8.Valid(text) {
			complete, err := decode(Decoder{}, "", text, func(r *bodyDecoder, object []byte) Job { return r.readJob(fieldParent{}, object) })
			require.NoError(t, err)
			require.Equal(t, complete, job)
		}
	})
}

// TestEachFieldOfAJob: each field of a job is read by both decoders, or the fast path rejects it,
// and each but traceparent changes the content hash. So a new field can't be forgotten in one of
// them.
func TestEachFieldOfAJob(t *testing.T) {
	values := map[string]string{
		"payload": `{"n":2}`, "type": `"OTHER"`, "run_at": `"2030-01-01T00:00:00Z"`,
		"traceparent": `"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"`, "key": `"customer-7"`,
	}
	submission := func(job string) *SubmitGroup {
		g, err := new(Decoder).DecodeSubmit([]byte(`{"id":"g","type":"T","jobs":[` + job + `]}`))
		require.NoError(t, err)
		return g
	}
	fields := reflect.TypeFor[Job]()
	for i := range fields.NumField() {
		name, _, _ := strings.Cut(fields.Field(i).Tag.Get("json"), ",")
		value, ok := values[name]
		require.True(t, ok, "give this test a value of the field %s", name)
		job := `{"payload":{"n":1},"` + name + `":` + value + `}`
		if name == "payload" {
			job = `{"payload":` + value + `}`
		}
		g := submission(job)
		require.False(t, reflect.ValueOf(g.Jobs[0]).Field(i).IsZero(), name)
		if fast, end := fastDecodeJob([]byte(job), 0); end >= 0 {
			require.Equal(t, g.Jobs[0], fast, name)
		}
		plain := ContentHash(submission(`{"payload":{"n":1}}`))
		if name == "traceparent" {
			require.Equal(t, plain, ContentHash(g), name)
		} else {
			require.NotEqual(t, plain, ContentHash(g), name)
		}
	}
}

// TestKeyOfAJob: DecodeJob accepts keys of at most 128 bytes without control characters. The error
// of another key names the field and the limit.
func TestKeyOfAJob(t *testing.T) {
	for key, ok := range map[string]bool{
		"customer-7": true, "auth0|7": true, "ü": true, strings.Repeat("k", 128): true, "": true,
		strings.Repeat("k", 129): false, `a\u001fb`: false, `a\nb`: false, "a\u007fb": false,
	} {
		job, err := new(Decoder).DecodeJob([]byte(`{"payload":1,"key":"` + key + `"}`))
		if ok {
			require.NoError(t, err, key)
			require.Equal(t, key, job.Key)
			continue
		}
		require.ErrorContains(t, err, "key: must be 1 to 128 bytes of UTF-8 without control characters", "%q", key)
	}
}

// FuzzCursor checks that, in valid text, a cursor finds the same values as encoding/json, and that
// it terminates on invalid text.
func FuzzCursor(f *testing.F) {
	for _, s := range []string{
		`[]`, ` [0] `, `[1 , "a,]" ,{"b":[2]}, [ ] ,null]`, `{"a":1,"\u0062" : {"}":"\\\""},"":[]}`, `["\\",true]`,
		`[`, `[1`, `["`, `["\`, `{"a`, `{"a"`, `{"a":`, `{1:2}`, `]`, `,`, `"`, ``, `[}`, `{]`, "[\xff]", strings.Repeat("[", 100),
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		text = bytes.Trim(text, whiteSpace) // the values that a cursor returns have none around them either
		var values []string
		for i, v := range elements(text) {
			require.Len(t, values, i)
			values = append(values, string(v))
		}
		require.Equal(t, len(values), countElements(text))
		keyed := map[string]string{}
		for k, v := range members(text) {
			keyed[string(k)] = string(v)
		}
		brokenField(text)

		var array []json.RawMessage
		if json.Unmarshal(text, &array) == nil && array != nil {
			require.Len(t, values, len(array))
			for i, want := range array {
				require.Equal(t, string(want), values[i])
			}
		}
		var object map[string]json.RawMessage
		if utf8.Valid(text) && json.Unmarshal(text, &object) == nil {
			require.Len(t, keyed, len(object))
			for k, want := range object {
				require.Equal(t, string(want), keyed[k])
			}
		}
	})
}
