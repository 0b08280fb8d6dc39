package httpapi

import (
	"time"
)

// SubmitOptions is the data of a submission beside its body.
type SubmitOptions struct {
	GeneratedID bool // the client gave no id; the API has generated one
	// IdempotencyKey is the request's header; "" when it is absent, else 1 to 255 bytes of visible
	// ASCII. Hash it before it becomes part of a Redis key.
	IdempotencyKey string
	TraceParent    string // W3C traceparent of the request; "" when it is absent or malformed
}

// JobQuery selects a page of a group's jobs. With Key it selects only the job with this key, if
// there is one. An empty State matches every job; an empty Cursor means the first page.
type JobQuery struct {
	State, Key, Cursor string
	Limit              int // 1 to 1,000
}

// DeadLetterQuery selects a page of dead letters. An empty Tenant, Group, Type or Code matches
// every dead letter. Older ones than Since are left out, unless Since is zero. An empty Cursor
// means the first page.
type DeadLetterQuery struct {
	Tenant, Group, Type, Code string
	Since                     time.Time
	Cursor                    string
	Limit                     int // 1 to 1,000
}
