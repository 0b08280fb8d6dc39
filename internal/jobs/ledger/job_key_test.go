package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// TestJobKeyStaysWithTheJob: a job keeps its key while it is retried, fails and runs in the next
// round. The dead letter, the failure and the worker get the key apart from the payload.
func TestJobKeyStaysWithTheJob(t *testing.T) {
	for name, c := range map[string]struct {
		typ   string // "" is the group's: its blobs are composed by the caller, the others by the script
		runAt *time.Time
		large bool
	}{
		"composed by the caller": {},
		"composed by the script": {typ: "T"},
		"scheduled":              {runAt: new(time.Now().Add(30 * time.Millisecond))},
		"with a large payload":   {large: true},
	} {
		t.Run(name, func(t *testing.T) {
			both(t, func(w *world) {
				w.create("g", "acme", "T")
				payload := []byte(`{"a":"|"}`)
				if c.large {
					payload = large
				}
				w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: []ledger.NewJob{
					{Type: c.typ, RunAt: c.runAt, Payload: payload, Key: "auth0|7"}, {Type: c.typ, RunAt: c.runAt, Payload: []byte(`2`)},
				}})
				w.seal("g")
				check := func(run []taken) {
					require.Len(w, run, 2)
					require.Equal(w, []string{"auth0|7", "", "2"}, []string{run[0].Key(), run[1].Key(), run[1].Payload})
					if c.large {
						require.Empty(w, run[0].Payload)
						require.Equal(w, string(large), w.c.HGet(w.Context(), w.p.Payloads("g"), "0").Val())
					} else {
						require.Equal(w, string(payload), run[0].Payload)
					}
				}
				next := func() []taken {
					var run []taken
					w.eventually(func() bool {
						w.promote(noLimit, "T")
						w.admit("T", 10, noLimit)
						run = append(run, w.read("T", "c")...)
						return len(run) == 2
					})
					w.start("T", run)
					check(run)
					return run
				}
				// Both jobs, with and without a key, are retried, fail, and run again in the next
				// round.
				for _, j := range next() {
					w.outcome("T", other(ledger.OutcomeRetry, j, 0))
				}
				for _, j := range next() {
					w.outcome("T", other(ledger.OutcomeFailed, j, 0))
				}
				letters := w.c.XRange(w.Context(), w.p.DeadLetters(), "-", "+").Val()
				require.Equal(w, []any{string(payload), "2"}, []any{letters[0].Values["payload"], letters[1].Values["payload"]})
				require.Equal(w, "auth0|7", letters[0].Values["key"])
				require.NotContains(w, letters[1].Values, "key")
				keys := map[int64]string{}
				require.NoError(w, ledger.Failures(w.Context(), w.c, w.p, "g", func(e ledger.JobError) error {
					keys[e.Ordinal] = e.Key
					return nil
				}))
				require.Equal(w, map[int64]string{0: "auth0|7", 1: ""}, keys)
				w.advance("g")
				w.retry("g")
				run := next()
				require.Equal(w, ledger.OutcomeReply{Owned: 2}, w.outcome("T", done(run...)))
			})
		})
	}
}
