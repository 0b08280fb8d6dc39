package ledger_test

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// FuzzGarbage: the same blob, mostly garbage, lies in a queue, among non-ready and suspended jobs
// and in the ready stream. Promote, Admit, Start, Outcome and Reclaim do not fail, and the valid
// job in the queue becomes done once.
func FuzzGarbage(f *testing.F) {
	for _, seed := range []string{
		"", "junk", "\x00\xff", "0|1||x", "-1|1||x", "7|1||x", "99999999999999999999|1||x", "1e9|1||",
		"g|T|1|0|0|0|0|0|0|1|E|0|1||x", "g|T|0|0|0|0|0|0|0|1|S|0|1||x", "g|T|1|0|0|0|0|0|0|1||-1|1||x", "g|T|1|0|0|0|0|0|0|1||9007199254740993|1||x",
		"g|U|1|0|0|0|0|0|0|1||0|1||x", "other|T|1|0|0|0|0|0|0|1|R|0|1||x", "|T|1|0|0|0|0|0|0|1||0|1||x", "g|T|99999999999999999999|0|0|0|0|0|0|1||0|1||x", "a:b{c}|T|1|0|0|0|0|0|0|1||0|1||x",
	} {
		f.Add(seed)
	}
	url, prefix := redistest.Shared(f)
	c := client(f, url)
	f.Fuzz(func(t *testing.T, blob string) {
		w := newWorld(t, c, prefix)
		if keys := w.keys(); len(keys) > 0 {
			require.NoError(t, c.Del(t.Context(), keys...).Err())
		}
		w.create("g", "acme", "T")
		w.append("g", 1)
		lies := func(err error) { require.NoError(t, err) }
		lies(c.XAdd(t.Context(), &redis.XAddArgs{Stream: w.p.Ready("T"), Values: []any{ledger.BlobField, blob}}).Err())
		lies(c.ZAdd(t.Context(), w.p.NonReadyOf("acme"), redis.Z{Score: 1, Member: blob}).Err())
		lies(c.ZAdd(t.Context(), w.p.SuspendedOf("acme"), redis.Z{Score: 1, Member: blob}).Err())
		lies(c.SAdd(t.Context(), w.p.Suspended(), "acme").Err())
		lies(c.ZAdd(t.Context(), w.p.NonReady(), redis.Z{Score: 1, Member: "acme"}).Err())
		lies(c.RPush(t.Context(), w.p.Queue("g", "T"), blob).Err())
		w.resume(ledger.PauseTenant, "acme")
		var run []taken
		for range 3 {
			w.promote(noLimit, "T")
			w.admit("T", 10, noLimit)
			w.consumerGroup(w.p.Ready("T"), "workers")
			read, err := c.XReadGroup(t.Context(), &redis.XReadGroupArgs{Group: "workers", Consumer: "c", Streams: []string{w.p.Ready("T"), ">"}, Block: -1}).Result()
			if err != nil {
				require.ErrorIs(t, err, redis.Nil)
				continue
			}
			for _, e := range read[0].Messages {
				if d, err := ledger.ParseJob(ledger.MessageBlob(e.Values)); err == nil {
					run = append(run, taken{entry: e.ID, Job: d})
				}
			}
			w.start("T", run)
			for _, j := range run {
				if j.token >= 0 {
					w.outcome("T", done(j))
				}
			}
			run = nil
			w.reclaim("T", 3)
		}
		require.Equal(t, "1", c.HGet(t.Context(), w.p.Group("g"), "done").Val(), "states %q, garbage %q", w.states("g"), w.c.LRange(t.Context(), w.p.Quarantine(), 0, -1).Val())
		w.cancel("g")
		w.sweep("g")
	})
}
