package ledger_test

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// argument is a row of the table KEYS or ARGV in a script's header. The unit "-" stands for text.
type argument struct{ name, unit string }

// signature is what a header says about KEYS and ARGV: the arguments with a fixed number, and the
// blocks of arguments behind them, each of which is repeated for each job, group or pair.
type signature struct {
	keys     []string
	fixed    []argument
	repeated [][]argument
}

var (
	keyRow    = regexp.MustCompile(`^--   (\d+)  +(\w+)  +\S`)
	argRow    = regexp.MustCompile(`^--   (\+?\d+) +(\w+)  +(\S+)  +\S`)
	thenRow   = regexp.MustCompile(`^--   then,? \S.*:$`)
	rowGoesOn = regexp.MustCompile(`^--    +\S`) // a row goes on
)

// signatureOf reads the tables KEYS and ARGV of a header. Their rows are numbered from 1 on.
func signatureOf(t *testing.T, header string) signature {
	t.Helper()
	var s signature
	for _, line := range table(t, header, "KEYS") {
		if row := keyRow.FindStringSubmatch(line); row != nil {
			s.keys = append(s.keys, row[2])
			require.Equal(t, strconv.Itoa(len(s.keys)), row[1], "%s", line)
			continue
		}
		require.Regexp(t, rowGoesOn, line, "a row of KEYS")
	}
	args := table(t, header, "ARGV")
	if slices.Equal(args, []string{"--   none"}) {
		return s
	}
	for _, line := range args {
		if thenRow.MatchString(line) {
			s.repeated = append(s.repeated, nil)
			continue
		}
		row := argRow.FindStringSubmatch(line)
		if row == nil {
			require.Regexp(t, rowGoesOn, line, "a row of ARGV")
			continue
		}
		require.True(t, row[3] == "-" || numeric(row[3]), "%s: the unit %q is not known", line, row[3])
		of, number := &s.fixed, ""
		if n := len(s.repeated); n > 0 {
			of, number = &s.repeated[n-1], "+"
		}
		*of = append(*of, argument{name: row[2], unit: row[3]})
		require.Equal(t, fmt.Sprint(number, len(*of)), row[1], "%s", line)
	}
	return s
}

// numeric says whether values of a unit are numbers.
func numeric(unit string) bool {
	return slices.Contains([]string{"n", "0|1", "ms", "µs", "1/s", "jobs", "entries", "groups", "permits", "workers"}, unit)
}

// table returns the lines below a title of a header.
func table(t *testing.T, header, title string) []string {
	t.Helper()
	found := regexp.MustCompile(`(?m)^-- ` + title + `\n((?:--   .*(?:\n|$))+)`).FindStringSubmatch(header)
	require.NotNil(t, found, "the header has no table %s", title)
	return strings.Split(strings.TrimSuffix(found[1], "\n"), "\n")
}

// takes checks the arguments of one call: their number, and that those with a unit are numbers.
func (s signature) takes(t *testing.T, script string, args []any) {
	t.Helper()
	check := func(arg any, a argument) {
		text := fmt.Sprint(arg)
		if b, ok := arg.([]byte); ok {
			text = string(b)
		}
		if _, is := arg.(bool); is && a.unit == "0|1" {
			return // the client sends it as 0 or 1
		}
		if !numeric(a.unit) || text == "" {
			return
		}
		_, err := strconv.ParseFloat(text, 64)
		require.NoError(t, err, "%s: argument %s", script, a.name)
	}
	if len(s.repeated) == 0 {
		require.Len(t, args, len(s.fixed), script)
	}
	require.GreaterOrEqual(t, len(args), len(s.fixed), script)
	for i, a := range s.fixed {
		check(args[i], a)
	}
	if len(s.repeated) != 1 {
		return // nothing follows, or blocks whose number only the script knows
	}
	rest, rows := args[len(s.fixed):], s.repeated[0]
	require.Zero(t, len(rest)%len(rows), "%s: the repeated arguments", script)
	for i, arg := range rest {
		check(arg, rows[i%len(rows)])
	}
}

var (
	assignment = regexp.MustCompile(`(?m)^(?:local )?([\w, ]+) = (.*)$`)
	oneArg     = regexp.MustCompile(`^(?:tonumber\()?ARGV\[(\d+)\]\)?$`)
)

// localsOf returns the names of the locals that a script assigns an element of ARGV to, in lower
// case, by the element's number.
func localsOf(code string) map[int]string {
	locals := map[int]string{}
	for _, found := range assignment.FindAllStringSubmatch(code, -1) {
		values := splitList(found[2])
		for i, name := range strings.Split(found[1], ", ") {
			if i >= len(values) {
				break
			}
			if arg := oneArg.FindStringSubmatch(values[i]); arg != nil {
				n, _ := strconv.Atoi(arg[1])
				locals[n] = strings.ToLower(name)
			}
		}
	}
	return locals
}

// splitList divides a list of Lua expressions at the commas outside of brackets.
func splitList(text string) []string {
	var all []string
	depth, from := 0, 0
	for i, c := range text {
		switch c {
		case '(', '{', '[':
			depth++
		case ')', '}', ']':
			depth--
		case ',':
			if depth == 0 {
				all, from = append(all, strings.TrimSpace(text[from:i])), i+1
			}
		}
	}
	return append(all, strings.TrimSpace(text[from:]))
}

// A header that does not fit its script or its contract is found.
func TestSignatures(t *testing.T) {
	t.Parallel()
	s := signatureOf(t, strings.Join([]string{
		"-- x: a purpose", "-- KEYS", "--   1  base    the prefix", "-- ARGV", "--   1  group  -   an id,",
		"--                 which goes on", "--   2  lease  ms  its length", "--   then for each job:",
		"--   +1  ordinal  n  its number", "--   +2  code     -  its error", "-- Twice: the same",
	}, "\n"))
	require.Equal(t, signature{
		keys:     []string{"base"},
		fixed:    []argument{{"group", "-"}, {"lease", "ms"}},
		repeated: [][]argument{{{"ordinal", "n"}, {"code", "-"}}},
	}, s)
	s.takes(t, "x", []any{"g", 5, 1, "E"})
	require.Equal(t, map[int]string{1: "group", 2: "lease"},
		localsOf("local group, LEASE, n = ARGV[1], tonumber(ARGV[2]), f(ARGV[3], 4)\n"))
}
