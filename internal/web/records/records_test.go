package records

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

const limit = 100

func TestLines(t *testing.T) {
	for name, c := range map[string]struct {
		body    string
		lines   []string
		longAt  int64
		inLines int64
	}{
		"none":               {"", nil, 0, 1},
		"lines":              {"a\nb\n", []string{"a", "b"}, 0, 3},
		"no last line break": {"a\r\nb", []string{"a", "b"}, 0, 3},
		"empty ones":         {"\n\n a \n", []string{"", "", "a"}, 0, 4},
		"byte order mark":    {"\xef\xbb\xbfa\n", []string{"a"}, 0, 2},
		"at the limit":       {strings.Repeat("x", limit) + "\r\nb", []string{strings.Repeat("x", limit), "b"}, 0, 3},
		"over the limit":     {"a\n" + strings.Repeat("x", limit+3) + "\nb\n", []string{"a", "b"}, 2, 4},
		"long last":          {"a\n" + strings.Repeat("x", 1000), []string{"a"}, 2, 3},
	} {
		t.Run(name, func(t *testing.T) {
			in := NewReader(bufio.NewReaderSize(strings.NewReader(c.body), 16), NDJSON, limit+2)
			var lines []string
			for {
				rec, err := in.Next()
				if errors.Is(err, io.EOF) {
					require.Equal(t, c.inLines, rec.Line)
					break
				}
				require.NoError(t, err)
				if rec.Truncated {
					require.Equal(t, c.longAt, rec.Line)
					continue
				}
				lines = append(lines, string(bytes.TrimSpace(rec.Data)))
			}
			require.Equal(t, c.lines, lines)
		})
	}
}

func TestEndlessRecordUsesBoundedMemory(t *testing.T) {
	open := io.MultiReader(strings.NewReader("a\n\""), io.LimitReader(endless("\n,x"), 8<<20))
	r := NewReader(bufio.NewReaderSize(open, 64<<10), CSV, 1<<20)
	_, err := r.Next()
	require.NoError(t, err)
	rec, err := r.Next()
	require.NoError(t, err)
	require.True(t, rec.Open)
	require.True(t, rec.Truncated)
	require.LessOrEqual(t, cap(r.buf), 2<<20)
}

// TestEndlessRecordIsAnError: a record with more than Longest bytes ends the reading with an error,
// even if it has no end. A shorter one that exceeds the limit is only truncated.
func TestEndlessRecordIsAnError(t *testing.T) {
	for format, text := range map[Format]endless{NDJSON: "x", CSV: "x\n"} {
		body := io.MultiReader(strings.NewReader("a\n"+strings.Repeat("x", 2*limit)+"\n\""), text)
		r := NewReader(bufio.NewReaderSize(body, 16), format, limit)
		r.Longest = 4 * limit
		_, err := r.Next()
		require.NoError(t, err)
		rec, err := r.Next()
		require.NoError(t, err)
		require.True(t, rec.Truncated)
		rec, err = r.Next()
		require.ErrorIs(t, err, ErrTooLong)
		require.EqualValues(t, 3, rec.Line)
	}
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

func TestReadErrorIsReturned(t *testing.T) {
	broken := io.MultiReader(strings.NewReader("a\nb"), iotest.ErrReader(io.ErrUnexpectedEOF))
	r := NewReader(bufio.NewReader(broken), NDJSON, limit)
	_, err := r.Next()
	require.NoError(t, err)
	_, err = r.Next()
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

// FuzzLines checks that a body has the same lines however it is cut into reads, and that a line
// over the limit is truncated.
func FuzzLines(f *testing.F) {
	f.Add("a\nb\r\n\n c ", uint8(3))
	f.Add(strings.Repeat("x", 300)+"\ny", uint8(1))
	f.Fuzz(func(t *testing.T, body string, step uint8) {
		if checkStart([]byte(strings.TrimPrefix(body, "\xef\xbb\xbf"))) != nil {
			return
		}
		const limit = 66
		var want []string
		for line := range strings.Lines(strings.TrimPrefix(body, "\xef\xbb\xbf")) {
			if len(line) > limit {
				line = "too long"
			}
			want = append(want, strings.TrimSpace(line))
		}
		cut := iotest.OneByteReader(strings.NewReader(body))
		in := NewReader(bufio.NewReaderSize(cut, 16+int(step)), NDJSON, limit)
		var got []string
		for {
			rec, err := in.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err)
			if rec.Truncated {
				rec.Data = []byte("too long")
			}
			got = append(got, string(bytes.TrimSpace(rec.Data)))
		}
		require.True(t, slices.Equal(want, got), "%q, %q", want, got)
	})
}

// FuzzRecords checks that the records of any input, put together again, are the input.
func FuzzRecords(f *testing.F) {
	f.Add([]byte("{}\n\n{\"a\":1}"), false)
	f.Add([]byte("a,b\n\"x\ny\",\"\"\"\"\r\n\n1"), true)
	f.Add([]byte("\"\n\n"), true)
	f.Fuzz(func(t *testing.T, body []byte, csv bool) {
		format := NDJSON
		if csv {
			format = CSV
		}
		r, lines := NewReader(bufio.NewReaderSize(bytes.NewReader(body), 16), format, len(body)+2), int64(0)
		body = bytes.TrimPrefix(body, []byte("\xef\xbb\xbf"))
		if checkStart(body) != nil {
			return
		}
		var back []byte
		for {
			rec, err := r.Next()
			if errors.Is(err, io.EOF) {
				require.Equal(t, lines+1, rec.Line)
				break
			}
			require.NoError(t, err)
			require.Positive(t, rec.Lines)
			require.False(t, rec.Truncated)
			require.False(t, !csv && rec.Lines != 1, "each line of NDJSON is a record")
			require.Equal(t, lines+1, rec.Line)
			back, lines = append(append(back, rec.Data...), '\n'), lines+rec.Lines
		}
		if len(body) > 0 && !bytes.HasSuffix(body, []byte("\n")) || len(back) > len(body) {
			body = append(bytes.Clone(body), '\n')
		}
		require.Equal(t, string(body), string(back))
		require.Equal(t, int64(bytes.Count(body, []byte("\n"))), lines)
	})
}
