// Command embedded is one Go program with everything in it: it runs all roles of bulkaction on a
// Redis, with a typed processor of its own, and submits a bulk action to itself.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

// Invoice is the payload of an INVOICE job.
type Invoice struct {
	Customer string `json:"customer"`
	Cents    int64  `json:"cents"`
}

// Validate is called by processor.Typed before charge; its error fails the job for good.
func (i Invoice) Validate() error {
	if i.Cents <= 0 {
		return errors.New("cents must be above 0")
	}
	return nil
}

// Receipt is the result of an INVOICE job.
type Receipt struct {
	Cents int64 `json:"cents"`
}

const invoiceType = "INVOICE"

var newInvoice = client.Typed[Invoice](invoiceType)

// charge runs one job. It may run twice for the same invoice: job.ID tells the bank that it is the
// same payment.
func charge(_ context.Context, job processor.Job, in Invoice) (Receipt, error) {
	slog.Info("charge", "customer", in.Customer, "cents", in.Cents, "idempotency_key", job.ID())
	return Receipt{in.Cents}, nil
}

// measured logs how long each attempt takes.
func measured(next processor.Handler) processor.Handler {
	return func(ctx context.Context, job processor.Job) (any, error) {
		began := time.Now()
		result, err := next(ctx, job)
		slog.Debug("attempt", "job", job.ID(), "took", time.Since(began), "retries_left", job.RetriesLeft)
		return result, err
	}
}

func main() {
	redisURL := flag.String("redis", "redis://127.0.0.1:6379/0", "Redis to use")
	api := flag.String("addr", "127.0.0.1:8080", "address of the API")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := serve(ctx, *redisURL, *api); err != nil {
		slog.Error("failed", "error", err)
		os.Exit(1) //nolint:gocritic // stop only restores the signals
	}
}

// serve runs all roles, and submits a bulk action to them as soon as the API listens.
func serve(ctx context.Context, redisURL, api string) error {
	listening := make(chan string, 1)
	roles := run.NewAll(run.Config{
		RedisURL: redisURL, Settings: map[string]string{"API_ADDR": api},
		Middleware: []processor.Middleware{measured},
		Listening:  func(addr string) { listening <- addr },
	}, processor.Typed(invoiceType, charge))

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- roles.Run(ctx) }()
	select {
	case err := <-ended:
		return err
	case addr := <-listening:
		err := submit(ctx, client.NewAPI("http://"+addr))
		cancel()
		return errors.Join(err, <-ended)
	}
}

// submit starts a bulk action of 100 invoices and prints its result.
func submit(ctx context.Context, a *client.API) error {
	jobs := make([]client.NewJob, 100)
	for i := range jobs {
		jobs[i] = newInvoice(Invoice{Customer: fmt.Sprintf("customer-%d", i), Cents: int64(i + 1)})
	}
	accepted, err := a.Submit(ctx, client.Submission{
		Tenant: "acme", Type: invoiceType, Jobs: jobs, Seal: true,
		Aggregate: []client.Aggregate{{As: "cents", Op: "sum", Field: "data.cents"}},
	})
	if err != nil {
		return err
	}
	group, err := a.Wait(ctx, accepted.ID)
	if err != nil {
		return err
	}
	fmt.Printf("%s: %d of %d invoices charged, %s cents\n",
		group.Status, group.Counts.Done, group.Counts.Accepted, group.Aggregate["cents"])
	return nil
}
