package integration

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// message is an entry of the ingest stream that ingest must reject: its fields, and a part of the
// expected reason.
type message struct {
	fields []any
	reason string
}

func of(typ, data, reason string) message {
	return message{[]any{"type", typ, "data", data}, reason}
}

// These are the types of messages on the ingest stream.
const groupSubmit, jobsAppend, groupSeal, groupCancel = "group.submit", "jobs.append", "group.seal", "group.cancel"

func garbage() map[string]message {
	all := map[string]message{
		"no field that we know":     {[]any{"hello", "world"}, "type"},
		"an unknown type":           of("group.explode", `{}`, "type"),
		"a type of another case":    of("Group.Submit", `{"type":"NOOP"}`, "type"),
		"no data":                   {[]any{"type", groupSubmit}, "data"},
		"no type":                   {[]any{"data", `{"type":"NOOP","jobs":[]}`}, "type"},
		"empty data":                of(groupSubmit, ``, "data"),
		"truncated JSON":            of(groupSubmit, `{"type":"NOOP","jobs":[{"payload":{"to":"a`, "data"),
		"two values":                of(groupSubmit, `{"type":"NOOP"} {}`, "data"),
		"a list":                    of(groupSubmit, `[{"type":"NOOP"}]`, "object"),
		"binary junk":               of(groupSubmit, "\x00\xff\xfe\x01\r\n{}", "data"),
		"JSON with a bad byte":      of(groupSubmit, "{\"type\":\"NOOP\",\"name\":\"\xff\"}", ""),
		"a number for a type":       of(groupSubmit, `{"type":17}`, "type"),
		"a text for jobs":           of(groupSubmit, `{"type":"NOOP","jobs":"many"}`, "jobs"),
		"a job that is none":        of(groupSubmit, `{"type":"NOOP","jobs":[1]}`, "jobs"),
		"a job without a payload":   of(groupSubmit, `{"type":"NOOP","jobs":[{}]}`, "payload"),
		"no type of the jobs":       of(groupSubmit, `{"jobs":[{"payload":1}]}`, "type"),
		"an unknown field":          of(groupSubmit, `{"type":"NOOP","sael":true}`, "sael"),
		"a total below the jobs":    of(groupSubmit, `{"type":"NOOP","total":1,"jobs":[{"payload":1},{"payload":2}]}`, "total"),
		"a negative total":          of(groupSubmit, `{"type":"NOOP","total":-1}`, "total"),
		"a priority that is none":   of(groupSubmit, `{"type":"NOOP","priority":"urgent"}`, "priority"),
		"a reducer that is none":    of(groupSubmit, `{"type":"NOOP","aggregate":[{"as":"x","op":"average","field":"data.x"}]}`, "op"),
		"a payload of over 256 KiB": of(groupSubmit, `{"type":"NOOP","jobs":[{"payload":"`+strings.Repeat("x", 256<<10)+`"}]}`, "payload"),
		"an append without a group": of(jobsAppend, `{"jobs":[{"payload":1}]}`, "group"),
		"an append without jobs":    of(jobsAppend, `{"group":"g"}`, "jobs"),
		"a seal without a group":    of(groupSeal, `{}`, "group"),
		"a cancel of a number":      of(groupCancel, `{"group":1}`, "group"),
	}
	for what, id := range map[string]string{
		"a brace": "a{b", "two braces": "{0}", "a colon": "bulk-action:x", "a newline": `a\nb`, "200 characters": strings.Repeat("x", 200),
		"letters of another script": "größe", "a space": "a b", "a slash": "../etc", "a nul": `a\u0000b`, "a star": "*", "a quote": `a\"b`,
	} {
		for _, field := range []string{"id", "tenant", "type"} {
			all["a group's "+field+" with "+what] = of(groupSubmit, fmt.Sprintf(`{"type":"NOOP",%q:"%s"}`, field, id), field)
		}
		all["a job's type with "+what] = of(groupSubmit, `{"type":"NOOP","jobs":[{"payload":1,"type":"`+id+`"}]}`, "type")
		all["a group to append to with "+what] = of(jobsAppend, `{"group":"`+id+`","jobs":[{"payload":1}]}`, "group")
		all["a group to seal with "+what] = of(groupSeal, `{"group":"`+id+`"}`, "group")
	}
	for what, id := range map[string]string{"a brace": "{0}", "a newline": "a\nb", "200 characters": strings.Repeat("x", 200), "junk": "\xff\x00"} {
		all["a message's id with "+what] = message{[]any{"type", groupSubmit, "data", `{"type":"NOOP"}`, "id", id}, "id"}
	}
	all["an empty id of a group to seal"] = of(groupSeal, `{"group":""}`, "group")
	all["an empty type"] = of(groupSubmit, `{"type":""}`, "type")
	return all
}

