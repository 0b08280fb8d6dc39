package roles

import (
	"context"
	"net"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// Hooks are functions that roles call, so that an experiment can log what they do, and package
// bulktest can open the API's listener itself. A nil function is not called. Times are in µs by
// Redis's clock.
type Hooks struct {
	// Admitted is called with the permits that the fetcher spent, Promoted with those of the
	// dispatcher.
	Admitted func(at int64, partition int, typ string, permits []ledger.Permit)
	Promoted func(at int64, partition int, permits []ledger.Permit)
	// Started is called for each job that a worker has started.
	Started func(at int64, partition int, typ, tenant, group string, ordinal int64, attempt int)
	// Listen opens the listener of the API; nil: it listens on the network.
	Listen func(ctx context.Context, addr string) (net.Listener, error)
}

type hooksKey struct{}

// WithHooks returns ctx with the hooks h, for the context of a role: the role calls them.
func WithHooks(ctx context.Context, h Hooks) context.Context {
	return context.WithValue(ctx, hooksKey{}, h)
}

// HooksOf returns the hooks of ctx; without any, those that are all nil.
func HooksOf(ctx context.Context) Hooks {
	h, _ := ctx.Value(hooksKey{}).(Hooks)
	return h
}
