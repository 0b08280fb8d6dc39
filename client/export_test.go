package client

import (
	"context"
	"time"
)

// WithSleep replaces the waits between retries, so that tests record them and take no time.
func WithSleep(sleep func(context.Context, time.Duration) error) Option {
	return func(a *API) { a.sleep = sleep }
}

// WithSilence sets after how much silence a stream of events is resumed.
func WithSilence(d time.Duration) Option {
	return func(a *API) { a.silenceTimeout = d }
}

// WithOutage sets for how long a broken stream of events is resumed.
func WithOutage(d time.Duration) Option {
	return func(a *API) { a.outageTimeout = d }
}

// OriginOf is originOf.
var OriginOf = originOf
