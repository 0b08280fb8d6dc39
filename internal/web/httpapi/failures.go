package httpapi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// FailureQuery selects failed jobs of a group: with Limit 0 all of them, otherwise a page.
type FailureQuery struct {
	Code     string // "": any
	Payloads bool   // with the payloads of the jobs
	Cursor   string // of a page: where the page before ended
	Limit    int    // 0: all; up to 1,000
}

// streamFailures answers with lines of NDJSON, one for each failed job that the query selects. With
// a limit or a cursor they are one page, and the header Link leads to the next one if there is any.
func (s *server) streamFailures(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	query := r.URL.Query()
	q := FailureQuery{Code: query.Get("code")}
	if q.Payloads, err = boolParam(r, "payload"); err != nil {
		return err
	}
	if len(q.Code) > MaxCodeLength {
		return invalidField("code", fmt.Sprintf("must be at most %d bytes", MaxCodeLength))
	}
	lines := func(write func([]byte) error) (next string, err error) {
		return s.Backend.Failures(r.Context(), id, q, func(f api.Failure) error {
			line, err := json.Marshal(f)
			if err != nil {
				return fmt.Errorf("encode failure %d of group %s: %w", f.Ordinal, id, err)
			}
			return write(line)
		})
	}
	if !query.Has("cursor") && !query.Has("limit") {
		return streamLines(r.Context(), w, func(write func([]byte) error) error {
			_, err := lines(write)
			return err
		})
	}
	if q.Cursor, q.Limit, err = pageParams(r); err != nil {
		return err
	}
	var page bytes.Buffer
	next, err := lines(func(line []byte) error {
		_, _ = page.Write(line) // never fails
		return page.WriteByte('\n')
	})
	if err != nil {
		return err
	}
	if next != "" {
		query.Set("cursor", next)
		w.Header().Set("Link", "</v1/groups/"+id+"/failures?"+query.Encode()+`>; rel="next"`)
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	_, err = w.Write(page.Bytes())
	return err
}

const (
	defaultBuckets = 500
	maxBuckets     = 1000
)

// getMap returns the function that reads the map of a group's jobs.
func getMap(b Backend) func(*http.Request) (api.JobMap, error) {
	return func(r *http.Request) (m api.JobMap, err error) {
		id, err := pathID(r)
		if err != nil {
			return m, err
		}
		buckets := defaultBuckets
		if v := r.URL.Query().Get("buckets"); v != "" {
			if buckets, err = strconv.Atoi(v); err != nil || buckets < 1 || buckets > maxBuckets {
				return m, invalidField("buckets", fmt.Sprintf("must be 1 to %d", maxBuckets))
			}
		}
		m, err = b.JobMap(r.Context(), id, buckets)
		m.Buckets = orEmpty(m.Buckets)
		return m, err
	}
}

const (
	streamBuffer = 32 << 10    // size of the buffer for an answer, in bytes
	streamDelay  = time.Second // a line flushes the buffer if the last flush is as old as this
)

func (s *server) streamResults(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	return streamLines(r.Context(), w, func(write func([]byte) error) error {
		return s.Backend.Results(r.Context(), id, write)
	})
}

// streamLines answers with the lines that produce writes, as NDJSON. Until the first lines are
// sent, because the buffer is full or streamDelay is over, an error is answered with a problem. A
// later error breaks the connection, so that the client does not mistake a part of the lines for
// all.
func streamLines(
	ctx context.Context, w http.ResponseWriter, produce func(write func(line []byte) error) error,
) error {
	out := bufio.NewWriterSize(w, streamBuffer)
	ctl := http.NewResponseController(w)
	sent := time.Now()
	w.Header().Set("Content-Type", "application/x-ndjson")
	err := produce(func(line []byte) error {
		if err := keyEnded(ctx); err != nil {
			return err
		}
		_, _ = out.Write(line) // a later call returns its error
		if err := out.WriteByte('\n'); err != nil {
			return err
		}
		if time.Since(sent) < streamDelay {
			return nil
		}
		sent = time.Now()
		if err := out.Flush(); err != nil {
			return err
		}
		return ctl.Flush()
	})
	if err != nil {
		return err
	}
	if out.Buffered() == 0 {
		w.WriteHeader(http.StatusOK)
	}
	return out.Flush()
}
