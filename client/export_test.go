package client

import (
	"context"
	"time"
)

// WithSleep replaces waiting, so that tests see the waits and lose no time.
func WithSleep(sleep func(context.Context, time.Duration) error) Option {
	return func(a *API) { a.sleep = sleep }
}

// WithSilence shortens the silence after which a stream of events is resumed.
func WithSilence(d time.Duration) Option {
	return func(a *API) { a.silenceTimeout = d }
}

// WithOutage sets for how long a broken stream of events is resumed.
func WithOutage(d time.Duration) Option {
	return func(a *API) { a.outageTimeout = d }
}

// SetBacklogClock replaces the clock by which the backlog is looked at anew.
func (p *Producer) SetBacklogClock(now func() time.Time) { p.backlog.now = now }

// Bounds of a message.
const (
	MaxMessageJobs  = maxMessageJobs
	MaxMessageBytes = maxMessageBytes
)
