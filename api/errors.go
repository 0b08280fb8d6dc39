package api

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// These errors say why a store, the backend of the HTTP API, can't do what was asked. The store
// wraps them in a message with the reason. The HTTP API shows this message to its client. For
// ErrTenant, ErrNotAllowed, ErrUnavailable and ErrReplicas it shows a message of its own: messages
// of the last two may contain host names.
var (
	ErrNotFound = errors.New("not found") // status 404
	// ErrConflict (status 409): the id or key exists with other content, or the state of an object,
	// such as a group, forbids the call.
	ErrConflict = errors.New("conflict")
	// ErrChanged (status 412): the object has another revision than the client has seen.
	ErrChanged = errors.New("changed meanwhile")
	ErrSealed  = errors.New("group is sealed: it accepts no more jobs") // status 409
	// ErrTenant (status 403): the call names another tenant than the caller's key has.
	ErrTenant = errors.New("tenant is not yours")
	// ErrNotAllowed (status 403): the role of the caller's key may not make such calls.
	ErrNotAllowed = errors.New("not allowed")
	// ErrInvalid (status 422): the store refuses an argument that only it can check, such as a
	// cursor.
	ErrInvalid     = errors.New("invalid")
	ErrUnavailable = errors.New("store is unavailable: try again in a moment") // status 503: mostly, Redis is away
	// ErrReplicas (status 503): fewer than REDIS_WAIT_REPLICAS replicas confirmed the write in
	// time. The write may exist; it is safe to repeat the request.
	ErrReplicas = fmt.Errorf("too few replicas have the write: %w", ErrUnavailable)
	// ErrNotConfigured (status 501): the server lacks the configuration for the call.
	ErrNotConfigured = errors.New("not configured")
	// ErrUpstream (status 502): a service that the call needs gave no usable answer. Its address is
	// not in the message.
	ErrUpstream     = errors.New("no usable answer")
	ErrBackpressure = errors.New("not accepted now") // status 429: see BackpressureError
)

// NotFoundError is an ErrNotFound whose text says by itself that something does not exist.
type NotFoundError struct{ Text string }

func (e *NotFoundError) Error() string { return e.Text }

// Unwrap returns ErrNotFound.
func (e *NotFoundError) Unwrap() error { return ErrNotFound }

// OtherTenantError is an ErrTenant that names the two tenants.
type OtherTenantError struct {
	Named string // by the call
	Own   string // of the API key
}

func (e *OtherTenantError) Error() string {
	return fmt.Sprintf("%s: %s; that of the API key is %s", ErrTenant, e.Named, e.Own)
}

// Unwrap returns ErrTenant.
func (e *OtherTenantError) Unwrap() error { return ErrTenant }

// BackpressureError is the error with which jobs are refused because too many jobs wait or Redis's
// memory is nearly full. errors.Is finds ErrBackpressure in it.
type BackpressureError struct {
	RetryAfter time.Duration // when to try again: an estimate from the rate at which jobs leave or memory gets free
	Reason     string        // for people: which bound is reached
}

func (e *BackpressureError) Error() string {
	return ErrBackpressure.Error() + ": " + e.Reason
}

func (e *BackpressureError) Unwrap() error { return ErrBackpressure }

// AppendProblem is the answer to a streamed append that stopped before the end of its body. The
// jobs that it counts as accepted are stored and stay. The client continues in one of two ways: it
// sends the same body again with the same Idempotency-Key, or it sends the part of the body that
// begins at NextLine.
type AppendProblem struct {
	Problem
	Appended
	NextLine int64 `json:"next_line"` // the first line that was neither accepted nor rejected; the first line is 1
}

// KeysTakenError says that some jobs of a request were not added, because the group has unique_keys
// and another of its jobs has their key. The other jobs of the request were added. It is an
// [ErrConflict].
type KeysTakenError struct {
	Jobs []int // their numbers in the request, from 0
}

func (e *KeysTakenError) Error() string {
	const shown = 10
	list, more := e.Jobs, ""
	if len(list) > shown {
		list, more = list[:shown], fmt.Sprintf(" and %d more", len(e.Jobs)-shown)
	}
	numbers := make([]string, len(list))
	for i, n := range list {
		numbers[i] = fmt.Sprintf("jobs[%d]", n)
	}
	return "not added, because other jobs of the group have their keys: " + strings.Join(numbers, ", ") + more +
		"; the other jobs of the request were added"
}

// Unwrap returns ErrConflict.
func (e *KeysTakenError) Unwrap() error { return ErrConflict }
