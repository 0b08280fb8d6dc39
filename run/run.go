// Package run turns processors and reducers of your own into the binaries of a role. A worker that
// runs your jobs is a main function of one call:
//
//	func main() { run.Worker(myProcessor{}) }
//
// It is configured by the environment as the built-in worker is, serves /healthz, /readyz and
// /metrics, and stops on SIGTERM once its running jobs have ended.
package run

import (
	"github.com/bulkaction/bulkaction/internal/app"
	"github.com/bulkaction/bulkaction/internal/roles"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/reducer"
)

// Worker runs a worker process with these processors and exits.
func Worker(procs ...processor.Processor) {
	app.Main("worker", roles.Alone(roles.Worker(procs...)))
}

// Aggregator runs an aggregator process with these reducers and exits. Groups may ask for a reducer
// once the processes of Ingest, Watcher and Aggregator know it.
func Aggregator(reducers *reducer.Registry) {
	app.Main("aggregator", roles.Alone(roles.Aggregator(reducers)))
}

// Ingest runs an ingest process that accepts groups which ask for these reducers, and exits.
func Ingest(reducers *reducer.Registry) {
	app.Main("ingest", roles.Alone(roles.Ingest(reducers, nil)))
}

// Watcher runs a watcher process that shows aggregates of these reducers, and exits.
func Watcher(reducers *reducer.Registry) {
	app.Main("watcher", roles.Alone(roles.Watcher(reducers)))
}
