package processor_test

import (
	"context"
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
