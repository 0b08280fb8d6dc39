package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/messages"
)

func TestAppendAndSeal(t *testing.T) {
	f := newFakeAPI(t)
	file := writeFile(t, "a.ndjson", "{\"payload\":1}\n{\"payload\":2}\n")
	got := f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--no-seal", "--file", file)
	require.Equal(t, exitOK, got.code, got.err)
	more := writeFile(t, "b.csv", "to\na@example.com\n")
	for _, before := range []string{"", " before: nothing is new"} {
		got = f.exec(t.Context(), console{}, "append", "g", "--file", more)
		require.Equal(t, run{exitOK, "g   1 job accepted" + before + "\n", ""}, got)
		require.Len(t, f.groupByID(t, "g").jobs, 3)
	}
	got = f.exec(t.Context(), console{}, "append", "g", "--file", file)
	require.Equal(t, exitOK, got.code, got.err)
	require.Len(t, f.groupByID(t, "g").jobs, 3, "submit has added this file already")
	got = f.exec(t.Context(), console{}, "append", "g", "--file", file, "--idempotency-key", "again", "--json")
	require.Equal(t, run{exitOK, `{"id":"g","accepted":2,"rejected":[],"rejected_total":0}` + "\n", ""}, got)
	require.Len(t, f.groupByID(t, "g").jobs, 5)

	got = f.exec(t.Context(), console{}, "append", "g", "--file", writeFile(t, "c.ndjson", "{\"payload\":3}\nx\n"))
	got.ends(t, exitError, "line 2: ", "1 line rejected; 1 other job accepted\nCorrect the rejected lines and append them in a file of their own.")

	got = f.exec(t.Context(), console{}, "seal", "g", "--total", "9")
	require.Equal(t, run{exitOK, "g   CREATED   0 of 6 jobs ended\n", ""}, got)
	require.Equal(t, []string{`{"total":9}`}, f.bodies)
	got = f.exec(t.Context(), console{}, "seal", "g", "--json")
	require.Equal(t, exitOK, got.code, got.err)
	require.True(t, f.groupByID(t, "g").Sealed)
	require.True(t, strings.HasPrefix(got.out, `{"id":"g",`))

	got = f.exec(t.Context(), console{}, "append", "g", "--file", writeFile(t, "d.ndjson", "{\"payload\":4}\n"))
	require.Equal(t, exitError, got.code)
	require.Equal(t, "bulkaction: group g is sealed: it takes no more jobs\nSubmit the file as a separate group, under another --id.\n", got.err)
	f.exec(t.Context(), console{}, "append", "nosuch", "--file", file).ends(t, exitError, "`bulkaction groups ls` lists the groups")
	for args, want := range map[string]string{
		"append g":                   "there are no jobs: give --file",
		"append":                     "append needs the id of one group",
		"append g --types a:number":  "there are no jobs: give --file",
		"seal g --total -1":          "--total -1: must be 0 or more",
		"append g --file - --strict": "--strict reads the file twice",
		"append g --file " + file + " --delimiter ;": "--delimiter, --types and --key-column are for CSV",
	} {
		f.exec(t.Context(), console{}, strings.Fields(args)...).ends(t, exitUsage, want)
	}
}

