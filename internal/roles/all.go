package roles

import "github.com/bulkaction/bulkaction/reducer"

// Names lists the six roles in the order of the pipeline.
var Names = []string{"ingest", "fetcher", "dispatcher", "worker", "aggregator", "watcher"}

// All returns the six roles by name, with the built-in processors and reducers. For listening see
// [Ingest].
func All(listening func(addr string)) map[string]BasedRole {
	reducers := reducer.NewRegistry()
	return map[string]BasedRole{
		"ingest":     Ingest(reducers, listening),
		"fetcher":    Fetcher,
		"dispatcher": Dispatcher,
		"worker":     BuiltIn,
		"aggregator": Aggregator(reducers),
		"watcher":    Watcher(reducers),
	}
}
