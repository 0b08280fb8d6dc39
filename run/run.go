// Package run builds the binary of a role with your own processors or reducers. A worker that runs
// your jobs is a main function with one call:
//
//	func main() { run.Worker(myProcessor{}) }
//
// It has the same environment variables as the built-in worker, serves /healthz, /readyz and
// /metrics, and stops on SIGTERM after its running jobs have ended.
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

// Aggregator runs an aggregator process with these reducers and exits. Before groups may ask for a
// reducer, the processes of Ingest, Watcher and Aggregator must all have it.
func Aggregator(reducers *reducer.Registry) {
	app.Main("aggregator", roles.Alone(roles.Aggregator(reducers)))
}

// Ingest runs an ingest process that accepts groups that ask for these reducers, and exits.
func Ingest(reducers *reducer.Registry) {
	app.Main("ingest", roles.Alone(roles.Ingest(reducers, nil)))
}

// Watcher runs a watcher process that can show the aggregates of these reducers, and exits.
func Watcher(reducers *reducer.Registry) {
	app.Main("watcher", roles.Alone(roles.Watcher(reducers)))
}

// Broker runs a broker process of the waiting room and exits.
func Broker() { app.Main("broker", roles.Alone(roles.Broker(nil))) }