func TestGroupsLs(t *testing.T) {
	f := newFakeAPI(t)
	for i := range 5 {
		got := f.exec(t.Context(), console{}, "submit", "--type", "T", "--tenant", fmt.Sprint("t", i%2), "--id", fmt.Sprint("g", i), "--payload", "1", "--tag", fmt.Sprint("half=", i%2), "--tag", "of=x=y")
		require.Equal(t, exitOK, got.code, got.err)
	}
	got := f.exec(t.Context(), console{}, "groups", "ls")
	require.Equal(t, exitOK, got.code, got.err)
	lines := strings.Split(strings.TrimSpace(got.out), "\n")
	require.Len(t, lines, 6)
	require.Equal(t, "GROUP TENANT TYPE STATUS JOBS DONE FAILED CREATED", strings.Join(strings.Fields(lines[0]), " "))
	require.Equal(t, "g0 t0 T COMPLETED 1 1 0 2030-01-02 03:04:05Z", strings.Join(strings.Fields(lines[1]), " "))
	for args, want := range map[string]int{
		"--tenant t1": 2, "--status completed": 5, "--status FAILED": 0, "--limit 3": 3, "--limit 5": 5, "--limit 2 --all": 5, "--failed-jobs": 0, "--failed-jobs=false": 5, "--tag half=1": 2, "--tag half=1 --tag of=x=y": 2, "--tag half=2": 0,
	} {
		got := f.exec(t.Context(), console{}, append([]string{"groups", "ls", "--json"}, strings.Fields(args)...)...)
		require.Equal(t, exitOK, got.code, got.err)
		require.Equal(t, want, strings.Count(got.out, "\n"), args)
		require.Equal(t, args == "--limit 3", got.err != "", args)
	}
	for args, want := range map[string]string{
		"--status DONE": `--status "DONE": must be one of CREATED, DISPATCHED`,
		"--limit -1":    "--limit -1: must be 0 (all) or more",
		"--tenant {":    `--tenant "{": must match`,
	} {
		f.exec(t.Context(), console{}, append([]string{"groups", "ls"}, strings.Fields(args)...)...).ends(t, exitUsage, want)
	}
}

func TestDryRun(t *testing.T) {
	f := newFakeAPI(t)
	file := writeFile(t, "a.csv", "to;age\na@example.com;41\n\nb@example.com;old\nc@example.com;7\n")
	args := []string{"submit", "--type", "T", "--file", file, "--delimiter", ";", "--types", "age:number", "--dry-run"}
	got := f.exec(t.Context(), console{}, args...)
	require.Equal(t, exitError, got.code)
	require.Equal(t, `Jobs          2
Wrong lines   1
Payload 0     {"to":"a@example.com","age":41}
Payload 1     {"to":"c@example.com","age":7}
`, got.out)
	require.Equal(t, "line 4: column 2 (age) must be a number such as 12 or -0.5, or empty\nNothing was sent (--dry-run).\n"+
		"bulkaction: the file has 1 wrong line\nCorrect them; without --strict, the other lines would be sent.\n", got.err)
	got = f.exec(t.Context(), console{}, append(args, "--json")...)
	require.Equal(t, exitError, got.code)
	require.JSONEq(t, `{"jobs":2,"first_payloads":[{"to":"a@example.com","age":41},{"to":"c@example.com","age":7}],
		"rejected":[{"line":4,"error":"column 2 (age) must be a number such as 12 or -0.5, or empty"}],"rejected_total":1}`, got.out)

	got = f.exec(t.Context(), console{}, "submit", "--type", "T", "--payload", "1", "--payload", `{"a":2}`, "--dry-run", "--json")
	require.Equal(t, run{exitOK, `{"jobs":2,"first_payloads":[1,{"a":2}]}` + "\n", ""}, got)
	ndjson := strings.NewReader("{\"payload\":1}\n\n{\"payload\":2}\n{\"payload\":3}\n{\"payload\":4}\n")
	got = f.exec(t.Context(), console{in: ndjson}, "append", "g", "--file", "-", "--dry-run", "--json")
	require.Equal(t, run{exitOK, `{"jobs":4,"first_payloads":[1,2,3]}` + "\n", ""}, got)
	require.Empty(t, f.calls, "nothing is sent")
}

