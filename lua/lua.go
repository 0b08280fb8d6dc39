// Package lua embeds the Lua scripts, and the parts that they share. A script is one transition of
// the state in Redis, or reads it. README.md draws the states. The Go function that calls a script,
// with typed arguments and reply, is in the package that owns the data, such as internal/jobs/ledger.
package lua

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

//go:embed */*.lua
var files embed.FS

// changed is the name of an environment variable with a folder whose scripts replace those of the
// same path. Only the linker can set it: tests/chaos breaks rules of scripts on purpose, to prove
// that it would notice.
var changed string

// Source returns the text of parts and scripts, concatenated in the order of the arguments. A path
// has no ending, such as "parts/base" or "jobs/admit". Source panics when a path does not exist:
// that is a mistake in the calling package.
func Source(paths ...string) string {
	var text strings.Builder
	for _, p := range paths {
		b, err := read(p + ".lua")
		if err != nil {
			panic(fmt.Sprintf("lua: %v", err))
		}
		text.Write(b)
	}
	return text.String()
}

func read(path string) ([]byte, error) {
	if folder := os.Getenv(changed); changed != "" && folder != "" {
		if b, err := os.ReadFile(filepath.Join(folder, path)); !errors.Is(err, fs.ErrNotExist) {
			return b, err
		}
	}
	return files.ReadFile(path)
}
