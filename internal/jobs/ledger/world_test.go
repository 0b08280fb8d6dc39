package ledger_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/limittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// tb is an interface with methods that testing.T, testing.B and rapid's T have: those that the
// tests' helpers call.
type tb interface {
	require.TestingT
	Helper()
	Context() context.Context
}

// world is one partition on a Redis server or miniredis, with methods that make the steps of the
// roles. A step that fails ends the test.
type world struct {
	tb
	c      redis.UniversalClient
	p      keyspace.Partition
	space  keyspace.Space
	prefix string
	limits *lastLimit
}

// onStores runs a test on each kind of server, as parallel subtests.
func onStores(t *testing.T, story func(w *world)) {
	t.Helper()
	t.Parallel()
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		story(newWorld(t, client(t, url), prefix))
	})
}

// onRedis runs a test on a real Redis only, because miniredis lacks a feature or is too slow for
// it.
func onRedis(t *testing.T, story func(w *world)) {
	t.Helper()
	url, prefix := redistest.Parallel(t)
	story(newWorld(t, client(t, url), prefix))
}

func newWorld(t tb, c redis.UniversalClient, prefix string) *world {
	space, err := keyspace.New(prefix, 1)
	require.NoError(t, err)
	space.SetLayout(ledger.Layout.Newest)
	return &world{tb: t, c: c, p: space.Partition(0), space: space, prefix: prefix, limits: &lastLimit{}}
}

