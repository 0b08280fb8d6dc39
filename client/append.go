package client

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strconv"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client/internal/submission"
	"github.com/bulkaction/bulkaction/internal/web/records"
)

// An append is sent in parts, one request each. These are the limits of a part: it is held in
// memory until the server has answered, and may have to be sent again.
const (
	maxPartLines = 5000
	maxPartBytes = 4 << 20
)

// maxListedLines is the highest number of rejected lines that the answer of an append lists. Its
// RejectedTotal counts all of them.
const maxListedLines = 1000

// maxRecordBytes is the size, above the server's limit of one record, at which a longer record is
// cut off. The server then rejects the record.
const maxRecordBytes = 1 << 20

// AppendNDJSON adds the jobs that r holds, as one JSON object per line: {"payload": …, "type"?,
// "run_at"?, "traceparent"?, "key"?}. There may be any number of lines; memory use does not grow
// with it. The answer lists the rejected lines, at most 1,000, by their number in r; all lines that
// are not rejected are accepted.
//
// The jobs are sent in requests of about 5,000 lines or 4 MiB. Each request is retried as described
// at API, and its jobs are added once. With an error, AppendNDJSON also returns what it knows to be
// accepted. With an idempotency key the caller may repeat the call from the start with the same
// records: no job is added twice. If records have changed, all jobs of each request that holds a
// changed record are added again. When ctx ends, AppendNDJSON returns without waiting for a Read of
// r that blocks.
func (a *API) AppendNDJSON(ctx context.Context, group string, r io.Reader, opts ...CallOption) (api.Appended, error) {
	return a.appendRecords(ctx, group, r, records.NDJSON, opts)
}

// AppendCSV is like AppendNDJSON for CSV (RFC 4180). The header row names the fields of the
// payloads. WithDelimiter, WithKeyColumn and WithColumnTypes say how the rows are read.
func (a *API) AppendCSV(ctx context.Context, group string, r io.Reader, opts ...CallOption) (api.Appended, error) {
	return a.appendRecords(ctx, group, r, records.CSV, opts)
}

// Append is like AppendNDJSON for jobs. It stops with an error at a job that can't be encoded as
// JSON; jobs before it that were not sent yet are dropped.
func (a *API) Append(
	ctx context.Context, group string, jobs iter.Seq[NewJob], opts ...CallOption,
) (api.Appended, error) {
	u, err := a.newUpload(group, records.NDJSON, opts)
	if err != nil {
		return api.Appended{}, err
	}
	n := 0
	for job := range jobs {
		line, err := submission.EncodeJob(job, job.Payload)
		if err != nil {
			return u.answer, fmt.Errorf("append to group %s: encode job %d: %w", group, n, err)
		}
		n++
		if err := u.add(ctx, records.Record{Data: line, Lines: 1}); err != nil {
			return u.answer, err
		}
	}
	return u.answer, u.finish(ctx)
}

// interruptible wraps r. A read from the returned reader ends when ctx ends; a Read of r that
// blocks at that time continues in a goroutine until it returns. The caller must call stop.
func interruptible(ctx context.Context, r io.Reader) (in io.Reader, stop func()) {
	pr, pw := io.Pipe()
	go func() {
		_, err := io.Copy(pw, r)
		_ = pw.CloseWithError(err)
	}()
	stopWatching := context.AfterFunc(ctx, func() { _ = pw.CloseWithError(context.Cause(ctx)) })
	return pr, func() {
		stopWatching()
		_ = pr.Close()
	}
}

// upload sends the records of one append call to the server, in parts of one request each.
type upload struct {
	api         *API
	call        apiCall // of each part, without its header and body
	contentType string
	key         string
	header      []byte // CSV only: the header row, with which each part begins

	part        bytes.Buffer
	partLines   int64 // lines in the current part
	linesBefore int64 // lines of the input before the current part
	partsSent   int
	// answer sums up the answers to all parts, with the line numbers of the whole input.
	answer api.Appended
}

var contentTypes = map[records.Format]string{records.NDJSON: "application/x-ndjson", records.CSV: "text/csv"}

