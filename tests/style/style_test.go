package style_test

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"
)

// TestClientDependsOnTheStandardLibraryAlone requires that a program that uses package client links
// no other module. As a control, package client/producer must depend on go-redis.
func TestClientDependsOnTheStandardLibraryAlone(t *testing.T) {
	t.Parallel()
	require.Empty(t, modulesOf(t, "client"))
	require.Contains(t, modulesOf(t, "client/producer"), "github.com/redis/go-redis/v9")
}

// modulesOf returns the paths of the other modules on whose packages the package in dir depends.
func modulesOf(t *testing.T, dir string) []string {
	t.Helper()
	const module = "{{with .Module}}{{if not .Main}}{{.Path}}{{end}}{{end}}"
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", module, "./"+dir)
	list.Dir = moduleRoot(t)
	out, err := list.Output()
	require.NoError(t, err)
	return strings.Fields(string(out))
}

// licences has the licences that the test knows. A regular expression finds each by its text.
var licences = []struct{ name, phrase string }{
	{"Apache-2.0", "Apache License,? Version 2.0"},
	{"BSD", "Redistribution and use in source and binary forms"},
	{"MIT", "Permission is hereby granted, free of charge"},
	{"Unlicense", "This is free and unencumbered software released into the public domain"},
	{"MPL-2.0", "Mozilla Public License Version 2.0"},
	{"GPL", "GNU (AFFERO |LESSER |LIBRARY )?GENERAL PUBLIC LICENSE"},
}

// inBinaries has the licences that are allowed for code in the binaries: they only require that
// their text is delivered, and the archives of make dist contain it. Code that only the tests use
// may also have a licence in testsOnly.
var (
	inBinaries = []string{"Apache-2.0", "BSD", "MIT", "Unlicense"}
	testsOnly  = []string{"MPL-2.0"}
)

func licencesIn(text string) []string {
	text = strings.Join(strings.Fields(text), " ")
	var found []string
	for _, l := range licences {
		if regexp.MustCompile(l.phrase).MatchString(text) {
			found = append(found, l.name)
		}
	}
	return found
}

// licenceFiles returns the files in a module's folder that have its licence. The script
// deployments/dist looks for the same file names.
func licenceFiles(t *testing.T, dir string) []string {
	t.Helper()
	var files []string
	for _, pattern := range []string{"LICEN[CS]E*", "COPYING*", "UNLICENSE*"} {
		found, err := filepath.Glob(filepath.Join(dir, pattern))
		require.NoError(t, err)
		files = append(files, found...)
	}
	return slices.DeleteFunc(files, func(name string) bool {
		info, err := os.Stat(name)
		return err == nil && info.IsDir()
	})
}

const ours = "github.com/bulkaction/bulkaction"

// TestLicences requires that the code in the binaries and in the program of the module bench, and
// each direct dependency, has a licence that is allowed. go.mod replaces no module, and that of bench
// only ours.
func TestLicences(t *testing.T) {
	t.Parallel()
	requireLicences(t, ".", "./cmd/...", 0)
	requireLicences(t, "bench", ".", 1)
}

// requireLicences does that for the module in a folder. It looks at the code of the programs.
func requireLicences(t *testing.T, dir, programs string, replaced int) {
	t.Helper()
	var mod struct {
		Require []struct {
			Path     string
			Indirect bool
		}
		Replace []any
	}
	require.NoError(t, json.Unmarshal(goTool(t, dir, "mod", "edit", "-json"), &mod))
	require.Len(t, mod.Replace, replaced, "go.mod replaces modules")
	// Direct dependencies are downloaded, not listed by go list: modules that only tests with build
	// tags use may not be in the module cache yet, and go list would fail.
	direct := []string{"mod", "download", "-json"}
	for _, r := range mod.Require {
		if !r.Indirect && r.Path != ours {
			direct = append(direct, r.Path)
		}
	}
	const module = "{{with .Module}}{{if not .Main}}{{.Path}} {{.Dir}}{{end}}{{end}}"
	linked := folders(t, goTool(t, dir, "list", "-deps", "-f", module, programs))
	require.Contains(t, linked, "github.com/redis/go-redis/v9")
	delete(linked, ours)
	all := maps.Clone(linked)
	for modules := json.NewDecoder(bytes.NewReader(goTool(t, dir, direct...))); modules.More(); {
		var m struct{ Path, Dir string }
		require.NoError(t, modules.Decode(&m))
		all[m.Path] = m.Dir
	}
	for path, folder := range all {
		allowed := inBinaries
		if linked[path] == "" {
			allowed = append(slices.Clone(inBinaries), testsOnly...)
		}
		files := licenceFiles(t, folder)
		require.NotEmpty(t, files, "%s has no licence", path)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			found := licencesIn(string(text))
			require.NotEmpty(t, found, "%s: unknown licence", file)
			require.Subset(t, allowed, found, file)
		}
	}
}

