package app

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func TestIngestStreams(t *testing.T) {
	many := make([]string, maxIngestStreams+1)
	for i := range many {
		many[i] = fmt.Sprintf("acme=bulk-action:ingest:s%d", i)
	}
	load := func(value, prefix string) ([]IngestStream, error) {
		c, _, err := Load([]string{"BULKACTION_INGEST_STREAMS=" + value, "BULKACTION_KEY_PREFIX=" + prefix})
		return c.Ingest.IngestStreams(), err
	}
	const prefix = "bulk-action:"
	got, err := load("acme=bulk-action:ingest:a,globex=bulk-action:ingest:ingest,acme=bulk-action:ingest:b.2", prefix)
	require.NoError(t, err)
	require.Equal(t, []IngestStream{{"acme", prefix, "a"}, {"globex", prefix, "ingest"}, {"acme", prefix, "b.2"}}, got)
	got, err = load("acme=ingest:ingest:a", "ingest:")
	require.NoError(t, err)
	require.Equal(t, []IngestStream{{"acme", "ingest:", "a"}}, got)
	_, err = load(strings.Join(many[1:], ","), prefix)
	require.NoError(t, err)

	for name, value := range map[string]string{
		"no stream":               "acme",
		"an empty stream":         "acme=",
		"no tenant":               "=bulk-action:ingest:a",
		"a wrong tenant":          "a{b=bulk-action:ingest:a",
		"the main stream":         "acme=bulk-action:ingest",
		"no name":                 "acme=bulk-action:ingest:",
		"rejected messages":       "acme=bulk-action:ingest:rejected",
		"a brace":                 "acme=bulk-action:ingest:{0}",
		"a colon":                 "acme=bulk-action:ingest:a:b",
		"a long name":             "acme=bulk-action:ingest:" + strings.Repeat("a", keyspace.MaxIngestName+1),
		"another key":             "acme=bulk-action:events",
		"the same stream twice":   "acme=bulk-action:ingest:a,globex=bulk-action:ingest:a",
		"a space":                 "acme=bulk-action:ingest:a, globex=bulk-action:ingest:b",
		"an empty entry":          "acme=bulk-action:ingest:a,",
		"more streams than there": strings.Join(many, ","),
	} {
		_, err := load(value, prefix)
		require.ErrorContains(t, err, "BULKACTION_INGEST_STREAMS=", name)
		require.ErrorContains(t, err, "must be a comma list of tenant=stream", name)
	}
	_, err = load("acme=other:ingest:a", prefix)
	require.ErrorContains(t, err, "must have streams that begin with the value of BULKACTION_KEY_PREFIX")
}