func client(t testing.TB, url string) redis.UniversalClient {
	o := redistest.Options(t, url)
	if !o.IsClusterMode {
		return clientOf(t, o.Simple())
	}
	o.MaxRetries, o.ReadTimeout = -1, time.Minute // as below
	c := redis.NewUniversalClient(o)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func clientOf(t testing.TB, opts *redis.Options) *redis.Client {
	opts.MaxRetries, opts.Protocol, opts.DisableIdentity = -1, 2, true // never retry: a retried write is a second write
	opts.ReadTimeout = time.Minute                                     // a busy machine is slow
	opts.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	c := redis.NewClient(opts)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// noLimit limits nothing. limit(n) allows n permits in a window that is longer than any test.
var noLimit = limittest.None

func limit(permits int64) limittest.Limit { return limittest.Ever(permits) }

// use makes this the limit of the partition, if another one was used last, and returns how it counts.
func (w *world) use(l limittest.Limit) ledger.Meter {
	w.Helper()
	w.limits.Lock()
	defer w.limits.Unlock()
	if text := fmt.Sprint(l); w.limits.last != text {
		limittest.Use(w.Context(), w, w.c, w.p, l)
		w.limits.last = text
	}
	return l.Meter
}

type lastLimit struct {
	sync.Mutex
	last string
}

const seed = "0badcafe"

func (w *world) create(group, tenant, typ string, fields ...string) {
	w.Helper()
	f := map[string]string{"lane": "normal"}
	for i := 0; i+1 < len(fields); i += 2 {
		f[fields[i]] = fields[i+1]
	}
	_, err := ledger.Create(w.Context(), w.c, w.p, ledger.CreateArgs{Group: group, Tenant: tenant, Type: typ, Hash: "h", Fields: f})
	require.NoError(w, err)
}

// jobs returns n new jobs with payloads {"n":0}, {"n":1} and so on. In a group without jobs these
// numbers are their ordinals.
func jobs(n int) []ledger.NewJob {
	all := make([]ledger.NewJob, n)
	for i := range all {
		all[i].Payload = fmt.Appendf(nil, `{"n":%d}`, i)
	}
	return all
}

func (w *world) append(group string, n int) {
	w.Helper()
	for all := range slices.Chunk(jobs(n), ledger.MaxAppend) {
		w.appendJobs(ledger.AppendArgs{Group: group, Jobs: all})
	}
}

func (w *world) fill(group string, n int, tenant, typ string, fields ...string) {
	w.Helper()
	w.create(group, tenant, typ, fields...)
	w.append(group, n)
}

func (w *world) appendJobs(a ledger.AppendArgs) ledger.AppendReply {
	w.Helper()
	a.Limit = cmp.Or(a.Limit, 1e7)
	r, err := ledger.Append(w.Context(), w.c, w.p, a)
	require.NoError(w, err)
	return r
}

func (w *world) seal(group string) {
	w.Helper()
	sealed, err := ledger.Seal(w.Context(), w.c, w.p, group, nil)
	require.NoError(w, err)
	require.True(w, sealed)
}

func (w *world) cancel(group string) {
	w.Helper()
	require.NoError(w, ledger.Cancel(w.Context(), w.c, w.p, group))
}

// sweep sweeps a cancelled group completely and returns the number of calls.
func (w *world) sweep(group string) int {
	w.Helper()
	for calls := 1; ; calls++ {
		more, _, err := ledger.Sweep(w.Context(), w.c, w.p, group)
		require.NoError(w, err)
		if !more {
			return calls
		}
	}
}

// retry opens the next round of a group and requeues its failed jobs completely.
func (w *world) retry(group string) {
	w.Helper()
	_, err := ledger.Reopen(w.Context(), w.c, w.p, group, "", ledger.RetryChoice{})
	require.NoError(w, err)
	w.requeue(group)
}

func (w *world) requeue(group string) {
	w.Helper()
	for more := true; more; {
		var err error
		more, err = ledger.Requeue(w.Context(), w.c, w.p, group)
		require.NoError(w, err)
	}
}

func (w *world) admit(typ string, most int, limit limittest.Limit) ledger.AdmitReply {
	w.Helper()
	return w.admitBelow(1000, typ, most, limit)
}

func (w *world) admitBelow(limitOfReady int, typ string, most int, limit limittest.Limit) ledger.AdmitReply {
	w.Helper()
	r, err := ledger.Admit(w.Context(), w.c, w.p, ledger.AdmitArgs{
		Type: typ, Most: most, Cap: limitOfReady, Meter: w.use(limit), Seed: seed, LaneWeights: [3]int{6, 3, 1},
	})
	require.NoError(w, err)
	return r
}

// promote promotes up to 100 due jobs of these types; each ready stream may hold 1,000 undelivered
// jobs.
func (w *world) promote(limit limittest.Limit, types ...string) ledger.PromoteReply {
	w.Helper()
	caps := map[string]int{}
	for _, typ := range types {
		caps[typ] = 1000
	}
	return w.promoteBelow(caps, limit)
}

func (w *world) promoteBelow(caps map[string]int, limit limittest.Limit) ledger.PromoteReply {
	w.Helper()
	r, err := ledger.Promote(w.Context(), w.c, w.p, ledger.PromoteArgs{Most: 100, Meter: w.use(limit), Seed: seed, FullWait: time.Millisecond, Caps: caps})
	require.NoError(w, err)
	return r
}

// promoteAll promotes jobs of a type until n of them have become ready; it waits for their due
// times. It ends the test if more become ready.
func (w *world) promoteAll(typ string, n int) {
	w.Helper()
	w.promoteAllBelow(map[string]int{typ: 1000}, n)
}

// promoteAllBelow does what promoteAll does, for several types with caps of their ready streams.
func (w *world) promoteAllBelow(caps map[string]int, n int) {
	w.Helper()
	moved := 0
	w.eventually(func() bool {
		moved += w.promoteBelow(caps, noLimit).Moved
		return moved >= n
	})
	require.Equal(w, n, moved)
}

// eventually calls ok until it returns true, for conditions that depend on Redis's clock. The test
// fails after a minute.
func (w *world) eventually(ok func() bool) {
	w.Helper()
	late := time.After(time.Minute)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-late:
			require.FailNow(w, "it has not come to that in time")
		case <-tick.C:
		}
	}
}

// taken is a job that a worker has read from the ready stream. token is the attempt under which the
// worker reports it, -1 before the worker calls Start, and negative if Start refused the job.
type taken struct {
	entry string
	ledger.Job
	token int64
	terms ledger.GroupTerms
	last  ledger.JobError // the job's last error, as the start told it
}