// TestLicencesAreFound: licencesIn finds the GPL, alone and beside the MIT licence, and does not
// know the Business Source License. So TestLicences would refuse all three texts.
func TestLicencesAreFound(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]string{
		"GNU AFFERO GENERAL PUBLIC LICENSE\n   Version 3":                                   {"GPL"},
		"MIT\n\nPermission is hereby\ngranted, free of charge\n GNU GENERAL PUBLIC LICENSE": {"MIT", "GPL"},
		"Business Source License 1.1":                                                       nil,
	} {
		require.Equal(t, want, licencesIn(text))
		require.False(t, len(want) > 0 && slices.Contains(inBinaries, want[len(want)-1]))
	}
}

// goTool runs the go command in a folder of the repository and returns its output. It needs the
// network for modules that are not in the module cache.
func goTool(t *testing.T, dir string, args ...string) []byte {
	t.Helper()
	tool := exec.CommandContext(t.Context(), "go", args...)
	tool.Dir = filepath.Join(moduleRoot(t), dir)
	var problem strings.Builder
	tool.Stderr = &problem
	out, err := tool.Output()
	require.NoError(t, err, "go %v: %s", args, &problem)
	return out
}

// folders parses lines with the path of a module and the module's folder in the cache. It returns
// the folders by path.
func folders(t *testing.T, lines []byte) map[string]string {
	t.Helper()
	all := map[string]string{}
	for line := range strings.Lines(string(lines)) {
		if path, dir, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			require.DirExists(t, dir, path)
			all[path] = dir
		}
	}
	require.NotEmpty(t, all)
	return all
}

var (
	markdownLink = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	fencedBlock  = regexp.MustCompile("(?ms)^```.*?^```$")
	heading      = regexp.MustCompile(`(?m)^#{1,6} (.+)$`)
)

// TestLinks requires that each relative link of a Markdown document, outside of fenced blocks,
// leads to a file or folder, and that its anchor in a Markdown document is a heading there.
func TestLinks(t *testing.T) {
	t.Parallel()
	root := moduleRoot(t)
	for _, file := range trackedFiles(t, root, ".md") {
		text, err := os.ReadFile(filepath.Join(root, file))
		require.NoError(t, err)
		for _, link := range markdownLink.FindAllStringSubmatch(fencedBlock.ReplaceAllString(string(text), ""), -1) {
			if strings.Contains(link[1], "://") || strings.HasPrefix(link[1], "mailto:") {
				continue
			}
			path, anchor, _ := strings.Cut(link[1], "#")
			target := filepath.Join(root, filepath.Dir(file), path)
			if path == "" {
				target = filepath.Join(root, file)
			}
			_, err := os.Stat(target)
			require.NoError(t, err, "%s: %s", file, link[1])
			if anchor != "" && strings.HasSuffix(target, ".md") {
				require.Contains(t, anchors(t, target), anchor, "%s: %s", file, link[1])
			}
		}
	}
}

// anchors returns the anchors of a document's headings, as GitHub makes them, but without the
// numbers by which GitHub tells equal headings apart.
func anchors(t *testing.T, file string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var found []string
	for _, h := range heading.FindAllStringSubmatch(fencedBlock.ReplaceAllString(string(text), ""), -1) {
		found = append(found, strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
				return unicode.ToLower(r)
			}
			return -1
		}, h[1]))
	}
	return found
}

func moduleRoot(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	require.NoError(t, err)
	return filepath.Dir(filepath.Dir(dir))
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

// TestWorkflows requires that the workflows of GitHub name each action by its commit, with the tag
// beside it, use the Go version of go.mod, and state the default permissions of their jobs.
func TestWorkflows(t *testing.T) {
	t.Parallel()
	root := moduleRoot(t)
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	require.NoError(t, err)
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(string(mod))
	require.Len(t, version, 2)
	files, err := filepath.Glob(filepath.Join(root, ".github", "workflows", "*"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		uses := regexp.MustCompile(`(?m)uses: (.*)$`).FindAllStringSubmatch(string(text), -1)
		require.NotEmpty(t, uses, file)
		for _, use := range uses {
			require.Regexp(t, `^[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$`, use[1], file)
		}
		for _, v := range regexp.MustCompile(`(?m)go-version.*$`).FindAllString(string(text), -1) {
			require.Equal(t, `go-version: "`+version[1]+`"`, v, file)
		}
		require.Regexp(t, `(?m)^permissions:( \{\})?$`, string(text), "%s: what a job may do by default", file)
	}
}
