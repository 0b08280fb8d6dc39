package app

import (
	"slices"
	"strings"

	"github.com/bulkaction/bulkaction/api"
)

const (
	maxIngestStreams = 64
	maxStreamName    = 64
)

// IngestStream is a further ingest stream. All its messages are of one tenant.
type IngestStream struct {
	Tenant string
	Prefix string // of the installation's keys
	Name   string // what follows the prefix and "ingest:" in the name of the stream
}

// ParseIngestStreams returns the streams of INGEST_STREAMS. ok is false if one is wrong.
func ParseIngestStreams(list []string) (streams []IngestStream, ok bool) {
	for _, text := range list {
		tenant, key, _ := strings.Cut(text, "=")
		at := strings.LastIndex(key, "ingest:")
		if at < 0 || !api.ValidID(tenant) {
			return nil, false
		}
		s := IngestStream{Tenant: tenant, Prefix: key[:at], Name: key[at+len("ingest:"):]}
		same := func(other IngestStream) bool { return other.Prefix == s.Prefix && other.Name == s.Name }
		if !api.ValidID(s.Name) || len(s.Name) > maxStreamName || s.Name == "rejected" ||
			slices.ContainsFunc(streams, same) {
			return nil, false
		}
		streams = append(streams, s)
	}
	return streams, len(streams) <= maxIngestStreams
}

// IngestStreams returns the further ingest streams.
func (c IngestConfig) IngestStreams() []IngestStream {
	streams, _ := ParseIngestStreams(c.Streams) // the rule of the variable has accepted them
	return streams
}

func (c Config) streamsHavePrefix() bool {
	return !slices.ContainsFunc(c.Ingest.IngestStreams(), func(s IngestStream) bool {
		return s.Prefix != c.Redis.KeyPrefix
	})
}
