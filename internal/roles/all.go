package roles

import "github.com/bulkaction/bulkaction/reducer"

// Names lists the six roles in the order of the pipeline.
var Names = []string{"ingest", "fetcher", "dispatcher", "worker", "aggregator", "watcher"}

// ByName returns a role with the built-in processors and reducers, as a process of its own. It
// returns nil if there is no role of this name.
func ByName(name string) Role {
	reducers := reducer.NewRegistry()
	switch name {
	case "ingest":
		return Alone(Ingest(reducers, nil))
	case "fetcher":
		return Alone(Fetcher)
	case "dispatcher":
		return Alone(Dispatcher)
	case "worker":
		return Alone(BuiltIn)
	case "aggregator":
		return Alone(Aggregator(reducers))
	case "watcher":
		return Alone(Watcher(reducers))
	}
	return nil
}
