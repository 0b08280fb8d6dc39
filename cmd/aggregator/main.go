// Command aggregator is the aggregator as a process of its own: it reduces results. -help lists
// its environment.
package main

import (
	"github.com/bulkaction/bulkaction/reducer"
	"github.com/bulkaction/bulkaction/run"
)

func main() { run.Aggregator(reducer.NewRegistry()) }
