package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"math/rand/v2"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client/internal/submission"
)

// apiCall is one call of the API, with the rule for its retries.
type apiCall struct {
	action string // text for error messages, for example "get group g"
	method string
	path   string // escaped
	query  url.Values
	header http.Header
	body   []byte
	stream bool // the answer is read while it arrives, without a timeout for the whole answer
	// onlyIfRefused says that carrying out the call twice would do harm. So it may be attempted
	// again only if the first attempt certainly had no effect.
	onlyIfRefused bool
	invalid       error // says why the call can't be made; nil if it can
}

// callOn returns a call on one object, such as a group. kind is the kind of the object, in the
// singular. rest follows the id in the path. An invalid id, which could change the URL, makes the
// call invalid.
func callOn(verb, method, kind, id, rest string) apiCall {
	c := apiCall{action: verb + " " + kind + " " + id, method: method, path: "/v1/" + kind + "s/" + id + rest}
	if !api.ValidID(id) {
		c.invalid = fmt.Errorf("%s id %q: must "+api.IDRule, kind, id)
	}
	return c
}

// withBody returns the call with a JSON body. A body that can't be encoded makes the call invalid.
func (c apiCall) withBody(body any) apiCall {
	text, err := submission.Encode(body)
	if err != nil && c.invalid == nil {
		c.invalid = fmt.Errorf("%s: %w", c.action, err)
	}
	c.body = text
	return c
}

// withPatch returns the call with a body that is a JSON merge patch.
func (c apiCall) withPatch(patch any) apiCall {
	c = c.withBody(patch)
	c.header = http.Header{"Content-Type": {"application/merge-patch+json"}}
	return c
}

// mayRepeat reports whether a call that failed with err may be attempted again.
func (c *apiCall) mayRepeat(err error) bool {
	e, ok := errors.AsType[*Error](err)
	if !ok {
		return !c.onlyIfRefused // the connection failed or broke
	}
	switch e.Status {
	case http.StatusTooManyRequests:
		return true
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return !c.onlyIfRefused
	}
	return false
}

// doJSON makes a call and decodes its JSON answer.
func doJSON[T any](ctx context.Context, a *API, c apiCall) (T, error) {
	var v T
	resp, err := a.do(ctx, c)
	if err != nil {
		return v, err
	}
	defer resp.Body.Close()
	defer drain(resp.Body)
	if err := json.NewDecoder(resp.Body).Decode(&v); err != nil {
		return v, fmt.Errorf("%s: read answer: %w", c.action, err)
	}
	return v, nil
}

// do makes a call and retries it as its rule allows, in at most a.attempts attempts. It
// returns the last error without waiting if the wait would exceed a.maxWait or ctx's
// deadline, or if it can't connect and no server at the address has ever answered. A status other
// than 2xx is an *Error. The caller must close the answer's body.
func (a *API) do(ctx context.Context, c apiCall) (*http.Response, error) {
	if c.invalid != nil {
		return nil, c.invalid
	}
	if err := checkBase(a.base); err != nil {
		return nil, fmt.Errorf("%s: %w", c.action, err)
	}
	for attempt := 1; ; attempt++ {
		resp, err := a.sendOnce(ctx, c)
		if err == nil {
			return resp, nil
		}
		err = fmt.Errorf("%s: %w", c.action, err)
		if ctx.Err() != nil || attempt >= a.attempts || !c.mayRepeat(err) || a.neverReached(err) {
			return nil, err
		}
		wait := backoff(err, attempt)
		if wait > a.maxWait || deadlineWithin(ctx, wait) {
			return nil, err
		}
		if a.notice != nil {
			a.notice(err, wait, a.attempts-attempt)
		}
		if stopped := a.sleep(ctx, wait); stopped != nil {
			return nil, fmt.Errorf("%w; then %w", err, stopped)
		}
	}
}

