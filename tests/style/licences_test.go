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

	"github.com/stretchr/testify/require"
)

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

// licencesIn returns the names of the licences in a text.
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
