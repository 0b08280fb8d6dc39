package ledger_test

import (
	"fmt"
	goast "go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/lua"
)

// sent is a script as it is sent to Redis: the files of package lua that are joined, in this order.
// The last file is the script itself; the others are parts, or a script that runs before it.
type sent struct{ files []string }

func (s sent) name() string   { return s.files[len(s.files)-1] }
func (s sent) source() string { return lua.Source(s.files...) }

func isPart(file string) bool { return strings.HasPrefix(file, "parts/") }

// fileAt returns the file of a line of the whole source.
func (s sent) fileAt(line int) string {
	for _, file := range s.files {
		n := strings.Count(lua.Source(file), "\n")
		if line <= n {
			return file
		}
		line -= n
	}
	return ""
}

// sentScripts returns the scripts that this module loads, outside of its tests: the calls of
// lua.Source and, in this package, of script. It checks that none is loaded twice and that they use
// every file of package lua.
func sentScripts(t *testing.T) []sent {
	t.Helper()
	var all []sent
	found := map[string]bool{}
	err := filepath.WalkDir("../../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(text), `bulkaction/lua"`) && !strings.Contains(string(text), ` script("`) {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, text, 0)
		if err != nil {
			return err
		}
		goast.Inspect(file, func(n goast.Node) bool {
			call, ok := n.(*goast.CallExpr)
			if !ok {
				return true
			}
			if s := loads(call, file.Name.Name); s.files != nil {
				require.False(t, found[s.name()], "%s is loaded twice", s.name())
				found[s.name()], all = true, append(all, s)
			}
			return true
		})
		return nil
	})
	require.NoError(t, err)

	// No file of package lua is left out.
	used := map[string]bool{}
	for _, s := range all {
		for _, file := range s.files {
			used[file] = true
		}
	}
	files, err := filepath.Glob("../../../lua/*/*.lua")
	require.NoError(t, err)
	var there []string
	for _, file := range files {
		there = append(there, strings.TrimSuffix(strings.TrimPrefix(filepath.ToSlash(file), "../../../lua/"), ".lua"))
	}
	require.ElementsMatch(t, there, slices.Collect(maps.Keys(used)))
	return all
}

// loads returns the files that a Go call expression loads, if all of its arguments are string
// literals.
func loads(call *goast.CallExpr, inPackage string) sent {
	var args []string
	for _, arg := range call.Args {
		literal, ok := arg.(*goast.BasicLit)
		if !ok || literal.Kind != token.STRING {
			return sent{}
		}
		text, err := strconv.Unquote(literal.Value)
		if err != nil {
			return sent{}
		}
		args = append(args, text)
	}
	switch f := call.Fun.(type) {
	case *goast.Ident:
		if f.Name != "script" || inPackage != "ledger" || len(args) == 0 {
			return sent{}
		}
		files := []string{"parts/base"}
		for _, part := range args[1:] {
			files = append(files, "parts/"+part)
		}
		return sent{files: append(files, args[0])}
	case *goast.SelectorExpr:
		if on, ok := f.X.(*goast.Ident); ok && on.Name == "lua" && f.Sel.Name == "Source" {
			return sent{files: args}
		}
	}
	return sent{}
}

// Lua 5.1 allows 200 locals that are active at one point of a function, and 60 upvalues of a
// function. Redis refuses a script with more. mostLocals and mostUpvalues leave space for changes.
const (
	luaLocals, mostLocals     = 200, 160
	luaUpvalues, mostUpvalues = 60, 45
)

func TestLocalsOfScripts(t *testing.T) {
	t.Parallel()
	url, _ := redistest.Shared(t)
	c := client(t, url)
	for _, s := range sentScripts(t) {
		t.Run(s.name(), func(t *testing.T) {
			funcs := walkLua(t, s.source()).funcs
			for _, f := range funcs {
				require.LessOrEqual(t, f.locals, mostLocals, "locals of the function in line %d", f.line)
				require.LessOrEqual(t, len(f.upvalues), mostUpvalues, "upvalues of the function in line %d", f.line)
			}

			// Redis counts locals like this test: a script loads with `free` more locals, and not
			// with one more than that.
			pad := func(n int) string {
				var names strings.Builder
				for i := range n {
					fmt.Fprintf(&names, "local pad%d ", i)
				}
				return names.String() + s.source()
			}
			free := luaLocals - funcs[0].locals
			require.NoError(t, c.ScriptLoad(t.Context(), pad(free)).Err())
			require.ErrorContains(t, c.ScriptLoad(t.Context(), pad(free+1)).Err(), "more than 200 local variables")
		})
	}
}

// builtins are the global names that Redis defines for scripts, as far as scripts of package lua
// use them.
var builtins = []string{
	"KEYS", "ARGV", "redis", "cjson", "string", "table", "math",
	"ipairs", "next", "pairs", "pcall", "select", "tonumber", "tostring", "type", "unpack",
}

// foreignFields are, by script, the fields of tables that the script does not build itself but gets
// from Redis or decodes from JSON.
var foreignFields = map[string][]string{
	// of a group's hash
	"groups/advance": {"failure_threshold", "reduce_failures", "requeue", "round", "sealed", "started", "status", "tenant"},
	// of a consumer, as XINFO describes it
	"processes/drop_consumer": {"idle", "name", "pending"},
	// of an error record, and of the JSON of a choice
	"groups/requeue": {"code", "codes", "jobs", "letter", "round"},
	"groups/reopen":  {"codes", "jobs"},
	// of an entry of the results stream
	"repair/repair_misplaced": {"g", "l"},
}

