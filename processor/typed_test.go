package processor_test

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
)

type invoice struct {
	Customer string `json:"customer"`
	Cents    int32  `json:"cents"`
	Lines    []struct {
		Price float64 `json:"price"`
		Paid  bool    `json:"paid"`
	} `json:"lines"`
	Due time.Time `json:"due"`
}

func (i *invoice) Validate() error {
	if i.Customer == "" {
		return errors.New("customer is missing")
	}
	return nil
}

func TestTyped(t *testing.T) {
	type receipt struct {
		Paid int32 `json:"paid"`
	}
	p := processor.Typed("INVOICE", func(_ context.Context, job processor.Job, in invoice) (receipt, error) {
		if job.Attempt == 1 {
			return receipt{}, processor.Retry("BANK_CLOSED", nil)
		}
		return receipt{in.Cents}, nil
	})
	require.Equal(t, "INVOICE", p.Type())
	process := func(attempt int, payload string) (any, processor.Verdict) {
		result, err := p.Process(t.Context(), processor.Job{Attempt: attempt, Payload: json.RawMessage(payload)})
		return result, processor.Classify(err)
	}
	result, _ := process(2, `{"customer":"ann","cents":5,"newer":1}`)
	require.Equal(t, receipt{5}, result)
	result, v := process(1, `{"customer":"ann"}`)
	require.Nil(t, result)
	require.Equal(t, "BANK_CLOSED", v.Code)

	for payload, message := range map[string]string{
		`{"customer":7}`:                 "payload.customer: must be a string, not a number",
		`{"cents":"secret"}`:             "payload.cents: must be a whole number in the range of int32, not a string",
		`{"cents":1.5}`:                  "payload.cents: must be a whole number in the range of int32, not a number",
		`{"cents":3000000000}`:           "payload.cents: must be a whole number in the range of int32, not a number",
		`{"lines":{}}`:                   "payload.lines: must be a list, not an object",
		`{"lines":[{"price":"secret"}]}`: "payload.lines.price: must be a number, not a string",
		`{"lines":[{"paid":"secret"}]}`:  "payload.lines.paid: must be true or false, not a string",
		`[]`:                             "payload: must be an object, not an array",
		`{}`:                             "payload: customer is missing",
	} {
		result, v := process(2, payload)
		require.Nil(t, result)
		require.Equal(t, processor.Fail, v.Kind)
		require.Equal(t, processor.CodeInvalidPayload, v.Code)
		require.Equal(t, message, v.Message, payload)
	}
	_, v = process(2, `{"due":"secret"}`)
	require.Equal(t, processor.CodeInvalidPayload, v.Code)
}

// limited makes a processor gated and limited: Admit defers each job, Availability has 7 free.
type limited struct{ processor.Processor }

func (limited) Admit(context.Context, processor.Job) (processor.Pass, error) {
	return nil, processor.Deferred(time.Minute, "busy")
}
func (limited) Availability() processor.Availability { return processor.Availability{Free: 7} }

// gatedOnly makes a processor gated only: it hides the method Availability.
type gatedOnly struct{ processor.Gated }

func TestUse(t *testing.T) {
	var calls []string
	note := func(name string) processor.Middleware {
		return func(next processor.Handler) processor.Handler {
			return func(ctx context.Context, job processor.Job) (any, error) {
				calls = append(calls, name)
				return next(ctx, job)
			}
		}
	}
	plain := processor.Func("T", func(context.Context, processor.Job) (any, error) {
		calls = append(calls, "process")
		return 1, nil
	})
	for _, p := range []processor.Processor{plain, gatedOnly{limited{plain}}, limited{plain}} {
		calls = nil
		u := processor.Use(p, note("outer"), note("inner"))
		require.Equal(t, "T", u.Type())
		result, err := u.Process(t.Context(), processor.Job{})
		require.NoError(t, err)
		require.Equal(t, 1, result)
		require.Equal(t, []string{"outer", "inner", "process"}, calls)
		_, wasGated := p.(processor.Gated)
		gated, isGated := u.(processor.Gated)
		require.Equal(t, wasGated, isGated)
		if isGated {
			_, err := gated.Admit(t.Context(), processor.Job{})
			require.Equal(t, processor.Defer, processor.Classify(err).Kind)
		}
		_, wasLimited := p.(processor.Limited)
		l, isLimited := u.(processor.Limited)
		require.Equal(t, wasLimited, isLimited)
		if isLimited {
			require.Equal(t, 7, l.Availability().Free)
		}
	}
	require.Equal(t, plain.Type(), processor.Use(plain).Type())
}
