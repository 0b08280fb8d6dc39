package app

import (
	"slices"
	"strings"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

const maxIngestStreams = 64

// IngestStream is an ingest stream in addition to the common one. All its messages belong to one
// tenant.
type IngestStream struct {
	Tenant string
	Prefix string // of the installation's keys
	Name   string // what follows the prefix and "ingest:" in the name of the stream
}

// ParseIngestStreams parses the value of INGEST_STREAMS. ok is false if an entry is invalid, a
// stream is named twice, or there are more than 64.
func ParseIngestStreams(list []string) (streams []IngestStream, ok bool) {
	for _, text := range list {
		tenant, key, _ := strings.Cut(text, "=")
		at := strings.LastIndex(key, "ingest:")
		if at < 0 || !api.ValidID(tenant) {
			return nil, false
		}
		s := IngestStream{Tenant: tenant, Prefix: key[:at], Name: key[at+len("ingest:"):]}
		same := func(other IngestStream) bool { return other.Prefix == s.Prefix && other.Name == s.Name }
		if !api.ValidID(s.Name) || !keyspace.FitsIngestOf(s.Name) || slices.ContainsFunc(streams, same) {
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
