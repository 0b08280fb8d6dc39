package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strconv"

	"github.com/google/uuid"

	"github.com/bulkaction/bulkaction/api"
)

// One request of an append carries so much: little enough to be held until it is answered for, and
// sent again if need be.
const (
	maxPartLines = 5000
	maxPartBytes = 4 << 20
)

// maxListedLines is how many refused lines an answer lists.
const maxListedLines = 1000

// AppendNDJSON adds the jobs that r holds, one JSON object a line ({"payload": …, "type"?,
// "run_at"?}), of any number, in flat memory. Lines that were refused are in the answer, numbered
// as in r; the others are accepted.
//
// The jobs travel in requests of up to 5,000 lines or 4 MiB, each repeated as API says and counted
// once. With an error comes what was accepted before it. Under an idempotency key, the same jobs
// can be appended again from the start and none counts twice. When ctx ends, a Read of r that is
// under way is not waited for.
func (a *API) AppendNDJSON(ctx context.Context, group string, r io.Reader, opts ...CallOption) (api.Appended, error) {
	return a.appendRecords(ctx, group, r, "application/x-ndjson", opts)
}

// AppendCSV is AppendNDJSON for CSV (RFC 4180): the header row names the fields of the payloads.
func (a *API) AppendCSV(ctx context.Context, group string, r io.Reader, opts ...CallOption) (api.Appended, error) {
	return a.appendRecords(ctx, group, r, "text/csv", opts)
}

// Append is AppendNDJSON for jobs. A job that can't be encoded ends it.
func (a *API) Append(ctx context.Context, group string, jobs iter.Seq[Job], opts ...CallOption) (api.Appended, error) {
	u, err := a.newUpload(group, "application/x-ndjson", opts)
	if err != nil {
		return api.Appended{}, err
	}
	n := 0
	for job := range jobs {
		line, err := marshal(job)
		if err != nil {
			return u.answer, fmt.Errorf("append to group %s: encode job %d: %w", group, n, err)
		}
		n++
		if err := u.add(ctx, record{data: append(line, '\n'), lines: 1}); err != nil {
			return u.answer, err
		}
	}
	return u.answer, u.finish(ctx)
}

func (a *API) appendRecords(
	ctx context.Context, group string, r io.Reader, contentType string, opts []CallOption,
) (api.Appended, error) {
	u, err := a.newUpload(group, contentType, opts)
	if err != nil {
		return api.Appended{}, err
	}
	in, stop := interruptible(ctx, r)
	defer stop()
	records := newRecordReader(in, contentType == "text/csv")
	if u.header, err = records.header(); err != nil && !errors.Is(err, io.EOF) {
		return u.answer, fmt.Errorf("append to group %s: read: %w", group, err)
	}
	u.linesBefore = records.linesRead
	for {
		rec, err := records.next()
		if errors.Is(err, io.EOF) {
			return u.answer, u.finish(ctx)
		}
		if err != nil {
			return u.answer, fmt.Errorf("append to group %s: read line %d: %w", group, records.linesRead+1, err)
		}
		if err := u.add(ctx, rec); err != nil {
			return u.answer, err
		}
	}
}

// interruptible makes reads of r end with ctx. After stop, at most a read of r that is under
// way ends later.
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

// upload sends records in parts.
type upload struct {
	api         *API
	group, path string
	contentType string
	key         string
	header      []byte // of CSV: goes before each part

	part        bytes.Buffer
	partLines   int64 // in the part
	linesBefore int64 // lines in front of the part
	partsSent   int   // parts
	answer      api.Appended
}

func (a *API) newUpload(group, contentType string, opts []CallOption) (*upload, error) {
	path, err := groupPath(group, "/jobs")
	if err != nil {
		return nil, err
	}
	return &upload{api: a, group: group, path: path, contentType: contentType, key: keyOf(opts)}, nil
}

// add sends the part when it is full.
func (u *upload) add(ctx context.Context, rec record) error {
	if u.partLines > 0 && (u.partLines >= maxPartLines || u.part.Len()+len(rec.data) > maxPartBytes) {
		if err := u.send(ctx); err != nil {
			return err
		}
	}
	u.part.Write(rec.data)
	u.partLines += rec.lines
	if rec.truncated {
		// Lines are missing in it, so those behind would be numbered wrongly.
		return u.send(ctx)
	}
	return nil
}

// finish sends the last part. One is sent even when there is nothing, so that an unknown group or a
// missing header shows.
func (u *upload) finish(ctx context.Context) error {
	if u.partLines == 0 && u.partsSent > 0 {
		return nil
	}
	return u.send(ctx)
}

func (u *upload) send(ctx context.Context) error {
	body := append(bytes.Clone(u.header), u.part.Bytes()...)
	header := http.Header{}
	header.Set("Content-Type", u.contentType)
	header.Set(headerIdempotency, messageID(u.key+"/"+strconv.Itoa(u.partsSent), body))
	got, err := doJSON[api.Appended](ctx, u.api, apiCall{
		action: "append to group " + u.group,
		method: http.MethodPost,
		path:   u.path,
		header: header,
		body:   body,
		retry:  retryAlways,
	})
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

// addAnswer adds a part's answer, with the numbers that lines have in the whole.
func (u *upload) addAnswer(got api.Appended) {
	u.answer.Accepted += got.Accepted
	u.answer.RejectedTotal += got.RejectedTotal
	offset := u.linesBefore - int64(bytes.Count(u.header, []byte("\n")))
	for _, l := range got.Rejected[:min(len(got.Rejected), maxListedLines-len(u.answer.Rejected))] {
		u.answer.Rejected = append(u.answer.Rejected, api.LineError{Line: l.Line + offset, Error: l.Error})
	}
}

// messageID is the same for the same key and content only: repeating a message changes nothing, and
// other content under a key is not lost as a repetition.
func messageID(key string, data []byte) string {
	return uuid.NewSHA1(uuid.NewSHA1(uuid.NameSpaceOID, []byte(key)), data).String()
}