func (w *world) read(typ, consumer string) []taken {
	w.Helper()
	return w.readSome(typ, consumer, 1000)
}

func (w *world) readSome(typ, consumer string, most int64) []taken {
	w.Helper()
	w.consumerGroup(w.p.Ready(typ), keyspace.GroupWorkers)
	return w.take(typ, consumer, most)
}

// take reads ready entries like readSome, but requires that the consumer group exists.
func (w *world) take(typ, consumer string, most int64) []taken {
	w.Helper()
	r, err := w.c.XReadGroup(w.Context(), &redis.XReadGroupArgs{
		Group: keyspace.GroupWorkers, Consumer: consumer, Streams: []string{w.p.Ready(typ), ">"}, Count: most, Block: -1,
	}).Result()
	if errors.Is(err, redis.Nil) {
		return nil
	}
	require.NoError(w, err)
	var out []taken
	for _, m := range r[0].Messages {
		d, err := ledger.ParseJob(ledger.MessageBlob(m.Values))
		require.NoError(w, err)
		out = append(out, taken{entry: m.ID, Job: d, token: -1})
	}
	return out
}

// consumerGroup creates a consumer group at the start of a stream, unless it exists.
func (w *world) consumerGroup(stream, group string) {
	w.Helper()
	if err := w.c.XGroupCreateMkStream(w.Context(), stream, group, "0").Err(); err != nil {
		require.ErrorContains(w, err, "BUSYGROUP")
	}
}

// start starts jobs of one type in one call, and stores their tokens, terms and last errors in
// them. It sorts jobs.
func (w *world) start(typ string, jobs []taken) {
	w.Helper()
	slices.SortFunc(jobs, byJob)
	var groups []ledger.StartGroup
	for _, j := range jobs {
		if n := len(groups); n == 0 || groups[n-1].Group != j.Group {
			groups = append(groups, ledger.StartGroup{Group: j.Group})
		}
		g := &groups[len(groups)-1]
		g.Jobs = append(g.Jobs, ledger.StartJob{
			Entry: j.entry, Ordinal: j.Ordinal, Attempt: j.Attempt, Failed: j.Retries+j.Throttles+j.Losses > 0,
		})
	}
	r, err := ledger.Start(w.Context(), w.c, w.p, typ, groups)
	require.NoError(w, err)
	i := 0
	for g := range groups {
		for range groups[g].Jobs {
			jobs[i].token, jobs[i].terms, jobs[i].last = r.Tokens[i], r.Groups[g], r.LastErrors[i]
			i++
		}
	}
}

func byJob(a, b taken) int {
	return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Ordinal, b.Ordinal), cmp.Compare(a.Attempt, b.Attempt))
}

// begin admits n jobs of a type; a worker then reads and starts them. Nothing else may be unread in
// the ready stream.
func (w *world) begin(typ, consumer string, n int) []taken {
	w.Helper()
	require.Equal(w, n, w.admit(typ, n, noLimit).Moved)
	jobs := w.read(typ, consumer)
	require.Len(w, jobs, n)
	w.start(typ, jobs)
	return jobs
}

// done returns a worker's report of done jobs.
func done(jobs ...taken) []ledger.GroupOutcome {
	jobs = slices.SortedStableFunc(slices.Values(jobs), byJob)
	var groups []ledger.GroupOutcome
	for _, j := range jobs {
		if n := len(groups); n == 0 || groups[n-1].Group != j.Group {
			groups = append(groups, ledger.GroupOutcome{Group: j.Group})
		}
		g := &groups[len(groups)-1]
		g.Done = append(g.Done, ledger.DoneJob{
			Entry: j.entry, Ordinal: j.Ordinal, Attempt: int(j.token), Line: fmt.Appendf(nil, `{"ordinal":%d}`, j.Ordinal),
			Trace: j.Trace, Marked: j.Payload == "" || j.token > 1,
		})
	}
	return groups
}

