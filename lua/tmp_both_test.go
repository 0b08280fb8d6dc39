package lua_test

import (
	"testing"
	"fmt"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func both(t *testing.T, f func(w *world)) {
	for _, name := range []string{"redis", "miniredis"} {
		t.Run(name, func(t *testing.T) {
			addr := "127.0.0.1:7399"
			if name == "miniredis" {
				addr = miniredis.RunT(t).Addr()
			}
			c := redis.NewClient(&redis.Options{Addr: addr})
			ks, err := keyspace.New(fmt.Sprintf("t%d:", time.Now().UnixNano()), 1)
			require.NoError(t, err)
			f(&world{t: t, ctx: t.Context(), c: c, p: ks.Partition(0)})
		})
	}
}
