// Package lua embeds the Lua scripts, and the parts that they share. A script is one transition of
// the state in Redis, or reads it. README.md draws the states. The Go function that calls a script,
// with typed arguments and reply, is in the package that owns the data, such as internal/jobs/ledger.
package lua

import (
	"embed"
	"fmt"
	"path"
	"strings"
)

//go:embed */*.lua
var files embed.FS

// Source returns the text of parts and scripts, concatenated in the order of the arguments. A path
// has no ending, such as "parts/base" or "jobs/admit". Source panics when a path does not exist:
// that is a mistake in the calling package.
func Source(paths ...string) string {
	var text strings.Builder
	for _, p := range paths {
		b, err := files.ReadFile(p + ".lua")
		if err != nil {
			panic(fmt.Sprintf("lua: %v", err))
		}
		text.WriteString(guarded(path.Base(p), string(b)))
	}
	return text.String()
}