// other returns a worker's report of one job whose attempt ended with this outcome, other than
// done, with this delay, the code BOOM and the text "it broke".
func other(kind ledger.OutcomeKind, j taken, delay time.Duration) []ledger.GroupOutcome {
	o := ledger.OtherJob{
		Entry: j.entry, Ordinal: j.Ordinal, Attempt: int(j.token), Kind: kind, Retries: j.Retries, Throttles: j.Throttles, Losses: j.Losses,
		Waits: j.Waits, Queued: []byte(j.Queued), Delay: delay, Code: "BOOM", Text: "it broke",
	}
	switch kind {
	case ledger.OutcomeUnstarted:
		o.Attempt = j.Attempt
	case ledger.OutcomeDeferred:
		if j.token < 0 { // it was not started
			o.Attempt = j.Attempt
		}
	case ledger.OutcomeRetry:
		o.Retries++
	case ledger.OutcomeThrottled:
		o.Throttles++
	}
	return []ledger.GroupOutcome{{Group: j.Group, Others: []ledger.OtherJob{o}}}
}

// soon are retry terms with which jobs are due again at once.
var soon = ledger.Congestion{Cap: time.Second}

func (w *world) outcome(typ string, groups []ledger.GroupOutcome) ledger.OutcomeReply {
	w.Helper()
	return w.outcomeIn(soon, typ, groups)
}

func (w *world) outcomeIn(terms ledger.Congestion, typ string, groups []ledger.GroupOutcome) ledger.OutcomeReply {
	w.Helper()
	r, err := ledger.Outcome(w.Context(), w.c, w.p, typ, terms, groups)
	require.NoError(w, err)
	return r
}

// reclaim reclaims up to 1,000 pending entries of a type, with a lease of 0: however recently they
// were read. A job with more losses than maxLosses fails.
func (w *world) reclaim(typ string, maxLosses int) ledger.ReclaimReply {
	w.Helper()
	r, err := ledger.Reclaim(w.Context(), w.c, w.p, typ, 0, 1000, maxLosses, false)
	require.NoError(w, err)
	return r
}

func (w *world) status(group string) string {
	w.Helper()
	return w.c.HGet(w.Context(), w.p.Group(group), "status").Val()
}

// fence returns the fencing number of the latest leader lease. If there was none, watcher w1
// becomes the leader for an hour.
func (w *world) fence() int64 {
	w.Helper()
	if n := number(w.c.HGet(w.Context(), w.p.Watch(), "fence").Val()); n > 0 {
		return n
	}
	fence, err := ledger.Lead(w.Context(), w.c, w.p, "w1", time.Hour)
	require.NoError(w, err)
	require.NotZero(w, fence)
	return fence
}

// advance moves a group through its states as far as possible and returns the number
// of transitions.
func (w *world) advance(group string) int {
	w.Helper()
	return w.advanceReply(group).Moved
}

func (w *world) advanceReply(group string) ledger.AdvanceReply {
	w.Helper()
	r, err := ledger.Advance(w.Context(), w.c, w.p, group)
	require.NoError(w, err)
	require.NoError(w, r[0].Err)
	return r[0]
}

func (w *world) expire(group string) {
	w.Helper()
	require.NoError(w, ledger.Expire(w.Context(), w.c, w.p, group, w.fence(), false))
}

func fmtInt(n int64) string { return strconv.FormatInt(n, 10) }

// number parses a number of a Redis reply; a value that is missing or no integer is 0.
func number(v any) int64 {
	s, _ := v.(string)
	n, _ := strconv.ParseInt(s, 10, 64)
	return n
}

// places are the fields of a group's hash that count its jobs in each state, by state letter.
var places = map[ledger.Letter]string{
	ledger.Waiting: "waiting", ledger.NonReady: "non_ready", ledger.Ready: "ready", ledger.InFlight: "in_flight",
	ledger.Done: "done", ledger.Reduced: "done", ledger.Failed: "failed", ledger.Cancelled: "cancelled",
}

// letters returns the state letters of a group's jobs, without the attempt marks.
func letters(states string) string {
	b := make([]byte, len(states)/2)
	for i := range b {
		b[i] = states[2*i]
	}
	return string(b)
}