// rejected waits until ingest has quarantined n messages, and returns these by the ids of their
// entries in the ingest stream.
func (s *system) rejected(n int) map[string]map[string]any {
	s.t.Helper()
	found := map[string]map[string]any{}
	s.follow(s.space.Rejected(), fmt.Sprint(n, " rejected messages"), func(m redis.XMessage) bool {
		id, _ := m.Values["entry"].(string)
		require.NotContains(s.t, found, id, "rejected twice")
		found[id] = m.Values
		return len(found) == n
	})
	return found
}

func TestGarbageOnTheIngestStream(t *testing.T) {
	t.Parallel()
	s := start(t)
	pid := s.proc("ingest", 0).PID()
	sent := map[string]message{} // by entry id
	name := map[string]string{}
	began := time.Now()
	good := func(i int) string { return fmt.Sprint("good-", i) }
	for what, m := range garbage() {
		id := s.xadd(s.space.Ingest(), m.fields...)
		sent[id], name[id] = m, what
		if n := len(sent); n%10 == 0 {
			s.xadd(s.space.Ingest(), "type", groupSubmit, "data", `{"id":"`+good(n)+`","type":"NOOP","seal":true,"jobs":[{"payload":{}}]}`)
		}
	}
	// A submission with other content under an existing group id is rejected, and so are more jobs
	// for a sealed group.
	s.xadd(s.space.Ingest(), "type", groupSubmit, "data", `{"id":"taken","type":"NOOP","seal":true,"jobs":[{"payload":{}}]}`)
	s.xadd(s.space.Ingest(), "type", groupSubmit, "id", "taken-2", "data", `{"type":"NOOP","seal":true}`)
	other := map[string]message{
		"another content under an id":          of(groupSubmit, `{"id":"taken","type":"NOOP","seal":true,"jobs":[{"payload":2}]}`, "another group"),
		"another tenant under an id":           of(groupSubmit, `{"id":"taken","tenant":"thief","type":"NOOP"}`, "another"),
		"an append to a sealed group":          of(jobsAppend, `{"group":"taken","jobs":[{"payload":3}]}`, "sealed"),
		"another content under a message's id": {[]any{"type", groupSubmit, "id", "taken-2", "data", `{"type":"NOOP","jobs":[]}`}, "another group"},
		"a seal with another total":            of(groupSeal, `{"group":"taken","total":7}`, ""),
		"an append to a finished group":        {[]any{"type", jobsAppend, "id", "m-1", "data", `{"group":"taken","jobs":[{"payload":4}]}`}, "sealed"},
	}
	s.wait("taken")
	s.wait("taken-2")
	for what, m := range other {
		id := s.xadd(s.space.Ingest(), m.fields...)
		sent[id], name[id] = m, what
	}

	for id, e := range s.rejected(len(sent)) {
		m, what := sent[id], name[id]
		require.NotNil(t, m.fields, "entry %s was good: %v", id, e["reason"])
		require.NotEmpty(t, e["reason"], what)
		require.Contains(t, e["reason"], m.reason, what)
		at, err := time.Parse(time.RFC3339Nano, e["at"].(string))
		require.NoError(t, err)
		require.WithinRange(t, at, began.Add(-time.Minute), time.Now().Add(time.Minute))
		for i := 0; i < len(m.fields); i += 2 {
			want, got := m.fields[i+1].(string), e[m.fields[i].(string)]
			require.Contains(t, got, want[:min(len(want), 256<<10)], what)
		}
	}
	for i := 10; i <= len(sent); i += 10 {
		if i <= len(sent)-len(other) {
			g := s.wait(good(i))
			require.Equal(t, api.Counts{Accepted: 1, Done: 1}, g.Counts)
		}
	}
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.group("taken").Counts)
	require.True(t, s.proc("ingest", 0).Running())
	require.Equal(t, pid, s.proc("ingest", 0).PID())
	s.await("nothing pending", func() bool { return s.rdb.XLen(s.ctx(), s.space.Ingest()).Val() == 0 })

	// Each key in Redis begins with bulk-action: or bulk-action:{0}:, and then has only letters,
	// digits and the characters . _ : - behind it.
	keys, err := s.rdb.Keys(s.ctx(), "*").Result()
	require.NoError(t, err)
	for _, key := range keys {
		require.Regexp(t, `^bulk-action:(\{0\}:)?[A-Za-z0-9._:-]+$`, key)
	}
	var st api.Stats
	st, err = s.api.Stats(s.ctx())
	require.NoError(t, err)
	require.EqualValues(t, len(sent), st.Rejected)
}

