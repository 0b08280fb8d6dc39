package worker_test

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/worker"
	"github.com/bulkaction/bulkaction/processor"
)

func TestWait(t *testing.T) {
	t.Parallel()
	retry := processor.Classify(errors.New("no"))
	for _, tt := range []struct {
		base, most time.Duration
		tries      int
		want       time.Duration
	}{
		{time.Second, time.Minute, 0, time.Second},
		{time.Second, time.Minute, 1, 2 * time.Second},
		{time.Second, time.Minute, 5, 32 * time.Second},
		{time.Second, time.Minute, 6, time.Minute},
		{time.Second, time.Minute, math.MaxInt - 1, time.Minute},
		{time.Hour, 24 * time.Hour, 29, 24 * time.Hour}, // a shift by 29 bits would overflow
		{time.Hour, time.Minute, 3, time.Minute},
		{time.Millisecond, time.Millisecond, 100, time.Millisecond},
	} {
		r := worker.Rules{MaxRetries: math.MaxInt, Backoff: tt.base, MaxBackoff: tt.most}
		kind, wait := r.Next(retry, tt.tries, 0)
		require.Equal(t, processor.RetryLater, kind)
		require.Equal(t, tt.want, wait, "%+v", tt)
	}
}

func TestNext(t *testing.T) {
	t.Parallel()
	r := worker.Rules{MaxRetries: 2, MaxThrottles: 2, Backoff: time.Second, MaxBackoff: time.Minute}
	for name, tt := range map[string]struct {
		err                error
		retries, throttles int
		want               processor.Kind
		wait               time.Duration
	}{
		"done":                     {nil, 9, 9, processor.Done, 0},
		"error":                    {errors.New("no"), 1, 9, processor.RetryLater, 2 * time.Second},
		"no retries left":          {errors.New("no"), 2, 0, processor.Fail, 0},
		"permanent":                {processor.Permanent("BAD", nil), 0, 0, processor.Fail, 0},
		"throttled":                {processor.Throttled(time.Hour, nil), 9, 1, processor.Throttle, time.Hour},
		"throttled for long":       {processor.Throttled(99*time.Hour, nil), 0, 0, processor.Throttle, worker.MaxWait},
		"throttled without a time": {processor.Throttled(0, nil), 9, 1, processor.Throttle, 2 * time.Second},
		"throttled too often":      {processor.Throttled(time.Hour, nil), 0, 2, processor.Fail, 0},
		"deferred":                 {processor.Deferred(time.Hour, ""), 9, 9, processor.Defer, time.Hour},
		"deferred for long":        {processor.Deferred(99*time.Hour, ""), 9, 9, processor.Defer, worker.MaxWait},
	} {
		kind, wait := r.Next(processor.Classify(tt.err), tt.retries, tt.throttles)
		require.Equal(t, tt.want, kind, name)
		require.Equal(t, tt.wait, wait, name)
	}
}

func TestEncodeResult(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		result     any
		want, code string
	}{
		"nothing":            {nil, "null", ""},
		"empty":              {json.RawMessage{}, "null", ""},
		"raw":                {json.RawMessage("{\n\"a\": 1}"), `{"a":1}`, ""},
		"value":              {map[string]int{"a": 1}, `{"a":1}`, ""},
		"not UTF-8":          {json.RawMessage("{\"a\":\"\xff\xfe\"}"), "{\"a\":\"\ufffd\"}", ""},
		"not UTF-8 inside":   {map[string]json.RawMessage{"a": json.RawMessage("\"\xc3\"")}, "{\"a\":\"\ufffd\"}", ""},
		"too large in UTF-8": {json.RawMessage(`"` + strings.Repeat("\xffx", processor.MaxResultBytes/2-1) + `"`), "", "RESULT_TOO_LARGE"},
		"not JSON":           {json.RawMessage("{"), "", "INVALID_RESULT"},
		"a channel":          {make(chan int), "", "INVALID_RESULT"},
		"largest":            {strings.Repeat("x", processor.MaxResultBytes-2), `"` + strings.Repeat("x", processor.MaxResultBytes-2) + `"`, ""},
		"too large":          {strings.Repeat("x", processor.MaxResultBytes-1), "", "RESULT_TOO_LARGE"},
	} {
		b, err := worker.EncodeResult(tt.result)
		v := processor.Classify(err)
		require.Equal(t, tt.code, v.Code, name)
		require.Equal(t, tt.want, string(b), name)
		if err != nil {
			require.Equal(t, processor.Fail, v.Kind, name)
		}
	}
}

func TestAbandonDelay(t *testing.T) {
	t.Parallel()
	require.Equal(t, time.Second, worker.AbandonDelay(time.Hour))
	require.Equal(t, time.Millisecond, worker.AbandonDelay(time.Millisecond))
}
