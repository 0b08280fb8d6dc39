package api

import (
	"cmp"
	"maps"
	"slices"
)

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
