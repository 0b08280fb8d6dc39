package httpapi

import (
	"bufio"
	"encoding/csv"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/records"
)

// drain reads all jobs of a body. It returns a refused line as "line: problem".
func drain(t *testing.T, src jobSource) (payloads, refused []string) {
	t.Helper()
	for {
		job, line, _, err := src.next()
		var bad *lineError
		switch {
		case errors.Is(err, io.EOF):
			return payloads, refused
		case errors.As(err, &bad):
			refused = append(refused, string(rune('0'+line))+": "+bad.problem)
		default:
			require.NoError(t, err)
			require.True(t, json.Valid(job.Payload), string(job.Payload))
			payloads = append(payloads, string(job.Payload))
		}
	}
}

func TestCSV(t *testing.T) {
	for name, c := range map[string]struct {
		table    string
		payloads []string
		refused  []string
	}{
		"rows":                {"to,subject\na,b\nc,d\n", []string{`{"to":"a","subject":"b"}`, `{"to":"c","subject":"d"}`}, nil},
		"no last line break":  {"a\n1", []string{`{"a":"1"}`}, nil},
		"only a header":       {"a,b", nil, nil},
		"CRLF":                {"a,b\r\n1,2\r\n3,\"4\"\r\n", []string{`{"a":"1","b":"2"}`, `{"a":"3","b":"4"}`}, nil},
		"CR at the end":       {"a\n1\r", []string{`{"a":"1"}`}, nil},
		"CR inside":           {"a\n1\r2\n", []string{`{"a":"1\u000d2"}`}, nil},
		"quotes":              {"a,b\n\"1,1\",\"say \"\"x\"\"\"\n", []string{`{"a":"1,1","b":"say \"x\""}`}, nil},
		"line break in quote": {"a,b\n\"1\n2\",3\n4,5,6\n", []string{`{"a":"1\n2","b":"3"}`}, []string{"4: has 3 columns where the header has 2"}},
		"empty values":        {"a,b\n,\n\"\",\n", []string{`{"a":"","b":""}`, `{"a":"","b":""}`}, nil},
		"empty lines":         {"a\n\n\r\n1\n\n", []string{`{"a":"1"}`}, nil},
		"quoted empty":        {"a\n\"\"\n", []string{`{"a":""}`}, nil},
		"escapes":             {"a\\,\"b\"\"\"\n\"\t\\\x01\",ü💡\u2028\n", []string{`{"a\\":"\t\\\u0001","b\"":"ü💡` + "\u2028" + `"}`}, nil},
		"wrong columns":       {"a,b\n1\n1,2,3\n4,5\n", []string{`{"a":"4","b":"5"}`}, []string{"2: has 1 columns where the header has 2", "3: has 3 columns where the header has 2"}},
		"bare quote":          {"a,b\n1\"x,2\n3,4\n", []string{`{"a":"3","b":"4"}`}, []string{"2: has a quote inside a field that is not quoted"}},
		"after a quote":       {"a,b\n\"1\"x,2\n3,4\n", []string{`{"a":"3","b":"4"}`}, []string{"2: goes on after a closing quote"}},
		"open quote":          {"a\n1\n\"2\n3\n", []string{`{"a":"1"}`}, []string{"3: opens a quote that is never closed"}},
		"not UTF-8":           {"a,b\n\xff,1\n\xc3,\xa9\n1,2\n", []string{`{"a":"1","b":"2"}`}, []string{"2: is not UTF-8", "3: is not UTF-8"}},
		"long row":            {"a\n" + strings.Repeat("x", maxLine+1) + "\n1\n", []string{`{"a":"1"}`}, []string{"2: " + errLongLine.problem}},
		"many commas":         {"a\n" + strings.Repeat(",", maxLine+1) + "\n1\n", []string{`{"a":"1"}`}, []string{"2: " + errLongLine.problem}},
		"large payload":       {"a\n" + strings.Repeat("\x01", messages.MaxPayloadBytes/6) + "\n1\n", []string{`{"a":"1"}`}, []string{"2: " + errLongLine.problem}},
	} {
		t.Run(name, func(t *testing.T) {
			src, err := newCSVSource(bufio.NewReaderSize(iotest.OneByteReader(strings.NewReader(c.table)), 16))
			require.NoError(t, err)
			payloads, refused := drain(t, src)
			require.Equal(t, c.payloads, payloads)
			require.Equal(t, c.refused, refused)
		})
	}
}

func TestCSVHeader(t *testing.T) {
	for name, c := range map[string]struct{ table, field string }{
		"none":       {"", "header"},
		"blank":      {"\n\r\n", "header"},
		"no name":    {"a,,b\n", "header[1]"},
		"repeated":   {"a,b,a\n", "header[2]"},
		"open quote": {"\"a\n", "header"},
		"UTF-16":     {"\xff\xfea\x00", "header"},
		"too long":   {strings.Repeat("x", maxLine+1), "header"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := newCSVSource(bufio.NewReader(strings.NewReader(c.table)))
			var p *problemError
			require.ErrorAs(t, err, &p)
			require.Equal(t, 422, p.Status)
			require.Equal(t, c.field, p.Fields[0].Field)
		})
	}
}

func TestEndlessRecordUsesBoundedMemory(t *testing.T) {
	open := io.MultiReader(strings.NewReader("a\n\""), io.LimitReader(endless("\n,x"), maxSkipped-1))
	src, err := newCSVSource(bufio.NewReaderSize(open, readBuffer))
	require.NoError(t, err)
	_, _, _, err = src.next()
	require.EqualError(t, err, "opens a quote that is never closed")
	require.LessOrEqual(t, cap(src.row.text), 2*maxLine)
	require.LessOrEqual(t, cap(src.row.ends), 16)
}

// endless is a reader that repeats a text without end.
type endless string

func (e endless) Read(p []byte) (int, error) {
	n := 0
	for n < len(p) {
		n += copy(p[n:], e)
	}
	return n, nil
}

// FuzzCSV checks that csvSource reads the same rows as encoding/csv, and refuses a row that
// encoding/csv refuses.
func FuzzCSV(f *testing.F) {
	for _, seed := range []string{"a,b\n1,2\n", "\"a\"\"\",b\r\n\"\n\",\r\n", "a\"b\n", "\"a\"b,c\n", "\"", "\r\r\n,", ",\n\n,\n"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, table string) {
		if !utf8.ValidString(table) || strings.Contains(table, "\r") || strings.HasPrefix(table, "\ufeff") {
			return // encoding/csv changes carriage returns, keeps a byte order mark and accepts any bytes
		}
		std := csv.NewReader(strings.NewReader(table))
		std.FieldsPerRecord = -1
		in := bufio.NewReaderSize(strings.NewReader(table), 16)
		ours := &csvSource{rows: records.NewReader(in, records.CSV, maxRecord)}
		for {
			want, wantErr := std.Read()
			line, err := ours.nextRow()
			if errors.Is(wantErr, io.EOF) {
				require.Equal(t, io.EOF, err)
				return
			}
			if wantErr != nil {
				require.Error(t, err)
				return // behind a malformed row the two readers continue differently
			}
			require.NoError(t, err)
			wantLine, _ := std.FieldPos(0)
			require.EqualValues(t, wantLine, line)
			var got []string
			for i := range ours.row.fields() {
				got = append(got, string(ours.row.field(i)))
				var back string
				require.NoError(t, json.Unmarshal(appendJSONString(nil, ours.row.field(i)), &back))
				require.Equal(t, got[i], back)
			}
			require.Equal(t, want, got)
		}
	})
}
