package messages

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

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
