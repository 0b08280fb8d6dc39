// Package run builds the binary of a role with your own processors or reducers. A worker that runs
// your jobs is a main function with one call:
//
//	func main() { run.Worker(myProcessor{}) }
//
// It has the same environment variables as the built-in worker, serves /healthz, /readyz and
// /metrics, and stops on SIGTERM after its running jobs have ended. [NewWorker] and [NewAll] run
// roles inside a program of yours.
package run

import (
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/roles"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/reducer"
)

// Worker is the main function of a worker process with these processors, and none of the built-in
// ones. It exits the process.
func Worker(procs ...processor.Processor) {
	app.Main("worker", roles.Alone(roles.Worker(procs...)))
}

// Aggregator is the main function of an aggregator process with these reducers; it exits the
// process. Before groups may ask for a reducer, the processes of Ingest, Watcher and Aggregator
// must all have it.
func Aggregator(reducers *reducer.Registry) {
	app.Main("aggregator", roles.Alone(roles.Aggregator(reducers)))
}

// Ingest is the main function of an ingest process that accepts groups that ask for these reducers.
// It exits the process.
func Ingest(reducers *reducer.Registry) {
	app.Main("ingest", roles.Alone(roles.Ingest(reducers, nil)))
}

// Watcher is the main function of a watcher process that can show the aggregates of these reducers.
// It exits the process.
func Watcher(reducers *reducer.Registry) {
	app.Main("watcher", roles.Alone(roles.Watcher(reducers)))
}

// Broker runs a broker process of the waiting room and exits.
func Broker() { app.Main("broker", roles.Alone(roles.Broker(nil))) }
