package release

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/oasdiff/oasdiff/checker"
	"github.com/oasdiff/oasdiff/diff"
	"github.com/oasdiff/oasdiff/load"
	"github.com/stretchr/testify/require"
)

const document = "internal/web/httpapi/openapi.yaml"

// accepted has the breaking changes since the last release that are made on purpose, in the words
// of the test. CHANGELOG.md names each of them. Empty it after a release.
var accepted = []string{}

// TestAPIIsCompatible compares the API with that of the last release: a client of that release must
// work with it.
func TestAPIIsCompatible(t *testing.T) {
	tag := lastRelease(t)
	if tag == "" {
		t.Log("nothing has been released before: there is no API to be compatible with")
		return
	}
	broken := breaking(t, []byte(git(t, "show", tag+":"+document)), current(t))
	require.ElementsMatch(t, accepted, broken, "the API breaks clients of %s; if that is on purpose, say so in CHANGELOG.md and in `accepted` of this file", tag)
}

// lastRelease returns the tag of the newest release, or "" before the first one. Each version in
// CHANGELOG.md has a tag, except that the newest one is perhaps about to be released: from the second
// version on, a clone without tags fails the test instead of comparing nothing.
func lastRelease(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "CHANGELOG.md"))
	require.NoError(t, err)
	versions := regexp.MustCompile(`(?m)^## (\d+\.\d+\.\d+)`).FindAllStringSubmatch(string(text), -1)
	require.NotEmpty(t, versions, "CHANGELOG.md has no version")
	tags := strings.Fields(git(t, "tag", "--list", "v*"))
	for i, v := range versions[:min(2, len(versions))] {
		for _, tag := range tags {
			if tag == "v"+v[1] {
				return tag
			}
		}
		require.Zero(t, i, "this clone lacks the tag of version %s: run `git fetch --tags --unshallow`", v[1])
	}
	require.Len(t, versions, 1)
	return ""
}

// TestAPIBreaksAreFound changes the document in ways that break clients, and in some that
// don't.
func TestAPIBreaksAreFound(t *testing.T) {
	group := func(s *openapi3.T) *openapi3.PathItem { return s.Paths.Find("/v1/groups/{id}") }
	for name, tc := range map[string]struct {
		change func(t *testing.T, s *openapi3.T)
		want   string // a part of the only finding, or ""
	}{
		"nothing": {func(*testing.T, *openapi3.T) {}, ""},
		"a new optional field in a response": {func(_ *testing.T, s *openapi3.T) {
			s.Components.Schemas["Group"].Value.Properties["novel"] = openapi3.NewStringSchema().NewRef()
		}, ""},
		"a removed route":  {func(_ *testing.T, s *openapi3.T) { s.Paths.Delete("/v1/groups/{id}") }, "/v1/groups/{id}"},
		"a removed method": {func(_ *testing.T, s *openapi3.T) { group(s).Get = nil }, "/v1/groups/{id}"},
		"a new required field of a request": {func(t *testing.T, s *openapi3.T) {
			body := s.Paths.Find("/v1/tenants/{id}").Put.RequestBody.Value.Content["application/json"].Schema.Value
			body.Properties["novel"] = openapi3.NewStringSchema().NewRef()
			body.Required = append(body.Required, "novel")
		}, "novel"},
		"a removed field of a response": {func(t *testing.T, s *openapi3.T) {
			fields := s.Components.Schemas["Group"].Value.Properties
			require.Contains(t, fields, "status")
			delete(fields, "status")
		}, "status"},
	} {
		t.Run(name, func(t *testing.T) {
			changed, err := openapi3.NewLoader().LoadFromData(current(t))
			require.NoError(t, err)
			tc.change(t, changed)
			text, err := changed.MarshalJSON()
			require.NoError(t, err)
			found := breaking(t, current(t), text)
			if tc.want == "" {
				require.Empty(t, found)
				return
			}
			require.NotEmpty(t, found)
			require.Contains(t, strings.Join(found, "\n"), tc.want)
		})
	}
}

// breaking returns the changes from one OpenAPI document to another that may break a client.
func breaking(t *testing.T, before, after []byte) []string {
	t.Helper()
	info := func(text []byte) *load.SpecInfo {
		s, err := openapi3.NewLoader().LoadFromData(text)
		require.NoError(t, err)
		return &load.SpecInfo{Url: document, Spec: s}
	}
	changes, sources, err := diff.GetWithOperationsSourcesMap(diff.NewConfig(), info(before), info(after))
	require.NoError(t, err)
	found := []string{}
	for _, c := range checker.CheckBackwardCompatibility(checker.NewConfig(checker.GetAllChecks()), changes, sources) {
		if c.IsBreaking() {
			found = append(found, fmt.Sprintf("%s %s: %s", c.GetOperation(), c.GetPath(), c.GetUncolorizedText(checker.NewDefaultLocalizer())))
		}
	}
	return found
}

func current(t *testing.T) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, document))
	require.NoError(t, err)
	return text
}

// root is the folder of the repository.
const root = "../.."

func git(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir, cmd.Stderr = root, os.Stderr
	out, err := cmd.Output()
	require.NoError(t, err, "git %s", strings.Join(args, " "))
	return string(out)
}
