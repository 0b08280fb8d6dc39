package layout_test

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/layout"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// one is a part of a version before layout 2, two of the one that brings it, three of a later one.
var (
	one   = layout.Part{Name: "jobs", Oldest: 1, Newest: 1}
	two   = layout.Part{Name: "jobs", Oldest: 1, Newest: 2}
	three = layout.Part{Name: "jobs", Oldest: 2, Newest: 3}
)

type world struct {
	*testing.T
	conn  *redisx.Conn
	space keyspace.Space
}

func both(t *testing.T, test func(*world)) {
	t.Parallel()
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		conn, err := redisx.Connect(t.Context(), redisx.Config{URL: url})
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		space, err := keyspace.New(prefix, 1)
		require.NoError(t, err)
		test(&world{t, conn, space})
	})
}

func (w *world) set(number string) {
	require.NoError(w, w.conn.Cmd.HSet(w.Context(), w.space.Layouts(), "jobs", number).Err())
}

func (w *world) number() string {
	return w.conn.Cmd.HGet(context.WithoutCancel(w.Context()), w.space.Layouts(), "jobs").Val()
}

func (w *world) start(empty bool, parts ...layout.Part) ([]layout.Number, error) {
	return layout.Start(w.Context(), w.conn.Cmd, w.space.Layouts(), func() (bool, error) { return empty, nil }, parts...)
}

// TestWhichVersionReadsWhat: each version refuses what it can't read, also what is announced or
// remains, and says which version can.
func TestWhichVersionReadsWhat(t *testing.T) {
	both(t, func(w *world) {
		for number, refused := range map[string]map[int]string{
			"1":   {3: "layout 1, and this version reads layouts 2 and 3: run a version that reads layouts 1 and 2"},
			"1+":  {1: "run a later version, which reads layout 2", 3: "reads layouts 1 and 2"},
			"2-":  {1: "run a later version, which reads layout 2", 3: "data of jobs has layout 1"},
			"2":   {1: "run a later version, which reads layout 2"},
			"3-":  {1: "run a later version", 2: "run a later version, which reads layout 3"},
			"x":   {1: `"x" is no number`, 2: `"x" is no number`, 3: `"x" is no number`},
			"0":   {1: `"0" is no number`, 2: `"0" is no number`, 3: `"0" is no number`},
			"1+-": {1: `no number`, 2: `no number`, 3: `no number`},
		} {
			w.set(number)
			for _, p := range []layout.Part{one, two, three} {
				_, err := w.start(true, p)
				if why, ok := refused[p.Newest]; ok {
					require.ErrorIs(w, err, layout.ErrUnsupported, "%s by %d", number, p.Newest)
					require.ErrorContains(w, err, why)
				} else {
					require.NoError(w, err, "%s by %d", number, p.Newest)
				}
			}
			require.Equal(w, number, w.number())
		}
	})
}

// TestFirstNumber: an empty Redis gets the newest layout, data without a number has layout 1. Of two
// versions that start at once, the first one decides.
func TestFirstNumber(t *testing.T) {
	both(t, func(w *world) {
		numbers, err := w.start(false, two)
		require.NoError(w, err)
		require.Equal(w, []layout.Number{{Layout: 1}}, numbers)
		require.Equal(w, "1", w.number())
		require.NoError(w, w.conn.Cmd.Del(w.Context(), w.space.Layouts()).Err())
		_, err = layout.Start(w.Context(), w.conn.Cmd, w.space.Layouts(), func() (bool, error) {
			w.set("2") // another process
			return true, nil
		}, one)
		require.ErrorIs(w, err, layout.ErrUnsupported)
		require.NoError(w, w.conn.Cmd.Del(w.Context(), w.space.Layouts()).Err())
		numbers, err = w.start(true, two)
		require.NoError(w, err)
		require.Equal(w, "2", numbers[0].String())
	})
}

// TestWatchRefuses: a running process sees the announcement of a layout that it can't read.
func TestWatchRefuses(t *testing.T) {
	both(t, func(w *world) {
		w.set("1+")
		var used []layout.Number
		var refused error
		log := slog.New(slog.DiscardHandler)
		layout.Watch(w.Context(), w.conn.Cmd, w.space.Layouts(), log, func([]layout.Number) {}, func(err error) { refused = err }, w.restart(one), one)
		require.ErrorIs(w, refused, layout.ErrUnsupported)
		ctx, cancel := context.WithCancel(w.Context())
		layout.Watch(ctx, w.conn.Cmd, w.space.Layouts(), log, func(n []layout.Number) { used = n; cancel() }, func(error) {}, w.restart(two), two)
		require.Equal(w, []layout.Number{{Layout: 1, Phase: layout.Announced}}, used)
	})
}

