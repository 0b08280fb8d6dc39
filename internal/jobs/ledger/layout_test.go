package ledger_test

import (
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// tables returns the fields that the file layout.go lists, by the name of the hash, without the
// keys' base. Words in capitals stand for an id or any text.
func tables(t *testing.T) map[string][]string {
	t.Helper()
	source, err := os.ReadFile("layout.go")
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
	require.ElementsMatch(t, []string{"payloads:GROUP", "failures:GROUP", "errors:GROUP", "codes:GROUP", "keys:GROUP", "endpoints", "callbacks:bytes"}, all["none"], "hashes with ordinals, codes and names for fields")
	for _, hash := range all["none"] {
		all[hash] = []string{"ANY"}
	}
	delete(all, "none")
	all["rebalance"], all["rate:TYPE"] = all["watch"], all["rate"]
	require.Len(t, all, 20)
	return all
}

// like says whether a name matches a pattern, in which each word in capitals stands for any text
// without colons.
func like(pattern, name string) bool {
	text := regexp.MustCompile(`[A-Z]+`).ReplaceAllString(regexp.QuoteMeta(pattern), `[^:]+`)
	return regexp.MustCompile("^" + text + "$").MatchString(name)
}

// TestLayoutListsEveryField: each hash field that a scene leaves is in a table of layout.go,
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
		"name", "lane", "base_priority", "max_retries", "job_timeout", "run_at", "failure_threshold", "aggregate", "reduce_failures", "callback_url", "submitted_by", // create takes them as they come
		"throttles", "waited", // in lists of names
		"do", "filter", "dry_run", "by", "total", // enlist likewise
		"renewals", // the watcher's, through CountRenewal
	}
	for hash, fields := range all {
		for _, field := range fields {
			stem := regexp.MustCompile(`[A-Z]+.*`).ReplaceAllString(field, "")
			require.True(t, stem == "" || slices.Contains(here, stem) || strings.Contains(scripts, "'"+stem), "no script names the field %s of %s", field, hash)
		}
	}
}

// TestKeysAgreeWithKeyspace: the keys that the scripts of jobs build by concatenation are the keys that package
// keyspace names for jobs, no more and, but for those in outside, no less.
func TestKeysAgreeWithKeyspace(t *testing.T) {
	t.Parallel()
	space, err := keyspace.New("", 1)
	require.NoError(t, err)
	named := patternsOf(space.Partition(0))
	outside := map[string]string{
		"owner:*":     "it lies in another partition, the one of the group's id",
		"rebalance":   "lead is told whether it is this one or watch",
		"waited":      "it is written for WAIT alone",
		"top":         "the watcher replaces it as a whole",
		"top-history": "the watcher appends to it",
		"audit":       "the watcher replaces it as a whole",
	}
	ofOthers := []string{"activity", "auth", "guard", "room", "guard.lua", "quick.lua", "quick_permit.lua", "room.lua"}
	stems := map[string]string{"over:*": "admit puts the lane behind it"}

	files, err := filepath.Glob("../../../lua/*/*.lua")
	require.NoError(t, err)
	comment := regexp.MustCompile(`(?m)(^| )--.*$`)
	used := map[string]bool{}
	for _, file := range files {
		if slices.Contains(ofOthers, path.Base(path.Dir(file))) || slices.Contains(ofOthers, path.Base(file)) {
			continue
		}
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, key := range keysIn(comment.ReplaceAllString(string(source), "")) {
			if stems[key] != "" {
				key += ":*"
			}
			i := slices.IndexFunc(named, func(pattern string) bool { return matches(pattern, key) })
			require.GreaterOrEqual(t, i, 0, "%s builds %q, which keyspace does not know", file, key)
			used[named[i]] = true
		}
	}
	for pattern := range outside {
		used[pattern] = true
	}
	require.ElementsMatch(t, named, slices.Collect(maps.Keys(used)))
}

// patternsOf returns the patterns of all keys that keyspace.Partition names, except those of the
// waiting room, with * for each id. It calls the methods by reflection.
func patternsOf(p keyspace.Partition) []string {
	var all []string
	v, room := reflect.ValueOf(p), reflect.TypeFor[keyspace.RoomKeys]() // of package waitingroom
	for i := range v.NumMethod() {
		method := v.Method(i).Type()
		if method.NumOut() != 1 || method.Out(0).Kind() != reflect.String || v.Type().Method(i).Name == "Base" {
			continue
		}
		if _, is := room.MethodByName(v.Type().Method(i).Name); is {
			continue
		}
		args := make([]reflect.Value, method.NumIn())
		for j := range args {
			args[j] = reflect.ValueOf("*")
		}
		all = append(all, strings.TrimPrefix(v.Method(i).Call(args)[0].String(), p.Base()))
	}
	return all
}

// keysIn returns the keys that a script's source builds by concatenations that begin with B, the
// base: a literal stands for itself, anything else for *.
func keysIn(code string) []string {
	part := regexp.MustCompile(`^ \.\. (?:'([^']*)'|[a-z_]+(?:\.[a-z]+|\[\w+\]|\([^()]*\))*)`)
	var keys []string
	for _, at := range regexp.MustCompile(`\bB \.\. '`).FindAllStringIndex(code, -1) {
		key := ""
		for rest := code[at[0]+1:]; ; {
			found := part.FindStringSubmatch(rest)
			if found == nil {
				break
			}
			if strings.Contains(found[0], "'") {
				key += found[1]
			} else {
				key += "*"
			}
			rest = rest[len(found[0]):]
		}
		keys = append(keys, key)
	}
	return keys
}

// matches says whether a key matches a pattern, in which * stands for one id.
func matches(pattern, key string) bool {
	want, got := strings.Split(pattern, ":"), strings.Split(key, ":")
	return len(want) == len(got) && slices.EqualFunc(want, got, func(w, g string) bool { return w == "*" || w == g })
}
