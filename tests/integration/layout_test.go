package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

// present and next are numbers of the layout of jobs: that of this version, and the one after it.
var present, next = strconv.Itoa(ledger.Layout.Newest), strconv.Itoa(ledger.Layout.Newest + 1)

// layoutTwo changes the program into one that reads the present layout of jobs and the next one. In
// the next one a job's
// blob has one more field, and the records of idempotency keys have other names.
var layoutTwo = map[string][][2]string{
	"internal/jobs/ledger/layout.go": {{
		"layout.Part{Name: layout.Jobs, Oldest: " + strconv.Itoa(ledger.Layout.Oldest) + ", Newest: " + present + "}",
		"layout.Part{Name: layout.Jobs, Oldest: " + present + ", Newest: " + next + ", Steps: stepsToTwo}",
	}},
	"internal/jobs/ledger/job.go": {{
		"	if job.Key == \"\" {\n		return to\n	}\n	to = append(append(to, fieldMark), job.Key...)\n	return append(to, fieldMark)\n",
		"	if job.Key == \"\" && !fieldTwo.Load() {\n		return to\n	}\n	to = append(append(to, fieldMark), job.Key...)\n" +
			"	to = append(to, fieldMark)\n	if fieldTwo.Load() {\n		to = append(append(to, \"two\"...), fieldMark)\n	}\n	return to\n",
	}},
	"internal/redisx/keyspace/keyspace.go": {
		{"{ s.layout.Store(int32(n)) }", "{ s.layout.Store(int32(n)); OnLayout(n) }\n\n// OnLayout is called with each number.\nvar OnLayout = func(int) {}"},
	},
	"internal/jobs/groups/submit.go": {
		{
			"	at := s.space.Idempotency(hex.EncodeToString(sum[:16]))\n",
			"	old := s.space.Idempotency(hex.EncodeToString(sum[:16]))\n	at := old\n" +
				"	if s.space.Layout() == " + next + " {\n		at = s.space.Idempotency(\"two:\" + hex.EncodeToString(sum[:16]))\n	}\n",
		},
		{
			"		stored, err := s.storeIfNone(ctx, at, mine)\n",
			"		if before, err := s.appender.Get(ctx, old).Bytes(); err == nil {\n			return json.Unmarshal(before, &first)\n		}\n" +
				"		stored, err := s.storeIfNone(ctx, at, mine)\n",
		},
	},
}

// stepsTwo are the steps of the migration to the next layout, in a file of their own.
var stepsTwo = `package ledger

import (
	"context"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/layout"
)

var fieldTwo atomic.Bool

func init() { keyspace.OnLayout = func(n int) { fieldTwo.Store(n == ` + next + `) } }

var stepsToTwo = []layout.Step{{Name: "idempotency keys", Convert: rename}}

func rename(ctx context.Context, conn *redisx.Conn, space keyspace.Space, cursor string, count bool) (string, int, error) {
	from, _ := strconv.ParseUint(cursor, 10, 64)
	keys, next, err := conn.Cmd.Scan(ctx, from, space.Idempotency("*"), 10).Result()
	n := 0
	for _, key := range keys {
		id := strings.TrimPrefix(key, space.Idempotency(""))
		if err != nil || strings.HasPrefix(id, "two:") {
			continue
		}
		if n++; !count {
			err = conn.Cmd.RenameNX(ctx, key, space.Idempotency("two:"+id)).Err()
		}
	}
	if next == 0 {
		return "", n, err
	}
	return strconv.FormatUint(next, 10), n, err
}
`

// buildLayoutTwo builds bulkaction with the next layout, and returns the path of the binary.
func buildLayoutTwo(t *testing.T) string {
	t.Helper()
	dir, root := t.TempDir(), filepath.Join("..", "..")
	replace := map[string]string{}
	put := func(file, text string) {
		at, err := filepath.Abs(filepath.Join(root, file))
		require.NoError(t, err)
		replace[at] = filepath.Join(dir, strings.ReplaceAll(file, "/", "_"))
		require.NoError(t, os.WriteFile(replace[at], []byte(text), 0o600))
	}
	for file, edits := range layoutTwo {
		text, err := os.ReadFile(filepath.Join(root, file))
		require.NoError(t, err)
		for _, e := range edits {
			require.Equal(t, 1, bytes.Count(text, []byte(e[0])), "let layoutTwo follow the code of %s: %s", file, e[0])
			text = bytes.ReplaceAll(text, []byte(e[0]), []byte(e[1]))
		}
		put(file, string(text))
	}
	put("internal/jobs/ledger/layout_two.go", stepsTwo)
	list, err := json.Marshal(map[string]any{"Replace": replace})
	require.NoError(t, err)
	overlay := filepath.Join(dir, "overlay.json")
	require.NoError(t, os.WriteFile(overlay, list, 0o600))
	cmd := exec.Command("go", "build", "-buildvcs=false", "-overlay="+overlay, "-o", filepath.Join(dir, "bulkaction-two"), "./cmd/bulkaction")
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	return filepath.Join(dir, "bulkaction-two")
}

