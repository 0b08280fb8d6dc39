package httpapi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/records"
)

// This file has the functions by which a handler of Options.UI uses limits and rules of the API.

// The paths of the index, and of Options.UI.
const (
	indexPath = "/{$}"
	uiRoot    = "/ui/"
)

// StreamBody lets the body of a request take any time, as long as it is not too slow (bodyReader).
// It is for handlers of Options.UI. It does nothing if no server of this package serves the
// request.
func StreamBody(r *http.Request) {
	if b, ok := r.Body.(*bodyReader); ok {
		b.streamed = true
	}
}

// OwnDeadlines makes the responseWriter set no more deadlines for writes: the handler of Options.UI
// that calls it sets them.
func (w *responseWriter) OwnDeadlines() { w.ownDeadlines = true }

// CountRequest counts a request towards the rate limit of an API key that the handler of Options.UI
// has checked, and notes the key for the log. It returns a problem if the key has made too many
// requests.
func (w *responseWriter) CountRequest(p auth.Principal) error {
	if w.keyID = p.KeyID; p.KeyID == "" {
		return nil
	}
	return w.server.callers.request(p, time.Now())
}

// BeginAppend counts a body of jobs that is sent to the handler of Options.UI as one of the
// caller's open appends, until end is called. It returns a problem if the caller has too many.
func (w *responseWriter) BeginAppend(r *http.Request, p auth.Principal) (end func(), err error) {
	return w.server.callers.begin(w.server.callerOf(r, p), appendKind)
}

// ProblemOf returns the problem with which the API answers err. retryAfter is how long the client
// should wait before it tries again; 0: the problem has no Retry-After. known is false for an
// unexpected error, which the caller should log.
func ProblemOf(err error) (p api.Problem, retryAfter time.Duration, known bool) {
	e, known := problemOf(err)
	return e.Problem, e.retryAfter, known
}

// Load is a text with jobs of a group.
type Load struct {
	Group string
	CSV   bool                 // the text is CSV; otherwise it is NDJSON
	Table records.TableOptions // how CSV is read; MaxPayload is set by AppendAll
	Text  io.Reader
}

// CheckLoad reads about the first `most` bytes of a text and checks its lines as AppendAll does, so
// that the caller creates no group for a text without jobs. It returns the counts and rejected
// lines that AppendAll would return for these lines, if no key is taken. Afterwards l.Text begins
// at its start again. The error means that this part can't be read, for example because of its CSV
// header.
func CheckLoad(d messages.Decoder, l *Load, most int) (a api.Appended, err error) {
	l.Table.MaxPayload = messages.MaxPayloadBytes
	var head bytes.Buffer
	in := bufio.NewReaderSize(io.TeeReader(l.Text, &head), readBuffer)
	defer func() { l.Text = io.MultiReader(&head, l.Text) }()
	src, err := newJobSource(in, l.CSV, l.Table, d)
	if err != nil {
		return a, err
	}
	for head.Len() <= most {
		_, line, _, err := src.next()
		var bad *lineError
		switch {
		case errors.Is(err, io.EOF):
			return a, nil
		case errors.As(err, &bad):
			if a.RejectedTotal++; len(a.Rejected) < maxListedLines {
				a.Rejected = append(a.Rejected, api.LineError{Line: line, Error: truncate(bad.problem)})
			}
		case err != nil:
			return a, brokenRecord(err, line)
		default:
			a.Accepted++
		}
	}
	return a, nil
}

// AppendAll appends the jobs of a text of any length to a group, as POST /v1/groups/{id}/jobs does
// without an Idempotency-Key, for handlers of Options.UI. After an error, the returned counts are
// those of the jobs that are known to be stored.
func AppendAll(ctx context.Context, b Backend, d messages.Decoder, l Load) (api.Appended, error) {
	l.Table.MaxPayload = messages.MaxPayloadBytes
	src, err := newJobSource(bufio.NewReaderSize(l.Text, readBuffer), l.CSV, l.Table, d)
	if err != nil {
		return api.Appended{}, err
	}
	a := &bodyAppender{
		backend: b, write: func(ctx context.Context, do func(context.Context) error) error {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
			defer cancel()
			return do(ctx)
		},
		group: l.Group, requestIDPrefix: newRequestIDPrefix(l.Group, ""), nextLine: 1,
	}
	err = a.run(ctx, src)
	return a.answer, err
}

// TenantPatchOf checks a tenant's settings, given as texts by field name, by the rules of PATCH
// /v1/tenants/{id}. An empty text means the default.
func TenantPatchOf(texts map[string]string) (api.TenantPatch, error) {
	fields := map[string]json.RawMessage{}
	for name, text := range texts {
		switch text = strings.TrimSpace(text); {
		case text == "":
			fields[name] = json.RawMessage("null")
		case json.Valid([]byte(text)):
			fields[name] = json.RawMessage(text)
		default:
			fields[name] = json.RawMessage(`"no number"`)
		}
	}
	body, err := json.Marshal(fields)
	if err != nil {
		return api.TenantPatch{}, err
	}
	return decodeSettings(body)
}
