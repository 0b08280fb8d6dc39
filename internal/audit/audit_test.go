package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/audittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/reducer"
)

func TestMain(m *testing.M) { audittest.Main(m) }

// run makes a full audit of a world and returns the report.
func run(w *audittest.World, opts Options) Report {
	r, err := Run(w.Context(), w.Conn, w.Space, opts)
	w.OK(err)
	return r
}

func TestCleanWorld(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		w := audittest.New(t, url, prefix, 3)
		audittest.Inhabit(w)
		r := run(w, Options{})
		require.Empty(t, r.Violations)
		require.True(t, r.OK)
		require.EqualValues(t, 16, r.Groups)
		require.EqualValues(t, 84+50+8+44+5+10+2+2+1200, r.Jobs)
		require.Equal(t, r, run(w, Options{stateBytes: 1}), "one group at a time")
	})
}

func TestNothingThere(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	w := audittest.New(t, url, prefix, 2)
	b, err := json.Marshal(run(w, Options{}))
	require.NoError(t, err)
	require.JSONEq(t, `{"ok":true,"groups":0,"jobs":0,"violations":[]}`, string(b))
}

func TestViolationAsJSON(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	w := audittest.New(t, url, prefix, 1)
	w.Create("g", "acme", "T")
	w.Append("g", audittest.Jobs(2))
	w.OK(w.C.LPop(w.Context(), w.Part("g").Queue("g", "T")).Err())
	w.Incr(w.Part("g").Group("g"), "throttles", 1)
	w.OK(w.C.Del(w.Context(), w.Space.OfGroup("g").Owner("g")).Err())
	b, err := json.Marshal(run(w, Options{}))
	require.NoError(t, err)
	require.JSONEq(t, `{"ok":false,"groups":1,"jobs":2,"violations":[
		{"law":"registry","partition":0,"group":"g","detail":"it is a group of tenant acme, but its owner key says \"\""},
		{"law":"location","partition":0,"group":"g","ordinal":0,"detail":"it is waiting at attempt 0, but not in the group's queues"}]}`, string(b))
}

// TestUnknownReducer: the number of results in an aggregate is checked even if the audit doesn't
// have its reducer.
func TestUnknownReducer(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	w := audittest.New(t, url, prefix, 1)
	most := reducer.MapReduce(func(r reducer.Result) (int64, error) { return r.Ordinal, nil }, func(a, b int64) int64 { return max(a, b) })
	w.OK(w.Plans.Register("highest", most))
	w.Create("g", "acme", "T", "aggregate", `[{"as":"h","op":"highest"},{"as":"n","op":"count"}]`)
	p := w.Part("g")
	w.Append("g", audittest.Jobs(5))
	w.Work(p, "T")
	require.Empty(t, run(w, Options{}).Violations)
	require.Empty(t, run(w, Options{Reducers: w.Plans}).Violations)

	w.OK(w.C.HSet(w.Context(), p.Aggregate("g"), "partial:0", `{"count":4,"aggregates":{}}`).Err())
	for _, opts := range []Options{{}, {Reducers: w.Plans}} {
		require.Equal(t, []string{audittest.Whole(LawResults, "g")}, audittest.Summary(run(w, opts).Violations))
	}
	w.OK(w.C.HSet(w.Context(), p.Aggregate("g"), "partial:0", `{}`).Err())
	require.Equal(t, []string{audittest.Whole(LawResults, "g")}, audittest.Summary(run(w, Options{}).Violations))
}

// TestLargeTenant: a tenant with more non-ready jobs than fit into one page is recounted. Each of
// its three counters is a violation when it is wrong.
func TestLargeTenant(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		w := audittest.New(t, url, prefix, 1)
		for i := range 20 {
			id := fmt.Sprint("g", i)
			w.Create(id, "acme", "T")
			w.Append(id, audittest.Jobs(2))
			w.Append(id, audittest.Jobs(40, audittest.Later))
		}
		require.Empty(t, run(w, Options{}).Violations)
		for _, counter := range counterNames {
			w.Incr(w.Space.OfTenant("acme").Tenant("acme"), counter, 1)
		}
		require.Len(t, run(w, Options{}).Violations, 3)
	})
}

