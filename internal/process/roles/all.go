package roles

import (
	"context"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/reducer"
)

// Names lists the six roles in the order of the pipeline.
var Names = api.Roles

// Own is what a program adds to the roles that it runs, such as its processors. The zero value
// serves no job type.
type Own struct {
	Processors []processor.Processor
	BuiltIn    bool                   // the worker serves the built-in processors, too
	Middleware []processor.Middleware // around all processors, the first one outermost
	Reducers   *reducer.Registry      // nil: only the built-in ones
	Listening  func(addr string)      // see [Ingest]
}

// All returns the six roles by name.
func All(o Own) map[string]BasedRole {
	reducers := o.Reducers
	if reducers == nil {
		reducers = reducer.NewRegistry()
	}
	return map[string]BasedRole{
		"ingest":     Ingest(reducers, o.Listening),
		"fetcher":    Fetcher,
		"dispatcher": Dispatcher,
		"worker":     WorkerOf(o),
		"aggregator": Aggregator(reducers),
		"watcher":    Watcher(reducers),
	}
}

// Together runs roles, given by their names, in one process until ctx ends or one of them fails.
// Then it stops the others. It returns all errors, joined. A role that was stopped while it started
// and returns nothing but the error of ctx has no error. The roles share the Redis connection of b.
func Together(ctx context.Context, p *app.Process, b Base, named map[string]BasedRole) error {
	var all []func(context.Context) error
	for name, role := range named {
		all = append(all, func(ctx context.Context) error {
			err := role(ctx, p.As(name), b)
			if end := ctx.Err(); end != nil && err != nil && app.IsOnly(err, end) {
				return nil
			}
			return err
		})
	}
	return stage.RunAll(ctx, all...)
}
