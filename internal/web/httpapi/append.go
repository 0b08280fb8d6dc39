package httpapi

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	"github.com/google/uuid"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web"
	"github.com/bulkaction/bulkaction/internal/web/joblines"
	"github.com/bulkaction/bulkaction/internal/web/records"
)

// Limits of a batch of appended lines. A batch ends when its lines, valid and invalid ones, reach a
// limit, or at the end of the body, and for no other reason. Therefore the same body is always
// divided into the same batches, and a repeated batch gets the same request id. Danger: if these
// limits are changed, a body that is sent again is divided into other batches, and its jobs are
// added twice.
const (
	maxBatchLines = 500
	maxBatchBytes = 512 << 10
)

const maxListedLines = 1000 // rejected lines beyond these are counted but not listed

// AppendOptions is the data of a batch of appended jobs beside the jobs.
type AppendOptions struct {
	RequestID   string // unique per group; a repeated id comes with the same jobs
	TraceParent string // W3C traceparent of the request; "" when it is absent or malformed
}

// appendJobs appends the jobs of a body of any length to a group. Memory use does not grow with the
// body.
func (s *server) appendJobs(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	typ, err := mediaType(r, "application/x-ndjson", "text/csv")
	if err != nil {
		return err
	}
	key, err := idempotencyKey(r)
	if err != nil {
		return err
	}
	var table records.TableOptions
	switch q := r.URL.Query(); {
	case typ == "text/csv":
		table, err = tableOptions(q)
	case len(q) > 0:
		err = web.NewProblem(api.Invalid,
			"the query parameters delimiter, types and key_column are only for Content-Type text/csv")
	}
	if err != nil {
		return err
	}
	caller, _ := auth.From(r.Context())
	end, err := s.callers.begin(s.callerOf(r, caller), appendKind)
	if err != nil {
		return err
	}
	defer end()
	bodyOf(r).streamed = true
	src, err := newJobSource(r.Body, typ == "text/csv", table, s.Decoder)
	if err != nil {
		return err
	}
	a := &bodyAppender{
		backend: s.Backend, write: s.write, group: id, trace: traceParent(r),
		requestIDPrefix: newRequestIDPrefix(id, key), answer: api.Appended{Rejected: []api.LineError{}}, nextLine: 1,
	}
	err = a.run(r.Context(), src)
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case err != nil:
		p := s.problem(w, r, err).Problem
		p.Detail += fmt.Sprintf("; %d jobs were stored before", a.answer.Accepted)
		switch {
		case p.Status == http.StatusConflict: // the group takes no more jobs, so to send them again is no help
		case key == "":
			p.Detail += fmt.Sprintf(": send the body from line %d on", a.nextLine)
		default:
			p.Detail += ": send the same body again with the same Idempotency-Key"
		}
		web.WriteJSON(w, p.Status, "application/problem+json", api.AppendProblem{
			Problem:  p,
			Appended: a.answer,
			NextLine: a.nextLine,
		})
		return nil
	}
	web.WriteJSON(w, http.StatusOK, "application/json", a.answer)
	return nil
}

// newJobSource returns a source of the jobs in a text, or the problem of its CSV header.
func newJobSource(text io.Reader, csv bool, o records.TableOptions, d messages.Decoder) (*joblines.Source, error) {
	src, line, err := joblines.New(text, csv, o, d)
	if bad, ok := errors.AsType[*records.HeaderError](err); ok {
		return nil, headerProblem(bad)
	}
	if err != nil {
		return nil, brokenRecord(err, line)
	}
	return src, nil
}

// newRequestIDPrefix returns the prefix of the request ids of a body's batches. An id is the
// prefix, a dot and the batch's number. The prefix is a hash of the group and the Idempotency-Key,
// so that the same key in two groups gives two prefixes. Without a key the prefix is random.
func newRequestIDPrefix(group, key string) string {
	if key == "" {
		return uuid.NewString()
	}
	sum := sha256.Sum256([]byte(group + "\x00" + key))
	return hex.EncodeToString(sum[:16])
}

// bodyAppender divides the lines of a body into batches, and appends the batches to the group in
// order.
type bodyAppender struct {
	backend         Backend
	write           func(ctx context.Context, do func(context.Context) error) error
	group           string
	trace           string
	requestIDPrefix string // prefix of the request ids of the batches

	batch         []messages.Job
	batchAt       []int64         // lines at which the jobs of batch begin
	batchRejected []api.LineError // rejected lines of the current batch
	batchLines    int             // lines of the current batch, good or bad
	batchBytes    int
	batchNumber   int64 // number of the current batch, from 0
	stored        bool  // at least one batch has been stored

	answer   api.Appended // sums up the batches before the current one
	nextLine int64        // first line of the current batch
}