func (a *API) newUpload(group string, format records.Format, opts []CallOption) (*upload, error) {
	c := callOn("append to", http.MethodPost, "group", group, "/jobs")
	o := optionsOf(opts)
	if format == records.CSV && len(o.table) > 0 {
		c.query = o.table
		o.key += "?" + o.table.Encode() // read in another way, the same rows are other jobs
	}
	return &upload{api: a, call: c, contentType: contentTypes[format], key: o.key}, c.invalid
}

func (a *API) appendRecords(
	ctx context.Context, group string, r io.Reader, format records.Format, opts []CallOption,
) (api.Appended, error) {
	u, err := a.newUpload(group, format, opts)
	if err != nil {
		return api.Appended{}, err
	}
	in, stop := interruptible(ctx, r)
	defer stop()
	all := records.NewReader(bufio.NewReaderSize(in, 64<<10), format, maxRecordBytes)
	if d := u.call.query.Get("delimiter"); d != "" {
		all.SetDelimiter(d[0])
	}
	headerRead := format == records.NDJSON // NDJSON has no header
	for {
		rec, err := all.Next()
		switch {
		case errors.Is(err, io.EOF):
			return u.answer, u.finish(ctx)
		case err != nil && !headerRead:
			return u.answer, fmt.Errorf("%s: read: %w", u.call.action, err)
		case err != nil:
			return u.answer, fmt.Errorf("%s: read line %d: %w", u.call.action, rec.Line, err)
		case headerRead:
			err = u.add(ctx, rec)
		default: // the header is the first row that is not empty
			u.linesBefore = rec.Line + rec.Lines - 1
			if headerRead = len(bytes.TrimSpace(rec.Data)) > 0; headerRead {
				u.header = append(bytes.Clone(rec.Data), '\n')
			}
		}
		if err != nil {
			return u.answer, err
		}
	}
}

// add adds a record to the current part. If the record does not fit, add first sends the part and
// begins another. After a truncated record it sends the part at once.
func (u *upload) add(ctx context.Context, rec records.Record) error {
	if u.partLines > 0 && (u.partLines >= maxPartLines || u.part.Len()+len(rec.Data)+1 > maxPartBytes) {
		if err := u.send(ctx); err != nil {
			return err
		}
	}
	u.part.Write(rec.Data)
	u.part.WriteByte('\n')
	u.partLines += rec.Lines
	if rec.Truncated {
		// The record is truncated, so later lines of the same part would get wrong numbers: send
		// the part now.
		return u.send(ctx)
	}
	return nil
}

// finish sends the last part. When the input holds no record, finish sends an empty part, so that
// the server can report an unknown group or a missing header.
func (u *upload) finish(ctx context.Context) error {
	if u.partLines == 0 && u.partsSent > 0 {
		return nil
	}
	return u.send(ctx)
}

// send sends the current part and begins the next one, also after an error. u.answer then counts
// what the server had stored of the part before the error.
func (u *upload) send(ctx context.Context) error {
	body := append(bytes.Clone(u.header), u.part.Bytes()...)
	header := http.Header{}
	header.Set("Content-Type", u.contentType)
	header.Set(headerIdempotency, submission.ID(u.key+"/"+strconv.Itoa(u.partsSent), body))
	c := u.call
	c.header, c.body = header, body
	got, err := doJSON[api.Appended](ctx, u.api, c)
	if err != nil {
		got = appendedBefore(err)
	}
	u.addAnswer(got)
	u.linesBefore += u.partLines
	u.partLines = 0
	u.part.Reset()
	u.partsSent++
	return err
}

// addAnswer adds the answer to one part to the answer of the whole append. It converts line numbers
// of the part to those of the input, and lists at most maxListedLines rejected lines.
func (u *upload) addAnswer(got api.Appended) {
	u.answer.Accepted += got.Accepted
	u.answer.RejectedTotal += got.RejectedTotal
	offset := u.linesBefore - int64(bytes.Count(u.header, []byte("\n")))
	for _, l := range got.Rejected[:min(len(got.Rejected), maxListedLines-len(u.answer.Rejected))] {
		u.answer.Rejected = append(u.answer.Rejected, api.LineError{Line: l.Line + offset, Error: l.Error})
	}
}
