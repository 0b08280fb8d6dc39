// Command watcher runs the role watcher as a process: it moves groups through their states and
// publishes their events. The flag -help lists its environment variables.
package main

import (
	"github.com/bulkaction/bulkaction/reducer"
	"github.com/bulkaction/bulkaction/run"
)

func main() { run.Watcher(reducer.NewRegistry()) }
