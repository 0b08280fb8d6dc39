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
	"github.com/bulkaction/bulkaction/internal/process/builtin"
	"github.com/bulkaction/bulkaction/internal/process/roles"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/reducer"
)

// Worker is the main function of a worker process with these processors, and none of the built-in
// ones. It exits the process.
func Worker(procs ...processor.Processor) {
	main("worker", roles.Own{Processors: procs}.Worker)
}

// Aggregator is the main function of an aggregator process with these reducers; it exits the
// process. Before groups may ask for a reducer, the processes of Ingest, Watcher and Aggregator
// must all have it.
func Aggregator(reducers *reducer.Registry) {
	main("aggregator", roles.Own{Reducers: reducers}.Aggregator)
}

// Ingest is the main function of an ingest process that accepts groups that ask for these reducers.
// It exits the process.
func Ingest(reducers *reducer.Registry) {
	main("ingest", roles.Ingest(reducers, nil))
}

// Watcher is the main function of a watcher process that can show the aggregates of these reducers.
// It exits the process.
func Watcher(reducers *reducer.Registry) {
	main("watcher", roles.Own{Reducers: reducers}.Watcher)
}

// Broker runs a broker process of the waiting room and exits.
func Broker() { main("broker", roles.Own{}.Broker) }

func main(name string, role roles.Role) { app.Main(name, new(builtin.Config), roles.Alone(role)) }
