package processor_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

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

func TestClassify(t *testing.T) {
	cause := errors.New("no luck")
	tests := map[string]struct {
		err  error
		want processor.Verdict
	}{
		"nil is done": {nil, processor.Verdict{Kind: processor.Done}},
		"plain error": {cause, processor.Verdict{Kind: processor.RetryLater, Code: "ERROR", Message: "no luck"}},
		"retry": {processor.Retry("SMTP_451", cause),
			processor.Verdict{Kind: processor.RetryLater, Code: "SMTP_451", Message: "no luck"}},
		"throttled": {processor.Throttled(3*time.Second, cause),
			processor.Verdict{Kind: processor.Throttle, Code: "API_THROTTLED", After: 3 * time.Second, Message: "no luck"}},
		"deferred": {processor.Deferred(3*time.Second, "no account is free"),
			processor.Verdict{Kind: processor.Defer, Code: "RESOURCE_BUSY", After: 3 * time.Second, Message: "no account is free"}},
		"deferred without a time": {processor.Deferred(0, "no account is free"),
			processor.Verdict{Kind: processor.Defer, Code: "RESOURCE_BUSY", After: time.Second, Message: "no account is free"}},
		"deferred without a reason": {processor.Deferred(time.Microsecond, ""),
			processor.Verdict{Kind: processor.Defer, Code: "RESOURCE_BUSY", After: time.Second, Message: "RESOURCE_BUSY"}},
		"throttled without a time": {processor.Throttled(-time.Second, nil),
			processor.Verdict{Kind: processor.Throttle, Code: "API_THROTTLED", Message: "API_THROTTLED"}},
		"permanent": {processor.Permanent("HTTP_404", cause),
			processor.Verdict{Kind: processor.Fail, Code: "HTTP_404", Message: "no luck"}},
		"no cause": {processor.Permanent("GONE", nil),
			processor.Verdict{Kind: processor.Fail, Code: "GONE", Message: "GONE"}},
		"wrapped": {fmt.Errorf("send: %w", processor.Permanent("X", cause)),
			processor.Verdict{Kind: processor.Fail, Code: "X", Message: "send: no luck"}},
		"joined": {errors.Join(io.EOF, processor.Permanent("X", cause)),
			processor.Verdict{Kind: processor.Fail, Code: "X", Message: "EOF\nno luck"}},
		"the outermost decides": {processor.Permanent("OUTER", processor.Retry("INNER", cause)),
			processor.Verdict{Kind: processor.Fail, Code: "OUTER", Message: "no luck"}},
		"deadline": {fmt.Errorf("call: %w", context.DeadlineExceeded),
			processor.Verdict{Kind: processor.RetryLater, Code: "TIMEOUT", Message: "call: context deadline exceeded"}},
		"own code before the deadline": {processor.Permanent("LATE", context.DeadlineExceeded),
			processor.Verdict{Kind: processor.Fail, Code: "LATE", Message: "context deadline exceeded"}},
		"cancelled": {context.Canceled,
			processor.Verdict{Kind: processor.RetryLater, Code: "ERROR", Message: "context canceled"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tt.want, processor.Classify(tt.err))
		})
	}
}

func TestAnswersKeepTheirCause(t *testing.T) {
	for _, err := range []error{
		processor.Retry("X", io.EOF), processor.Throttled(0, io.EOF), processor.Permanent("X", io.EOF),
	} {
		require.ErrorIs(t, err, io.EOF)
	}
}

func TestClassifyReplacesInvalidCodes(t *testing.T) {
	for code, want := range map[string]string{
		"":                      "ERROR",
		"A.b_c-9":               "A.b_c-9",
		strings.Repeat("A", 64): strings.Repeat("A", 64),
		strings.Repeat("A", 65): "ERROR",
		"NO SPACE":              "ERROR",
		"ÄRGER":                 "ERROR",
		"a\n":                   "ERROR",
		"a{1}":                  "ERROR",
	} {
		require.Equal(t, want, processor.Classify(processor.Permanent(code, io.EOF)).Code, "code %q", code)
	}
}

func TestClassifyBoundsTheMessage(t *testing.T) {
	for name, text := range map[string]string{
		"fits":                strings.Repeat("a", 1024),
		"too long":            strings.Repeat("a", 1025),
		"huge":                strings.Repeat("ü", 1<<20),
		"split character":     strings.Repeat("a", 1023) + "ü",
		"long split":          strings.Repeat("a", 1022) + strings.Repeat("世", 9),
		"not UTF-8":           "a\xffb",
		"not UTF-8 at length": strings.Repeat("a\xff", 600),
		"cut character":       strings.Repeat("a", 1026) + "世",
	} {
		t.Run(name, func(t *testing.T) {
			got := processor.Classify(errors.New(text)).Message
			require.True(t, utf8.ValidString(got))
			require.LessOrEqual(t, len(got), 1024)
			require.GreaterOrEqual(t, len(got), min(len(text), 1021), "no more is cut than must be")
			require.True(t, strings.HasPrefix(text, strings.SplitN(got, "\uFFFD", 2)[0]))
		})
	}
}

func TestKindString(t *testing.T) {
	require.Equal(t, "done retry throttle fail defer unknown", fmt.Sprint(
		processor.Done, " ", processor.RetryLater, " ", processor.Throttle, " ", processor.Fail, " ", processor.Defer, " ",
		processor.Kind(9)))
}

func TestJobID(t *testing.T) {
	require.Equal(t, "promo.2024.17", processor.Job{Group: "promo.2024", Ordinal: 17}.ID())
}
