package k8s

import (
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"helm.sh/helm/v3/pkg/chartutil"
	core "k8s.io/api/core/v1"
	security "k8s.io/pod-security-admission/api"
	standards "k8s.io/pod-security-admission/policy"
	strictjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// TestDocumentedValues: what the documents tell people to install exists: values, also those in the
// text, variables, Secrets, Deployments and Services; and the pod for commands is restricted.
func TestDocumentedValues(t *testing.T) {
	t.Parallel()
	block := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$")
	doc := string(read(t, filepath.Join(root, "docs/deployment.md")))
	made := []string{"bulkaction-redis"} // the Secrets that the page makes
	for _, m := range regexp.MustCompile("(?:secret generic|the Secret) `?([a-z-]+)").FindAllStringSubmatch(doc, -1) {
		made = append(made, m[1])
	}
	objects := map[string]object{}
	for _, m := range block.FindAllStringSubmatch(doc, -1) {
		values, err := chartutil.ReadValues([]byte(m[1]))
		require.NoError(t, err)
		text, err := yaml.Marshal(values)
		require.NoError(t, err)
		r, _ := decode(t, text)
		maps.Copy(objects, r)
		for _, s := range regexp.MustCompile(`(?:[sS]ecret: |Secret: \{name: )([a-z-]+)`).FindAllStringSubmatch(m[1], -1) {
			require.Contains(t, made, s[1])
		}
	}
	for _, m := range regexp.MustCompile(`\b(deployment|service)/([a-z-]+)`).FindAllStringSubmatch(doc, -1) {
		require.NotNil(t, objects[strings.ToUpper(m[1][:1])+m[1][1:]+" "+m[2]], m[0])
	}

	var defaults map[string]any
	require.NoError(t, yaml.Unmarshal(read(t, filepath.Join(root, chartDir, "values.yaml")), &defaults))
	sections := slices.Collect(maps.Keys(defaults))
	for _, m := range regexp.MustCompile("`([a-z]+)\\.([a-zA-Z.]+)`").FindAllStringSubmatch(doc, -1) {
		if !slices.Contains(sections, m[1]) {
			continue
		}
		at, _ := defaults[m[1]].(map[string]any)
		if m[1] == "fetcher" {
			at, _ = defaults["defaults"].(map[string]any) // a role takes all of it
		}
		path := strings.Split(m[2], ".")
		for i, name := range path {
			require.Contains(t, at, name, m[0])
			if i < len(path)-1 {
				at, _ = at[name].(map[string]any)
			}
		}
	}
	variables := string(read(t, filepath.Join(root, "docs/configuration.md")))
	for _, name := range regexp.MustCompile(`\bBULKACTION_[A-Z_]+[A-Z]\b`).FindAllString(doc, -1) {
		if !slices.Contains([]string{"BULKACTION_API", "BULKACTION_API_KEY_FILE"}, name) { // of the command line
			require.True(t, strings.Contains(variables, "`"+name+"`"), name)
		}
	}

	pods := block.FindAllStringSubmatch(string(read(t, filepath.Join(root, "docs/howto/upgrading.md"))), -1)
	require.Len(t, pods, 1)
	data, err := yaml.YAMLToJSONStrict([]byte(pods[0][1]))
	require.NoError(t, err)
	var pod core.Pod
	unknown, err := strictjson.UnmarshalStrict(data, &pod)
	require.NoError(t, err)
	require.Empty(t, unknown)
	evaluator, err := standards.NewEvaluator(standards.DefaultChecks(), nil)
	require.NoError(t, err)
	restricted := security.LevelVersion{Level: security.LevelRestricted, Version: security.LatestVersion()}
	verdict := standards.AggregateCheckResults(evaluator.EvaluatePod(restricted, &pod.ObjectMeta, &pod.Spec))
	require.True(t, verdict.Allowed, verdict.ForbiddenDetail())
	for _, v := range pod.Spec.Containers[0].Env {
		require.True(t, strings.Contains(variables, "`"+v.Name+"`"), v.Name)
		if v.ValueFrom != nil {
			require.Contains(t, made, v.ValueFrom.SecretKeyRef.Name)
		}
	}
}
