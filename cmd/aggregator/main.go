// Command aggregator runs the role aggregator as a process: it reduces results. The flag -help
// lists its environment variables.
package main

import (
	"github.com/bulkaction/bulkaction/reducer"
	"github.com/bulkaction/bulkaction/run"
)

func main() { run.Aggregator(reducer.NewRegistry()) }
