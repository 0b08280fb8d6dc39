package ledger_test

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// changing is a Redis whose replies of scripts arrive changed.
type changing struct {
	redis.Cmdable
	change func(reply []any) any
}

func (c changing) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	cmd := c.Cmdable.EvalSha(ctx, sha, keys, args...)
	if reply, ok := cmd.Val().([]any); ok {
		cmd.SetVal(c.change(reply))
	}
	return cmd
}

// TestUnexpectedRepliesAreErrors: a reply that is shorter or longer than the script's contract, or
// has a value of another type, is an error that names the script. Nothing of it reads as zero: of
// an admission that has moved jobs, "none were moved" would be a lie.
func TestUnexpectedRepliesAreErrors(t *testing.T) {
	type call func(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (any, error)
	one := []ledger.StartGroup{{Group: "g", Jobs: []ledger.StartJob{{Entry: "1-1", Failed: true}}}}
	calls := map[string]struct {
		call call
		zero any
	}{
		"admit": {func(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (any, error) {
			return ledger.Admit(ctx, c, p, ledger.AdmitArgs{Type: "T", Most: 1, Cap: 9, Meter: limit(9).Meter, Seed: seed, LaneWeights: [3]int{1, 1, 1}})
		}, ledger.AdmitReply{}},
		"promote": {func(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (any, error) {
			return ledger.Promote(ctx, c, p, ledger.PromoteArgs{Most: 1, Cap: 9, Meter: noLimit.Meter, Seed: seed})
		}, ledger.PromoteReply{}},
		"append": {func(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (any, error) {
			return ledger.Append(ctx, c, p, ledger.AppendArgs{Group: "g", Limit: 100, Jobs: jobs(1)})
		}, ledger.AppendReply{}},
		"start": {func(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (any, error) {
			return ledger.Start(ctx, c, p, "T", one)
		}, ledger.StartReply{}},
		"outcome": {func(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (any, error) {
			return ledger.Outcome(ctx, c, p, "T", ledger.Congestion{Cap: time.Hour}, nil)
		}, ledger.OutcomeReply{}},
		"reclaim": {func(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (any, error) {
			return ledger.Reclaim(ctx, c, p, "T", time.Hour, 1, 3, false)
		}, ledger.ReclaimReply{}},
		"reduce": {func(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (any, error) {
			return ledger.Reduce(ctx, c, p, ledger.ReduceArgs{Group: "g", Partial: "0"})
		}, []ledger.ReduceReply(nil)},
		"advance": {func(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (any, error) {
			return ledger.Advance(ctx, c, p, "g")
		}, []ledger.AdvanceReply(nil)},
		"tenant_state": {func(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (any, error) {
			return ledger.Tenant(ctx, c, p, "acme", noLimit.Meter)
		}, ledger.TenantState{}},
		"why": {func(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (any, error) {
			return ledger.Why(ctx, c, p, "g", 0, 10)
		}, ledger.WaitingJob{}},
		"seal": {func(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (any, error) {
			return ledger.Seal(ctx, c, p, "h", nil)
		}, false},
	}
	onStores(t, func(w *world) {
		w.fill("g", 60, "acme", "T")
		w.create("h", "acme", "T")
		fence, err := ledger.Lead(w.Context(), w.c, w.p, "w", time.Hour)
		require.NoError(w, err)
		require.EqualValues(w, 1, fence)
		for name, test := range calls {
			ctx := w.Context()
			_, err := test.call(ctx, w.c, w.p) // also loads the script
			require.NoError(w, err, name)
			for kind, change := range map[string]func([]any) any{
				"short":  func(reply []any) any { return reply[:len(reply)-1] },
				"empty":  func(reply []any) any { return []any{} },
				"long":   func(reply []any) any { return append(reply, int64(1)) },
				"typed":  func(reply []any) any { reply[len(reply)-1] = 1.5; return reply },
				"absent": func([]any) any { return nil },
				"inside": func(reply []any) any { // the first list
					for i := range reply {
						if inner, ok := reply[i].([]any); ok {
							reply[i] = append(inner, 1.5)
							return reply
						}
					}
					return append(reply, nil)
				},
			} {
				got, err := test.call(ctx, changing{w.c, change}, w.p)
				require.ErrorContains(w, err, "script "+name+": unexpected reply: ", kind)
				require.Equal(w, test.zero, got, "%s, %s", name, kind)
			}
		}
	})
}

// TestUnexpectedRefusals: a refusal without the values that its text needs is an unexpected reply.
func TestUnexpectedRefusals(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		w.cancel("g")
		w.sweep("g")
		short := changing{w.c, func(reply []any) any { return reply[:1] }}
		require.ErrorContains(w, ledger.Pause(w.Context(), w.c, w.p, ledger.PauseGroup, "g"), "group g is CANCELLED")
		require.ErrorContains(w, ledger.Pause(w.Context(), short, w.p, ledger.PauseGroup, "g"),
			"script pause: unexpected reply: too short")
	})
}

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
		w.fill("g", 1, "acme", "T")
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
