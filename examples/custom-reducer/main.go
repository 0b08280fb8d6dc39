// Command custom-reducer runs the roles that must know a reducer of one's own: "longest", the
// longest string at a result's data. Start it three times: with ingest, watcher and aggregator as
// its first argument.
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
			if len(b) > len(a) || len(b) == len(a) && b < a { // the order of results must not matter
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
