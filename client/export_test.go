package client

import (
	"context"
	"time"
)

// WithSleep replaces the function that waits between retries, so that tests record the waits and
// take no time.
func WithSleep(sleep func(context.Context, time.Duration) error) Option {
	return func(a *API) { a.sleep = sleep }
}

// WithSilence sets how long a stream of events may be silent before the client connects again.
func WithSilence(d time.Duration) Option {
	return func(a *API) { a.silenceTimeout = d }
}

// WithOutage sets for how long the client tries to continue a broken stream of events.
func WithOutage(d time.Duration) Option {
	return func(a *API) { a.outageTimeout = d }
}

// OriginOf is originOf.
var OriginOf = originOf