func TestStrict(t *testing.T) {
	f := newFakeAPI(t)
	bad := writeFile(t, "a.ndjson", "{\"payload\":1}\nx\n")
	got := f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--strict", "--file", bad)
	got.ends(t, exitError, "line 2: ", "a.ndjson has 1 wrong line, and --strict sends nothing then\nCorrect the lines, or leave out --strict to send the 1 other job.")
	require.Empty(t, f.calls)
	got = f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--strict", "--file", writeFile(t, "b.ndjson", "{\"payload\":1}\n"))
	require.Equal(t, run{exitOK, "g\n", ""}, got)
}

// TestStrictChecksKeys: the dry run and --strict refuse the lines that the server would refuse for
// their keys, and send nothing.
func TestStrictChecksKeys(t *testing.T) {
	f := newFakeAPI(t)
	long := strings.Repeat("k", 129)
	files := map[string]string{
		writeFile(t, "a.csv", "id,name\na,Ann\n"+long+",Bob\n\"c\nd\",Cid\na,Ann again\n"): "--key-column id",
		writeFile(t, "a.ndjson", `{"payload":1,"key":"a"}`+"\n"+`{"payload":2,"key":"`+long+`"}`+"\n"+
			`{"payload":2,"key":"c\nd"}`+"\n\n"+`{"payload":3,"key":"a"}`+"\n"): "",
	}
	for file, flags := range files {
		submit := append([]string{"submit", "--type", "T", "--unique-keys", "--file", file}, strings.Fields(flags)...)
		for _, mode := range []string{"--strict", "--dry-run"} {
			f.exec(t.Context(), console{}, append(submit, mode)...).ends(t, exitError,
				"must be 1 to 128 bytes of UTF-8 without control characters", "key: line", "has it, too", "3 wrong lines")
			require.Empty(t, f.calls, "nothing is sent")
		}
		submit = slices.DeleteFunc(submit, func(s string) bool { return s == "--unique-keys" })
		f.exec(t.Context(), console{}, append(submit, "--dry-run")...).ends(t, exitError, "2 wrong lines")
		for _, mode := range []string{"--strict", "--dry-run"} {
			args := append([]string{"append", "g", mode, "--file", file}, strings.Fields(flags)...)
			f.exec(t.Context(), console{}, args...).ends(t, exitError, "3 wrong lines")
		}
		require.NotContains(t, strings.Join(f.calls, " "), "POST", "append asks whether the group has unique keys")
		f.calls = nil
	}
	got := f.exec(t.Context(), console{}, "submit", "--type", "T", "--payload", `"`+strings.Repeat("x", 256<<10)+`"`, "--dry-run")
	got.ends(t, exitError, "the server would refuse the group: jobs[0].payload: is 262146 bytes; at most 262144 are accepted")
	got = f.exec(t.Context(), console{}, "submit", "--type", "T", "--payload", "1", "--max-retries", "-1", "--aggregate", "as=x,op=own", "--dry-run")
	got.ends(t, exitError, "the server would refuse the group: max_retries: must be a whole number from 0 to 1000")
}

// TestFileThatIsNoText: nothing is sent of a file that is not what its name says.
func TestFileThatIsNoText(t *testing.T) {
	f := newFakeAPI(t)
	for _, c := range []struct{ name, content, flags, want string }{
		{"cr.csv", "to,name\ra,b\rc,d\r", "", "the header has a carriage return inside: end the lines with LF or CRLF"},
		{"one.csv", "to\ra\rb\r", "", "the header has a carriage return inside"},
		{"a.csv", "PK\x03\x04", "", "the text is a ZIP archive, such as a workbook (.xlsx, .ods): export the table as CSV in UTF-8"},
		{"a.ndjson", "\xff\xfe{\x00", "", "the text is in UTF-16: save the file as UTF-8"},
		{"b.ndjson", "{\x00\"\x00", "", "has a NUL character, as UTF-16 has"},
		{"a.csv", "to\u200b,name\n", "", "column 1 contains the invisible character U+200B"},
		{"sep.csv", "\ufeffsep=;\r\nto;name\r\na;b\r\n", "", "Remove this line and give --delimiter ';'."},
		{"sep.csv", "sep=;\r\nto;name\r\na;b\r\n", "--delimiter ;", "Remove this line and give --delimiter ';'."},
		{"array.ndjson", "[\n{\"payload\":1},\n{\"payload\":2}\n]\n", "", "is a JSON array, not NDJSON: write one job a line"},
		{"a.json", "[]", "", "a JSON array of payloads becomes that with: jq"},
		{"a.xlsx", "", "", "is a workbook: export the table as CSV"},
	} {
		args := append([]string{"submit", "--type", "T", "--file", writeFile(t, c.name, c.content)}, strings.Fields(c.flags)...)
		got := f.exec(t.Context(), console{}, args...)
		require.NotEqual(t, exitOK, got.code, c.name)
		require.Contains(t, got.err, c.want)
	}
	require.Empty(t, f.calls, "no group is created")
}

