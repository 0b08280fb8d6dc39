// Command custom-reducer runs one of the three roles that must have a custom reducer. The reducer
// "longest" returns the longest string among the results' data. Start the command three times, with
// ingest, watcher and aggregator as its first argument.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/bulkaction/bulkaction/reducer"
	"github.com/bulkaction/bulkaction/run"
)

func main() {
	reducers := reducer.NewRegistry()
	longest := reducer.MapReduce(
		func(r reducer.Result) (string, error) {
			var s string
			return s, json.Unmarshal(r.Data, &s)
		},
		func(a, b string) string {
			// Of equal lengths the smaller string wins: the order of results must not matter.
			if len(b) > len(a) || len(b) == len(a) && b < a {
				return b
			}
			return a
		},
	)
	if err := reducers.Register("longest", longest); err != nil {
		panic(err)
	}
	roles := map[string]func(*reducer.Registry){
		"ingest":     run.Ingest,
		"watcher":    run.Watcher,
		"aggregator": run.Aggregator,
	}
	if len(os.Args) < 2 || roles[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: custom-reducer ingest|watcher|aggregator")
		os.Exit(2)
	}
	role := roles[os.Args[1]]
	os.Args = os.Args[1:]
	role(reducers)
}
