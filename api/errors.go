package api

import (
	"errors"
	"fmt"
	"time"
)

// What a store answers when it cannot do what it was asked. Wrap them with a message that says why:
// the HTTP API hands it to the caller, except that of ErrUnavailable.
var (
	ErrNotFound = errors.New("not found") // 404
	// 409: same id with other content, or the state forbids it
	ErrConflict = errors.New("conflict")
	ErrSealed   = errors.New("group is sealed: no more jobs are taken") // 409
	// 422: an argument that only the store can judge, such as a cursor
	ErrInvalid      = errors.New("invalid")
	ErrUnavailable  = errors.New("store is unavailable: try again in a moment")   // 503: Redis is away
	ErrReplicas     = fmt.Errorf("too few replicas have it: %w", ErrUnavailable)  // 503: see REDIS_WAIT_REPLICAS
	ErrBackpressure = errors.New("too much work is waiting: slow down and retry") // 429: see BackpressureError
)

// BackpressureError refuses work that could not be stored or run soon. It is an ErrBackpressure.
type BackpressureError struct {
	RetryAfter time.Duration // an honest estimate of when to come again
	Reason     string        // which bound was reached, for people
}

func (e *BackpressureError) Error() string {
	return fmt.Sprintf("too much work is waiting: %s: retry in %s", e.Reason, e.RetryAfter)
}

func (e *BackpressureError) Unwrap() error { return ErrBackpressure }

// AppendProblem is the answer to a streamed append that stopped before its body's end. What it
// counts is stored and stays: send the same body again under the same Idempotency-Key, or what
// begins at NextLine.
type AppendProblem struct {
	Problem
	Appended
	NextLine int64 `json:"next_line"` // the first line that was neither accepted nor rejected; counts from 1
}
