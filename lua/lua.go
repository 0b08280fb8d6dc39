// Package lua embeds the Lua scripts: one script is one transition of the state in Redis. README.md
// draws the states. The typed Go contract of a script is in the package that owns the layout.
package lua

import (
	"embed"
	"fmt"
	"path"
	"strings"
)

//go:embed */*.lua
var files embed.FS

// Source returns the text of scripts, put together in the order of their paths, e.g. "parts/base"
// and "jobs/admit". It panics when a path does not exist: that is a mistake in the calling package.
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
