package ledger_test

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/lua"
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

func (w *world) job(group string, ordinal int64) ledger.JobStatus {
	w.Helper()
	j, err := ledger.ReadJob(w.Context(), w.c, w.p, group, ordinal)
	require.NoError(w, err)
	return j
}

func TestReadJob(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 4, "acme", "T")
		held := w.begin("T", "c", 3)
		w.outcome("T", done(held[0]))
		w.outcome("T", other(ledger.OutcomeFailed, held[1], 0))
		w.outcomeIn(ledger.Congestion{Cap: time.Hour}, "T", other(ledger.OutcomeRetry, held[2], time.Minute))

		require.Equal(w, ledger.Done, w.job("g", 0).State.Letter())
		require.Nil(w, w.job("g", 0).LastError())
		failed := w.job("g", 1)
		require.Equal(w, ledger.Failed, failed.State.Letter())
		require.Equal(w, 1, failed.State.Attempt())
		require.Equal(w, "BOOM", failed.LastError().Code)
		require.Equal(w, "it broke", failed.LastError().Error)
		require.EqualValues(w, 1, failed.LastError().Ordinal)
		require.Zero(w, failed.LastError().Until)
		retried := w.job("g", 2)
		require.Equal(w, ledger.NonReady, retried.State.Letter())
		require.Equal(w, "E", retried.LastError().Reason)
		require.Equal(w, time.Minute, time.UnixMilli(retried.LastError().Until).Sub(retried.LastError().Time()))
		require.Equal(w, ledger.Waiting, w.job("g", 3).State.Letter())

		w.c.HSet(w.Context(), w.p.Errors("g"), "2", "no JSON")
		require.Equal(w, ledger.JobStatus{State: retried.State}, w.job("g", 2), "the state holds although the record can't be read")
		for _, unknown := range []struct {
			group   string
			ordinal int64
		}{{"g", 4}, {"g", 1 << 30}, {"h", 0}} {
			_, err := ledger.ReadJob(w.Context(), w.c, w.p, unknown.group, unknown.ordinal)
			require.ErrorIs(w, err, api.ErrNotFound)
			letter, err := ledger.ReadLetter(w.Context(), w.c, w.p, unknown.group, unknown.ordinal)
			require.NoError(w, err)
			require.Zero(w, letter)
		}
		letter, err := ledger.ReadLetter(w.Context(), w.c, w.p, "g", 1)
		require.NoError(w, err)
		require.Equal(w, ledger.Failed, letter)
		w.c.Del(w.Context(), w.p.Failures("g"))
		w.c.Set(w.Context(), w.p.Failures("g"), "x", 0)
		_, err = ledger.ReadJob(w.Context(), w.c, w.p, "g", 1)
		require.ErrorContains(w, err, "read job g.1: WRONGTYPE")
	})
}

// TestCountWaiting: CountWaiting counts the waiting jobs below an ordinal, among 40,000 states:
// more than one command reads.
func TestCountWaiting(t *testing.T) {
	onStores(t, func(w *world) {
		const n = 40_000
		states := make([]byte, 0, 2*n)
		for i := range n {
			states = append(states, "WNWR"[i%4], '!')
		}
		w.c.Set(w.Context(), w.p.States("g"), string(states), 0)
		for before, want := range map[int64]int64{0: 0, 1: 1, 2: 1, 3: 2, 4: 2, 32_768: 16_384, 32_769: 16_385, 32_771: 16_386, n: n / 2, 2 * n: n / 2} {
			got, err := ledger.CountWaiting(w.Context(), w.c, w.p, "g", before)
			require.NoError(w, err)
			require.Equal(w, want, got, "before %d", before)
		}
	})
}