// TestMessagesForUnknownGroups: four messages for a group that does not exist, with entry ids of
// the year 1970, are rejected. A new message for another such group waits, and counts when that
// group is submitted.
func TestMessagesForUnknownGroups(t *testing.T) {
	t.Parallel()
	s := start(t, replicas("ingest", 0))
	want := map[string]string{}
	for i, m := range []message{
		of(jobsAppend, `{"group":"nobody","jobs":[{"payload":1}]}`, "nobody"), of(groupSeal, `{"group":"nobody"}`, "nobody"),
		of(groupSeal, `{"group":"nobody","total":2}`, "nobody"), of(groupCancel, `{"group":"nobody"}`, "nobody"),
	} {
		id := fmt.Sprintf("1000-%d", i)
		require.NoError(t, s.rdb.XAdd(s.ctx(), &redis.XAddArgs{Stream: s.space.Ingest(), ID: id, Values: m.fields}).Err())
		want[id] = m.reason
	}
	// A recent message for a group that does not exist stays in the stream, and does not delay
	// other messages.
	s.xadd(s.space.Ingest(), "type", jobsAppend, "data", `{"group":"later","jobs":[{"payload":{}}]}`)
	s.xadd(s.space.Ingest(), "type", groupSubmit, "data", `{"id":"good","type":"NOOP","seal":true,"jobs":[{"payload":{}}]}`)
	s.add("ingest")
	s.api = client.NewAPI(s.url(0))
	for id, e := range s.rejected(len(want)) {
		require.Contains(t, want, id)
		require.Contains(t, e["reason"], want[id])
		require.Contains(t, e["reason"], "not found")
	}
	s.wait("good")
	s.xadd(s.space.Ingest(), "type", groupSubmit, "data", `{"id":"later","type":"NOOP"}`)
	s.xadd(s.space.Ingest(), "type", groupSeal, "data", `{"group":"later"}`)
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.wait("later").Counts)
}

// hostile returns the i-th of several values that must not be in a list, set or stream of jobs:
// texts that are not blobs, and blobs that fit no job. Some blobs name the existing group other.
// Each 500th value is a text of 1 MiB.
func hostile(i int, other string) string {
	kinds := []string{
		"", "junk", "\x00\xff\xfe\r\n", "{}", "null", "a|b|c", strings.Repeat("|", 5000), other + "|NOOP|1", "-1|1||x", "99999999999999999999|1||x", "1e9|1||", "NaN|NaN||",
		other + "|NOOP|-1|0|0|0|0|0|0|1||0|1||{}", other + "|NOOP|1|0|0|0|0|0|0|1||-1|1||{}", other + "|NOOP|1|0|0|0|0|0|0|1||99999999999999999999|1||{}",
		other + "|NOOP|99999999999999999999|0|0|0|0|0|0|1||x|1||{}", "{0}:x|NOOP|x|0|0|0|0|0|0|1||0|1||{}", other + "|NOOP|1|0|0|0|0|0|0||||||",
	}
	if i%500 == 499 {
		return strings.Repeat("x", 1<<20)
	}
	return kinds[i%len(kinds)] + strings.Repeat(" ", i/len(kinds)) // different texts, since a set stores equal ones once
}

