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
	partLines = 5000
	partBytes = 4 << 20
)

// maxListed is how many refused lines an answer lists.
const maxListed = 1000

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
	u, err := a.upload(group, "application/x-ndjson", opts)
	if err != nil {
		return api.Appended{}, err
	}
	n := 0
	for job := range jobs {
		line, err := marshal(job)
		if err != nil {
			return u.total, fmt.Errorf("append to group %s: encode job %d: %w", group, n, err)
		}
		n++
		if err := u.add(ctx, record{data: append(line, '\n'), lines: 1}); err != nil {
			return u.total, err
		}
	}
	return u.total, u.finish(ctx)
}

func (a *API) appendRecords(
	ctx context.Context, group string, r io.Reader, contentType string, opts []CallOption,
) (api.Appended, error) {
	u, err := a.upload(group, contentType, opts)
	if err != nil {
		return api.Appended{}, err
	}
	in, stop := interruptible(ctx, r)
	defer stop()
	records := newRecordReader(in, contentType == "text/csv")
	if u.header, err = records.header(); err != nil && !errors.Is(err, io.EOF) {
		return u.total, fmt.Errorf("append to group %s: read: %w", group, err)
	}
	u.before = records.line
	for {
		rec, err := records.next()
		if errors.Is(err, io.EOF) {
			return u.total, u.finish(ctx)
		}
		if err != nil {
			return u.total, fmt.Errorf("append to group %s: read line %d: %w", group, records.line+1, err)
		}
		if err := u.add(ctx, rec); err != nil {
			return u.total, err
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
	forget := context.AfterFunc(ctx, func() { _ = pw.CloseWithError(context.Cause(ctx)) })
	return pr, func() {
		forget()
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

	part   bytes.Buffer
	lines  int64 // in the part
	before int64 // lines in front of the part
	sent   int   // parts
	total  api.Appended
}

func (a *API) upload(group, contentType string, opts []CallOption) (*upload, error) {
	path, err := groupPath(group, "/jobs")
	if err != nil {
		return nil, err
	}
	return &upload{api: a, group: group, path: path, contentType: contentType, key: keyOf(opts)}, nil
}

// add sends the part when it is full.
func (u *upload) add(ctx context.Context, rec record) error {
	if u.lines > 0 && (u.lines >= partLines || u.part.Len()+len(rec.data) > partBytes) {
		if err := u.send(ctx); err != nil {
			return err
		}
	}
	u.part.Write(rec.data)
	u.lines += rec.lines
	if rec.cut {
		// Lines are missing in it, so those behind would be numbered wrongly.
		return u.send(ctx)
	}
	return nil
}

// finish sends the last part. One is sent even when there is nothing, so that an unknown group or a
// missing header shows.
func (u *upload) finish(ctx context.Context) error {
	if u.lines == 0 && u.sent > 0 {
		return nil
	}
	return u.send(ctx)
}

func (u *upload) send(ctx context.Context) error {
	body := append(bytes.Clone(u.header), u.part.Bytes()...)
	header := http.Header{}
	header.Set("Content-Type", u.contentType)
	header.Set(headerIdempotency, messageID(u.key+"/"+strconv.Itoa(u.sent), body))
	got, err := get[api.Appended](ctx, u.api, apiCall{
		what:   "append to group " + u.group,
		method: http.MethodPost,
		path:   u.path,
		header: header,
		body:   body,
		repeat: always,
	})
	if err != nil {
		got = appendedBefore(err)
	}
	u.count(got)
	u.before += u.lines
	u.lines = 0
	u.part.Reset()
	u.sent++
	return err
}

// count adds a part's answer, with the numbers that lines have in the whole.
func (u *upload) count(got api.Appended) {
	u.total.Accepted += got.Accepted
	u.total.RejectedTotal += got.RejectedTotal
	offset := u.before - int64(bytes.Count(u.header, []byte("\n")))
	for _, l := range got.Rejected[:min(len(got.Rejected), maxListed-len(u.total.Rejected))] {
		u.total.Rejected = append(u.total.Rejected, api.LineError{Line: l.Line + offset, Error: l.Error})
	}
}

// messageID is the same for the same key and content only: repeating a message changes nothing, and
// other content under a key is not lost as a repetition.
func messageID(key string, data []byte) string {
	return uuid.NewSHA1(uuid.NewSHA1(uuid.NameSpaceOID, []byte(key)), data).String()
}