func TestStops(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	w := audittest.New(t, url, prefix, 1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Run(ctx, w.Conn, w.Space, Options{})
	require.ErrorIs(t, err, context.Canceled)
	_, err = Partition(ctx, w.Conn, w.Space, w.Space.Partition(0), Options{})
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "audit partition 0: read groups: ")
}

// TestCancelledMeanwhile: a worker that reads a job of a cancelled group removes the job, even
// before the watcher's sweep has completed the cancellation. The audit reports no violation for
// that.
func TestCancelledMeanwhile(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	w := audittest.New(t, url, prefix, 1)
	p := w.Space.Partition(0)
	w.Create("g", "acme", "T")
	w.Append("g", audittest.Jobs(20))
	w.Append("g", audittest.Jobs(5, audittest.Later))
	w.Admit(p, "T", 10, audittest.NoLimit)
	read := w.Read(p, "T", "c", 8)
	w.Done(p, "T", w.Start(p, "T", read[:2])...)
	w.Cancel("g")
	require.Empty(t, run(w, Options{}).Violations)
	require.Empty(t, w.Start(p, "T", read[2:]))
	require.Empty(t, run(w, Options{}).Violations)
	w.Sweep("g")
	require.Empty(t, run(w, Options{}).Violations)
	require.EqualValues(t, 2, w.C.XLen(w.Context(), p.Ready("T")).Val(), "the entries that no worker has read")
	w.Reduce(p, "0", 10)
	require.Empty(t, run(w, Options{}).Violations)
}

// TestUnownedEntries: in a ready stream, the results stream and the ingest stream, each entry that
// was delivered and that no consumer owns is a violation. So is an entry of the ingest stream whose
// id has the largest possible time.
func TestUnownedEntries(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		w := audittest.New(t, url, prefix, 1)
		p := w.Space.Partition(0)
		w.Create("g", "acme", "T")
		w.Append("g", audittest.Jobs(3))
		w.Admit(p, "T", 3, audittest.NoLimit)
		w.Done(p, "T", w.Start(p, "T", w.Read(p, "T", "gone", 1))...)
		w.Read(p, "T", "gone", 1)
		w.OK(w.C.XAdd(w.Context(), &redis.XAddArgs{Stream: w.Space.Ingest(), Values: []string{"k", "v"}}).Err())
		require.Empty(t, run(w, Options{}).Violations)
		for key, group := range map[string]string{
			p.Ready("T"): keyspace.GroupWorkers, p.ResultStream(): keyspace.GroupAggregator, w.Space.Ingest(): keyspace.GroupIngest,
		} {
			if key != p.Ready("T") {
				w.OK(w.C.XGroupCreate(w.Context(), key, group, "0").Err())
			}
			read := w.C.XReadGroup(w.Context(), &redis.XReadGroupArgs{Group: group, Consumer: "gone", Streams: []string{key, ">"}, Block: -1})
			w.OK(read.Err())
			w.OK(w.C.XGroupDelConsumer(w.Context(), key, group, "gone").Err())
		}
		found := run(w, Options{}).Violations
		require.Equal(t, []string{LawDelivery}, audittest.Summary(found))
		require.Len(t, found, 4)
		require.Contains(t, fmt.Sprint(found), "of "+w.Space.Ingest()+" was delivered, but no consumer owns it")

		w.OK(w.C.XAdd(w.Context(), &redis.XAddArgs{Stream: w.Space.Ingest(), ID: "18446744073709551615-7", Values: []string{"k", "v"}}).Err())
		require.Len(t, run(w, Options{}).Violations, 5)
	})
}

