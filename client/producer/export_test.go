package producer

import "time"

// SetBacklogClock replaces the clock that decides when the backlog's length is read again.
func (p *Producer) SetBacklogClock(now func() time.Time) { p.backlog.now = now }

// The limits of one message.
const (
	MaxMessageJobs  = maxMessageJobs
	MaxMessageBytes = maxMessageBytes
)