func TestSubmitWithAKey(t *testing.T) {
	f := newFakeAPI(t)
	file := writeFile(t, "a.csv", "to;age\na@example.com;41\n")
	got := f.exec(t.Context(), console{}, "submit", "--type", "T", "--file", file, "--idempotency-key", "import-1", "--base-priority", "7",
		"--delimiter", ";", "--types", "age:number")
	require.Equal(t, run{exitOK, "made-up-0\n", ""}, got, "the server chooses the id, and repeats it for the same key")
	require.InDelta(t, 7, f.groupByID(t, "made-up-0").submitted.BasePriority, 0)
	require.Equal(t, []string{"delimiter=%3B&types=age%3Anumber"}, f.queries)
	require.Equal(t, api.StatusCompleted, f.groupByID(t, "made-up-0").Status)
	f.exec(t.Context(), console{}, "submit", "--type", "T", "--payload", "1", "--idempotency-key", "a b").ends(t, exitUsage, "--idempotency-key must be 1 to 255 bytes of visible ASCII")
}

func TestHeaderOfCSV(t *testing.T) {
	f := newFakeAPI(t)
	for content, c := range map[string]struct {
		flags, want string
		code        int
	}{
		"to;name\n":   {"", "a.csv: line 1: the header has one column, whose name contains a semicolon: the columns seem to be separated by it\nGive --delimiter ';', or --delimiter ',' if it is right.", exitError},
		"\nto,to\n":   {"", `a.csv: line 2, column 2 repeats the name "to" of column 1: each column needs its own name`, exitError},
		"to,,name\n":  {"", "a.csv: line 1, column 2 is empty: each column needs a name", exitError},
		"to,name\n":   {"--types age:number", `--types names the column "age", which the header does not have`, exitUsage},
		"to, name\n":  {"--types to:int", `--types "to:int": the type must be string, number or boolean`, exitUsage},
		"to,  name\n": {"--delimiter x", `--delimiter "x": must be a comma`, exitUsage},
	} {
		got := f.exec(t.Context(), console{}, append([]string{"submit", "--type", "T", "--file", writeFile(t, "a.csv", content)}, strings.Fields(c.flags)...)...)
		require.Equal(t, c.code, got.code, got.err)
		require.Contains(t, got.err, c.want)
	}
	require.Empty(t, f.calls, "no group is created")
}

