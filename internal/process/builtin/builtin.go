// Package builtin creates the built-in processors from a worker's configuration. It is a package of
// its own so that the other roles do not link them.
package builtin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
	"github.com/bulkaction/bulkaction/internal/calls/lending"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/email"
	"github.com/bulkaction/bulkaction/processor/httpcall"
	"github.com/bulkaction/bulkaction/processor/noop"
	"github.com/bulkaction/bulkaction/processor/push"
)

// Config has the sections of the built-in processors, for [app.Config.Processors].
type Config struct {
	SMTP email.Config    `section:"Processor SEND_EMAIL" envPrefix:"SMTP_"`
	HTTP httpcall.Config `section:"Processor HTTP" envPrefix:"HTTP_PROCESSOR_"`
	Push push.Config     `section:"Processor PUSH_NOTIFICATION" envPrefix:"PUSH_"`
}

// Create creates the built-in processors of a worker, whose configuration has the sections of
// Config. It adds NOOP, for tests and benchmarks, only if WORKER_TYPES contains it, in upper or
// lower case, and PUSH_NOTIFICATION only if PUSH_ACCOUNTS_FILE is set. If ctx ends before Redis has
// the pools of accounts, Create returns nil. Otherwise the caller must call stop, which ends the
// watch of the files of accounts.
func Create(
	ctx context.Context, p *app.Process, guards *guard.Client,
) (list []processor.Runner, stop func(), err error) {
	set := &processors{
		process: p, config: p.Config.Processors.(*Config),
		lender: lending.Lender{
			Guards: guards, Wait: p.Config.Guard.Wait, MaxWait: p.Config.Guard.MaxWait, Log: p.Tel.Log,
		},
	}
	if err := set.create(ctx); err != nil || ctx.Err() != nil {
		return nil, nil, err
	}
	return set.list, set.watch(ctx), nil
}

// processors are the built-in processors of a process.
type processors struct {
	process *app.Process
	config  *Config
	lender  lending.Lender
	list    []processor.Runner
	files   []reloader // processors that have read a file of accounts
}

type closer interface {
	processor.Processor
	Close() error
}

type reloader interface {
	processor.Processor
	Reload() (changed bool, err error)
}

// create creates the built-in processors and adds them to the list. Those with accounts or with
// limits for hosts are gated; the others are not, so they cost as little as without guards.
func (s *processors) create(ctx context.Context) error {
	var mistakes []error
	for _, create := range []func() (closer, error){s.mail, s.http, s.push} {
		p, err := retried(ctx, s.process, create)
		switch {
		case ctx.Err() != nil:
			return err
		case err != nil:
			mistakes = append(mistakes, err)
			continue
		case p == nil:
			continue
		}
		s.process.OnStop("connections of "+p.Type(), func(context.Context) error { return p.Close() })
		s.list = append(s.list, p)
		if further, ok := p.(interface{ Types() []processor.Runner }); ok {
			s.list = append(s.list, further.Types()...)
		}
		if file, ok := p.(reloader); ok {
			s.files = append(s.files, file)
		}
	}
	if len(mistakes) > 0 {
		return fmt.Errorf("%w:\n%w", app.ErrConfig, errors.Join(mistakes...))
	}
	// With a type such as noop, too: then the worker can say that NOOP is meant.
	drill := new(noop.Processor)
	isNoop := func(typ string) bool { return strings.EqualFold(typ, drill.Type()) }
	if slices.ContainsFunc(s.process.Config.Worker.Types, isNoop) {
		s.list = append(s.list, drill)
	}
	return nil
}

// named returns p if err is nil, else only err with the name of the variable that is wrong.
func named(variable string, p closer, err error) (closer, error) {
	if err != nil {
		return nil, fmt.Errorf("BULKACTION_%s: %w", variable, err)
	}
	return p, nil
}

func (s *processors) mail() (closer, error) {
	c := s.config.SMTP
	if c.AccountsFile == "" {
		return email.New(c)
	}
	p, err := email.NewAccounts(c, email.WithChoice(s.lender.Choice(c.Limits)))
	return named("SMTP_ACCOUNTS_FILE", p, err)
}

func (s *processors) http() (closer, error) {
	c := s.config.HTTP
	if c.CredentialsFile == "" && !c.GuardsHosts() {
		return httpcall.New(c)
	}
	options := []httpcall.Option{httpcall.WithChoice(s.lender.Choice(c.Limits))}
	if c.GuardsHosts() {
		hosts := s.lender.PerKey("http-host", c.HostRate, c.Limiter, c.HostBreaker)
		options = append(options, httpcall.WithHosts(hosts))
	}
	p, err := httpcall.NewGuarded(c, options...)
	return named("HTTP_PROCESSOR_CREDENTIALS_FILE", p, err)
}

// push returns the processor PUSH_NOTIFICATION; nil without a file of accounts, because each push
// service needs an account.
func (s *processors) push() (closer, error) {
	c := s.config.Push
	if c.AccountsFile == "" {
		return nil, nil
	}
	p, err := push.New(c, push.WithChoice(s.lender.Choice(c.Limits)))
	return named("PUSH_ACCOUNTS_FILE", p, err)
}

// retried calls create, which may declare pools of accounts in Redis, again and again while Redis
// does not answer. If ctx ends meanwhile, it returns nil without an error.
func retried(ctx context.Context, p *app.Process, create func() (closer, error)) (closer, error) {
	backoff := redisx.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second}
	for {
		created, err := create()
		switch {
		case err == nil:
			return created, nil
		case !errors.Is(err, guard.ErrUnavailable):
			return nil, err
		}
		p.Tel.Log.Warn("redis does not take the accounts, trying again", "error", err)
		if redisx.Sleep(ctx, backoff.Next()) != nil {
			return nil, nil // the process was told to stop
		}
	}
}

// watch starts goroutines that read the files of accounts again when they change or the process
// gets SIGHUP, until ctx ends or stop is called. An embedded process does not handle SIGHUP.
func (s *processors) watch(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	onHangup := func(c chan os.Signal) {
		if !s.process.Embedded {
			signal.Notify(c, syscall.SIGHUP)
		}
	}
	for _, p := range s.files {
		hangup := make(chan os.Signal, 1)
		onHangup(hangup)
		watching.Go(func() {
			defer signal.Stop(hangup)
			accountsfile.Watch(ctx, s.process.Tel.Log, p.Type(), hangup, p.Reload)
		})
	}
	return func() {
		cancel()
		watching.Wait()
	}
}