// TestRollingUpgradeToAnotherLayout: a version with another layout replaces the present one role by
// role, under load and with kills, and goes back once before the number is raised. The migration is
// interrupted three times. No job is lost or counted twice, and the audit is clean at each step.
func TestRollingUpgradeToAnotherLayout(t *testing.T) {
	t.Parallel()
	two := buildLayoutTwo(t)
	listen, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := listen.Addr().String()
	require.NoError(t, listen.Close())
	s := start(t, apart, env("API_ADDR", addr), env("LEASE", "3s"))
	number := func() string { return s.rdb.HGet(s.ctx(), s.space.Layouts(), "jobs").Val() }
	require.Equal(t, present, number())

	// The load: groups by the stream, one after the other, and one request over HTTP, whose
	// idempotency key is known later.
	keyed := client.NewAPI("http://" + addr)
	submission := client.Submission{Tenant: "keyed", Type: "NOOP", Seal: true, Jobs: jobs(3, `{}`)}
	const keys = 60
	ids := map[string]string{}
	for i := range keys {
		key := fmt.Sprint("key-", i)
		accepted, err := keyed.Submit(s.ctx(), submission, client.WithIdempotencyKey(key))
		require.NoError(t, err)
		ids[key] = accepted.ID
	}
	stream, err := producer.New(s.ctx(), proctest.AsUser("producer", s.env["BULKACTION_REDIS_URL"]))
	require.NoError(t, err)
	defer func() { _ = stream.Close() }()
	ctx, stop := context.WithCancel(s.ctx())
	var loads []load
	var producing sync.WaitGroup
	producing.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			l := newLoad(fmt.Sprint("tenant-", i%7), 100)
			l.group.ID = fmt.Sprint("load-", i)
			l.group.Jobs[3].Key = "the key"
			if _, err := stream.Submit(s.ctx(), l.group); err != nil {
				t.Errorf("submit: %v", err)
				return
			}
			loads = append(loads, l)
			_ = redisx.Sleep(ctx, 100*time.Millisecond)
		}
	})
	defer func() { stop(); producing.Wait() }()

	// replace replaces the process of a role by another version, and kills it if hard.
	replace := func(role, binary string, hard bool) {
		t.Helper()
		old := s.procs[role][0]
		if hard {
			old.Kill()
		} else {
			s.stop(old)
		}
		s.procs[role] = nil
		environ := map[string]string{"BULKACTION_REDIS_URL": proctest.AsUser(role, s.env["BULKACTION_REDIS_URL"])}
		for name, value := range s.env {
			if environ[name] == "" {
				environ[name] = value
			}
		}
		p := proctest.Start(t, binary, environ, role)
		s.procs[role] = append(s.procs[role], p)
		p.WaitReady()
		s.audit()
	}
	for i, role := range roles {
		replace(role, two, i%2 == 0)
	}
	replace("worker", "bulkaction", true) // and back: nothing of the next layout is written yet

	command := func(args ...string) *proctest.Process {
		return proctest.Start(t, two, s.env, append(args, "--redis-url", s.env["BULKACTION_REDIS_URL"])...)
	}
	refused := command("migrate")
	require.NotZero(t, refused.Wait(patience))
	require.Contains(t, refused.Output(), "live processes can't read layout "+next+" of jobs")
	require.Contains(t, refused.Output(), " worker-")
	require.Equal(t, present, number())
	replace("worker", two, false)
	conn := connect(t, s.env["BULKACTION_REDIS_URL"])
	s.await("the end of the killed processes' heartbeats", func() bool {
		older, err := presence.Older(s.ctx(), conn, s.space, "jobs", ledger.Layout.Newest+1)
		return err == nil && len(older) == 0
	})

	counted := command("migrate", "--dry-run", "--json")
	require.Zero(t, counted.Wait(patience))
	require.Contains(t, counted.Stdout(), `"counts":{"idempotency keys":60}`)
	interrupt := func(phase string, sig syscall.Signal) {
		t.Helper()
		p := command("migrate")
		s.await("phase "+phase, func() bool { return number() == phase })
		p.Signal(sig)
		p.Wait(patience)
		s.audit()
	}
	interrupt(present+"+", syscall.SIGINT)
	require.Equal(t, present, number(), "the announcement is taken back")
	interrupt(present+"+", syscall.SIGKILL)
	interrupt(next+"-", syscall.SIGKILL)

	// the raised number refuses what reads the present layout only
	old := proctest.Start(t, "bulkaction", s.env, "worker")
	require.NotZero(t, old.Wait(patience))
	require.Contains(t, old.Output(), "run a later version, which reads layout "+next)
	again, err := keyed.Submit(s.ctx(), submission, client.WithIdempotencyKey("key-0"))
	require.NoError(t, err)
	require.Equal(t, ids["key-0"], again.ID, "found although it is not converted yet")

	migrated := command("migrate")
	require.Zero(t, migrated.Wait(patience), migrated.Output())
	require.Equal(t, next, number())
	require.Len(t, s.rdb.Keys(s.ctx(), s.space.Idempotency("two:*")).Val(), keys)
	for key, id := range ids {
		again, err := keyed.Submit(s.ctx(), submission, client.WithIdempotencyKey(key))
		require.NoError(t, err)
		require.Equal(t, id, again.ID)
	}
	nothing := command("migrate")
	require.Zero(t, nothing.Wait(patience))

	stop()
	producing.Wait()
	s.api = keyed
	for _, l := range loads {
		g := s.wait(l.group.ID)
		l.retries = g.Retries // an attempt that was lost with its worker does not count as one
		l.check(t, g)
	}
	stats, err := keyed.Stats(s.ctx())
	require.NoError(t, err)
	require.Equal(t, map[string]string{"jobs": next, "rooms": "1", "guards": "1"}, stats.Layouts)
	t.Logf("%d groups of 100 jobs", len(loads))
}
