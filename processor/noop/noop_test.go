package noop_test

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/noop"
)

func job(attempt int, payload string) processor.Job {
	return processor.Job{Group: "g", Type: noop.Type, Attempt: attempt, Payload: json.RawMessage(payload)}
}

func TestProcess(t *testing.T) {
	tests := map[string]struct {
		payload string
		attempt int
		result  any
		kind    processor.Kind
		code    string
	}{
		"no payload":           {payload: "", attempt: 1},
		"empty object":         {payload: "{}", attempt: 1},
		"null":                 {payload: "null", attempt: 1},
		"empty with spaces":    {payload: " { } ", attempt: 1},
		"result":               {payload: `{"result":{"cost":3}}`, attempt: 1, result: json.RawMessage(`{"cost":3}`)},
		"null result":          {payload: `{"result":null}`, attempt: 1, result: json.RawMessage(`null`)},
		"sleep":                {payload: `{"sleep_ms":1,"result":7}`, attempt: 1, result: json.RawMessage(`7`)},
		"retry":                {payload: `{"fail":"retry"}`, attempt: 9, kind: processor.RetryLater, code: noop.CodeRetry},
		"permanent":            {payload: `{"fail":"permanent"}`, attempt: 1, kind: processor.Fail, code: noop.CodePermanent},
		"throttle":             {payload: `{"fail":"throttle"}`, attempt: 1, kind: processor.Throttle, code: "API_THROTTLED"},
		"defer":                {payload: `{"fail":"defer"}`, attempt: 1, kind: processor.Defer, code: "RESOURCE_BUSY"},
		"fails for a while":    {payload: `{"fail":"retry","fail_times":2}`, attempt: 2, kind: processor.RetryLater, code: noop.CodeRetry},
		"then no more":         {payload: `{"fail":"retry","fail_times":2,"result":1}`, attempt: 3, result: json.RawMessage(`1`)},
		"fails no time":        {payload: `{"fail":"permanent","fail_times":0}`, attempt: 1},
		"unknown way to fail":  {payload: `{"fail":"loudly"}`, attempt: 1, kind: processor.Fail, code: "INVALID_PAYLOAD"},
		"negative sleep":       {payload: `{"sleep_ms":-1}`, attempt: 1, kind: processor.Fail, code: "INVALID_PAYLOAD"},
		"sleep that overflows": {payload: `{"sleep_ms":9223372036854775807}`, attempt: 1, kind: processor.Fail, code: "INVALID_PAYLOAD"},
		"negative fail_times":  {payload: `{"fail_times":-1}`, attempt: 1, kind: processor.Fail, code: "INVALID_PAYLOAD"},
		"not an object":        {payload: `[1]`, attempt: 1, kind: processor.Fail, code: "INVALID_PAYLOAD"},
		"not JSON":             {payload: `{`, attempt: 1, kind: processor.Fail, code: "INVALID_PAYLOAD"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			result, err := noop.Processor{}.Process(t.Context(), job(tt.attempt, tt.payload))
			v := processor.Classify(err)
			require.Equal(t, tt.kind, v.Kind, "%v", err)
			require.Equal(t, tt.code, v.Code)
			require.Equal(t, tt.result, result)
		})
	}
}

func TestSleepEndsWithTheContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := noop.Processor{}.Process(ctx, job(1, `{"sleep_ms":3600000}`))
	require.ErrorIs(t, err, context.Canceled)
}

func TestCrashCallsTheInjectedFunction(t *testing.T) {
	crashed := 0
	p := noop.Processor{Crash: func() { crashed++ }}
	_, err := p.Process(t.Context(), job(1, `{"fail":"crash","fail_times":1}`))
	require.Error(t, err)
	require.Equal(t, 1, crashed)

	_, err = p.Process(t.Context(), job(2, `{"fail":"crash","fail_times":1}`))
	require.NoError(t, err)
	require.Equal(t, 1, crashed, "the second attempt is past fail_times")
}

// TestCrashEndsTheProcess starts the test binary as a child process, in which the payload
// {"fail":"crash"} ends the process with exit code 137.
func TestCrashEndsTheProcess(t *testing.T) {
	if os.Getenv("NOOP_TEST_CRASH") != "" {
		defer os.Exit(0) // never runs: the processor ends the process first
		_, _ = noop.Processor{}.Process(t.Context(), job(1, `{"fail":"crash"}`))
		return
	}
	child := exec.Command(os.Args[0], "-test.run=^TestCrashEndsTheProcess$")
	child.Env = append(os.Environ(), "NOOP_TEST_CRASH=1")
	var exit *exec.ExitError
	require.ErrorAs(t, child.Run(), &exit)
	require.Equal(t, 137, exit.ExitCode())
}

func TestEmptyPayloadAllocatesNothing(t *testing.T) {
	p, j, ctx := noop.Processor{}, job(1, "{}"), t.Context()
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = p.Process(ctx, j) }))
}

func BenchmarkEmptyPayload(b *testing.B) {
	p, j, ctx := noop.Processor{}, job(1, "{}"), b.Context()
	b.ReportAllocs()
	for b.Loop() {
		_, _ = p.Process(ctx, j)
	}
}
