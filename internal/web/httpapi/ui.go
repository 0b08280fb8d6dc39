package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/joblines"
	"github.com/bulkaction/bulkaction/internal/web/records"
)

// This file has the functions by which a handler of Options.UI uses limits and rules of the API.

// The paths of the index, and of Options.UI.
const (
	indexPath = "/{$}"
	uiRoot    = "/ui/"
)

// Shared is what the API shares with the handler of Options.UI.
type Shared struct {
	Options             // of the API; the stores record changes in the activity log
	Submissions Backend // the same store, which records nothing
	// Closing ends when the server stops, and event streams with it.
	Closing context.Context //nolint:containedctx // the server's, not a call's
	callers *callers        // nil: there are no limits
}

// Share returns the stores of opt so that they record changes in opt.Activity. Without a server
// there are no limits of callers.
func Share(opt Options) Shared {
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	s := Shared{Options: opt, Submissions: opt.Backend, Closing: context.Background()}
	if opt.Activity == nil {
		return s
	}
	s.Backend = recorded{opt.Backend, opt.Activity}
	if opt.Rooms != nil {
		s.Rooms = recordedRooms{opt.Rooms, opt.Activity}
	}
	if opt.KeyStore != nil {
		s.KeyStore = recordedKeys{opt.KeyStore, opt.Activity}
	}
	return s
}

// CountRequest counts a request to Options.UI towards the rate limit of the API key that the UI has
// checked, which requests to the API share, and notes the key for the log. It returns a problem if
// the key has made too many requests.
func (s Shared) CountRequest(r *http.Request, p auth.Principal) error {
	if p.KeyID == "" || s.callers == nil {
		return nil
	}
	answerOf(r).keyID = p.KeyID
	return s.callers.request(p, time.Now())
}

// BeginAppend lets the body of a request to Options.UI take any time, as long as it is not too slow
// (bodyReader), and counts it as one of the caller's open appends until end is called. It returns a
// problem if the caller has too many.
func (s Shared) BeginAppend(r *http.Request, p auth.Principal) (end func(), err error) {
	if s.callers == nil {
		return func() {}, nil
	}
	if end, err = s.callers.begin(s.callerOf(r, p), appendKind); err == nil {
		answerOf(r).body.streamed = true
	}
	return end, err
}

type answerKey struct{}

// withAnswer wraps the handler of Options.UI: answerOf finds the answer to each of its requests.
func withAnswer(ui http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		inner := r.WithContext(context.WithValue(r.Context(), answerKey{}, w))
		defer func() { r.Pattern = inner.Pattern }() // for the metrics of requests
		ui.ServeHTTP(w, inner)
	})
}

func answerOf(r *http.Request) *responseWriter {
	return r.Context().Value(answerKey{}).(*responseWriter)
}

// ProblemOf returns the problem with which the API answers err. retryAfter is how long the client
// should wait before it tries again; 0: the problem has no Retry-After. known is false for an
// unexpected error, which the caller should log.
func ProblemOf(err error) (p api.Problem, retryAfter time.Duration, known bool) {
	e, known := problemOf(err)
	return e.Problem, e.RetryAfter, known
}

// Load is a text with jobs of a group.
type Load struct {
	Group string
	CSV   bool                 // the text is CSV; otherwise it is NDJSON
	Table records.TableOptions // how CSV is read
	Text  io.Reader
}

// CheckLoad reads about the first `most` bytes of a text and checks its lines as AppendAll does, so
// that the caller creates no group for a text without jobs. It returns the counts and rejected
// lines that AppendAll would return for these lines, if no key is taken. Afterwards l.Text begins
// at its start again. The error means that this part can't be read, for example because of its CSV
// header.
func CheckLoad(d messages.Decoder, l *Load, most int) (a api.Appended, err error) {
	var head bytes.Buffer
	defer func() { l.Text = io.MultiReader(&head, l.Text) }()
	src, err := newJobSource(io.TeeReader(l.Text, &head), l.CSV, l.Table, d)
	if err != nil {
		return a, err
	}
	for head.Len() <= most {
		_, line, _, err := src.Next()
		var bad *joblines.LineError
		switch {
		case errors.Is(err, io.EOF):
			return a, nil
		case errors.As(err, &bad):
			if a.RejectedTotal++; len(a.Rejected) < maxListedLines {
				a.Rejected = append(a.Rejected, api.LineError{Line: line, Error: truncate(bad.Problem)})
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
	src, err := newJobSource(l.Text, l.CSV, l.Table, d)
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
	return decodeTexts(texts, "", decodeSettings)
}

// LimitsPatchOf checks global limits, given as texts by field name, by the rules of PATCH
// /v1/limits. An empty text means the value of the environment.
func LimitsPatchOf(texts map[string]string) (api.LimitsPatch, error) {
	return decodeTexts(texts, "global", decodeLimits)
}

// TypePatchOf checks limits of a type, given as texts by field name, by the rules of PATCH
// /v1/types/{type}. An empty text means no limit.
func TypePatchOf(texts map[string]string) (api.TypePatch, error) {
	return decodeTexts(texts, "", decodeType)
}

// decodeTexts decodes the JSON object with the fields that were typed, which is the field object of
// the body, or the body itself if object is "".
func decodeTexts[P any](texts map[string]string, object string, decode func([]byte) (P, error)) (p P, err error) {
	fields := map[string]any{}
	for name, text := range texts {
		switch text = strings.TrimSpace(text); {
		case text == "":
			fields[name] = nil
		case json.Valid([]byte(text)):
			fields[name] = json.RawMessage(text)
		default:
			fields[name] = text
		}
	}
	if object != "" {
		fields = map[string]any{object: fields}
	}
	body, err := json.Marshal(fields)
	if err != nil {
		return p, err
	}
	return decode(body)
}