func writeFile(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

func ptr[T any](v T) *T { return &v }

func TestSubmitFlags(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "submit", "--type", "SEND_EMAIL", "--tenant", "acme", "--id", "g", "--name", "Spring sale",
		"--priority", "high", "--max-retries", "0", "--job-timeout", "90s", "--failure-threshold", "0.5", "--run-at", "2030-01-31T09:00:00Z",
		"--aggregate", "as=cost,op=sum,field=data.cost", "--aggregate", "as=n,op=count",
		"--payload", `{"to":"a@example.com"}`, "--payload", "[1,2]")
	require.Equal(t, run{exitOK, "g\n", ""}, got)
	at := time.Date(2030, 1, 31, 9, 0, 0, 0, time.UTC)
	require.Equal(t, &messages.SubmitGroup{
		ID: "g", Tenant: "acme", Name: "Spring sale", Type: "SEND_EMAIL", Priority: messages.LaneHigh, MaxRetries: ptr(0),
		JobTimeout: messages.Duration(90 * time.Second), RunAt: &at, FailureThreshold: ptr(0.5), Seal: true,
		Aggregate: []messages.Aggregate{{As: "cost", Op: "sum", Field: "data.cost"}, {As: "n", Op: "count"}},
		Jobs:      []messages.Job{{Payload: json.RawMessage(`{"to":"a@example.com"}`)}, {Payload: json.RawMessage("[1,2]")}},
	}, f.groupByID(t, "g").submitted)

	got = f.exec(t.Context(), console{}, "submit", "--type", "NOOP", "--payload", "1", "--json")
	require.Equal(t, run{exitOK, `{"id":"made-up-1","status":"COMPLETED","counts":{"accepted":1,"waiting":0,"non_ready":0,"ready":0,"in_flight":0,"done":1,"failed":0,"cancelled":0},"links":{"self":"/v1/groups/made-up-1"}}` + "\n", ""}, got)
	require.Equal(t, &messages.SubmitGroup{ID: "made-up-1", Type: "NOOP", Seal: true, Jobs: []messages.Job{{Payload: json.RawMessage("1")}}}, f.groupByID(t, "made-up-1").submitted)

	got = f.exec(t.Context(), console{}, "submit", "--type", "NOOP", "--id", "open", "--no-seal")
	require.Equal(t, exitOK, got.code)
	require.False(t, f.groupByID(t, "open").Sealed)
}

func TestParseRunAt(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	at, err := parseRunAt("1h30m", now)
	require.NoError(t, err)
	require.Equal(t, now.Add(90*time.Minute), at)
}

func TestSubmitRefused(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "submit", "--type", "T", "--max-retries", "-1", "--failure-threshold", "2", "--payload", "1")
	require.Equal(t, exitUsage, got.code)
	require.Contains(t, got.err, "bulkaction: --max-retries -1: must be a whole number from 0 to 1000; "+
		"--failure-threshold 2: must be a number above 0, to 1\n", "the error names the flags")
	require.Empty(t, got.out)
}

func TestSubmitFile(t *testing.T) {
	ndjson := func(n int) string { return strings.Repeat("{\"payload\":{\"to\":\"a@example.com\"}}\n", n) }
	csv := "to\n" + strings.Repeat("a@example.com\n", 3)
	for _, c := range []struct {
		name, content, stdin string
		args                 []string
		jobs                 int
	}{
		{"a.ndjson", ndjson(12_000), "", nil, 12_000},
		{"a.JSONL", ndjson(7), "", nil, 7},
		{"a.csv", csv, "", nil, 3},
		{"a.txt", csv, "", []string{"--format", "csv"}, 3},
		{"", "", ndjson(2), nil, 2},
		{"", "", csv, []string{"--format", "csv"}, 3},
		{"empty.ndjson", "", "", nil, 0},
	} {
		t.Run(c.name+c.stdin[:min(3, len(c.stdin))], func(t *testing.T) {
			f := newFakeAPI(t)
			path := "-"
			if c.name != "" {
				path = writeFile(t, c.name, c.content)
			}
			args := append([]string{"submit", "--type", "T", "--id", "g", "--file", path}, c.args...)
			got := f.exec(t.Context(), console{in: strings.NewReader(c.stdin)}, args...)
			note := ""
			if c.jobs == 0 {
				note = "The file " + path + " has no lines, so it adds no jobs.\n"
			}
			require.Equal(t, run{exitOK, "g\n", note}, got)
			g := f.groupByID(t, "g")
			require.Len(t, g.jobs, c.jobs)
			require.True(t, g.Sealed)
			require.False(t, g.submitted.Seal, "the group is sealed only after the upload")

			again := f.exec(t.Context(), console{in: strings.NewReader(c.stdin)}, args...)
			if c.jobs > 0 {
				note = "Group g has accepted these jobs before: nothing is new.\n"
			}
			require.Equal(t, run{exitOK, "g\n", note}, again)
			require.Len(t, f.groupByID(t, "g").jobs, c.jobs)
		})
	}
}

