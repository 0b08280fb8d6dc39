package groups_test

import (
	"context"
	"fmt"
	"io"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// lossy is a hook of the Redis client that loses the first reply to each different command: Redis
// executes it, and the caller gets a network error. Commands are different if their names or first
// arguments are (a key or a script). A pipeline counts as its first command and its length.
type lossy struct {
	mu   sync.Mutex
	seen map[string]bool
}

func (l *lossy) loses(cmds ...redis.Cmder) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	args := cmds[0].Args()
	name := fmt.Sprint(len(cmds), args[:min(2, len(args))])
	fresh := !l.seen[name]
	l.seen[name] = true
	return fresh
}

func (l *lossy) DialHook(next redis.DialHook) redis.DialHook { return next }

func (l *lossy) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if l.loses(cmd) {
			err = io.ErrUnexpectedEOF
			cmd.SetErr(err)
		}
		return err
	}
}

func (l *lossy) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		if l.loses(cmds...) {
			err = io.ErrUnexpectedEOF
			for _, cmd := range cmds {
				cmd.SetErr(err)
			}
		}
		return err
	}
}

// TestALostReplyFailsNoRequest: submit, append (of a request or an entry), seal, pause and cancel
// succeed although the first reply to each of their commands is lost.
func TestALostReplyFailsNoRequest(t *testing.T) {
	t.Parallel()
	ctx := stagetest.Trusted(t)
	for name, request := range map[string]func(*groups.Store) error{
		"submit": func(s *groups.Store) error {
			_, err := s.Submit(ctx, &messages.SubmitGroup{ID: "new", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(1)}, now)
			return err
		},
		"append": func(s *groups.Store) error { return s.Append(ctx, "g", stagetest.Numbered(1), "r", now) },
		"entry":  func(s *groups.Store) error { return appendEntry(ctx, s, "g", stagetest.Numbered(1), "1-1", "", now) },
		"seal":   func(s *groups.Store) error { _, err := s.Seal(ctx, "g", nil); return err },
		"pause":  func(s *groups.Store) error { _, err := s.Pause(ctx, "g"); return err },
		"cancel": func(s *groups.Store) error { _, err := s.Cancel(ctx, "g"); return err },
	} {
		t.Run(name, func(t *testing.T) {
			url, prefix := redistest.Shared(t)
			w := stagetest.New(t, url, prefix, 1)
			_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(1)}, now)
			require.NoError(t, err)
			w.Conn.Cmd.AddHook(&lossy{seen: map[string]bool{}})
			require.NoError(t, request(w.NewStore(groups.Config{MaxBacklog: 100, MaxMemoryRatio: 0.9})))
		})
	}
}
