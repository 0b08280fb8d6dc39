package roles

import (
	"context"
	"fmt"
	"slices"

	"github.com/bulkaction/bulkaction/internal/app"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/email"
	"github.com/bulkaction/bulkaction/processor/httpcall"
	"github.com/bulkaction/bulkaction/processor/noop"
	"github.com/bulkaction/bulkaction/processor/push"
)

// BuiltIn runs the role worker with the built-in processors. NOOP is for tests and benchmarks: a
// worker serves it only if WORKER_TYPES contains it. PUSH_NOTIFICATION needs PUSH_ACCOUNTS_FILE.
func BuiltIn(ctx context.Context, p *app.Process, b Base) error {
	mail, err := email.New(p.Config.SMTP)
	if err != nil {
		return fmt.Errorf("processor SEND_EMAIL: %w", err)
	}
	p.OnStop("smtp connections", func(context.Context) error { return mail.Close() })
	call, err := httpcall.New(p.Config.HTTP)
	if err != nil {
		return fmt.Errorf("processor HTTP: %w", err)
	}
	p.OnStop("http connections", func(context.Context) error { return call.Close() })
	procs := []processor.Processor{mail, call}
	if p.Config.Push.AccountsFile != "" {
		sender, err := push.New(p.Config.Push)
		if err != nil {
			return fmt.Errorf("%w: processor PUSH_NOTIFICATION: %w", app.ErrConfig, err)
		}
		p.OnStop("push connections", func(context.Context) error { return sender.Close() })
		defer watchAccounts(ctx, p, sender)()
		procs = append(procs, sender)
	}
	if drill := new(noop.Processor); slices.Contains(p.Config.Worker.Types, drill.Type()) {
		procs = append(procs, drill)
	}
	return Worker(procs...)(ctx, p, b)
}

// watchAccounts has the push accounts read again when they change, until stop is called.
func watchAccounts(ctx context.Context, p *app.Process, sender *push.Processor) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		sender.Watch(ctx, p.Tel.Log)
	}()
	return func() {
		cancel()
		<-ended
	}
}
