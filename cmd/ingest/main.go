// Command ingest is the ingest as a process of its own: it takes groups and jobs in. -help lists
// its environment.
package main

import (
	"github.com/bulkaction/bulkaction/reducer"
	"github.com/bulkaction/bulkaction/run"
)

func main() { run.Ingest(reducer.NewRegistry()) }
