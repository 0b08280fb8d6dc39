package style_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"
)

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
