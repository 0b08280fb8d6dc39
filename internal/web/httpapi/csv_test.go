package httpapi

import (
	"encoding/json"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

func TestAppendCSVWithOptions(t *testing.T) {
	f := newFakeBackend().withGroup("g")
	h := New(options(f))
	send := func(query, body string) (int, string) {
		rec := call(t, h, "POST", "/v1/groups/g/jobs?"+query, body, "Content-Type", "text/csv")
		return rec.Code, rec.Body.String()
	}
	code, answer := send(url.Values{"delimiter": {";"}, "types": {"age:number,vip:boolean"}}.Encode(),
		"to;age;vip\na@example.com;41;true\nb@example.com;old;false\n")
	require.Equal(t, 200, code, answer)
	require.JSONEq(t, `{"accepted":1,"rejected_total":1,"rejected":[{"line":3,"error":"column 2 (age) must be a number such as 12 or -0.5, or empty"}]}`, answer)
	require.Equal(t, []string{`{"to":"a@example.com","age":41,"vip":true}`}, f.payloads("g"))

	for name, c := range map[string]struct{ query, body, field, problem string }{
		"no header":      {"", "\n", "header", "line 1: the header is missing"},
		"column":         {"", "a,b,a\n", "header[2]", `line 1, column 3 repeats the name "a" of column 1`},
		"semicolons":     {"", "a;b\n", "header", "send the query parameter delimiter=%3B"},
		"delimiter":      {"delimiter=x", "a\n", "delimiter", "must be a comma, a semicolon"},
		"types":          {"types=age", "a\n", "types", "write it as name:type"},
		"unknown column": {"types=age:number", "a\n", "types", `names the column "age"`},
		"too long":       {"", strings.Repeat("x", maxLine+1), "header", "is too long"},
	} {
		t.Run(name, func(t *testing.T) {
			code, answer := send(c.query, c.body)
			require.Equal(t, 422, code, answer)
			var p api.Problem
			require.NoError(t, json.Unmarshal([]byte(answer), &p))
			require.Equal(t, c.field, p.Fields[0].Field)
			require.Contains(t, p.Fields[0].Problem, c.problem)
		})
	}
	rec := call(t, h, "POST", "/v1/groups/g/jobs?delimiter=%3B", "{}", "Content-Type", "application/x-ndjson")
	require.Equal(t, 422, rec.Code)
	require.Contains(t, rec.Body.String(), "only for Content-Type text/csv")
}
