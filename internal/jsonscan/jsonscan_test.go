package jsonscan_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jsonscan"
)

var seeds = []string{
	``, `null`, `true`, `false`, `tru`, `nulls`, `0`, `-0`, `00`, `1.5e-7`, `1.`, `1e`, `1e+`, `-`, `.5`, `+1`, `"a"`, `"a\u00fc\"\n"`, `"\ud800\u12g4"`, `"\x"`, `"`, `"\`, `"\u1`,
	`["12345678","1234567\"","1234567\\"]`, "\"123456\x1f\"", "\"1234567\x7f\x80\"", `{}`, `[ ]`, `{"a":[1,-0.5e+7,{"b":false}],"c":""}`, ` { "a" : [ 1 , 2 ] } `, `{"a":1,}`, `{"a" 1}`,
	`[,]`, `[1 2]`, `[`, `{`, `[}`, `{"a":1`, `{1:2}`, `]`, strings.Repeat("[", 40) + strings.Repeat("]", 40), `{"}":"]\"\\"}`, "\xff", "[\"\xff\"]", `"a" `,
}

// FuzzScan compares Space, Value, SkipValue and Unquote with package strings and encoding/json, for
// any text. It checks that SkipRest stays within the text.
func FuzzScan(f *testing.F) {
	for _, s := range seeds {
		f.Add(s)
	}
	const depth = 32
	f.Fuzz(func(t *testing.T, text string) {
		b := []byte(text)
		start := jsonscan.Space(b, 0)
		require.Equal(t, text[start:], strings.TrimLeft(text, " \t\r\n"))

		end := jsonscan.Value(b, start, depth)
		if end >= 0 {
			require.True(t, json.Valid(b[start:end]), "Value accepts only what encoding/json does")
			require.Equal(t, end, jsonscan.SkipValue(b[:end], start), "both find the end of a valid value")
		}
		if trimmed := strings.Trim(text, " \t\r\n"); json.Valid([]byte(trimmed)) && nesting(trimmed) <= depth {
			require.Equal(t, start+len(trimmed), end, "Value accepts each value that is not too deep")
		}

		skipped := jsonscan.SkipValue(b, start)
		require.True(t, skipped == -1 || skipped > start && skipped <= len(b))
		require.LessOrEqual(t, jsonscan.SkipRest(b, start), len(b))

		got, ok := jsonscan.Unquote(b)
		var want string
		err := json.Unmarshal(b, &want)
		if isString := len(b) > 0 && b[0] == '"' && b[len(b)-1] == '"'; !isString {
			require.False(t, ok)
		} else {
			require.Equal(t, err == nil, ok)
			require.Equal(t, want, string(got))
			require.True(t, utf8.Valid(got))
		}
	})
}

// nesting returns how deep arrays and objects are nested in a valid text. Empty ones are not
// counted.
func nesting(text string) (deepest int) {
	d, now := json.NewDecoder(strings.NewReader(text)), 0
	for {
		token, err := d.Token()
		if err != nil {
			return deepest
		}
		switch token {
		case json.Delim('{'), json.Delim('['):
			if now++; d.More() {
				deepest = max(deepest, now)
			}
		case json.Delim('}'), json.Delim(']'):
			now--
		}
	}
}

// TestMinusOne: each function that skips something, except Plain, returns -1 for the offset -1, so
// that calls can be chained without a check.
func TestMinusOne(t *testing.T) {
	t.Parallel()
	for _, s := range seeds {
		text := []byte(s)
		for name, end := range map[string]int{
			"Space": jsonscan.Space(text, -1), "Token": jsonscan.Token(text, -1, '{'), "Literal": jsonscan.Literal(text, -1, ""),
			"Value": jsonscan.Value(text, -1, 9), "Number": jsonscan.Number(text, -1), "String": jsonscan.String(text, -1),
			"SkipString": jsonscan.SkipString(text, -1), "SkipRest": jsonscan.SkipRest(text, -1), "SkipValue": jsonscan.SkipValue(text, -1),
		} {
			require.Equal(t, -1, end, name)
		}
		next, more := jsonscan.Next(text, -1, '}')
		require.Equal(t, -1, next)
		require.False(t, more)
	}
}

// TestTokens: Token, Literal and Next skip what they expect, and return -1 if it is not there.
func TestTokens(t *testing.T) {
	t.Parallel()
	require.Equal(t, 4, jsonscan.Token([]byte(" \t: 1"), 0, ':'))
	require.Equal(t, -1, jsonscan.Token([]byte(" 1"), 0, ':'))
	require.Equal(t, 4, jsonscan.Literal([]byte("true"), 0, "true"))
	require.Equal(t, -1, jsonscan.Literal([]byte("tru"), 0, "true"))
	for text, want := range map[string]struct {
		next int
		more bool
	}{" , 1": {3, true}, "} ": {2, false}, "]": {-1, false}, "": {-1, false}, "x": {-1, false}} {
		next, more := jsonscan.Next([]byte(text), 0, '}')
		require.Equal(t, want.next, next, text)
		require.Equal(t, want.more, more, text)
	}
}

var benchText = []byte(`{"id":"msg-000001","accepted":true,"cost":0.25,"items":[1,2,{"name":"a longer text, as in most results"}],"n":null}`)

func BenchmarkValue(b *testing.B) {
	for name, valid := range map[string]func() bool{
		"jsonscan":      func() bool { return jsonscan.Value(benchText, 0, 32) == len(benchText) },
		"encoding/json": func() bool { return json.Valid(benchText) },
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(benchText)))
			b.ReportAllocs()
			for b.Loop() {
				if !valid() {
					b.Fatal("invalid")
				}
			}
		})
	}
}

func BenchmarkSkip(b *testing.B) {
	for name, end := range map[string]func() int{
		"jsonscan": func() int { return jsonscan.SkipValue(benchText, 0) },
		"encoding/json": func() int {
			d := json.NewDecoder(bytes.NewReader(benchText))
			var raw json.RawMessage
			_ = d.Decode(&raw)
			return int(d.InputOffset())
		},
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(benchText)))
			b.ReportAllocs()
			for b.Loop() {
				if end() != len(benchText) {
					b.Fatal("no end")
				}
			}
		})
	}
}