// TestJobKeyStaysWithTheJob: a job keeps its key while it is retried, fails and runs in the next
// round. The dead letter, the failure and the worker get the key apart from the payload.
func TestJobKeyStaysWithTheJob(t *testing.T) {
	for name, c := range map[string]struct {
		typ   string // "" is the group's: its blobs are composed by the caller, the others by the script
		runAt *time.Time
		large bool
	}{
		"composed by the caller": {},
		"composed by the script": {typ: "T"},
		"scheduled":              {runAt: new(time.Now().Add(30 * time.Millisecond))},
		"with a large payload":   {large: true},
	} {
		t.Run(name, func(t *testing.T) {
			onStores(t, func(w *world) {
				w.create("g", "acme", "T")
				payload := []byte(`{"a":"|"}`)
				if c.large {
					payload = large
				}
				w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: []ledger.NewJob{
					{Type: c.typ, RunAt: c.runAt, Payload: payload, Key: "auth0|7"}, {Type: c.typ, RunAt: c.runAt, Payload: []byte(`2`)},
				}})
				w.seal("g")
				check := func(run []taken) {
					require.Len(w, run, 2)
					require.Equal(w, []string{"auth0|7", "", "2"}, []string{run[0].Key(), run[1].Key(), run[1].Payload})
					if c.large {
						require.Empty(w, run[0].Payload)
						require.Equal(w, string(large), w.c.HGet(w.Context(), w.p.Payloads("g"), "0").Val())
					} else {
						require.Equal(w, string(payload), run[0].Payload)
					}
				}
				next := func() []taken {
					var run []taken
					w.eventually(func() bool {
						w.promote(noLimit, "T")
						w.admit("T", 10, noLimit)
						run = append(run, w.read("T", "c")...)
						return len(run) == 2
					})
					w.start("T", run)
					check(run)
					return run
				}
				// Both jobs, with and without a key, are retried, fail, and run again in the next
				// round.
				for _, j := range next() {
					w.outcome("T", other(ledger.OutcomeRetry, j, 0))
				}
				for _, j := range next() {
					w.outcome("T", other(ledger.OutcomeFailed, j, 0))
				}
				letters := w.c.XRange(w.Context(), w.p.DeadLetters(), "-", "+").Val()
				require.Equal(w, []any{string(payload), "2"}, []any{letters[0].Values["payload"], letters[1].Values["payload"]})
				require.Equal(w, "auth0|7", letters[0].Values["key"])
				require.NotContains(w, letters[1].Values, "key")
				keys := map[int64]string{}
				require.NoError(w, ledger.Failures(w.Context(), w.c, w.p, "g", func(e ledger.JobError) error {
					keys[e.Ordinal] = e.Key
					return nil
				}))
				require.Equal(w, map[int64]string{0: "auth0|7", 1: ""}, keys)
				w.advance("g")
				w.retry("g")
				run := next()
				require.Equal(w, ledger.OutcomeReply{Owned: 2}, w.outcome("T", done(run...)))
			})
		})
	}
}

// readJob is a script that parses a blob with the scripts' codec and composes it again.
const readJob = `
local blob = ARGV[1]
local j = parse(blob)
if not j then return {} end
local payload, key = payload_and_key(string.sub(blob, j.payload_at))
return { j.group, j.typ, tostring(j.attempt), j.retries, j.throttles, tostring(j.losses), tostring(j.wf), tostring(j.wr), tostring(j.wc),
  string.format('%.0f', j.since), j.reason, tostring(j.ordinal), string.format('%.0f', j.accepted), j.trace, payload, key, compose(j, blob) }`

// leadingZero matches a leading zero of a number, which is lost when a blob is composed again.
var leadingZero = regexp.MustCompile(`\|0[0-9]`)

