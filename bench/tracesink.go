package bench

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"
)

// traceSink is an HTTP server that receives the traces which processes export by OTLP. It counts
// the bytes of the requests and drops the traces.
type traceSink struct {
	server *http.Server
	url    string
	bytes  atomic.Int64
}

func startTraceSink(ctx context.Context) (*traceSink, error) {
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start the receiver of traces: %w", err)
	}
	s := &traceSink{url: "http://" + listener.Addr().String()}
	s.server = &http.Server{Handler: http.HandlerFunc(s.receive), ReadHeaderTimeout: time.Minute}
	go s.server.Serve(listener) //nolint:errcheck // it ends with Close
	return s, nil
}

func (s *traceSink) receive(w http.ResponseWriter, r *http.Request) {
	n, _ := io.Copy(io.Discard, r.Body) // the exporter repeats a request that fails
	s.bytes.Add(n)
	// an empty body means: all spans were accepted
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// env returns environment variables with which processes trace the fraction `ratio` of the jobs,
// send traces to s, and export no metrics.
func (s *traceSink) env(ratio float64) []string {
	return []string{
		"OTEL_EXPORTER_OTLP_ENDPOINT=" + s.url, "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
		"OTEL_METRICS_EXPORTER=none",
		"OTEL_TRACES_SAMPLER=parentbased_traceidratio",
		"OTEL_TRACES_SAMPLER_ARG=" + strconv.FormatFloat(ratio, 'g', -1, 64),
	}
}

func (s *traceSink) close() { _ = s.server.Close() }
