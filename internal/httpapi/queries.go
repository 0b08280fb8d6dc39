package httpapi

import (
	"time"
)

// SubmitOptions is the data of a submission that is not in its body.
type SubmitOptions struct {
	GeneratedID bool // the client gave no id; the API has generated one
	// IdempotencyKey is "" when there is none, else 1 to 255 bytes of visible ASCII. Hash it before
	// it enters a Redis key.
	IdempotencyKey string
	TraceParent    string // W3C traceparent of the request; "" when it is absent or malformed
}

// JobQuery selects a page of a group's jobs. With Key it has the job with this key, or none. An
// empty State matches every job; an empty Cursor means the first page.
type JobQuery struct {
	State, Key, Cursor string
	Limit              int // 1 to 1,000
}

// DeadLetterQuery selects a page of dead letters. An empty Tenant, Group, Type or Code matches
// every dead letter; Since is the oldest time, the zero time sets none; an empty Cursor means the
// first page.
type DeadLetterQuery struct {
	Tenant, Group, Type, Code string
	Since                     time.Time
	Cursor                    string
	Limit                     int // 1 to 1,000
}