// TestGarbageInEveryStream: 1000 texts as garbage in the ingest stream, the ready stream, the
// results, the outbox, the dead letters and the events, in a tenant's non-ready jobs and in the
// hash of workers end no process. All 1000 messages are rejected, the quarantine has 1000 entries,
// and five groups submitted between and after them are done.
func TestGarbageInEveryStream(t *testing.T) {
	t.Parallel()
	s := start(t)
	ctx, p := s.ctx(), s.space.Partition(0)
	s.submit(client.Submission{ID: "first", Tenant: "acme", Type: "NOOP", Jobs: jobs(10, `{}`), Seal: true})
	s.wait("first")
	later := time.Now().Add(time.Hour)
	s.submit(client.Submission{ID: "later", Tenant: "acme", Type: "NOOP", Jobs: []client.NewJob{{Payload: 1, RunAt: &later}}}) // creates acme's structures
	pids := map[string]int{}
	for _, role := range roles {
		pids[role] = s.proc(role, 0).PID()
	}

	const n = 1000
	good := func(i int) client.Submission {
		return client.Submission{ID: fmt.Sprint("good-", i), Tenant: "acme", Type: "NOOP", Jobs: jobs(20, `{"result":1}`), Seal: true, Aggregate: []client.Aggregate{{As: "n", Op: "sum", Field: "data"}}}
	}
	far := int64(1) << 62
	for from := 0; from < n; from += 50 {
		_, err := s.rdb.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			add := func(stream string, values ...any) { pipe.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: values}) }
			for i := from; i < from+50; i++ {
				h := hostile(i, "first")
				add(s.space.Ingest(), "type", groupSubmit, "data", h)
				if i%2 == 0 {
					add(p.Ready("NOOP"), "j", h)
					add(p.ResultStream(), "g", "first", "l", h, "t", h)
				} else {
					add(p.Ready("NOOP"), "x"+h, h, "j", "twice", "j", h)
					add(p.ResultStream(), "g", h, "l", `{"ordinal":-1}`, "l", h)
				}
				add(p.Outbox(), "group", h, "status", h, "round", -1, "at", far, "snapshot", `["id","first","at:created","`+fmt.Sprint(far)+`"]`)
				add(p.Outbox(), "group", "first", "at", i, "snapshot", h)
				add(p.DeadLetters(), "job", h, "ordinal", h, "at", far, "payload", h)
				add(s.space.Events(), "type", h, "data", h)
				if h != "" {
					pipe.ZAdd(ctx, p.NonReadyOf("acme"), redis.Z{Score: 1, Member: "n" + h}) // a blob that can't be parsed: others would be counted
					pipe.HSet(ctx, s.space.Workers(), h, h)
				}
			}
			pipe.ZAdd(ctx, p.NonReady(), redis.Z{Score: 1, Member: "acme"})
			return nil
		})
		require.NoError(t, err)
		if from%250 == 0 {
			s.submit(good(from))
		}
	}
	s.submit(good(n))
	for _, i := range []int{0, 250, 500, 750, n} {
		s.awaitCounts(good(i).ID, "done", func(c api.Counts) bool { return c == api.Counts{Accepted: 20, Done: 20} })
		s.await("results are reduced", func() bool { g := s.group(good(i).ID); return g.Status.Ended() && string(g.Aggregate["n"]) == "20" })
	}

	s.await("no garbage is left", func() bool {
		return s.rdb.XLen(ctx, s.space.Ingest()).Val()+s.rdb.XLen(ctx, p.Ready("NOOP")).Val()+s.rdb.XLen(ctx, p.ResultStream()).Val()+s.rdb.XLen(ctx, p.Outbox()).Val() == 0 &&
			s.rdb.ZCard(ctx, p.NonReadyOf("acme")).Val() == 1
	})
	require.Len(t, s.rejected(n), n, "each entry is rejected with a reason")
	quarantined, err := s.rdb.LRange(ctx, p.Quarantine(), 0, -1).Result()
	require.NoError(t, err)
	require.Len(t, quarantined, n, "the quarantine is bounded")
	for _, text := range quarantined {
		require.Regexp(t, `^(ready:NOOP|results|outbox|non-ready:acme)[ :]`, text)
	}
	for _, path := range []string{"/v1/dead-letters", "/v1/stats", "/v1/groups", "/v1/tenants", "/v1/groups/first", "/v1/groups/first/jobs/3", "/v1/groups/later/jobs/0"} {
		status, body := s.call("GET", s.url(0)+path, "")
		require.Equal(t, 200, status, "%s: %.300s", path, body)
	}
	require.Equal(t, api.Counts{Accepted: 10, Done: 10}, s.group("first").Counts)
	for _, role := range roles {
		require.True(t, s.proc(role, 0).Running(), role)
		require.Equal(t, pids[role], s.proc(role, 0).PID())
	}
	s.cancelAndWait("later")
}

// cancelAndWait cancels a group and waits until all of its jobs are counted as cancelled.
func (s *system) cancelAndWait(group string) {
	s.t.Helper()
	status, body := s.call("POST", s.url(0)+"/v1/groups/"+group+"/cancel", "")
	require.Equal(s.t, 202, status, "%s", body)
	s.awaitCounts(group, "cancelled", func(c api.Counts) bool { return c.Cancelled == c.Accepted })
}

