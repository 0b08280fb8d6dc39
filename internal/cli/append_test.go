package cli

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
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
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.err, "line 2: ")
	require.Contains(t, got.err, "1 line rejected; 1 other job accepted\nCorrect the rejected lines and append them in a file of their own.")

	got = f.exec(t.Context(), console{}, "seal", "g", "--total", "9")
	require.Equal(t, run{exitOK, "g   CREATED   0 of 6 jobs ended\n", ""}, got)
	require.Equal(t, []string{`{"total":9}`}, f.bodies)
	got = f.exec(t.Context(), console{}, "seal", "g", "--json")
	require.Equal(t, exitOK, got.code, got.err)
	require.True(t, f.groupByID(t, "g").Sealed)
	require.True(t, strings.HasPrefix(got.out, `{"id":"g",`))

	got = f.exec(t.Context(), console{}, "append", "g", "--file", writeFile(t, "d.ndjson", "{\"payload\":4}\n"))
	require.Equal(t, exitError, got.code)
	require.Equal(t, "bulkaction: group g is sealed: it takes no more jobs\nSubmit the file as a group of its own, under another --id.\n", got.err)
	got = f.exec(t.Context(), console{}, "append", "nosuch", "--file", file)
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.err, "`bulkaction groups ls` lists the groups")
	for args, want := range map[string]string{
		"append g":                   "there are no jobs: give --file",
		"append":                     "append needs the id of one group",
		"append g --types a:number":  "there are no jobs: give --file",
		"seal g --total -1":          "--total -1: must be 0 or more",
		"append g --file - --strict": "--strict reads the file twice",
		"append g --file " + file + " --delimiter ;": "--delimiter, --types and --key-column are for CSV",
	} {
		got := f.exec(t.Context(), console{}, strings.Fields(args)...)
		require.Equal(t, exitUsage, got.code, args)
		require.Contains(t, got.err, want)
	}
}

func TestGroupsLs(t *testing.T) {
	f := newFakeAPI(t)
	for i := range 5 {
		got := f.exec(t.Context(), console{}, "submit", "--type", "T", "--tenant", fmt.Sprint("t", i%2), "--id", fmt.Sprint("g", i), "--payload", "1")
		require.Equal(t, exitOK, got.code, got.err)
	}
	got := f.exec(t.Context(), console{}, "groups", "ls")
	require.Equal(t, exitOK, got.code, got.err)
	lines := strings.Split(strings.TrimSpace(got.out), "\n")
	require.Len(t, lines, 6)
	require.Equal(t, "GROUP TENANT TYPE STATUS JOBS DONE FAILED CREATED", strings.Join(strings.Fields(lines[0]), " "))
	require.Equal(t, "g0 t0 T COMPLETED 1 1 0 2030-01-02 03:04:05Z", strings.Join(strings.Fields(lines[1]), " "))
	for args, want := range map[string]int{
		"--tenant t1": 2, "--status completed": 5, "--status FAILED": 0, "--limit 3": 3, "--limit 5": 5, "--limit 2 --all": 5, "--failed-jobs": 0, "--failed-jobs=false": 5,
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
		got := f.exec(t.Context(), console{}, append([]string{"groups", "ls"}, strings.Fields(args)...)...)
		require.Equal(t, exitUsage, got.code)
		require.Contains(t, got.err, want)
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
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.err, "line 2: ")
	require.Contains(t, got.err, "a.ndjson has 1 wrong line, and --strict sends nothing then\nCorrect the lines, or leave out --strict to send the 1 other job.")
	require.Empty(t, f.calls)
	got = f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--strict", "--file", writeFile(t, "b.ndjson", "{\"payload\":1}\n"))
	require.Equal(t, run{exitOK, "g\n", ""}, got)
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
	got = f.exec(t.Context(), console{}, "submit", "--type", "T", "--payload", "1", "--idempotency-key", "a b")
	require.Equal(t, exitUsage, got.code)
	require.Contains(t, got.err, "--idempotency-key must be 1 to 255 bytes of visible ASCII")
}

func TestHeaderOfCSV(t *testing.T) {
	f := newFakeAPI(t)
	for content, c := range map[string]struct {
		flags, want string
		code        int
	}{
		"to;name\n":   {"", "a.csv: line 1: the header has one column, whose name contains a semicolon: the columns seem to be separated by it\nGive --delimiter ';', or --delimiter ',' if it is right.", exitError},
		"\nto,to\n":   {"", `a.csv: line 2, column 2 repeats the name "to" of column 1`, exitError},
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