// FuzzJobInScripts: scripts parse a blob that Go accepts as Go does, and compose the same blob. But
// they refuse ordinals of more than 9 digits and reasons that are no letter. Blobs with leading
// zeros or with numbers above 1e14 are not compared.
func FuzzJobInScripts(f *testing.F) {
	for _, seed := range []string{
		"g|T|1|0|0|0|0|0|0|1||0|1||1", "g|T|12|1|2|3|40|50|60|1700000000000|E|7|1700000000000|trace|{}", "",
		"g|T|12|1|2|3|40|50|60|1700000000000|P|7|1700000000000|trace|{\"a\":\"|\"}\x1fa|b\x1f", "g|T|1|0|0|0|0|0|0|1||0|1||\x1fkey\x1f",
		"g|T|1|0|0|0|0|0|0|1||0|1||\x1f\x1f", "g|T|1|0|0|0|0|0|0|1||0|1||a\x1fb\x1fc\x1f", "g|T|1|0|0|0|0|0|0|1||0|1||a\x1f\x1f\x1f", "g|T|1|0|0|0|0|0|0|1||0|1|",
		"g|T|1|0|0|0|0|0|0|1|EE|0|1||", "g|T|-1|0|0|0|0|0|0|1||0|1||", "g|T|1|0|0|0|0|0|0|1||9999999999|1||", "g|T|1|0|0|0|0|0|0|1|?|0|1||",
	} {
		f.Add(seed)
	}
	url, _ := redistest.Shared(f)
	c, source := client(f, url), lua.Source("parts/base", "parts/blob")+readJob
	f.Fuzz(func(t *testing.T, blob string) {
		got, err := c.Eval(t.Context(), source, []string{"base", "base-"}, blob).StringSlice()
		require.NoError(t, err)
		j, err := ledger.ParseJob(blob)
		if err != nil {
			return // scripts accept numbers of any length
		}
		ordinal, _, _ := strings.Cut(j.Queued, "|")
		letter := j.Reason == 0 || 'a' <= j.Reason|0x20 && j.Reason|0x20 <= 'z'
		require.Equal(t, letter && len(ordinal) <= 9, len(got) > 0, "%q", blob)
		if len(got) == 0 {
			return
		}
		n := func(i int) int { n, err := strconv.Atoi(got[i]); require.NoError(t, err); return n }
		want := []any{j.Group, j.Type, j.Attempt, j.Retries, j.Throttles, j.Losses, j.Waits, int(j.SinceMS), int(j.Ordinal), j.Accepted, j.Trace, j.Payload, j.Key()}
		if max(j.Attempt, j.Losses, int(j.SinceMS), int(j.Accepted.UnixMilli())) > 1e14 || len(j.Waits) > 40 {
			return // Lua's numbers are not exact above 2^53
		}
		if leadingZero.MatchString("|" + blob) {
			return
		}
		require.Equal(t, want, []any{
			got[0], got[1], n(2), n(3), n(4), n(5), strings.Join(got[6:9], "|"), n(9), n(11), time.UnixMilli(int64(n(12))), got[13], got[14], got[15],
		})
		var reason ledger.Reason
		if got[10] != "" {
			reason = ledger.Reason(got[10][0])
		}
		require.Equal(t, j.Reason, reason)
		again, err := ledger.ParseJob(got[16])
		require.NoError(t, err)
		require.Equal(t, j.Payload, again.Payload)
		require.Equal(t, j.Key(), again.Key())
		require.Equal(t, blob, got[16])
	})
}

