package activity_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestEntryOnBothServers: the script that stores entries works on a real Redis, and on the embedded
// server of `bulkaction dev`.
func TestEntryOnBothServers(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		opt, err := redis.ParseURL(url)
		require.NoError(t, err)
		c := redis.NewClient(opt)
		t.Cleanup(func() { _ = c.Close() })
		space, err := keyspace.New(prefix, 1)
		require.NoError(t, err)
		for _, keep := range []time.Duration{0, time.Hour} {
			log := activity.New(c, space, keep, slog.New(slog.DiscardHandler))
			require.NoError(t, log.Do(t.Context(), api.Activity{Action: "group.cancel", Object: "g"}, func(context.Context) error { return nil }))
		}
		list, err := activity.New(c, space, 0, slog.New(slog.DiscardHandler)).Read(t.Context(), activity.Query{Limit: 10})
		require.NoError(t, err)
		require.Len(t, list.Activity, 2)
	})
}