func (w *world) states(group string) string {
	w.Helper()
	s, err := w.c.Get(w.Context(), w.p.States(group)).Result()
	if !errors.Is(err, redis.Nil) {
		require.NoError(w, err)
	}
	return letters(s)
}

// ledger returns a group's counts that are not 0, by state. Like balance, it checks that they agree
// with the states.
func (w *world) ledger(group string) map[string]int64 {
	w.Helper()
	h, err := w.c.HGetAll(w.Context(), w.p.Group(group)).Result()
	require.NoError(w, err)
	return w.balance(h, w.states(group))
}

// balance returns the counts in a group's hash that are not 0. It checks that they agree with the
// states, that accepted is their sum, and that reduced counts the reduced jobs.
func (w *world) balance(h map[string]string, states string) map[string]int64 {
	w.Helper()
	counts, count, sum := map[string]int64{}, map[string]int64{}, int64(0)
	for _, letter := range []byte(states) {
		count[places[ledger.Letter(letter)]]++
	}
	for _, field := range slices.Compact(slices.Sorted(maps.Values(places))) {
		if n := number(h[field]); n != 0 {
			counts[field] = n
			sum += n
		}
	}
	require.Equal(w, count, counts, "ledger of %s against its states %s", h["id"], states)
	require.Equal(w, number(h["accepted"]), sum, "accepted jobs of %s", h["id"])
	require.Equal(w, int64(strings.Count(states, string(ledger.Reduced))), number(h["reduced"]), "reduced jobs of %s", h["id"])
	return counts
}

// dump returns the partition's data for comparisons: for each key its Redis type and content, with
// the consumers' pending entries, but without the counters stale and lost.
func (w *world) dump() map[string]string {
	w.Helper()
	all := map[string]string{}
	for _, key := range w.keys() {
		all[strings.TrimPrefix(key, w.p.Base())] = w.content(key)
	}
	return all
}

func (w *world) keys() []string {
	w.Helper()
	keys, err := redistest.Keys(w.Context(), w.c, w.p.Base()+"*")
	require.NoError(w, err)
	return keys
}

func (w *world) content(key string) string {
	w.Helper()
	ctx, what := w.Context(), w.c.Type(w.Context(), key).Val()
	var v any
	var err error
	switch what {
	case "string":
		v, err = w.c.Get(ctx, key).Result()
	case "hash":
		var h map[string]string
		h, err = w.c.HGetAll(ctx, key).Result()
		delete(h, "stale") // this counter counts reports that change nothing
		delete(h, "lost")
		v = h // fmt prints the keys of a map sorted
	case "list":
		v, err = w.c.LRange(ctx, key, 0, -1).Result()
	case "set":
		var s []string
		s, err = w.c.SMembers(ctx, key).Result()
		slices.Sort(s)
		v = s
	case "zset":
		v, err = w.c.ZRangeWithScores(ctx, key, 0, -1).Result()
	case "stream":
		var entries []redis.XMessage
		entries, err = w.c.XRange(ctx, key, "-", "+").Result()
		v = fmt.Sprint(entries, w.pending(key))
	}
	require.NoError(w, err)
	return fmt.Sprintf("%s %v", what, v)
}

// pending returns the pending entries of a stream in the ledger's consumer groups, each as
// "CONSUMER ENTRY".
func (w *world) pending(stream string) []string {
	w.Helper()
	var held []string
	for _, group := range []string{keyspace.GroupWorkers, keyspace.GroupAggregator} {
		p, err := w.c.XPendingExt(w.Context(), &redis.XPendingExtArgs{Stream: stream, Group: group, Start: "-", End: "+", Count: 10_000}).Result()
		if err != nil {
			require.ErrorContains(w, err, "NOGROUP")
			continue
		}
		for _, e := range p {
			held = append(held, e.Consumer+" "+e.ID)
		}
	}
	return held
}

// unchanged runs a step and checks that it changes nothing in the partition but the counters stale
// and lost.
func (w *world) unchanged(step func()) {
	w.Helper()
	before := w.dump()
	step()
	require.Equal(w, before, w.dump())
}