func TestFindNonReady(t *testing.T) {
	onStores(t, func(w *world) {
		find := func(group string, ordinal int64) (ledger.NonReadyJob, bool) {
			j, found, err := ledger.FindNonReady(w.Context(), w.c, w.p, "acme", group, ordinal)
			require.NoError(w, err)
			return j, found
		}
		_, found := find("g", ledger.NextJob)
		require.False(w, found)

		at := time.UnixMilli(1_700_000_000_000)
		add := func(key, group, typ, reason string, ordinal int, due time.Time) {
			blob := fmt.Sprintf("%s|%s|1|0|0|0|0|0|0|1|%s|%d|1||{}", group, typ, reason, ordinal)
			require.NoError(w, w.c.ZAdd(w.Context(), key, redis.Z{Score: float64(due.UnixMilli()), Member: blob}).Err())
		}
		key := w.p.NonReadyOf("acme")
		for i := range 2500 { // some pages of other jobs
			add(key, "other", "T", "E", i, at)
		}
		w.c.ZAdd(w.Context(), key, redis.Z{Score: 1, Member: "g|junk"})
		add(key, "g", "T", "E", 7, at.Add(2*time.Second))
		add(key, "g", "U", "S", 12, at.Add(time.Second))
		add(key, "g", "T", "", 1, at.Add(3*time.Second)) // 12 and 7|1 contain its number
		add(w.p.SuspendedOf("acme"), "g", "T", "P", 3, at)
		for _, want := range []ledger.NonReadyJob{
			{Ordinal: 7, Type: "T", Due: at.Add(2 * time.Second), Reason: ledger.ReasonError},
			{Ordinal: 12, Type: "U", Due: at.Add(time.Second), Reason: ledger.ReasonScheduled},
			{Ordinal: 1, Type: "T", Due: at.Add(3 * time.Second)},
			{Ordinal: 3, Type: "T", Due: at, Reason: ledger.ReasonPaused},
		} {
			got, found := find("g", want.Ordinal)
			require.True(w, found)
			require.Equal(w, want.Ordinal, got.Job.Ordinal)
			got.Job = nil
			require.Equal(w, want, got)
		}
		first, found := find("g", ledger.NextJob)
		require.True(w, found)
		require.EqualValues(w, 3, first.Ordinal)
		_, found = find("g", 2)
		require.False(w, found)

		for due, want := range map[time.Duration]int64{0: 1, time.Millisecond: 2501, time.Second: 2501, 3 * time.Second: 2503, time.Hour: 2504} {
			n, err := ledger.DueBefore(w.Context(), w.c, w.p, "acme", at.Add(due))
			require.NoError(w, err)
			require.Equal(w, want, n, "%v", due)
		}
	})
}

func TestFindReady(t *testing.T) {
	onStores(t, func(w *world) {
		find := func(group string, ordinal int64) (ledger.ReadyJob, bool) {
			j, found, err := ledger.FindReady(w.Context(), w.c, w.p, []string{"T", "U"}, group, ordinal)
			require.NoError(w, err)
			return j, found
		}
		_, found := find("g", 0)
		require.False(w, found)
		w.backlog("f", "U", 600) // more than one page
		w.backlog("g", "U", 4)
		for range 4 {
			w.admit("U", 200, noLimit)
		}
		require.EqualValues(w, 604, w.c.XLen(w.Context(), w.p.Ready("U")).Val())
		before := map[int64]int64{}
		for i := range int64(4) {
			j, found := find("g", i)
			require.True(w, found)
			require.Equal(w, i, j.Job.Ordinal)
			j.Job, j.ID = nil, ""
			require.Equal(w, ledger.ReadyJob{Ordinal: i, Type: "U", Before: j.Before}, j, "no worker has served the type yet")
			before[i] = j.Before
		}
		first, found := find("g", ledger.NextJob)
		require.True(w, found)
		require.EqualValues(w, 0, first.Ordinal)
		require.Equal(w, before[0], first.Before)
		_, found = find("g", 4)
		require.False(w, found)

		read := w.readSome("U", "c", before[0]+1)
		j, found := find("g", 1)
		require.True(w, found)
		require.Equal(w, before[1]-before[0]-1, j.Before, "entries that a worker has read are not before it")
		w.start("U", read) // with job 0 of g
		first, found = find("g", ledger.NextJob)
		require.True(w, found)
		require.EqualValues(w, 1, first.Ordinal, "job 0 is in flight")
		j, found = find("g", 0)
		require.True(w, found)
		require.Zero(w, j.Before)
	})
}

func TestPayloads(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: []ledger.NewJob{{Payload: []byte("1")}, {Payload: large}}})
		payloads, err := ledger.Payloads(w.Context(), w.c, w.p, []ledger.JobRef{{Group: "g", Ordinal: 7}, {Group: "g", Ordinal: 1}, {Group: "missing"}})
		require.NoError(w, err)
		require.Equal(w, []string{"", string(large), ""}, payloads)

		require.NoError(w, w.c.Set(w.Context(), w.p.Payloads("text"), "1", 0).Err())
		_, err = ledger.Payloads(w.Context(), w.c, w.p, []ledger.JobRef{{Group: "missing"}, {Group: "text"}})
		require.ErrorContains(w, err, "WRONGTYPE", "the reply before it, which has found nothing, does not hide the error")
	})
}
