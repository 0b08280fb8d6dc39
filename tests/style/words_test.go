package style_test

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"
)

// replacedWord is a word of the glossary's column "replaces".
type replacedWord struct {
	word   string
	parts  []string // lower case: keepHouse and keep_house are both "keep", "house"
	folder string   // "": the word may not occur in any text; else no name in this folder may hold it
	use    string   // the word that replaces it
}

// TestReplacedWords requires that no Go, Lua, Markdown, YAML, shell or proto file uses a word that
// the glossary has replaced. The glossary, CHANGELOG.md and tests/style are left out.
func TestReplacedWords(t *testing.T) {
	t.Parallel()
	root := moduleRoot(t)
	replaced := readGlossary(t, filepath.Join(root, "docs", "glossary.md"))
	require.Greater(t, len(replaced), 30)

	var offences []string
	for _, file := range trackedFiles(t, root, ".go", ".lua", ".md", ".yaml", ".yml", ".sh", ".proto") {
		if file == "docs/glossary.md" || file == "CHANGELOG.md" || strings.HasPrefix(file, "tests/style/") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, file))
		require.NoError(t, err)
		for _, o := range offencesOf(t, file, text, replaced) {
			offences = append(offences, o.String())
		}
	}
	require.Empty(t, offences, "words that docs/glossary.md has replaced")
}

// TestReplacedWordsAreFound tests the check of TestReplacedWords: in which places it finds a
// replaced word.
func TestReplacedWordsAreFound(t *testing.T) {
	t.Parallel()
	everywhere := []replacedWord{{word: "keepHouse", parts: []string{"keep", "house"}}, {word: "convoy", parts: []string{"convoy"}}}
	inLua := []replacedWord{{word: "see", parts: []string{"see"}, folder: "lua"}}
	for name, c := range map[string]struct {
		file, text string
		words      []replacedWord
		lines      []int
	}{
		"a Go name":        {"a/b.go", "package b\n\nfunc startConvoy() {}\n", everywhere, []int{3}},
		"a comment":        {"a/b.go", "package b\n\n// Two convoys.\n", everywhere, []int{3}},
		"a string":         {"a/b.go", "package b\n\nconst c = \"keep-house\"\n", everywhere, []int{3}},
		"a Lua name":       {"lua/x.lua", "local keep_house = 1\n", everywhere, []int{1}},
		"a document":       {"docs/x.md", "The\nconvoy\n", everywhere, []int{2}},
		"another word":     {"a/b.go", "package b\n\nfunc housekeeper() {}\n", everywhere, nil},
		"a scoped name":    {"lua/x.lua", "-- see README\nlocal function see_it() end\n", inLua, []int{2}},
		"outside of scope": {"b/c.go", "package c\n\nfunc see() {}\n", inLua, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var lines []int
			for _, o := range offencesOf(t, c.file, []byte(c.text), c.words) {
				lines = append(lines, o.line)
			}
			require.Equal(t, c.lines, lines)
		})
	}
}

var (
	glossaryRow  = regexp.MustCompile(`^\| ([^|]+?) \|.*\| (.*) \|$`)
	replacedTerm = regexp.MustCompile("`([A-Za-z_-]+)`((?:,? in [A-Za-z/]+)?(?:, [a-z]+/[A-Za-z/]+)*)")
)

// readGlossary returns the words in the column "replaces" of the glossary. It reads only the first
// and the last column of a row, because the column between may contain "|".
func readGlossary(t *testing.T, file string) []replacedWord {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var all []replacedWord
	for line := range strings.Lines(string(text)) {
		row := glossaryRow.FindStringSubmatch(strings.TrimSpace(line))
		if row == nil || row[1] == "word" {
			continue
		}
		for _, term := range replacedTerm.FindAllStringSubmatch(row[2], -1) {
			w := replacedWord{word: term[1], parts: wordParts(term[1]), use: row[1]}
			folders := strings.TrimPrefix(strings.TrimPrefix(strings.TrimSpace(term[2]), ","), "in ")
			for folder := range strings.SplitSeq(folders, ", ") {
				w.folder = strings.TrimSpace(folder)
				all = append(all, w)
			}
		}
	}
	return all
}

// trackedFiles returns the files below root that have one of the endings, relative to root. It
// leaves out hidden folders, bin and node_modules.
func trackedFiles(t *testing.T, root string, endings ...string) []string {
	t.Helper()
	var files []string
	require.NoError(t, filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (strings.HasPrefix(d.Name(), ".") && path != root || d.Name() == "bin" || d.Name() == "node_modules") {
			return filepath.SkipDir
		}
		if d.Type().IsRegular() && slices.Contains(endings, filepath.Ext(path)) {
			rel, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			files = append(files, filepath.ToSlash(rel))
		}
		return nil
	}))
	require.NotEmpty(t, files)
	return files
}

