package main

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/bulktest"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/reducer"
	"github.com/bulkaction/bulkaction/run"
)

// TestCharge: an attempt with 500 cents is done, and one with 0 cents fails for good, as a worker
// would decide.
func TestCharge(t *testing.T) {
	attempt := func(in Invoice) bulktest.Outcome {
		job := processor.Job{Payload: bulktest.JSON(t, in)}
		return bulktest.Attempt(t, run.Config{}, processor.Typed(invoiceType, charge), job)
	}
	paid := attempt(Invoice{Customer: "ann", Cents: 500})
	require.Equal(t, processor.Done, paid.Kind)
	require.JSONEq(t, `{"cents": 500}`, string(paid.Result))

	refused := attempt(Invoice{Customer: "ann"})
	require.Equal(t, processor.Fail, refused.Kind)
	require.Equal(t, processor.CodeInvalidPayload, refused.Code)
}

// TestSum: the aggregate of 500 and 250 cents is 750, in whatever way bulktest.Reduce divides the
// two results.
func TestSum(t *testing.T) {
	sum := []client.Aggregate{{As: "cents", Op: "sum", Field: "data.cents"}}
	values := bulktest.Reduce(t, nil, sum,
		reducer.Result{Data: bulktest.JSON(t, Receipt{Cents: 500})},
		reducer.Result{Data: bulktest.JSON(t, Receipt{Cents: 250})},
	)
	require.Equal(t, "750", string(values["cents"]))
}

// TestBankIsAway: each of two jobs fails twice because the bank is away. After two waits of about a
// minute, which the clock skips, ann's job is charged, and bob's job of 0 cents fails for good.
func TestBankIsAway(t *testing.T) {
	away := func(next processor.Handler) processor.Handler {
		return func(ctx context.Context, job processor.Job) (any, error) {
			if job.Retries < 2 {
				return nil, processor.Retry("BANK_AWAY", nil)
			}
			return next(ctx, job)
		}
	}
	config := run.Config{
		Middleware: []processor.Middleware{measured, away},
		Settings:   map[string]string{"BACKPRESSURE_DEFAULT_BACKOFF": "60s"},
	}
	procs := []processor.Processor{processor.Typed(invoiceType, charge)}
	bulktest.Run(t, config, procs, func(t *testing.T, s *bulktest.System) {
		began := time.Now()
		group := s.Submit(client.Submission{
			Tenant: "acme", Type: invoiceType,
			Jobs:      []client.NewJob{newInvoice(Invoice{"ann", 500}), newInvoice(Invoice{"bob", 0})},
			Aggregate: []client.Aggregate{{As: "cents", Op: "sum", Field: "data.cents"}},
		})
		require.Equal(t, api.StatusCompleted, group.Status)
		require.Equal(t, "500", string(group.Aggregate["cents"]))
		require.Equal(t, 3, group.Results[0].Attempts)
		require.Equal(t, processor.CodeInvalidPayload, group.Failures[1].Code)
		require.Greater(t, time.Since(began), 100*time.Second) // by the clock of the test
	})
}

// TestTomorrow: an invoice of tomorrow is not charged within 23 hours, and is charged later.
func TestTomorrow(t *testing.T) {
	procs := []processor.Processor{processor.Typed(invoiceType, charge)}
	bulktest.Run(t, run.Config{}, procs, func(t *testing.T, s *bulktest.System) {
		tomorrow := time.Now().Add(24 * time.Hour)
		accepted, err := s.API.Submit(t.Context(), client.Submission{
			Type: invoiceType, Jobs: []client.NewJob{newInvoice(Invoice{"ann", 500})}, RunAt: &tomorrow, Seal: true,
		})
		require.NoError(t, err)
		s.Sleep(23 * time.Hour)
		group, err := s.API.Group(t.Context(), accepted.ID)
		require.NoError(t, err)
		require.Zero(t, group.Counts.Done)
		require.EqualValues(t, 1, s.Wait(accepted.ID).Counts.Done)
	})
}
