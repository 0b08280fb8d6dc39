package api

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
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

// MaxIDLength is the highest number of bytes of an id.
const MaxIDLength = 128

// IDRule is the end of an error message about an id: "must " + IDRule.
const IDRule = "match ^[A-Za-z0-9._-]{1,128}$ (except . and ..)"

// ValidID reports whether id follows IDRule. Ids of tenants, groups, types and messages must, so
// that they can be part of a Redis key and of a URL's path, in which . and .. are no names.
func ValidID(id string) bool {
	if len(id) == 0 || len(id) > MaxIDLength || id == "." || id == ".." {
		return false
	}
	for i := range len(id) {
		switch c := id[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '_', c == '-':
		default:
			return false
		}
	}
	return true
}

// Problem is an error answer, of the media type application/problem+json (RFC 9457).
type Problem struct {
	Type   string       `json:"type"` // the URI of the code
	Code   ProblemCode  `json:"code"`
	Title  string       `json:"title"`
	Status int          `json:"status"`
	Detail string       `json:"detail,omitempty"`
	Fields []FieldError `json:"fields,omitempty"`
}

// FieldError names a bad field of a request and says what is wrong with it.
type FieldError struct {
	Field   string `json:"field"`
	Problem string `json:"problem"`
}

// ProblemCode says which kind of problem an answer reports. Programs may decide by it: a code never
// changes its meaning or its status. New codes may be added, so programs decide by the status where
// they do not know a code. docs/problems.md lists all codes.
type ProblemCode string

// The codes of the API and of the calls of the brokers.
const (
	BadParameter     ProblemCode = "bad_parameter"
	IncompleteBody   ProblemCode = "incomplete_body"
	MalformedJSON    ProblemCode = "malformed_json"
	BadIdentity      ProblemCode = "bad_identity"
	Unauthenticated  ProblemCode = "unauthenticated"
	CrossSite        ProblemCode = "cross_site"
	Forbidden        ProblemCode = "forbidden"
	NotAllowed       ProblemCode = "not_allowed"
	WrongTenant      ProblemCode = "wrong_tenant"
	NoSuchPath       ProblemCode = "no_such_path"
	NoTicket         ProblemCode = "no_ticket"
	NotFound         ProblemCode = "not_found"
	UnknownEvent     ProblemCode = "unknown_event"
	MethodNotAllowed ProblemCode = "method_not_allowed"
	SlowBody         ProblemCode = "slow_body"
	Conflict         ProblemCode = "conflict"
	EventClosed      ProblemCode = "event_closed"
	NotYourTurn      ProblemCode = "not_your_turn"
	Sealed           ProblemCode = "sealed"
	SoldOut          ProblemCode = "sold_out"
	Changed          ProblemCode = "changed"
	TooLarge         ProblemCode = "too_large"
	UnsupportedMedia ProblemCode = "unsupported_media_type"
	WrongHost        ProblemCode = "wrong_host"
	Invalid          ProblemCode = "invalid"
	Backlog          ProblemCode = "backlog"
	QueueFull        ProblemCode = "queue_full"
	TooManyFailures  ProblemCode = "too_many_failures"
	TooManyRequests  ProblemCode = "too_many_requests"
	TooManyStreams   ProblemCode = "too_many_streams"
	Internal         ProblemCode = "internal"
	NotConfigured    ProblemCode = "not_configured"
	Upstream         ProblemCode = "upstream"
	Busy             ProblemCode = "busy"
	FewReplicas      ProblemCode = "few_replicas"
	ShuttingDown     ProblemCode = "shutting_down"
	StoreUnavailable ProblemCode = "store_unavailable"
)

type problemKind struct {
	status  int
	meaning string
}

var problemKinds = map[ProblemCode]problemKind{
	BadParameter:     {400, "An unknown query parameter; or a malformed query, If-Match, guard's or visitor's name."},
	IncompleteBody:   {400, "The body ended before it was complete."},
	MalformedJSON:    {400, "The body is not JSON; `detail` says at which byte it breaks."},
	BadIdentity:      {401, "The request does not say, or not credibly, who the visitor is."},
	Unauthenticated:  {401, "The call needs an API key, and the request has none, or one that is not valid."},
	CrossSite:        {403, "A web page of another site made the request."},
	Forbidden:        {403, "This server does not accept the call from this address."},
	NotAllowed:       {403, "The API key is valid, but its role or tenant may not make such calls."},
	WrongTenant:      {403, "The request names another tenant than the API key has."},
	NoSuchPath:       {404, "The API has no such path; `/openapi.yaml` lists all."},
	NoTicket:         {404, "The user has no ticket of the event."},
	NotFound:         {404, "There is no such object: it never existed, or it was deleted after its retention."},
	UnknownEvent:     {404, "There is no such event."},
	MethodNotAllowed: {405, "The path does not accept this method; the header Allow lists the accepted ones."},
	SlowBody:         {408, "The body arrived too slowly."},
	Conflict:         {409, "The id exists with other content, or the object's state does not allow the command."},
	EventClosed:      {409, "The event is closed: nobody can enter."},
	NotYourTurn:      {409, "It is not the user's turn yet."},
	Sealed:           {409, "The group is sealed: it accepts no more jobs."},
	SoldOut:          {410, "The event is sold out: nobody can enter."},
	Changed:          {412, "The object has another revision than the request names: read it again."},
	TooLarge:         {413, "The body, a record or a payload has too many bytes; `detail` names the limit."},
	UnsupportedMedia: {415, "The body has a media type, charset or encoding that the call does not accept."},
	WrongHost:        {421, "A server on a loopback address got a request for another host."},
	Invalid:          {422, "A field, query parameter, id or Idempotency-Key is not valid; `fields` lists them."},
	Backlog:          {429, "Too many jobs wait, or Redis is almost full. Send the request again after Retry-After."},
	QueueFull:        {429, "The event's queue is as long as it may be. Try again after Retry-After."},
	TooManyFailures:  {429, "Too many invalid API keys came, from you or in all. A valid one is never refused."},
	TooManyRequests:  {429, "Too many requests of your key, new visitors or large bodies at once. Try again later."},
	TooManyStreams:   {429, "The server, your API key or your address has as many open streams as allowed."},
	Internal:         {500, "A fault of the server; its log has the reason under the X-Request-Id."},
	NotConfigured:    {501, "The server lacks the configuration for this call."},
	Upstream:         {502, "A service that the call needs gave no usable answer."},
	Busy:             {503, "The server has no capacity for the request now."},
	FewReplicas:      {503, "Too few replicas of Redis confirmed the write. It is safe to repeat the request."},
	ShuttingDown:     {503, "The server is stopping. Repeat the request: another server serves it."},
	StoreUnavailable: {503, "Redis can't be reached or does not answer. Try again in a moment."},
}

// ProblemCodes returns all codes, ordered by status and name.
func ProblemCodes() []ProblemCode {
	return slices.SortedFunc(maps.Keys(problemKinds), func(a, b ProblemCode) int {
		return cmp.Or(cmp.Compare(a.Status(), b.Status()), cmp.Compare(a, b))
	})
}

// Status returns the HTTP status of answers with this code, 0 for an unknown code.
func (c ProblemCode) Status() int { return problemKinds[c].status }

// Meaning says in a sentence what the code means, "" for an unknown code.
func (c ProblemCode) Meaning() string { return problemKinds[c].meaning }

// URI returns the code's URI, the type of its problems. It leads to the code's description.
func (c ProblemCode) URI() string {
	return "https://github.com/bulkaction/bulkaction/blob/main/docs/problems.md#" + string(c)
}
