// Command watcher is the watcher as a process of its own: it moves groups through their states and
// announces that. -help lists its environment.
package main

import (
	"github.com/bulkaction/bulkaction/reducer"
	"github.com/bulkaction/bulkaction/run"
)

func main() { run.Watcher(reducer.NewRegistry()) }