// TestElementThatAScanRepeatsIsNotADuplicate: the sorted set non-ready is read twice. Only the job
// that is in it twice is reported as duplicated, and not the other 19.
func TestElementThatAScanRepeatsIsNotADuplicate(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	w := audittest.New(t, url, prefix, 1)
	w.Create("g", "acme", "T")
	w.Append("g", audittest.Jobs(20, audittest.Later))
	p := w.Space.Partition(0)
	blobs := w.C.ZRange(w.Context(), p.NonReadyOf("acme"), 0, 1).Val()
	w.AddNonReady(p, "acme", blobs[1]+" ")

	ps := newPass(scope{Reader: read.Reader{Cmd: w.C}, space: w.Space, p: p, opts: Options{Reducers: w.Plans, stateBytes: maxStateBytes}})
	w.OK(ps.ReadByScore(w.Context(), p.Groups(), func(ids []string) error { return ps.checkGroups(w.Context(), ids) }))
	w.OK(ps.shared.read(w.Context(), read.NonReadyOf("acme")[0]))
	w.OK(ps.shared.read(w.Context(), read.NonReadyOf("acme")[0]))
	w.OK(ps.shared.checkTracked(w.Context(), ps.shared.judgedKinds()))
	n, _ := ledger.QueuedOrdinal(blobs[1][len("g|T|0|0|0|0|0|0|0|1700000000000|S|"):])
	found := ps.found.withSummaries()
	require.Len(t, found, 1)
	require.Equal(t, "it is non-ready at attempt 0, and more than once in non-ready", found[identity{LawLocation, "g", n, "duplicated1N!"}].Detail)
}

func TestFindingsAreBounded(t *testing.T) {
	t.Parallel()
	fs := newFindings()
	for g := range 200 {
		for i := range int64(2 * maxPerGroupAndLaw) {
			fs.add(newFinding(LawLocation, fmt.Sprint(g), "", "x", "detail").aboutJob(i))
		}
	}
	fs.add(newFinding(LawLocation, "0", "", "x", "the same again").aboutJob(0))
	all := fs.withSummaries()
	require.Equal(t, "detail", all[identity{LawLocation, "0", 99, "x"}].Detail)
	require.Equal(t, "and 100 more like these", all[identity{LawLocation, "0", noOrdinal, "more"}].Detail)
	require.Equal(t, "and 20000 findings about more groups", all[identity{LawLocation, "", noOrdinal, "omitted"}].Detail)
	require.Len(t, all, maxFindings+100+1)
}

// TestAuditOfAMovingWorld: while all scripts move jobs, an audit reports no false violation, and it
// reports one that the test has caused.
func TestAuditOfAMovingWorld(t *testing.T) {
	audits, size := map[string]int{"redis": 6, "miniredis": 2}, map[string]int{"redis": 600, "miniredis": 100}
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		_, server, _ := strings.Cut(t.Name(), "/")
		w := audittest.New(t, url, prefix, 2)
		c := audittest.NewChurn(w, []string{"a", "b", "c", "d", "e"}, []string{"T", "U"})
		for i, tenant := range c.Tenants { // more than one page
			id := "g" + tenant
			w.Create(id, tenant, c.Types[i%2])
			w.Append(id, audittest.Jobs(size[server], audittest.OfType(c.Types[i%2])))
			w.Append(id, audittest.Jobs(size[server], audittest.Later))
		}
		stop := c.Run(t.Context(), server == "miniredis") // miniredis doesn't share its time fairly among connections
		t.Cleanup(func() { _ = stop() })
		for i := 0; i < audits[server] || c.Moves.Load() < 100; i++ {
			r := run(w, Options{stateBytes: []int{0, 1000}[i%2]})
			require.Empty(t, r.Violations, "audit %d", i)
		}

		p := w.Space.OfTenant("a")
		w.Create("broken", "a", "V")
		w.Append("broken", audittest.Jobs(3))
		w.OK(w.C.LPop(w.Context(), p.Queue("broken", "V")).Err())
		for range 3 {
			require.Contains(t, audittest.Summary(run(w, Options{}).Violations), audittest.Of(LawLocation, "broken", 0))
		}
		require.NoError(t, stop())
		require.Equal(t, []string{audittest.Of(LawLocation, "broken", 0)}, audittest.Summary(run(w, Options{}).Violations))
		t.Logf("%d moves", c.Moves.Load())
	})
}