// TestFieldsOfScripts: reading a misspelt field gives nil, and a misspelt function fails only when
// it is called, perhaps in a rare case. So each field that a script reads must be set by the script
// or be in foreignFields, and each library function must be one of Redis's.
func TestFieldsOfScripts(t *testing.T) {
	t.Parallel()
	url, _ := redistest.Shared(t)
	c := client(t, url)
	for _, s := range sentScripts(t) {
		t.Run(s.name(), func(t *testing.T) {
			chunk := walkLua(t, s.source())
			for name, line := range chunk.library {
				kind, err := c.Eval(t.Context(), "return type("+name+")", nil).Result()
				require.NoError(t, err, "%s, in %s", name, s.fileAt(line))
				require.Equal(t, "function", kind, "%s, in %s", name, s.fileAt(line))
			}
			if chunk.library["redis.pcall"] > 0 {
				chunk.sets["err"] = true // of an error reply
			}
			var unset []string
			for name := range chunk.reads {
				if !chunk.sets[name] {
					unset = append(unset, name)
				}
			}
			slices.Sort(unset)
			require.Equal(t, foreignFields[s.name()], unset, "fields that the script reads and does not set")
		})
	}
}

// TestParts: a part's header lists what the part needs, what it offers and what scripts set. A
// script loads the parts that it uses and the parts that these need, and no others.
func TestParts(t *testing.T) {
	t.Parallel()
	needs := map[string][]string{}
	offers, sets := map[string]map[string]bool{}, map[string]map[string]bool{}
	used := map[string][]string{} // by script: the parts that it uses itself
	all := sentScripts(t)
	for _, s := range all {
		chunk := walkLua(t, s.source())
		for name, line := range chunk.globals {
			require.Contains(t, builtins, name, "%s, in %s: neither a local nor one of Redis's; is a part missing?", s.name(), s.fileAt(line))
		}
		for _, v := range chunk.outer {
			from := s.fileAt(v.line)
			if !isPart(from) {
				continue
			}
			note := func(file string, of map[string]map[string]bool) {
				if of[from] == nil {
					of[from] = map[string]bool{}
				}
				of[from][v.name] = true
				if !isPart(file) {
					used[file] = append(used[file], from)
				} else if !slices.Contains(needs[file], from) {
					needs[file] = append(needs[file], from)
				}
			}
			for _, line := range v.read {
				if file := s.fileAt(line); file != from {
					note(file, offers)
				}
			}
			for _, line := range v.written {
				if file := s.fileAt(line); file != from {
					note(file, sets)
				}
			}
		}
	}
	for _, s := range all {
		var want, parts []string
		for _, file := range s.files {
			want = append(want, used[file]...)
			if isPart(file) {
				parts = append(parts, file)
			}
		}
		for i := 0; i < len(want); i++ {
			want = append(want, needs[want[i]]...)
		}
		slices.Sort(want)
		require.ElementsMatch(t, slices.Compact(want), parts, "parts that %s uses, and parts that it loads", s.name())
	}
	files, err := filepath.Glob("../../../lua/parts/*.lua")
	require.NoError(t, err)
	for _, path := range files {
		name := strings.TrimSuffix(filepath.Base(path), ".lua")
		t.Run(name, func(t *testing.T) {
			part := "parts/" + name
			source := lua.Source(part)
			require.True(t, strings.HasPrefix(source, "-- "+name+": "), "the first line says what it is for")
			want := "nothing"
			if part != "parts/base" {
				for i, file := range needs[part] {
					needs[part][i] = strings.TrimPrefix(file, "parts/")
				}
				slices.Sort(needs[part])
				want = strings.Join(needs[part], ", ")
			}
			require.Equal(t, want, partSection(source, "NEEDS"), "NEEDS")
			namesIn := func(title string) []string {
				var names []string
				for _, found := range regexp.MustCompile(`(?m)^--   (\w.*?)(?:   .*)?$`).FindAllStringSubmatch(partSection(source, title), -1) {
					list := regexp.MustCompile(`\([^)]*\)|\[\w+\]`).ReplaceAllString(found[1], "")
					names = append(names, strings.Split(list, ", ")...)
				}
				return names
			}
			for name := range sets[part] {
				delete(offers[part], name) // it is the script's
			}
			require.ElementsMatch(t, slices.Collect(maps.Keys(offers[part])), namesIn("OFFERS"), "OFFERS")
			require.ElementsMatch(t, slices.Collect(maps.Keys(sets[part])), namesIn("SETS"), "SETS")
		})
	}
}

// partSection returns what a part's header says under a title (NEEDS, OFFERS, ...), on the title's
// line and on the lines below it.
func partSection(source, title string) string {
	found := regexp.MustCompile(`(?m)^-- ` + title + `(?:  (.*)\n|\n((?:--   .*\n)*))`).FindStringSubmatch(source)
	if found == nil {
		return ""
	}
	return found[1] + found[2]
}