// restart returns a function that writes the numbers of an installation without data.
func (w *world) restart(p layout.Part) func(context.Context) error {
	return func(context.Context) error {
		_, err := w.start(true, p)
		return err
	}
}

// TestWatchAfterALoss: when Redis has lost its data, a running process goes on with its newest layout.
func TestWatchAfterALoss(t *testing.T) {
	both(t, func(w *world) {
		ctx, cancel := context.WithCancel(w.Context())
		layout.Watch(ctx, w.conn.Cmd, w.space.Layouts(), slog.New(slog.DiscardHandler), func(n []layout.Number) {
			require.Equal(w, []layout.Number{{Layout: 2}}, n)
			cancel()
		}, func(err error) { require.NoError(w, err) }, w.restart(two), two)
	})
}

// TestMigration: it refuses while an older process lives, waits for one that starts meanwhile, can
// be interrupted in each phase, and converts what is written late.
func TestMigration(t *testing.T) {
	both(t, func(w *world) {
		w.set("1")
		key := func(i int) string { return w.space.Prefix() + "old:" + strconv.Itoa(i) }
		for i := range 25 {
			require.NoError(w, w.conn.Cmd.Set(w.Context(), key(i), i, 0).Err())
		}
		var older []string
		var said []string
		broken := errors.New("broken")
		failAt, late := 12, true
		part := two
		part.Steps = []layout.Step{{Name: "old keys", Convert: func(
			ctx context.Context, conn *redisx.Conn, _ keyspace.Space, cursor string, count bool,
		) (string, int, error) {
			i, _ := strconv.Atoi(cursor)
			if i == failAt && !count {
				return "", 0, broken
			}
			n := int(conn.Cmd.Exists(ctx, key(i)).Val())
			if n == 1 && !count {
				require.NoError(w, conn.Cmd.Rename(ctx, key(i), w.space.Prefix()+"new:"+strconv.Itoa(i)).Err())
			}
			if i == 25 && !count && late { // by a process that had not seen the number
				late = false
				require.NoError(w, conn.Cmd.Set(ctx, key(3), 3, 0).Err())
			}
			if i == 25 {
				return "", n, nil
			}
			return strconv.Itoa(i + 1), n, nil
		}}}
		m := layout.Migration{
			Part: part, Key: w.space.Layouts(), Conn: w.conn, Space: w.space,
			Older: func(context.Context) ([]string, error) { return older, nil },
			Say:   func(format string, _ ...any) { said = append(said, format) },
		}
		older = []string{"worker-1"}
		require.ErrorContains(w, m.Run(w.Context()), "upgrade or stop them first (a killed one counts as alive for some seconds): worker-1")
		require.Equal(w, "1", w.number())
		older = nil
		counts, err := m.Count(w.Context())
		require.NoError(w, err)
		require.Equal(w, map[string]int{"old keys": 25}, counts)

		ctx, cancel := context.WithCancel(w.Context())
		m.Older = func(context.Context) ([]string, error) {
			if w.number() == "1+" { // one has started since
				cancel()
				return []string{"worker-2"}, nil
			}
			return nil, nil
		}
		require.ErrorIs(w, m.Run(ctx), context.Canceled)
		require.Equal(w, "1", w.number(), "the announcement is taken back")

		m.Older = func(context.Context) ([]string, error) { return nil, nil }
		require.ErrorIs(w, m.Run(w.Context()), broken)
		require.Equal(w, "2-", w.number())
		failAt = -1
		require.NoError(w, m.Run(w.Context()))
		require.Equal(w, "2", w.number())
		require.Empty(w, w.conn.Cmd.Keys(w.Context(), w.space.Prefix()+"old:*").Val())
		require.Len(w, w.conn.Cmd.Keys(w.Context(), w.space.Prefix()+"new:*").Val(), 25)
		said = nil
		require.NoError(w, m.Run(w.Context()))
		require.Empty(w, strings.Join(said, "\n"))

		m.Part = three
		w.set("1")
		require.ErrorIs(w, m.Run(w.Context()), layout.ErrUnsupported)
	})
}
