// Command ingest runs the role ingest as a process: it accepts groups and jobs. The flag -help
// lists its environment variables.
package main

import (
	"github.com/bulkaction/bulkaction/reducer"
	"github.com/bulkaction/bulkaction/run"
)

func main() { run.Ingest(reducer.NewRegistry()) }
