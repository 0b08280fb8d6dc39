package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gopkg.in/yaml.v3"
)

// names returns the metrics that the tables of the documents list, with their prefix.
func names(t *testing.T) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	for file, prefix := range map[string]string{"metrics.md": "", "guards.md": "", "operations.md": "room_"} {
		text, err := os.ReadFile("../../docs/" + file)
		require.NoError(t, err)
		for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]*) \\|").FindAllStringSubmatch(string(text), -1) {
			for _, name := range regexp.MustCompile("`([a-z_]+)[^`]*`").FindAllStringSubmatch(row[1], -1) {
				all["bulk_action_"+prefix+name[1]] = true
			}
		}
	}
	all["http_server_request_duration_seconds"] = true
	return all
}

// checkQuery requires that each metric of a query is one of ours, or of those that every process has.
func checkQuery(t *testing.T, known map[string]bool, query string) {
	t.Helper()
	found := false
	for _, name := range regexp.MustCompile(`\b(bulk_action_|http_|process_|go_|up\b)\w*(:\w+)*`).FindAllString(query, -1) {
		found = true
		short := name
		for _, suffix := range []string{"_bucket", "_count", "_sum"} {
			short = strings.TrimSuffix(short, suffix)
		}
		common := name == "up" || strings.HasPrefix(name, "process_") || strings.HasPrefix(name, "go_")
		require.True(t, common || known[short], "%s in %s is in no table of the documents", name, query)
	}
	require.True(t, found || strings.Contains(query, "bulk_action:"), query)
}

func TestDashboards(t *testing.T) {
	files, err := filepath.Glob("*.json")
	require.NoError(t, err)
	require.Len(t, files, len(dashboards))
	known, uids := names(t), map[string]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		require.NotRegexp(t, `localhost|127\.0\.0\.1`, string(text))
		var d struct {
			UID    string
			Panels []struct {
				ID                 int
				Title, Description string
				Datasource         struct{ UID string }
				FieldConfig        struct{ Defaults struct{ Unit string } }
				Targets            []struct{ Expr string }
			}
		}
		require.NoError(t, json.Unmarshal(text, &d), file)
		require.False(t, uids[d.UID], "%s: its uid is used twice", file)
		uids[d.UID] = true
		ids := map[int]bool{}
		for _, p := range d.Panels {
			require.False(t, ids[p.ID], "%s: %s: its id is used twice", file, p.Title)
			ids[p.ID] = true
			require.NotEmpty(t, p.FieldConfig.Defaults.Unit, "%s: %s", file, p.Title)
			require.Contains(t, p.Title, "(", "%s: the title names no unit", file)
			require.Equal(t, "${datasource}", p.Datasource.UID)
			requireAnchor(t, regexp.MustCompile(`\((http.*)\)`).FindStringSubmatch(p.Description)[1])
			for _, q := range p.Targets {
				checkQuery(t, known, q.Expr)
			}
		}
	}
	for _, d := range dashboards {
		text, err := os.ReadFile(strings.TrimPrefix(d.uid, "bulkaction-") + ".json")
		require.NoError(t, err)
		require.Equal(t, string(d.encode()), string(text), "run go generate ./deployments/grafana")
	}
}

// requireAnchor requires that a link to a page of docs names a page and a heading that exist.
func requireAnchor(t *testing.T, link string) {
	t.Helper()
	page, anchor, _ := strings.Cut(strings.TrimPrefix(link, docs), "#")
	text, err := os.ReadFile("../../docs/" + page)
	require.NoError(t, err, link)
	if anchor == "" {
		return
	}
	var all []string
	for _, h := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(text), -1) {
		all = append(all, strings.ReplaceAll(regexp.MustCompile(`[^\w -]`).ReplaceAllString(strings.ToLower(h[1]), ""), " ", "-"))
	}
	require.True(t, slices.Contains(all, anchor), "%s: no such heading", link)
}

// TestRules: each alert says what it means and where to read on, is tested, and is in the document.
func TestRules(t *testing.T) {
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert, Record, Expr string
				Labels, Annotations map[string]string
			}
		}
	}
	read := func(file string, v any) string {
		text, err := os.ReadFile("../" + file)
		require.NoError(t, err)
		if v != nil {
			require.NoError(t, yaml.Unmarshal(text, v))
		}
		return string(text)
	}
	read("prometheus/rules.yaml", &rules)
	tests, operations, known := read("prometheus/rules_test.yaml", nil), read("../docs/operations.md", nil), names(t)
	alerts := 0
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			checkQuery(t, known, r.Expr)
			if r.Alert == "" {
				continue
			}
			alerts++
			require.Contains(t, []string{"critical", "warning", "info"}, r.Labels["severity"], r.Alert)
			require.NotEmpty(t, r.Annotations["summary"], r.Alert)
			requireAnchor(t, r.Annotations["runbook_url"])
			require.Contains(t, tests, `alertname="`+r.Alert+`"`)
			require.Contains(t, operations, "`"+r.Alert+"`")
		}
	}
	require.Greater(t, alerts, 30)
}
