package httpapi

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/google/uuid"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// A batch ends after so many lines or bytes of them, good or bad, whatever the time or the network.
// So the same body always falls into the same batches, which is what makes its request ids
// repeatable. Changing these makes a body that is resent across the upgrade count twice.
const (
	maxBatchLines = 500
	maxBatchBytes = 512 << 10
)

const (
	readBuffer      = 64 << 10
	maxLineOverhead = 64 << 10 // bytes of a line beside its payload: field names, white space, other fields
	maxLine         = messages.MaxPayloadBytes + maxLineOverhead
	maxListedLines  = 1000 // lines that are listed; the others are counted
)

// jobSource yields the jobs of a body, with the line each begins at. A *lineError refuses one line,
// io.EOF ends the body, any other error breaks it off. size is what the line weighs in its batch: a
// function of the line alone.
type jobSource interface {
	next() (job messages.Job, line int64, size int, err error)
}

// lineError says what is wrong with one line.
type lineError struct{ problem string }

func (e *lineError) Error() string { return e.problem }

var errLongLine = &lineError{fmt.Sprintf("is too long: at most %d bytes of payload are taken",
	messages.MaxPayloadBytes)}

// appendJobs streams a body of any length into a group, in flat memory.
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
	bodyOf(r).idleTimeout = idleTimeout
	in := bufio.NewReaderSize(r.Body, readBuffer)
	skipBOM(in)
	var src jobSource = &ndjsonSource{lines: newLineReader(in, maxLine), decoder: s.decoder}
	if typ == "text/csv" {
		if src, err = newCSVSource(in); err != nil {
			return err
		}
	}
	a := &bodyAppender{
		backend: s.backend, group: id, trace: traceParent(r), requestIDPrefix: newRequestIDPrefix(id, key),
		answer: api.Appended{Rejected: []api.LineError{}}, nextLine: 1,
	}
	err = a.run(r.Context(), src, s.closing)
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case err != nil:
		p := s.problem(w, r, err).Problem
		p.Detail += fmt.Sprintf("; %d jobs were taken before: ", a.answer.Accepted)
		if key == "" {
			p.Detail += fmt.Sprintf("send what begins at line %d", a.nextLine)
		} else {
			p.Detail += "send the same body again with the same Idempotency-Key"
		}
		writeJSON(w, p.Status, "application/problem+json", api.AppendProblem{
			Problem:  p,
			Appended: a.answer,
			NextLine: a.nextLine,
		})
		return nil
	}
	writeJSON(w, http.StatusOK, "application/json", a.answer)
	return nil
}

// newRequestIDPrefix is what the ids of a body's batches begin with: derived from group and key, so that a
// key means its group only and any key leaves room for the batch's number.
func newRequestIDPrefix(group, key string) string {
	if key == "" {
		return uuid.NewString()
	}
	sum := sha256.Sum256([]byte(group + "\x00" + key))
	return hex.EncodeToString(sum[:16])
}

// bodyAppender collects a body's lines into batches and hands them to the backend, in order.
type bodyAppender struct {
	backend         Backend
	group           string
	trace           string
	requestIDPrefix string // what the batches' request ids begin with

	batch         []messages.Job
	batchRejected []api.LineError // of this batch
	batchLines    int             // in this batch, good or bad
	batchBytes    int
	batchNumber   int64 // of this batch, from 0
	stored        bool  // some batch reached the backend

	answer   api.Appended // of the batches before
	nextLine int64        // after the batches before
}

// run appends all that src yields. After an error the answer counts what is stored.
func (a *bodyAppender) run(ctx context.Context, src jobSource, closing <-chan struct{}) error {
	for {
		job, line, size, err := src.next()
		var bad *lineError
		isBad := errors.As(err, &bad)
		switch {
		case errors.Is(err, io.EOF):
			return a.storeLastBatch(ctx, line)
		case err != nil && !isBad:
			return brokenBody(err) // the begun batch is dropped: its id belongs to the whole one
		}
		if a.batchLines == maxBatchLines || a.batchLines > 0 && a.batchBytes+size > maxBatchBytes {
			if err := a.storeBatch(ctx, line); err != nil {
				return err
			}
			select {
			case <-closing:
				return errShutdown
			default:
			}
		}
		a.batchLines++
		a.batchBytes += size
		if isBad {
			a.batchRejected = append(a.batchRejected, api.LineError{Line: line, Error: truncate(bad.problem)})
			continue
		}
		a.batch = append(a.batch, job)
	}
}

// storeBatch stores the batch; next is the line after it.
func (a *bodyAppender) storeBatch(ctx context.Context, next int64) error {
	if len(a.batch) > 0 {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
		defer cancel()
		opt := AppendOptions{RequestID: a.requestIDPrefix + "." + strconv.FormatInt(a.batchNumber, 10), TraceParent: a.trace}
		if err := a.backend.Append(ctx, a.group, a.batch, opt); err != nil {
			return err
		}
		a.stored = true
	}
	a.answer.Accepted += int64(len(a.batch))
	a.answer.RejectedTotal += int64(len(a.batchRejected))
	room := maxListedLines - len(a.answer.Rejected)
	a.answer.Rejected = append(a.answer.Rejected, a.batchRejected[:min(room, len(a.batchRejected))]...)
	a.batch, a.batchRejected = make([]messages.Job, 0, maxBatchLines), a.batchRejected[:0]
	a.batchLines, a.batchBytes, a.nextLine = 0, 0, next
	a.batchNumber++
	return nil
}

// storeLastBatch stores the last batch. A body without a good line must not hide that there is
// no such group.
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

// ndjsonSource reads a job a line: {"payload": …}.
type ndjsonSource struct {
	lines   *lineReader
	decoder messages.Decoder
}

func (s *ndjsonSource) next() (messages.Job, int64, int, error) {
	for {
		text, err := s.lines.next()
		if err != nil {
			return messages.Job{}, s.lines.line, 0, err
		}
		if len(text) == 0 {
			continue
		}
		job, err := s.decoder.DecodeJob(text)
		if err != nil {
			err = &lineError{err.Error()}
		}
		return job, s.lines.line, len(text), err
	}
}