// wordOffence is a place where a replaced word is used.
type wordOffence struct {
	file string
	line int
	word replacedWord
}

func (o wordOffence) String() string {
	return o.file + ":" + itoa(o.line) + ": " + o.word.word + " (use: " + o.word.use + ")"
}

// offencesOf finds replaced words in one file. A word without a folder may not occur anywhere in
// the text; a word with a folder may not be declared as a name there.
func offencesOf(t *testing.T, file string, text []byte, words []replacedWord) []wordOffence {
	t.Helper()
	var found []wordOffence
	var scoped []replacedWord
	var everywhere []replacedWord
	for _, w := range words {
		switch {
		case w.folder == "":
			everywhere = append(everywhere, w)
		case strings.HasPrefix(file, w.folder+"/"):
			scoped = append(scoped, w)
		}
	}
	line := 0
	for text := range bytes.Lines(text) {
		line++
		parts := wordParts(string(text))
		for _, w := range everywhere {
			if holds(parts, w.parts) {
				found = append(found, wordOffence{file, line, w})
			}
		}
	}
	if len(scoped) > 0 {
		for _, name := range declaredNames(t, file, text) {
			for _, w := range scoped {
				if holds(wordParts(name.text), w.parts) {
					found = append(found, wordOffence{file, name.line, w})
				}
			}
		}
	}
	return found
}

// declaredName is a name that a file declares.
type declaredName struct {
	text string
	line int
}

var luaDeclaration = regexp.MustCompile(`\b(?:local|function|for)\s+(?:function\s+)?([A-Za-z_][\w, ]*)`)

// declaredNames returns the names that a file declares. In Go these are types, functions, fields,
// parameters, constants, and variables of var and :=; in Lua, names after local, function and for.
func declaredNames(t *testing.T, file string, text []byte) []declaredName {
	t.Helper()
	var names []declaredName
	switch filepath.Ext(file) {
	case ".lua":
		line := 0
		for text := range strings.Lines(string(text)) {
			line++
			code, _, _ := strings.Cut(text, "--")
			for _, found := range luaDeclaration.FindAllStringSubmatch(code, -1) {
				for name := range strings.FieldsFuncSeq(found[1], func(r rune) bool { return r == ',' || r == ' ' }) {
					names = append(names, declaredName{name, line})
				}
			}
		}
	case ".go":
		fset := token.NewFileSet()
		parsed, err := parser.ParseFile(fset, file, text, parser.SkipObjectResolution)
		require.NoError(t, err)
		add := func(id *ast.Ident) {
			if id != nil {
				names = append(names, declaredName{id.Name, fset.Position(id.Pos()).Line})
			}
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.TypeSpec:
				add(n.Name)
			case *ast.FuncDecl:
				add(n.Name)
			case *ast.Field:
				for _, id := range n.Names {
					add(id)
				}
			case *ast.ValueSpec:
				for _, id := range n.Names {
					add(id)
				}
			case *ast.AssignStmt:
				for _, e := range n.Lhs {
					if id, ok := e.(*ast.Ident); ok && n.Tok == token.DEFINE {
						add(id)
					}
				}
			}
			return true
		})
	}
	return names
}

// wordParts splits a text into lower-case words, also at underscores and capitals: keepHouse
// becomes "keep", "house".
func wordParts(text string) []string {
	var parts []string
	var current []rune
	flush := func() {
		if len(current) > 0 {
			parts = append(parts, strings.ToLower(string(current)))
			current = current[:0]
		}
	}
	var last rune
	for _, r := range text {
		switch {
		case !unicode.IsLetter(r):
			flush()
		case unicode.IsUpper(r) && unicode.IsLower(last):
			flush()
			current = append(current, r)
		default:
			current = append(current, r)
		}
		last = r
	}
	flush()
	return parts
}

// holds says whether the words of a replaced word occur in parts, one after the other. The last of
// them may be in the plural.
func holds(parts, word []string) bool {
	for i := range len(parts) - len(word) + 1 {
		n := len(word) - 1
		if slices.Equal(parts[i:i+n], word[:n]) && (parts[i+n] == word[n] || parts[i+n] == word[n]+"s") {
			return true
		}
	}
	return false
}