// TestTamperingOfReadyJobs: an audit that reads one group at a time finds exactly the violations that
// a tamper with ready or non-ready jobs causes. TestTampering of package repair has all tampers.
func TestTamperingOfReadyJobs(t *testing.T) {
	tampers := slices.DeleteFunc(slices.Clone(audittest.Tampers), func(x audittest.Tamper) bool { return !strings.Contains(x.Name, "ready") })
	audittest.EachTamper(t, tampers, func(w *audittest.World, tamper audittest.Tamper) {
		want := tamper.Do(w)
		slices.Sort(want)
		r := run(w, Options{stateBytes: 1})
		require.Equal(w, want, audittest.Summary(r.Violations), "%v", r.Violations)
	})
}

// TestKeyOfWrongTypeIsReported: a key of one of ten kinds has the wrong Redis type. The audit does
// not stop, and a violation names the key.
func TestKeyOfWrongTypeIsReported(t *testing.T) {
	for _, c := range audittest.WrongTypes {
		t.Run(c.Name, func(t *testing.T) {
			redistest.Both(t, func(t *testing.T, url, prefix string) {
				t.Parallel()
				w := audittest.New(t, url, prefix, 1)
				c.Do(w)
				r := run(w, Options{})
				require.True(t, c.IsReported(w, r.Violations), "%v", r.Violations)
			})
		})
	}
}

// TestCallbacksThatMove: while callbacks are added, sent and redelivered, no audit finds a violation, in a
// queue of several pages. When they rest, it finds one that is lost in the middle.
func TestCallbacksThatMove(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	w := audittest.New(t, url, prefix, 1)
	p := w.Space.Partition(0)
	add := func(from, to int) error {
		var all []ledger.NewCallback
		for i := from; i < to; i++ {
			all = append(all, ledger.NewCallback{ID: fmt.Sprint("c", i), Queue: "acme", Tenant: "acme", Body: []byte("12345")})
		}
		_, _, err := ledger.AddCallbacks(w.Context(), w.C, p, all)
		return err
	}
	for i := 0; i < 1200; i += 200 {
		w.OK(add(i, i+200))
	}
	move := func(n int) error {
		all, _, _, err := ledger.ClaimCallbacks(w.Context(), w.C, p, ledger.Claim{Most: 2, Each: 2, Lease: time.Minute})
		for i := range all {
			how := []ledger.Settlement{ledger.Delivered, ledger.Dead, ledger.Retry}[(n+i)%3]
			_, settled := ledger.SettleCallback(w.Context(), w.C, p, &all[i], how, time.Minute, "", "")
			err = errors.Join(err, settled)
		}
		dead, listed := ledger.CallbackIDs(w.Context(), w.C, p, "", 0, 1)
		_, _, _, redelivered := ledger.RedeliverCallbacks(w.Context(), w.C, p, dead...)
		return errors.Join(err, add(n, n+1), listed, redelivered)
	}
	stop, stopped := make(chan struct{}), make(chan error)
	go func() {
		var err error
		for n := 1200; err == nil; n++ {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
				err = move(n)
			}
		}
		stopped <- err
	}()
	for range 3 {
		require.Empty(t, run(w, Options{}).Violations)
	}
	close(stop)
	w.OK(<-stopped)
	require.Empty(t, run(w, Options{}).Violations)
	ids := w.C.ZRange(w.Context(), p.CallbackAges("acme"), 600, -1).Val()
	for !w.C.HExists(w.Context(), p.Callback(ids[0]), "body").Val() { // one that was sent again has none
		ids = ids[1:]
	}
	w.OK(w.C.Del(w.Context(), p.Callback(ids[0])).Err())
	found := run(w, Options{}).Violations
	require.Len(t, found, 2)
	require.Equal(t, "callback "+ids[0]+": it is in queue acme, but does not exist", found[0].Detail)
	require.Contains(t, found[1].Detail, "the bodies of queue acme have ")
}
