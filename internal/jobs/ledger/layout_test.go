package ledger_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// tables returns the fields that the file layout.go lists, by the name of the hash, without the
// keys' base. Words in capitals stand for an id or any text.
func tables(t *testing.T) map[string][]string {
	t.Helper()
	source, err := os.ReadFile("layout/layout.go")
	require.NoError(t, err)
	all, hash := map[string][]string{}, ""
	of := regexp.MustCompile(`^// \w+ is the hash (\w+(?::\w+)*)`)
	row := regexp.MustCompile(`^//\t([a-z].*?)(?:  |$)`)
	for line := range strings.Lines(string(source)) {
		if found := of.FindStringSubmatch(line); found != nil {
			hash = found[1]
		} else if found := row.FindStringSubmatch(line); found != nil && found[1] != "field" && found[1] != "key" {
			all[hash] = append(all[hash], strings.Split(found[1], ", ")...)
		} else if !strings.HasPrefix(line, "//") {
			hash = "none"
		}
	}
	require.ElementsMatch(t, []string{"payloads:GROUP", "failures:GROUP", "errors:GROUP", "codes:GROUP", "keys:GROUP"}, all["none"], "hashes with ordinals and codes for fields")
	for _, hash := range all["none"] {
		all[hash] = []string{"ANY"}
	}
	delete(all, "none")
	all["rebalance"] = all["watch"]
	require.Len(t, all, 15)
	return all
}

// like says whether a name matches a pattern, in which each word in capitals stands for any text
// without colons.
func like(pattern, name string) bool {
	text := regexp.MustCompile(`[A-Z]+`).ReplaceAllString(regexp.QuoteMeta(pattern), `[^:]+`)
	return regexp.MustCompile("^" + text + "$").MatchString(name)
}

// TestLayoutListsEveryField: each hash field that a scene leaves is in a table of package layout,
// and the text of some script names each field of a table, except those in here.
func TestLayoutListsEveryField(t *testing.T) {
	t.Parallel()
	all := tables(t)
	url, prefix := redistest.Shared(t)
	c := client(t, url)
	for i, s := range slices.Concat(scenes, readOnlyScenes) {
		w := newWorld(t, c, prefix+fmtInt(int64(i))+":")
		require.NoError(t, s.prepare(w)(), s.name)
		for _, key := range w.keys() {
			if c.Type(t.Context(), key).Val() != "hash" {
				continue
			}
			name := strings.TrimPrefix(key, w.p.Base())
			fields := []string(nil)
			for pattern := range all {
				if like(pattern, name) {
					fields = all[pattern]
				}
			}
			require.NotNil(t, fields, "layout.go has no table of %s", name)
			for _, field := range c.HKeys(t.Context(), key).Val() {
				require.True(t, slices.ContainsFunc(fields, func(pattern string) bool { return like(pattern, field) }), "%s has the field %s", name, field)
			}
		}
	}

	scripts := ""
	require.NoError(t, filepath.WalkDir("../../../lua", func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".lua" {
			return err
		}
		b, err := os.ReadFile(path)
		scripts += string(b)
		return err
	}))
	here := []string{
		"name", "lane", "base_priority", "max_retries", "job_timeout", "run_at", "failure_threshold", "aggregate", "reduce_failures", // create takes them as they come
		"throttles", "waited", // in lists of names
		"renewals", // the watcher's, through CountRenewal
	}
	for hash, fields := range all {
		for _, field := range fields {
			stem := regexp.MustCompile(`[A-Z]+.*`).ReplaceAllString(field, "")
			require.True(t, stem == "" || slices.Contains(here, stem) || strings.Contains(scripts, "'"+stem), "no script names the field %s of %s", field, hash)
		}
	}
}