func TestSubmitExample(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "submit", "--type", "SEND_EMAIL", "--file", "../../examples/recipients.csv", "--json")
	require.Equal(t, exitOK, got.code, got.err)
	var out submitted
	require.NoError(t, json.Unmarshal([]byte(got.out), &out))
	require.EqualValues(t, 20, *out.Accepted)
	require.Len(t, f.groupByID(t, out.ID).jobs, 20)
}

func TestSubmitMissingFile(t *testing.T) {
	f := newFakeAPI(t)
	f.exec(t.Context(), console{}, "submit", "--type", "T", "--file", "nosuch.csv").ends(t, exitError, "open nosuch.csv: no such file or directory\nGive the path of a file, or - for standard input.")
	f.exec(t.Context(), console{}, "submit", "--type", "T", "--format", "csv", "--file", ".").ends(t, exitError, "open .: is a directory")
	require.Empty(t, f.calls, "no group may be created")
}

func TestSubmitFileOnATerminal(t *testing.T) {
	f := newFakeAPI(t)
	path := writeFile(t, "a.ndjson", strings.Repeat("{\"payload\":1}\n", 6000))
	got := f.exec(t.Context(), console{terminal: true}, "submit", "--type", "T", "--id", "g", "--file", path, "--wait")
	require.Equal(t, exitOK, got.code)
	require.True(t, strings.HasPrefix(got.out, "g\nGroup      g\n"), got.out)
	require.Contains(t, got.err, "sending")
	require.Contains(t, got.err, "6,000 lines (100%)")
	require.Contains(t, got.err, "6,000 of 6,000 ended (100%)")
}

func TestSubmitWithBadLines(t *testing.T) {
	f := newFakeAPI(t)
	path := writeFile(t, "a.ndjson", "{\"payload\":1}\n{\"pay\":2}\n{\"payload\":3}\n"+strings.Repeat("x\n", 30))
	got := f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--file", path)
	require.Equal(t, exitError, got.code)
	require.Equal(t, "g\n", got.out)
	lines := strings.Split(got.err, "\n")
	require.Contains(t, lines[0], "line 2: ")
	require.Contains(t, lines[0], "pay: not a known field")
	require.Contains(t, lines[19], "line 22: ")
	require.Equal(t, "and 11 more lines", lines[20])
	require.Equal(t, "bulkaction: 31 lines rejected; group g has 2 other jobs of the file", lines[21])
	require.True(t, f.groupByID(t, "g").Sealed)

	got = f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "h", "--file", path, "--json", "--wait")
	require.Equal(t, exitError, got.code)
	var out submitted
	require.NoError(t, json.Unmarshal([]byte(got.out), &out))
	require.EqualValues(t, 2, *out.Accepted)
	require.EqualValues(t, 31, out.RejectedTotal)
	require.Len(t, out.Rejected, 31)
	require.EqualValues(t, 2, out.Group.Counts.Done)

	got = f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "i", "--file", writeFile(t, "b.ndjson", "x\n"))
	got.ends(t, exitError, "bulkaction: no line was accepted, so group i is cancelled\nCorrect the lines and submit the file again, under another --id")
	require.Empty(t, got.out)
	require.EqualValues(t, "CANCELLED", f.groupByID(t, "i").Status)
}