// TestVanishedDataEndsWithinAMinute: with default settings, jobs whose data vanishes from Redis
// while their group makes progress end as LOST within a minute: the ready stream is deleted,
// renamed or misses 30 entries, or the results are deleted. Each round begins at another time of
// the audit interval, and takes two minutes. LOST_ROUNDS is the number of rounds; without it the
// test is skipped.
func TestVanishedDataEndsWithinAMinute(t *testing.T) {
	rounds, _ := strconv.Atoi(os.Getenv("LOST_ROUNDS"))
	if rounds == 0 {
		t.Skip("LOST_ROUNDS is not set")
	}
	const auditInterval = 15 * time.Second // the default of AUDIT_INTERVAL
	for name, vanish := range map[string]func(*system, keyspace.Partition) (jobs int64){
		"DEL of the ready stream": func(s *system, p keyspace.Partition) int64 {
			ready := s.undelivered(p)
			require.NoError(s.t, s.rdb.Del(s.ctx(), p.Ready("NOOP")).Err())
			return ready
		},
		"RENAME of the ready stream": func(s *system, p keyspace.Partition) int64 {
			ready := s.undelivered(p)
			require.NoError(s.t, s.rdb.Rename(s.ctx(), p.Ready("NOOP"), p.Ready("NOOP")+".away").Err())
			return ready
		},
		"XDEL of 30 entries": func(s *system, p keyspace.Partition) int64 {
			last, err := s.rdb.XRevRangeN(s.ctx(), p.Ready("NOOP"), "+", "-", 30).Result()
			require.NoError(s.t, err)
			var ids []string
			for _, e := range last {
				ids = append(ids, e.ID)
			}
			deleted, err := s.rdb.XDel(s.ctx(), p.Ready("NOOP"), ids...).Result()
			require.NoError(s.t, err)
			return deleted
		},
		"DEL of the results stream": func(s *system, p keyspace.Partition) int64 {
			aggregator := s.proc("aggregator", 0)
			aggregator.Suspend() // otherwise results are reduced within milliseconds
			s.await("results", func() bool { return s.rdb.XLen(s.ctx(), p.ResultStream()).Val() > 0 })
			var entries *redis.IntCmd
			_, err := s.rdb.TxPipelined(s.ctx(), func(tx redis.Pipeliner) error {
				entries = tx.XLen(s.ctx(), p.ResultStream())
				return tx.Del(s.ctx(), p.ResultStream()).Err()
			})
			require.NoError(s.t, err)
			aggregator.Signal(syscall.SIGCONT)
			return entries.Val()
		},
	} {
		for round := range rounds {
			t.Run(name+" "+strconv.Itoa(round+1), func(t *testing.T) {
				t.Parallel()
				const n = 2000
				s := start(t, apart, replicas("worker", 4))
				p := s.space.Partition(0)
				require.NoError(t, redisx.Sleep(t.Context(), time.Duration(round)*auditInterval/time.Duration(rounds)))
				s.submit(client.Submission{ID: "g", Type: "NOOP", Jobs: jobs(n, `{"sleep_ms":1800}`), Seal: true})
				s.await("more ready jobs than slots", func() bool { return s.undelivered(p) >= 30 })
				at, vanished := time.Now(), vanish(s, p)
				var first, last time.Duration
				var lost int64
				s.followGroup("g", func(g api.Group) bool {
					if now := g.FailuresByCode["LOST"]; now > lost {
						if last = time.Since(at); lost == 0 {
							first = last
						}
						lost = now
					}
					return g.Status.Ended()
				})
				t.Logf("%d entries vanished, %d jobs ended as LOST, %.1f to %.1f s later", vanished, lost, first.Seconds(), last.Seconds())
				require.GreaterOrEqual(t, lost, vanished)
				require.LessOrEqual(t, last, time.Minute)
				require.Equal(t, api.Counts{Accepted: n, Done: n - lost, Failed: lost}, s.group("g").Counts)
			})
		}
	}
}

// undelivered returns the number of entries of the ready stream of the type NOOP that no worker has
// read.
func (s *system) undelivered(p keyspace.Partition) int64 {
	s.t.Helper()
	info, err := s.rdb.XInfoGroups(s.ctx(), p.Ready("NOOP")).Result()
	if err != nil || len(info) == 0 {
		return 0 // no stream yet
	}
	return s.rdb.XLen(s.ctx(), p.Ready("NOOP")).Val() - info[0].Pending
}

// followGroup reads a group ten times a second and calls done with it, until done returns true. The
// test fails after three minutes.
func (s *system) followGroup(group string, done func(api.Group) bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.ctx(), 3*time.Minute)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for !done(s.group(group)) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			require.Fail(s.t, "group "+group+" has not ended")
		}
	}
}
