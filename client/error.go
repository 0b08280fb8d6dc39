package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// The kinds of error answers of the API, for errors.Is.
var (
	ErrInvalid         = errors.New("invalid request")   // 400 or 422; Error.Problem names the fields
	ErrNotFound        = errors.New("not found")         // 404
	ErrConflict        = errors.New("conflict")          // 409: the present state does not allow it
	ErrChanged         = errors.New("changed meanwhile") // 412
	ErrTooManyRequests = errors.New("too many requests") // 429; see Error.RetryAfter
	ErrUnavailable     = errors.New("unavailable")       // 503; see Error.RetryAfter
)

var kinds = map[int]error{
	http.StatusBadRequest: ErrInvalid, http.StatusUnprocessableEntity: ErrInvalid,
	http.StatusNotFound: ErrNotFound, http.StatusConflict: ErrConflict, http.StatusPreconditionFailed: ErrChanged,
	http.StatusTooManyRequests: ErrTooManyRequests, http.StatusServiceUnavailable: ErrUnavailable,
}

// Error is an answer of the API that is not a success. Use errors.As to find it in an error, or
// errors.Is with one of the kinds, such as ErrNotFound.
type Error struct {
	Status     int           // HTTP status code
	Problem    api.Problem   // the error document, whose Fields name the bad fields; zero when there was none
	RetryAfter time.Duration // how long the server asks the client to wait; 0 when it does not say
	RequestID  string        // finds the request in the server's log

	appended api.Appended // after a refused append: the part that the server had stored before the refusal
}

// Is tells whether the answer is of a kind.
func (e *Error) Is(kind error) bool { return kind == kinds[e.Status] }

// Error returns the answer's status, detail and bad fields on one line, with the request id (after
// status 500) and the wait that the server asks for.
func (e *Error) Error() string {
	var b strings.Builder
	title := e.Problem.Title
	if title == "" {
		title = http.StatusText(e.Status)
	}
	fmt.Fprintf(&b, "%d %s", e.Status, title)
	if e.Problem.Detail != "" && !e.detailRepeatsFields() {
		b.WriteString(": " + e.Problem.Detail)
	}
	for i, f := range e.Problem.Fields {
		sep := "; "
		if i == 0 {
			sep = ": "
		}
		b.WriteString(sep + f.Field + ": " + f.Problem)
	}
	if e.Status == http.StatusInternalServerError && e.RequestID != "" {
		fmt.Fprintf(&b, " (request %s)", e.RequestID)
	}
	if e.RetryAfter > 0 {
		fmt.Fprintf(&b, " (try again in %s)", e.RetryAfter)
	}
	return b.String()
}

// detailRepeatsFields reports whether the problem's detail contains the text of the first bad
// field, so that the detail can be left out.
func (e *Error) detailRepeatsFields() bool {
	return len(e.Problem.Fields) > 0 && strings.Contains(e.Problem.Detail, e.Problem.Fields[0].Problem)
}

const (
	maxProblemBytes = 1 << 20
	maxPlainBytes   = 300 // of an answer without Content-Type
)

// problemOf turns an answer that is not a success into an Error. If the answer is no problem
// document, such as a proxy's page, the Error has only the status and the headers; if it has no
// Content-Type, its text becomes the detail.
func problemOf(resp *http.Response) *Error {
	e := &Error{
		Status:     resp.StatusCode,
		RetryAfter: retryAfter(resp.Header.Get("Retry-After"), time.Now()),
		RequestID:  resp.Header.Get("X-Request-Id"),
	}
	media, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if resp.Header.Get("Content-Type") == "" { // so answers an https server that is asked by http
		text, _ := io.ReadAll(io.LimitReader(resp.Body, maxPlainBytes))
		e.Problem.Detail = strings.TrimSpace(string(text))
		return e
	}
	if media != "application/problem+json" && media != "application/json" {
		return e
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxProblemBytes))
	var p api.AppendProblem // has all fields of api.Problem and more
	if err == nil && json.Unmarshal(body, &p) == nil {
		e.Problem, e.appended = p.Problem, p.Appended
	}
	return e
}

// appendedBefore returns what the server had stored of an append before it refused the rest.
func appendedBefore(err error) api.Appended {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.appended
	}
	return api.Appended{}
}

// retryAfter reads the header Retry-After in both forms: seconds, at most a day, or an HTTP date. It
// returns 0 for anything else.
func retryAfter(header string, now time.Time) time.Duration {
	s, err := strconv.ParseFloat(strings.TrimSpace(header), 64)
	if s >= 0 && (err == nil || errors.Is(err, strconv.ErrRange)) { // not NaN
		return time.Duration(min(s, (24*time.Hour).Seconds()) * float64(time.Second))
	}
	if at, err := http.ParseTime(header); err == nil {
		return max(0, at.Sub(now).Round(time.Millisecond))
	}
	return 0
}
