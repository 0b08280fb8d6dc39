package ledger_test

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestParseJob(t *testing.T) {
	t.Parallel()
	blob := `g.1|SEND-EMAIL|3|1|0|2|70|8|900|1700000000123||42|1700000000000|00-aa-bb-01|{"a":"|","b":1}`
	d, err := ledger.ParseJob(blob)
	require.NoError(t, err)
	require.Equal(t, ledger.Job{
		Group: "g.1", Type: "SEND-EMAIL", Attempt: 3, Retries: 1, Throttles: 0, Losses: 2, Waits: "70|8|900", SinceMS: 1700000000123,
		Ordinal: 42, Accepted: time.UnixMilli(1700000000000), Trace: "00-aa-bb-01", Payload: `{"a":"|","b":1}`,
		Queued: `42|1700000000000|00-aa-bb-01|{"a":"|","b":1}`,
	}, d)
	fair, rate, congestion := d.Waited()
	require.Equal(t, []time.Duration{70 * time.Millisecond, 8 * time.Millisecond, 900 * time.Millisecond}, []time.Duration{fair, rate, congestion})
	require.Equal(t, d.Queued, d.QueuedWithTrace(d.Trace))
	require.Equal(t, `42|1700000000000|new|{"a":"|","b":1}`, d.QueuedWithTrace("new"))
	require.Equal(t, `42|1700000000000||{"a":"|","b":1}`, d.QueuedWithTrace(""))
}

func TestParseJobRefuses(t *testing.T) {
	t.Parallel()
	for _, blob := range []string{
		"", "nonsense", "g|T|1|0|0|0|0|0|0|1||0|1|", "|T|1|0|0|0|0|0|0|1||0|1||1", "g||1|0|0|0|0|0|0|1||0|1||1",
		"g|T|x|0|0|0|0|0|0|1||0|1||1", "g|T|-1|0|0|0|0|0|0|1||0|1||1", "g|T|1|0|0|0|0|0|0|1||x|1||1", "g|T|1|0|0|0|0||0|1||0|1||1",
	} {
		_, err := ledger.ParseJob(blob)
		require.ErrorContains(t, err, "not a job", blob)
	}
}

// TestJobKey: a job's key is behind its payload, between two bytes 0x1f. Nine blobs are parsed,
// among them some with a bar in the key, without a payload, with an empty key, or with another
// field behind it.
func TestJobKey(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ end, payload, key string }{
		"without":               {`{"a":1}`, `{"a":1}`, ""},
		"with":                  {"{}\x1fcustomer-7\x1f", "{}", "customer-7"},
		"with bars":             {"{}\x1fauth0|50\x1f", "{}", "auth0|50"},
		"with a large payload":  {"\x1fcustomer-7\x1f", "", "customer-7"},
		"an empty one is none":  {"{}\x1f\x1f", "{}", ""},
		"one mark alone":        {"{}\x1f", "{}", ""},
		"with a further field":  {"{}\x1fcustomer-7\x1fmore\x1f", "{}", "customer-7"},
		"payload stored apart":  {"", "", ""},
		"payload with newlines": {"{\n}\x1fü\x1f", "{\n}", "ü"},
	} {
		t.Run(name, func(t *testing.T) {
			queued := "42|1700000000000|trace|" + c.end
			j, err := ledger.ParseJob("g|T|1|0|0|0|0|0|0|1||" + queued)
			require.NoError(t, err)
			require.Equal(t, []string{c.payload, c.key, queued}, []string{j.Payload, j.Key(), j.Queued})
			require.Equal(t, "42|1700000000000|other|"+c.end, j.QueuedWithTrace("other"))
			require.Equal(t, "42|1700000000000||"+c.end, j.QueuedWithTrace(""))
		})
	}
}

// parseSimply parses a moving blob in the simplest way, as a reference for the codec.
func parseSimply(blob string) (j ledger.Job, key string, ok bool) {
	part := strings.SplitN(blob, "|", 15)
	if len(part) < 15 || part[0] == "" || part[1] == "" || len(part[10]) > 1 {
		return j, "", false
	}
	numbers := map[int]int64{}
	for _, i := range []int{2, 3, 4, 5, 6, 7, 8, 9, 11, 12} {
		n, err := strconv.ParseInt(part[i], 10, 64)
		if err != nil || strings.Trim(part[i], "0123456789") != "" {
			return j, "", false
		}
		numbers[i] = n
	}
	j = ledger.Job{
		Group: part[0], Type: part[1], Attempt: int(numbers[2]), Retries: int(numbers[3]), Throttles: int(numbers[4]), Losses: int(numbers[5]),
		Waits: strings.Join(part[6:9], "|"), SinceMS: numbers[9], Ordinal: numbers[11], Accepted: time.UnixMilli(numbers[12]), Trace: part[13],
		Payload: part[14], Queued: strings.Join(part[11:], "|"),
	}
	if part[10] != "" {
		j.Reason = ledger.Reason(part[10][0])
	}
	if fields := strings.Split(part[14], "\x1f"); len(fields) > 1 && fields[len(fields)-1] == "" {
		j.Payload, key = fields[0], fields[1]
	}
	return j, key, true
}