// checkBase returns an error that says how to write an address that is no http or https URL.
func checkBase(base string) error {
	u, err := url.Parse(base)
	if err == nil && u.Host != "" && (u.Scheme == "http" || u.Scheme == "https") {
		return nil
	}
	example := "127.0.0.1:8080"
	if host, _, err := net.SplitHostPort(base); err == nil && host != "" && !strings.Contains(base, "/") {
		example = base
	}
	return fmt.Errorf("address %q: write it as http://%s", base, example)
}

// neverReached reports whether err means that no connection could be made to a server that has
// never answered. do waits for a server that restarts, but not for a server whose address is
// probably wrong.
func (a *API) neverReached(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial" && !a.answered.Load()
}

func (a *API) sendOnce(ctx context.Context, c apiCall) (*http.Response, error) {
	target := a.base + c.path
	if len(c.query) > 0 {
		target += "?" + c.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, c.method, target, bytes.NewReader(c.body))
	if err != nil {
		return nil, err
	}
	if len(c.body) > 0 {
		req.Header.Set("Content-Type", "application/json") // c.header may replace it
	}
	for k, v := range c.header {
		req.Header[k] = v
	}

	client := a.unary
	if c.stream {
		client = a.stream
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	a.answered.Store(true)
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer resp.Body.Close()
	defer drain(resp.Body)
	return nil, problemOf(resp)
}

// drain reads the rest of a body, up to 64 KiB, so that the connection can be used again.
func drain(body io.Reader) { _, _ = io.CopyN(io.Discard, body, 64<<10) }

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// backoff returns how long to wait after an attempt that failed: as long as the server asks for. If
// the server asks for nothing, the wait doubles with each attempt, up to 5 s, with jitter so that
// clients don't retry at the same time.
func backoff(err error, attempt int) time.Duration {
	if e, ok := errors.AsType[*Error](err); ok && e.RetryAfter > 0 {
		return e.RetryAfter
	}
	d := min(minBackoff<<min(attempt-1, 10), maxBackoff)
	return d/2 + rand.N(d/2+1)
}

// sleep waits for d and returns nil. If ctx ends first, sleep returns the error of ctx at once.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// deadlineWithin reports whether ctx's deadline comes within d, so that waiting for d would be
// useless.
func deadlineWithin(ctx context.Context, d time.Duration) bool {
	deadline, ok := ctx.Deadline()
	return ok && time.Until(deadline) < d
}

// pages iterates over the items of a list that the server returns in pages. what names the list in
// errors, and in the path with - for spaces. split returns the items and the cursor of a page.
func pages[P, T any](
	ctx context.Context, a *API, what string, query url.Values, split func(P) (items []T, cursor string),
) iter.Seq2[T, error] {
	c := apiCall{action: "list " + what, method: http.MethodGet, path: "/v1/" + strings.ReplaceAll(what, " ", "-")}
	return pagesOf(ctx, a, c, query, split)
}

func pagesOf[P, T any](
	ctx context.Context, a *API, call apiCall, query url.Values, split func(P) (items []T, cursor string),
) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		c := call
		c.query = maps.Clone(query)
		for {
			page, err := doJSON[P](ctx, a, c)
			if err != nil {
				yield(none, err)
				return
			}
			items, cursor := split(page)
			for _, item := range items {
				if !yield(item, nil) {
					return
				}
			}
			if cursor == "" {
				return
			}
			c.query.Set("cursor", cursor)
		}
	}
}

// streamLines iterates over the NDJSON lines of a group's results or failures. list is the end of
// the path, and may have a query.
func streamLines[T any](ctx context.Context, a *API, group, list string) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		list, query, _ := strings.Cut(list, "?")
		c := callOn("get "+list+" of", http.MethodGet, "group", group, "/"+list)
		c.stream = true
		c.query, _ = url.ParseQuery(query) // a constant of this package
		resp, err := a.do(ctx, c)
		if err != nil {
			yield(none, err)
			return
		}
		defer resp.Body.Close() // not drained: the rest may be long
		d := json.NewDecoder(resp.Body)
		for {
			var v T
			err := d.Decode(&v)
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				yield(none, fmt.Errorf("%s: the answer ended early and is not whole (read it again): %w", c.action, err))
				return
			}
			if !yield(v, nil) {
				return
			}
		}
	}
}

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