func TestSubmitWaits(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--payload", "1", "--wait")
	require.Equal(t, exitOK, got.code, got.err)
	require.True(t, strings.HasPrefix(got.out, "g\nGroup      g\n"))
	require.Empty(t, got.err)

	got = f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "h", "--payload", `"fail"`, "--wait", "--json")
	require.Equal(t, exitFailedJobs, got.code)
	var out submitted
	require.NoError(t, json.Unmarshal([]byte(got.out), &out))
	require.EqualValues(t, "COMPLETED", out.Status)
	require.EqualValues(t, 1, out.Group.Counts.Failed)

	f.keepOpen = true
	waited := make(chan run)
	go func() {
		waited <- f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "i", "--payload", "1", "--wait")
	}()
	require.Eventually(t, func() bool { return f.called("GET /v1/groups/i/events") }, waitFor, tick)
	require.Equal(t, exitOK, f.exec(t.Context(), console{}, "cancel", "i").code)
	got = <-waited
	got.ends(t, exitError, "group i was cancelled: 1 job did not run")
}

func TestSubmitBody(t *testing.T) {
	f := newFakeAPI(t)
	const body = `{"id": "g", "type": "T", "seal": true, "jobs": [{"payload": 1}]}`
	require.Equal(t, run{exitOK, "g\n", ""}, f.exec(t.Context(), console{}, "submit", "--body", writeFile(t, "body.json", body)))
	require.Len(t, f.groupByID(t, "g").jobs, 1)
	got := f.exec(t.Context(), console{in: strings.NewReader(strings.Replace(body, "g", "h", 1))}, "submit", "--body", "-", "--wait")
	require.Equal(t, exitOK, got.code)
	require.Len(t, f.groupByID(t, "h").jobs, 1)

	for content, want := range map[string]string{
		"{":             "is not the JSON of a group",
		`{"type": "T"}`: "--wait would never end",
	} {
		f.exec(t.Context(), console{in: strings.NewReader(content)}, "submit", "--body", "-", "--wait").ends(t, exitUsage, want)
	}
}

func TestSubmitRetriesWhileTheServerIsBusy(t *testing.T) {
	f := newFakeAPI(t)
	f.busyAppends = 3
	got := f.exec(t.Context(), console{in: strings.NewReader("{\"payload\":1}\n")}, "submit", "--type", "T", "--id", "g", "--file", "-")
	notes := ""
	for left := 11; left > 8; left-- {
		notes += fmt.Sprintf("The API refuses the jobs now (429: the backlog is full). Trying again in 1 s, at most %d more times; Ctrl-C ends this.\n", left)
	}
	require.Equal(t, run{exitOK, "g\n", notes}, got)
	require.Len(t, f.groupByID(t, "g").jobs, 1)

	f.busyAppends = 1
	got = f.exec(t.Context(), console{in: strings.NewReader("{\"payload\":1}\n"), terminal: true}, "submit", "--type", "T", "--id", "h", "--file", "-")
	require.Equal(t, exitOK, got.code)
	require.Equal(t, 1, strings.Count(got.err, "The API refuses the jobs now (429: the backlog is full)."), "also above a bar")
}

func TestSubmitInterruptedWhileTheServerIsBusy(t *testing.T) {
	f := newFakeAPI(t)
	f.busyAppends, f.retryAfter = 1, "60"
	ctx, cancel := context.WithCancel(t.Context())
	notes := cancelAt{"Trying again in 60 s, at most 11 more times", cancel, &strings.Builder{}}
	code := Main(ctx, []string{"--api", f.URL, "submit", "--type", "T", "--id", "g", "--file", "-"},
		IO{In: strings.NewReader("{\"payload\":1}\n"), Out: io.Discard, Err: notes})
	require.Equal(t, exitInterrupted, code)
	require.Contains(t, notes.String(), "bulkaction: interrupted\n"+
		"The last attempt: append to group g: 429 Too Many Requests: "+api.ErrBackpressure.Error()+": the backlog is full (try again in 1m0s)\n"+
		"Group g has accepted at least 0 jobs and is not sealed.")
}

