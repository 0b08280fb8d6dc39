package groups_test

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// vanishing is a hook of the Redis client that deletes a key just before its first GET, as if the
// key had expired then.
type vanishing struct {
	client redis.Cmdable
	key    string
	gone   bool
}

// makeVanish adds the hook to the client of w.
func makeVanish(w *stagetest.World, key string) *vanishing {
	v := &vanishing{client: w.Connect().Cmd, key: key}
	w.Conn.Cmd.AddHook(v)
	return v
}

func (v *vanishing) DialHook(next redis.DialHook) redis.DialHook { return next }

func (v *vanishing) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (v *vanishing) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if !v.gone && cmd.Name() == "get" && cmd.Args()[1] == v.key {
			v.gone = true
			v.client.Del(ctx, v.key)
		}
		return next(ctx, cmd)
	}
}

// TestOwnerKeyThatVanishes: a submission is stored although the owner key of an earlier group with
// the same id is deleted between the two commands that register it.
func TestOwnerKeyThatVanishes(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx, owner := stagetest.Trusted(w.T), w.P.Owner("g")
		require.NoError(w.T, w.Conn.Cmd.Set(ctx, owner, "globex", 0).Err())
		v := makeVanish(w, owner)
		_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T"}, groups.Origin{})
		require.NoError(w.T, err)
		require.True(w.T, v.gone)
		require.Equal(w.T, "acme", w.Conn.Cmd.Get(ctx, owner).Val())
	})
}

// TestIdempotencyRecordThatVanishes: a submission is stored although the record of its idempotency
// key expires between the two commands that reserve the key.
func TestIdempotencyRecordThatVanishes(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := stagetest.Trusted(w.T)
		submit := func(id string) string {
			a, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: id, Tenant: "acme", Type: "T"},
				groups.Origin{IdempotencyKey: "k", GeneratedID: true, At: time.Now()})
			require.NoError(w.T, err)
			return a.ID
		}
		require.Equal(w.T, "first", submit("first"))
		v := makeVanish(w, w.Conn.Cmd.Keys(ctx, w.Space.Idempotency("*")).Val()[0])
		require.Equal(w.T, "second", submit("second"))
		require.True(w.T, v.gone)
		require.Equal(w.T, "second", submit("third"))
	})
}
