package bulktest_test

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/bulktest"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

// sceneVariable names the scene that a child process plays.
const sceneVariable = "BULKTEST_SCENE"

// scene is a test that must fail, and what it must say.
type scene struct {
	play func(t *testing.T)
	says []string
}

var scenes = map[string]scene{
	"a processor ignores the end of its context": {
		func(t *testing.T) {
			proc := processor.Func("T", func(context.Context, processor.Job) (any, error) { return nil, waitsForNothing() })
			c := run.Config{Settings: map[string]string{"JOB_TIMEOUT": "1s"}}
			bulktest.Run(t, c, []processor.Processor{proc}, func(_ *testing.T, s *bulktest.System) {
				g := s.Submit(one("T"))
				if g.FailuresByCode[processor.CodeTimeout] != 1 {
					panic("the job must have timed out")
				}
			})
		},
		[]string{"processors ignore the end of their contexts", "Processors that run: 4.", "job g.0, attempt 1", "waitsForNothing"},
	},
	"a batcher ignores the end of its context": {
		func(t *testing.T) {
			b := processor.Batch("T", processor.BatchOptions{Wait: time.Second}, func(
				context.Context, []processor.BatchJob[int],
			) ([]processor.Outcome[any], error) {
				return nil, waitsForNothing()
			})
			c := run.Config{Settings: map[string]string{"JOB_TIMEOUT": "1s"}}
			bulktest.Run(t, c, []processor.Runner{b}, func(_ *testing.T, s *bulktest.System) {
				g := s.Submit(one("T"))
				if g.FailuresByCode[processor.CodeTimeout] != 1 {
					panic("the job must have timed out")
				}
			})
		},
		[]string{"processors ignore the end of their contexts", "Processors that run: 4.", "job g.0, attempt 1", "waitsForNothing"},
	},
	"a processor waits outside of the bubble": {
		func(t *testing.T) {
			outside := make(chan error)
			proc := processor.Func("T", func(context.Context, processor.Job) (any, error) { return nil, <-outside })
			bulktest.RunLimited(t, run.Config{}, []processor.Runner{proc}, func(_ *testing.T, s *bulktest.System) {
				s.Submit(one("T"))
			}, time.Second)
		},
		[]string{"the clock has stood still for 1s", "Type T, job g.0, attempt 1", "failing_test.go"},
	},
	"a processor works without end": {
		func(t *testing.T) {
			proc := processor.Func("T", func(context.Context, processor.Job) (any, error) {
				for i := 0; ; i++ {
					busy(i)
				}
			})
			bulktest.RunLimited(t, run.Config{}, []processor.Runner{proc}, func(_ *testing.T, s *bulktest.System) {
				s.Submit(one("T"))
			}, time.Second)
		},
		[]string{"the clock has stood still for 1s", "Processors that run: 1.", "failing_test.go"},
	},
	"a group is paused": {
		func(t *testing.T) {
			bulktest.ShortenPatience(10 * time.Second)
			bulktest.Run(t, impatient, []processor.Processor{quick("T")}, func(t *testing.T, s *bulktest.System) {
				_, err := s.API.Submit(t.Context(), client.Submission{ID: "empty", Type: "T"})
				require.NoError(t, err)
				_, err = s.API.Pause(t.Context(), "empty")
				require.NoError(t, err)
				_, err = s.API.Append(t.Context(), "empty", func(yield func(client.NewJob) bool) { yield(client.NewJob{Payload: 1}) })
				require.NoError(t, err)
				s.Wait("empty")
			})
		},
		[]string{"group empty makes no progress: Paused: group empty."},
	},
	"a job is deferred for ever": {
		func(t *testing.T) {
			proc := processor.Func("T", func(context.Context, processor.Job) (any, error) {
				return nil, processor.Deferred(time.Hour, "no account")
			})
			bulktest.ShortenPatience(10 * time.Second)
			bulktest.Run(t, impatient, []processor.Processor{proc}, func(_ *testing.T, s *bulktest.System) { s.Submit(one("T")) })
		},
		[]string{"group g makes no progress: ", "no account"},
	},
	"a group does not arrive": {
		func(t *testing.T) {
			bulktest.Run(t, run.Config{}, []processor.Processor{quick("T")}, func(_ *testing.T, s *bulktest.System) { s.Wait("g") })
		},
		[]string{"group g makes no progress: it has not arrived"},
	},
	"a goroutine of the test stays": {
		func(t *testing.T) {
			bulktest.Run(t, run.Config{}, []processor.Processor{quick("T")}, func(*testing.T, *bulktest.System) {
				go func() { _ = waitsForNothing() }()
			})
		},
		[]string{"goroutines that it started have not: deadlock"},
	},
	"a setting is wrong": {
		func(t *testing.T) {
			c := run.Config{Settings: map[string]string{"WORKER_COUNT": "ten"}}
			bulktest.Run(t, c, []processor.Processor{quick("T")}, func(*testing.T, *bulktest.System) { panic("not reached") })
		},
		[]string{"run: wrong configuration", "BULKACTION_WORKER_COUNT"},
	},
	"a Redis is named": {
		func(t *testing.T) {
			c := run.Config{Settings: map[string]string{"ADMIN_ADDR": "127.0.0.1:0"}}
			bulktest.Run(t, c, []processor.Runner{}, func(*testing.T, *bulktest.System) { panic("not reached") })
		},
		[]string{"RedisURL, REDIS_URL and ADMIN_ADDR must not be set"},
	},
}

// impatient has a timeout of jobs that adds little to the patience of Wait.
var impatient = run.Config{Settings: map[string]string{"JOB_TIMEOUT": "1s"}}

func quick(typ string) processor.Processor {
	return processor.Func(typ, func(context.Context, processor.Job) (any, error) { return nil, nil })
}

func one(typ string) client.Submission {
	return client.Submission{ID: "g", Type: typ, Jobs: []client.NewJob{{Payload: 1}}}
}

// waitsForNothing waits for ever. Scenes find it in stack traces by its name.
func waitsForNothing() error { return <-make(chan error) }

//go:noinline
func busy(int) {}

// TestRunFails runs each scene, which is a test that must fail, in a child process. It must fail in
// time, without a panic, and with a message that says why.
func TestRunFails(t *testing.T) {
	if name := os.Getenv(sceneVariable); name != "" {
		scenes[name].play(t)
		return
	}
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	for name, scene := range scenes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			child := exec.CommandContext(t.Context(), self, "-test.run=^TestRunFails$", "-test.timeout=5m")
			child.Env = append(os.Environ(), sceneVariable+"="+name)
			out, err := child.CombinedOutput()
			require.Error(t, err, "%s", out)
			require.NotContains(t, string(out), "panic: ")
			for _, want := range scene.says {
				require.Contains(t, string(out), want)
			}
		})
	}
}
