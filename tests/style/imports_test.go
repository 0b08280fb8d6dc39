package style_test

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gopkg.in/yaml.v3"
)

// importRule is a rule of depguard in .golangci.yml.
type importRule struct {
	Mode  string         `yaml:"list-mode"`
	Files []string       `yaml:"files"`
	Deny  []deniedImport `yaml:"deny"`
}

type deniedImport struct {
	Pkg string `yaml:"pkg"`
}

// TestImportRules requires that the linter's configuration has a rule for the imports of every
// internal package, so that no new package is forgotten.
func TestImportRules(t *testing.T) {
	t.Parallel()
	root := moduleRoot(t)
	rules := readImportRules(t, root)
	require.Greater(t, len(rules), 30)
	var without []string
	for _, dir := range internalPackages(t, root) {
		if !slices.ContainsFunc(rules, func(r importRule) bool { return r.namesImportsOf(dir) }) {
			without = append(without, dir)
		}
	}
	require.Empty(t, without, "packages without a rule in .golangci.yml that names what they may import")
}

// namesImportsOf says whether the rule applies to the package in a folder, and lists what that
// package may import.
func (r importRule) namesImportsOf(dir string) bool {
	if r.Mode != "strict" && !slices.Contains(r.Deny, deniedImport{"github.com/bulkaction/bulkaction"}) {
		return false
	}
	holds := false
	for _, pattern := range r.Files {
		pattern, not := strings.CutPrefix(pattern, "!")
		if strings.HasPrefix(pattern, "$all") || strings.HasPrefix(pattern, "$test") {
			continue
		}
		if matches(strings.TrimPrefix(pattern, "${config-path}/"), path.Join(dir, "file.go")) {
			if not {
				return false
			}
			holds = true
		}
	}
	return holds
}

// matches says whether a pattern of the linter depguard matches a file: * matches anything but a
// slash, ** matches anything.
func matches(pattern, file string) bool {
	text := regexp.QuoteMeta(pattern)
	text = strings.ReplaceAll(text, `\*\*`, ".*")
	text = strings.ReplaceAll(text, `\*`, "[^/]*")
	return regexp.MustCompile("^" + text + "$").MatchString(file)
}

func readImportRules(t *testing.T, root string) []importRule {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, ".golangci.yml"))
	require.NoError(t, err)
	var config struct {
		Linters struct {
			Settings struct {
				Depguard struct {
					Rules map[string]importRule `yaml:"rules"`
				} `yaml:"depguard"`
			} `yaml:"settings"`
		} `yaml:"linters"`
	}
	require.NoError(t, yaml.Unmarshal(text, &config))
	var rules []importRule
	for _, r := range config.Linters.Settings.Depguard.Rules {
		rules = append(rules, r)
	}
	return rules
}

// internalPackages returns the folders below internal that have Go files other than tests.
func internalPackages(t *testing.T, root string) []string {
	t.Helper()
	var dirs []string
	for _, file := range trackedFiles(t, root, ".go") {
		dir := path.Dir(file)
		if strings.HasPrefix(dir, "internal/") && !strings.HasSuffix(file, "_test.go") &&
			!slices.Contains(strings.Split(dir, "/"), "testdata") && !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}
