// Command luacheck checks the Lua scripts with the tool luacheck, each as Redis gets it: the parts
// that the Go code puts in front of it, and the script, as one chunk. Run it in the module's root.
package main

import (
	"fmt"
	"io/fs"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

func main() {
	log.SetFlags(0)
	uses := map[string]int{}  // by file: the scripts that contain it
	found := map[string]int{} // by finding: the scripts that have it
	for _, files := range scripts() {
		check(files, uses, found)
	}
	for _, file := range must(filepath.Glob("lua/*/*.lua")) {
		if uses[file] == 0 {
			log.Fatalf("%s: no script uses it", file)
		}
	}
	// What one script does not use of a part, another may: a finding in a part counts if all scripts
	// with the part have it. A global that is undefined (W1) in one of them is an error there.
	var faults []string
	for at, n := range found {
		file, _, _ := strings.Cut(at, ":")
		if n == uses[file] || strings.Contains(at, "(W1") {
			faults = append(faults, at)
		}
	}
	slices.Sort(faults)
	if len(faults) > 0 {
		log.Fatal(strings.Join(faults, "\n"))
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}

var finding = regexp.MustCompile(`(?m)^stdin:(\d+):(.*)$`)

// check runs luacheck on the script that consists of the files, and counts them and the findings.
func check(files []string, uses, found map[string]int) {
	var chunk strings.Builder
	var lines []string // file:line of each line of the chunk
	for _, file := range files {
		file = "lua/" + file + ".lua"
		uses[file]++
		text := must(os.ReadFile(file))
		chunk.Write(text)
		for i := range strings.Count(string(text), "\n") {
			lines = append(lines, fmt.Sprintf("%s:%d", file, i+1))
		}
	}
	tool := exec.Command("luacheck", "-", "--codes", "--formatter", "plain")
	tool.Stdin = strings.NewReader(chunk.String())
	out, err := tool.Output() // fails if there are findings
	findings := finding.FindAllStringSubmatch(string(out), -1)
	if err != nil && findings == nil {
		log.Fatalf("luacheck %s: %v: %s", files, err, out)
	}
	for _, f := range findings {
		found[lines[must(strconv.Atoi(f[1]))-1]+":"+f[2]]++
	}
}

var (
	ofLedger = regexp.MustCompile(`\bscript\(((?:\s*"[^"]+",?)+)\s*\)`)
	ofOthers = regexp.MustCompile(`\blua\.Source\(((?:\s*"[^"]+",?)+)\s*\)`)
	literal  = regexp.MustCompile(`"([^"]+)"`)
)

// scripts returns the files of each script, in their order: the arguments of lua.Source, and in
// package ledger those of script.
func scripts() (all [][]string) {
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text := string(must(os.ReadFile(path)))
		for _, call := range ofOthers.FindAllStringSubmatch(text, -1) {
			var files []string
			for _, file := range literal.FindAllStringSubmatch(call[1], -1) {
				files = append(files, file[1])
			}
			all = append(all, files)
		}
		if filepath.Dir(path) == "internal/room/waitingroom" {
			for _, call := range ofLedger.FindAllStringSubmatch(text, -1) {
				name := literal.FindStringSubmatch(call[1])[1]
				all = append(all, []string{"parts/base", "parts/limiters", "parts/signals", "parts/room", "room/" + name})
			}
		}
		if filepath.Dir(path) != "internal/jobs/ledger" {
			return nil
		}
		for _, call := range ofLedger.FindAllStringSubmatch(text, -1) {
			files := []string{"parts/base"}
			names := literal.FindAllStringSubmatch(call[1], -1)
			for _, part := range names[1:] {
				files = append(files, "parts/"+part[1])
			}
			all = append(all, append(files, names[0][1]))
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	return all
}
