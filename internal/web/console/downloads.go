package console

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

const (
	downloadPage   = 1000      // failed jobs that are read at once
	downloadBuffer = 128 << 10 // bytes
)

// downloads are the files of a group: what is in them, and their formats.
var downloads = []string{"results.ndjson", "results.csv", "failures.ndjson", "failures.csv"}

// download is a file that is written while it is read, so that a large group takes little memory.
type download struct {
	*Console
	w    http.ResponseWriter
	r    *http.Request
	name string // of the file
	csv  bool
	text bytes.Buffer // not yet sent
	sent bool         // a part of the file is
}

// serveDownload answers with a file of a group. It checks the session for each part. An error before
// the first part is answered with a page of HTML. A later error breaks the connection, so that a part
// of the jobs is not mistaken for all.
func (c *Console) serveDownload(file string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		id, err := pathID(r, "id")
		d := &download{Console: c, w: w, r: r, name: id + "-" + file, csv: strings.HasSuffix(file, ".csv")}
		if err == nil {
			if strings.HasPrefix(file, "results") {
				err = d.results(id)
			} else {
				err = d.failures(id)
			}
		}
		if err == nil {
			err = d.send()
		}
		switch {
		case err != nil && d.sent:
			panic(http.ErrAbortHandler)
		case err != nil:
			c.fail(w, r, err)
		}
	}
}

func (d *download) results(id string) error {
	d.row("ordinal", "key", "attempts", "duration_ms", "started", "data")
	return d.Backend.Results(d.r.Context(), id, func(line []byte) error {
		if d.csv {
			var r api.Result
			if err := json.Unmarshal(line, &r); err != nil {
				return fmt.Errorf("decode a result: %w", err)
			}
			started := ""
			if r.StartedMS > 0 {
				started = isoTime(time.UnixMilli(r.StartedMS))
			}
			d.row(r.Ordinal, r.Key, r.Attempts, r.DurationMS, started, string(r.Data))
		} else {
			d.text.Write(line)
			d.text.WriteByte('\n')
		}
		if d.text.Len() < downloadBuffer {
			return nil
		}
		return d.send()
	})
}

// failures reads the failed jobs page by page; CSV has their payloads.
func (d *download) failures(id string) (err error) {
	q := messages.FailureQuery{Limit: downloadPage, Payloads: d.csv}
	if q.Code, err = codeOf(d.r.URL.Query()); err != nil {
		return err
	}
	d.row("ordinal", "key", "code", "error", "attempts", "at", "payload")
	for {
		if q.Cursor, err = d.failurePage(id, q); err != nil || q.Cursor == "" {
			return err
		}
		if err := d.send(); err != nil {
			return err
		}
	}
}

func (d *download) failurePage(id string, q messages.FailureQuery) (next string, err error) {
	ctx, cancel := context.WithTimeout(d.r.Context(), readTimeout)
	defer cancel()
	out := json.NewEncoder(&d.text)
	return d.Backend.Failures(ctx, id, q, func(f api.Failure) error {
		if !d.csv {
			return out.Encode(f)
		}
		d.row(f.Ordinal, f.Key, f.Code, f.Error, f.Attempts, isoTime(f.At), string(f.Payload))
		return nil
	})
}

// row adds a row of CSV; to NDJSON it adds nothing. A text that spreadsheets would run as a formula
// gets an apostrophe in front.
func (d *download) row(cells ...any) {
	if !d.csv {
		return
	}
	row := make([]string, len(cells))
	for i, cell := range cells {
		row[i] = fmt.Sprint(cell)
		_, text := cell.(string)
		if _, err := strconv.ParseFloat(row[i], 64); err != nil && text && strings.IndexAny(row[i], "=+-@\t\r") == 0 {
			row[i] = "'" + row[i]
		}
	}
	out := csv.NewWriter(&d.text)
	_ = out.Write(row) // a buffer takes everything
	out.Flush()
}

// send sends what was read.
func (d *download) send() error {
	if d.sent {
		if _, err := d.principal(d.r, false); err != nil {
			return err
		}
	} else {
		mediaType := "application/x-ndjson"
		if d.csv {
			mediaType = "text/csv; charset=utf-8"
		}
		d.w.Header().Set("Content-Type", mediaType)
		d.w.Header().Set("Content-Disposition", `attachment; filename="`+d.name+`"`)
		if d.sent = true; d.csv {
			_, _ = io.WriteString(d.w, "\ufeff") // Excel takes a file without it for one that is not UTF-8
		}
	}
	_, err := d.text.WriteTo(d.w)
	return err
}