// FuzzParseJob: the codec parses a blob like parseSimply, and what it composes of the job is parsed
// to the same job.
func FuzzParseJob(f *testing.F) {
	f.Add("g|T|1|0|0|0|0|0|0|1||0|1||1")
	f.Add("g|T|12|1|2|3|40|50|60|1700000000000|E|7|1700000000000|trace|{}")
	f.Add("g|T|12|1|2|3|40|50|60|1700000000000|E|7|1700000000000|trace|{}\x1fkey\x1f")
	f.Add("g|T|01|0|0|0|0|0|0|1|S|0|1||\x1f\x1f")
	f.Add("g|T|1|0|0|0|0|0|0|1||0|1|\x1f|\x1f")
	f.Add("g|T|+1|0|0|0|0|0|0|1||0|9223372036854775808||")
	f.Add("g|T|1|0|0|0|0|0|0|1||0|1|")
	f.Fuzz(func(t *testing.T, blob string) {
		j, err := ledger.ParseJob(blob)
		want, key, ok := parseSimply(blob)
		require.Equal(t, ok, err == nil, "%q: %v", blob, err)
		if err != nil {
			return
		}
		require.Equal(t, want, j)
		require.Equal(t, key, j.Key())
		require.Equal(t, j.Queued, j.QueuedWithTrace(j.Trace))
		end := strings.SplitN(blob, "|", 15)[14]
		require.True(t, strings.HasSuffix(j.QueuedWithTrace("other"), "|other|"+end))
		j.Waited()
		again, err := ledger.ParseJob(j.Blob())
		require.NoError(t, err)
		require.Equal(t, j, again)
		var divided ledger.Job
		require.NoError(t, new(ledger.Parser).Parse(j.Entry(), &divided))
		require.Equal(t, j, divided)
	})
}

// FuzzParser: the parser returns the same job wherever the entry's blob is divided into field and
// value, and whichever entry it has parsed before.
func FuzzParser(f *testing.F) {
	f.Add("g|T|1|0|0|0|0|0|0|1||0|1||1", 23, "g|T|1|0|0|0|0|0|0|1||")
	f.Add("g|T|12|1|2|3|40|50|60|1700000000000|E|7|1700000000000|trace|{}", 36, "")
	f.Add("g|T|1|0|0|0|0|0|0|1||0|1||1", 3, "nonsense")
	f.Fuzz(func(t *testing.T, blob string, at int, before string) {
		at = max(0, min(at, len(blob)))
		var p ledger.Parser
		_ = p.Parse([]string{before, "0|1||1"}, new(ledger.Job))
		for range 2 {
			var d ledger.Job
			err := p.Parse([]string{blob[:at], blob[at:]}, &d)
			want, wantErr := ledger.ParseJob(ledger.EntryBlob([]string{blob[:at], blob[at:]}))
			require.Equal(t, wantErr, err)
			if err == nil {
				require.Equal(t, want, d)
			}
		}
	})
}

// BenchmarkParseJob compares three ways to read an entry. strings.SplitN does only a part of the
// work: it reads no number.
func BenchmarkParseJob(b *testing.B) {
	head := "bench-group-7|NOOP|1|0|0|0|70|8|0|1700000000123||"
	queued := "123456|1700000000000||" + `{"pad":"` + strings.Repeat("x", 190) + `"}`
	blob, fields := head+queued, []string{head, queued}
	var p ledger.Parser
	for name, parse := range map[string]func(*ledger.Job) error{
		"Job.Parse":      func(j *ledger.Job) error { return j.Parse(blob) },
		"Parser":         func(j *ledger.Job) error { return p.Parse(fields, j) },
		"strings.SplitN": func(j *ledger.Job) error { j.Group = strings.SplitN(blob, "|", 15)[0]; return nil },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			var j ledger.Job
			for b.Loop() {
				j = ledger.Job{}
				if err := parse(&j); err != nil || j.Group != "bench-group-7" {
					b.Fatal(err)
				}
			}
		})
	}
}