// cancelAt cancels a context when a text is written to it.
type cancelAt struct {
	text   string
	cancel func()
	*strings.Builder
}

func (c cancelAt) Write(p []byte) (int, error) {
	if strings.Contains(string(p), c.text) {
		c.cancel()
	}
	return c.Builder.Write(p)
}

func TestHintWhenRedisIsOutOfMemory(t *testing.T) {
	refused := &api.BackpressureError{RetryAfter: 5 * time.Second, Reason: "Redis is out of memory"}
	err := &client.Error{Status: 429, RetryAfter: refused.RetryAfter, Problem: api.Problem{Title: "Too Many Requests", Detail: refused.Error()}}
	require.EqualError(t, err, "429 Too Many Requests: not accepted now: Redis is out of memory (try again in 5s)")
	require.Equal(t, `Raise Redis's maxmemory, or cancel groups: docs/operations.md, "Memory is full".`, advice(err))
}

func TestNoteOfAnAPIThatDoesNotAnswer(t *testing.T) {
	var err strings.Builder
	r := &Root{IO: IO{Err: &err}}
	r.noteRetry(io.ErrUnexpectedEOF, 100*time.Millisecond, 3)
	r.noteRetry(&client.Error{Status: 503, Problem: api.Problem{Title: "Service Unavailable"}}, time.Second, 2)
	require.Equal(t, "The API does not answer now (unexpected EOF). Trying again in 1 s, at most 3 more times; Ctrl-C ends this.\n"+
		"The API refuses the jobs now (503: Service Unavailable). Trying again in 1 s, at most 2 more times; Ctrl-C ends this.\n", err.String())
}

func TestSubmitHintsHowToContinue(t *testing.T) {
	f := newFakeAPI(t)
	require.Equal(t, exitOK, f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--no-seal").code)
	require.Equal(t, exitOK, f.exec(t.Context(), console{}, "cancel", "g").code)
	f.groups["g"].Sealed = true
	got := f.exec(t.Context(), console{in: strings.NewReader("{\"payload\":1}\n")}, "submit", "--type", "T", "--id", "g", "--file", "-")
	require.Equal(t, exitError, got.code)
	require.Equal(t, "bulkaction: group g is sealed: it takes no more jobs\nSubmit the file as a separate group, under another --id.\n", got.err)
	f.groups["g"].Sealed, f.failSeals = false, true
	got = f.exec(t.Context(), console{in: strings.NewReader("{\"payload\":1}\n")}, "submit", "--type", "T", "--id", "g", "--file", "-")
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.err, "Group g has accepted at least 1 jobs and is not sealed. "+
		"Run the same command again and the same input, to continue: no job counts twice. Or `bulkaction cancel g`.")
}

func TestSubmitInterruptedWhileSending(t *testing.T) {
	for _, terminal := range []bool{false, true} {
		f := newFakeAPI(t)
		ctx, cancel := context.WithCancel(t.Context())
		in, out := io.Pipe()
		done := make(chan run)
		go func() {
			done <- f.exec(ctx, console{in: in, terminal: terminal}, "submit", "--type", "T", "--file", "-")
		}()
		for range 5001 { // more than one request
			_, err := fmt.Fprintln(out, `{"payload":1}`)
			require.NoError(t, err)
		}
		require.Eventually(t, func() bool {
			f.mu.Lock()
			defer f.mu.Unlock()
			for _, g := range f.groups {
				return len(g.jobs) == 5000
			}
			return false
		}, waitFor, tick)
		cancel()
		got := <-done
		require.NoError(t, out.Close())
		got.ends(t, exitInterrupted, "bulkaction: interrupted\nGroup ")
		require.Regexp(t, "has accepted at least (0|5000) jobs and is not sealed. Run the same command again, with --id ", got.err)
		require.Empty(t, got.out)
	}
}
