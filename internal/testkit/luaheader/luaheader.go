// Package luaheader compares the header of a Lua script with the script and with the arguments that
// its Go contract sends. lua/README.md describes the form of a header.
package luaheader

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Argument is a row of the table ARGV in a script's header: a name and a unit. The unit "-" means
// text.
type Argument struct{ Name, Unit string }

// Signature is what a script's header says about KEYS and ARGV: the keys, the arguments at fixed
// positions, and the blocks of arguments after them, each of which is repeated, for example for
// each job.
type Signature struct {
	Keys     []string
	Fixed    []Argument
	Repeated [][]Argument
}

var (
	keyRow    = regexp.MustCompile(`^--   (\d+)  +(\w+)  +\S`)
	argRow    = regexp.MustCompile(`^--   (\+?\d+) +(\w+)  +(\S+)  +\S`)
	thenRow   = regexp.MustCompile(`^--   then,? \S.*:$`)
	rowGoesOn = regexp.MustCompile(`^--    +\S`) // a row goes on
)

// none is the only row of a table KEYS or ARGV of a script without keys or arguments.
const none = "--   none"

// Of parses the tables KEYS and ARGV of a header. It requires that their rows are numbered from 1.
func Of(t testing.TB, header string) Signature {
	t.Helper()
	var s Signature
	keys := table(t, header, "KEYS")
	if slices.Equal(keys, []string{none}) {
		keys = nil
	}
	for _, line := range keys {
		if row := keyRow.FindStringSubmatch(line); row != nil {
			s.Keys = append(s.Keys, row[2])
			require.Equal(t, strconv.Itoa(len(s.Keys)), row[1], "%s", line)
			continue
		}
		require.Regexp(t, rowGoesOn, line, "a row of KEYS")
	}
	args := table(t, header, "ARGV")
	if slices.Equal(args, []string{none}) {
		return s
	}
	for _, line := range args {
		if thenRow.MatchString(line) {
			s.Repeated = append(s.Repeated, nil)
			continue
		}
		row := argRow.FindStringSubmatch(line)
		if row == nil {
			require.Regexp(t, rowGoesOn, line, "a row of ARGV")
			continue
		}
		require.True(t, row[3] == "-" || numeric(row[3]), "%s: the unit %q is not known", line, row[3])
		of, number := &s.Fixed, ""
		if n := len(s.Repeated); n > 0 {
			of, number = &s.Repeated[n-1], "+"
		}
		*of = append(*of, Argument{Name: row[2], Unit: row[3]})
		require.Equal(t, fmt.Sprint(number, len(*of)), row[1], "%s", line)
	}
	return s
}

// numeric says whether values of a unit are numbers.
func numeric(unit string) bool {
	units := []string{"n", "0|1", "ms", "µs", "1/s", "jobs", "entries", "groups", "permits", "workers"}
	return slices.Contains(units, unit)
}

// table returns the lines below a title of a header.
func table(t testing.TB, header, title string) []string {
	t.Helper()
	found := regexp.MustCompile(`(?m)^-- ` + title + `\n((?:--   .*(?:\n|$))+)`).FindStringSubmatch(header)
	require.NotNil(t, found, "the header has no table %s", title)
	return strings.Split(strings.TrimSuffix(found[1], "\n"), "\n")
}

// Takes requires that the arguments of one call of a script fit the signature: in their number, and
// arguments with a unit are numbers or empty. With several repeated blocks it checks only the
// arguments at fixed positions.
func (s Signature) Takes(t testing.TB, script string, args []any) {
	t.Helper()
	check := func(arg any, a Argument) {
		text := fmt.Sprint(arg)
		if b, ok := arg.([]byte); ok {
			text = string(b)
		}
		if _, is := arg.(bool); is && a.Unit == "0|1" {
			return // the client sends it as 0 or 1
		}
		if !numeric(a.Unit) || text == "" {
			return
		}
		_, err := strconv.ParseFloat(text, 64)
		require.NoError(t, err, "%s: argument %s", script, a.Name)
	}
	if len(s.Repeated) == 0 {
		require.Len(t, args, len(s.Fixed), script)
	}
	require.GreaterOrEqual(t, len(args), len(s.Fixed), script)
	for i, a := range s.Fixed {
		check(args[i], a)
	}
	if len(s.Repeated) != 1 {
		return // nothing follows, or blocks whose number only the script knows
	}
	rest, rows := args[len(s.Fixed):], s.Repeated[0]
	require.Zero(t, len(rest)%len(rows), "%s: the repeated arguments", script)
	for i, arg := range rest {
		check(arg, rows[i%len(rows)])
	}
}

var (
	assignment = regexp.MustCompile(`(?m)^(?:local )?([\w, ]+) = (.*)$`)
	oneArg     = regexp.MustCompile(`^(?:tonumber\()?ARGV\[(\d+)\]\)?$`)
)

// localsOf returns, by index in ARGV, the names of the Lua locals to which a script assigns that
// element, in lower case.
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

// Split separates a script into its header and its code without comments.
func Split(source string) (header, code string) {
	lines := strings.Split(source, "\n")
	n := slices.IndexFunc(lines, func(l string) bool { return !strings.HasPrefix(l, "--") })
	comments := regexp.MustCompile(`(?m)(^| )--.*$`)
	return strings.Join(lines[:n], "\n"), comments.ReplaceAllString(strings.Join(lines[n:], "\n"), "")
}

// answered is a regular expression that finds the codes with which a script answers.
const answered = `(?:(?:return|local reply =|reply\[[^\]]+\] =) \{ |` +
	`(?:state|result|state, wait|result, from) = )'([A-Z_]+)'`

// Check requires that the header of a script has all its parts and agrees with the script's code.
// keys lists the tables KEYS that are allowed.
func Check(t testing.TB, name, source string, keys ...[]string) {
	t.Helper()
	header, code := Split(source)
	require.Regexp(t, `^-- `+name+`: \S.{20,}`, header, "the first line says what for")
	sig := Of(t, header)
	require.Contains(t, keys, sig.Keys)
	require.Regexp(t, `(?m)^-- Twice(, with a request id)?: \S`, header, "what happens when it runs twice")
	require.Regexp(t, `(?m)^-- Out of memory: (goes through|refused)`, header)
	require.Regexp(t, `(?m)^-- Cost: \S`, header)

	// The reply codes in the script's code must be those that the header lists.
	codes := func(text, pattern string) []string {
		var all []string
		for _, found := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			all = append(all, found[1])
		}
		slices.Sort(all)
		return slices.Compact(all)
	}
	inReply := codes(strings.Join(table(t, header, "Reply"), "\n"), `'([A-Z_]+)'`)
	require.Equal(t, inReply, codes(code, answered), "reply codes")

	// The elements of ARGV that the code reads by a constant index must be the arguments that the
	// header lists before the repeated part.
	read := map[int]bool{}
	for _, found := range regexp.MustCompile(`ARGV\[(\d+)\]`).FindAllStringSubmatch(code, -1) {
		n, err := strconv.Atoi(found[1])
		require.NoError(t, err)
		read[n] = true
	}
	want := map[int]bool{}
	for i := range sig.Fixed {
		want[i+1] = true
	}
	if strings.Contains(code, "ARGV[i + 1]") { // it goes over the rest of them
		require.Subset(t, want, read, "arguments")
	} else {
		require.Equal(t, want, read, "arguments")
	}

	// A local that holds an argument has the argument's name.
	for n, local := range localsOf(code) {
		require.LessOrEqual(t, n, len(sig.Fixed))
		require.Equal(t, sig.Fixed[n-1].Name, local, "ARGV[%d]", n)
	}
}
