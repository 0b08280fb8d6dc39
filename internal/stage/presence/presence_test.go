package presence_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func TestStatusOfDeadProcessesIsIgnored(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		// report stores a heartbeat of this age by the clock of Redis. That clock decides, because
		// the clocks of hosts differ.
		report := func(id string, age time.Duration) {
			r := presence.WorkerReport{WorkerStatus: api.WorkerStatus{ID: id, Types: []string{"T"}, Workers: 3}}
			require.NoError(w.T, presence.PublishWorker(ctx, w.Conn, w.Space, r))
			shown, err := w.Conn.Cmd.HGet(ctx, w.Space.Workers(), id).Result()
			require.NoError(w.T, err)
			ms, text, _ := strings.Cut(shown, " ")
			at := time.UnixMilli(stagetest.Decode[int64](w.T, ms)).Add(-age)
			require.WithinDuration(w.T, time.Now().Add(-age), at, stagetest.Patience)
			require.NoError(w.T, w.Conn.Cmd.HSet(ctx, w.Space.Workers(), id, fmt.Sprintf("%d %s", at.UnixMilli(), text)).Err())
		}
		report("live", 0)
		report("silent", 2*presence.TTL)
		report("gone", time.Hour)
		require.NoError(w.T, w.Conn.Cmd.HSet(ctx, w.Space.Workers(), "unreadable", "{").Err())

		ids := func() (ids []string) {
			all, err := presence.Workers(ctx, w.Conn, w.Space)
			require.NoError(w.T, err)
			for _, r := range all {
				ids = append(ids, r.ID)
			}
			return ids
		}
		require.Equal(w.T, []string{"live"}, ids())
		kept, err := w.Conn.Cmd.HKeys(ctx, w.Space.Workers()).Result()
		require.NoError(w.T, err)
		require.ElementsMatch(w.T, []string{"live", "silent"}, kept)

		ended, cancel := context.WithCancel(ctx)
		cancel()
		presence.Withdraw(ended, w.Conn, w.Space, "live")
		require.Empty(w.T, ids())
	})
}
