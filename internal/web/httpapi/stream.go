package httpapi

import (
	"bufio"
	"context"
	"net/http"
	"time"
)

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
