package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// patientAPI returns a client that attempts a call up to 12 times, so that a busy server delays a
// command instead of ending it. The client prints why a call waits (noteRetry).
func (r *Root) patientAPI() (*client.API, error) {
	return r.API(client.WithRetry(12, time.Minute), client.WithRetryNotice(r.noteRetry))
}

// noteRetry prints to Err that a call has failed and is attempted again.
func (r *Root) noteRetry(err error, wait time.Duration, left int) {
	what := fmt.Sprintf("The API does not answer now (%s).", err)
	if e, ok := errors.AsType[*client.Error](err); ok {
		reason := strings.TrimPrefix(e.Problem.Detail, api.ErrBackpressure.Error()+": ")
		if reason == "" {
			reason = e.Problem.Title
		}
		what = fmt.Sprintf("The API refuses the jobs now (%d: %s).", e.Status, reason)
	}
	line := printable(fmt.Sprintf("%s Trying again in %d s, at most %d more times; Ctrl-C ends this.",
		what, (wait+time.Second-1)/time.Second, left))
	if !r.shown.printAbove(line) {
		r.Notef("%s", line)
	}
}

// lastRefusal returns the error of the last attempt of a call whose next attempt was interrupted;
// nil if err is not the error of such a call.
func lastRefusal(err error) error {
	if both, ok := errors.AsType[interface {
		error
		Unwrap() []error
	}](err); ok && !errors.Is(both.Unwrap()[0], context.Canceled) {
		return both.Unwrap()[0]
	}
	return nil
}