// run appends all jobs of src, batch by batch. After an error, a.answer counts the batches before
// the current one, which may be stored, too.
func (a *bodyAppender) run(ctx context.Context, src *joblines.Source) error {
	for {
		job, line, size, err := src.Next()
		var bad *joblines.LineError
		isBad := errors.As(err, &bad)
		switch {
		case errors.Is(err, io.EOF):
			return a.storeLastBatch(ctx, line)
		case err != nil && !isBad:
			// Drop the incomplete batch. The request id of its number belongs to the complete
			// batch, which the client sends with the next attempt.
			return brokenRecord(err, line)
		}
		if a.batchLines == maxBatchLines || a.batchLines > 0 && a.batchBytes+size > maxBatchBytes {
			if err := a.storeBatch(ctx, line); err != nil {
				return err
			}
		}
		a.batchLines++
		a.batchBytes += size
		if isBad {
			a.batchRejected = append(a.batchRejected, api.LineError{Line: line, Error: truncate(bad.Problem)})
			continue
		}
		a.batch, a.batchAt = append(a.batch, job), append(a.batchAt, line)
	}
}

// storeBatch stores the current batch and begins the next one, whose first line is next. It stores
// the batch even if the client has disconnected, but not if its API key is not valid any more.
// After an error the batch is not cleared.
func (a *bodyAppender) storeBatch(ctx context.Context, next int64) error {
	if len(a.batch) > 0 {
		opt := AppendOptions{
			RequestID:   a.requestIDPrefix + "." + strconv.FormatInt(a.batchNumber, 10),
			TraceParent: a.trace,
		}
		if err := keyEnded(ctx); err != nil {
			return err
		}
		err := a.write(ctx, func(ctx context.Context) error {
			return a.backend.Append(ctx, a.group, a.batch, opt)
		})
		var taken *api.KeysTakenError
		if err != nil && !errors.As(err, &taken) {
			return err
		}
		if taken != nil {
			a.answer.Accepted -= int64(len(taken.Jobs))
			a.rejectTaken(taken.Jobs)
		}
		a.stored = true
	}
	a.answer.Accepted += int64(len(a.batch))
	a.answer.RejectedTotal += int64(len(a.batchRejected))
	room := maxListedLines - len(a.answer.Rejected)
	a.answer.Rejected = append(a.answer.Rejected, a.batchRejected[:min(room, len(a.batchRejected))]...)
	a.batch, a.batchRejected = make([]messages.Job, 0, maxBatchLines), a.batchRejected[:0]
	a.batchAt = a.batchAt[:0]
	a.batchLines, a.batchBytes, a.nextLine = 0, 0, next
	a.batchNumber++
	return nil
}

// rejectTaken adds lines of the current batch to its rejected lines: the jobs with these indexes,
// because other jobs of the group already have their keys.
func (a *bodyAppender) rejectTaken(jobs []int) {
	for _, n := range jobs {
		a.batchRejected = append(a.batchRejected, api.LineError{
			Line: a.batchAt[n], Error: "key: another job of the group has it, and the group has unique_keys",
		})
	}
	slices.SortFunc(a.batchRejected, func(x, y api.LineError) int { return cmp.Compare(x.Line, y.Line) })
}

// storeLastBatch stores the last batch. If no batch held a good line, nothing was stored; then
// storeLastBatch reads the group, so that an unknown group is reported.
func (a *bodyAppender) storeLastBatch(ctx context.Context, end int64) error {
	if err := a.storeBatch(ctx, end); err != nil {
		return err
	}
	if a.stored {
		return nil
	}
	_, err := a.backend.Group(ctx, a.group)
	return err
}

// brokenRecord returns the problem for a body that can't be read further: err occurred at the
// record that begins at the given line.
func brokenRecord(err error, line int64) *web.Problem {
	if bad, ok := errors.AsType[*records.TextError](err); ok {
		return web.NewProblem(api.Invalid, bad.Error(), api.FieldError{Field: "body", Problem: bad.Problem})
	}
	if errors.Is(err, records.ErrTooLong) {
		return web.NewProblem(api.TooLarge, fmt.Sprintf(
			"the record that begins at line %d is longer than %d bytes: it has no line break, or a quote is open",
			line, joblines.MaxSkipped))
	}
	return brokenBody(err)
}

// tableQuery lists the query parameters that an append of CSV may have.
var tableQuery = []string{"delimiter", "types", "key_column"}

// tableOptions parses the query parameters of an append of CSV.
func tableOptions(q url.Values) (o records.TableOptions, err error) {
	if o.Delimiter, err = records.ParseDelimiter(q.Get("delimiter")); err != nil {
		return o, invalidField("delimiter", err.Error())
	}
	if o.Types, err = records.ParseColumnTypes(q.Get("types")); err != nil {
		return o, invalidField("types", err.Error())
	}
	o.Key = q.Get("key_column")
	return o, nil
}

// headerProblem returns the problem for a CSV body whose header row is refused.
func headerProblem(bad *records.HeaderError) *web.Problem {
	field, detail := "header", bad.Error()
	switch {
	case bad.Option != "":
		field = bad.Option
	case bad.Column > 0:
		field = fmt.Sprintf("header[%d]", bad.Column-1)
	}
	if bad.Looks != 0 {
		if bad.Excel {
			detail += "; remove it"
		}
		detail += "; send the query parameter delimiter=" + url.QueryEscape(string(bad.Looks))
	}
	return web.NewProblem(api.Invalid, detail, api.FieldError{Field: field, Problem: detail})
}
