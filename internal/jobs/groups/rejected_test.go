package groups_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestRejectedMessages(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		t := w.T
		at := time.Date(2026, 11, 24, 1, 2, 3, 0, time.UTC)
		const all = 45 // more than two chunks
		for i := range all {
			require.NoError(t, w.Conn.Cmd.XAdd(stagetest.Trusted(t), &redis.XAddArgs{Stream: w.Space.Rejected(), ID: fmt.Sprintf("%d-0", i+1), Values: []any{
				"reason", "no such type", "entry", "7-0", "at", at.Format(time.RFC3339Nano), "id", fmt.Sprint("m", i), "type", "no.such", "data", "{}",
			}}).Err())
		}
		var ids []string
		for cursor, first := "", true; first || cursor != ""; first = false {
			page, err := w.Store.Rejected(stagetest.Trusted(t), cursor, 22, false)
			require.NoError(t, err)
			for _, m := range page.Rejected {
				require.Empty(t, m.Data)
				ids = append(ids, m.MessageID)
			}
			cursor = page.Cursor
		}
		require.Len(t, ids, all)
		require.Equal(t, []string{"m44", "m0"}, []string{ids[0], ids[all-1]})

		page, err := w.Store.Rejected(stagetest.Trusted(t), "", 1, true)
		require.NoError(t, err)
		require.Equal(t, "45-0", page.Cursor)
		m := page.Rejected[0]
		require.Equal(t, "{} no.such no such type 7-0 2", fmt.Sprint(m.Data, " ", m.Type, " ", m.Reason, " ", m.Entry, " ", m.Bytes))
		require.Equal(t, at, *m.At)
		for _, cursor := range []string{"x", "1", "-", "1-", "1-2-3", "+", "0-0"} {
			_, err := w.Store.Rejected(stagetest.Trusted(t), cursor, 1, false)
			require.ErrorContains(t, err, "cursor")
		}

		// Of 60 rejected messages of 256 KiB, a page with the limit 1,000 has only 40, because a
		// call reads a bounded number of bytes.
		large := strings.Repeat("x", 256<<10)
		for i := range 60 {
			require.NoError(t, w.Conn.Cmd.XAdd(stagetest.Trusted(t), &redis.XAddArgs{Stream: w.Space.Rejected(), ID: fmt.Sprintf("%d-0", i+100), Values: []any{"data", large}}).Err())
		}
		page, err = w.Store.Rejected(stagetest.Trusted(t), "", 1000, true)
		require.NoError(t, err)
		require.Len(t, page.Rejected, 40)
		require.Equal(t, "120-0", page.Cursor)
	})
}
