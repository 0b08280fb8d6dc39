package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// These are the streams that administrators' commands hit.
const (
	readyStream  = "ready"
	resultStream = "results"
	ingestStream = "ingest"
)

// command is an administrator's command on a stream.
type command struct {
	streams []string
	// script is a Lua script that runs an administrator's command if the command has an effect now.
	// KEYS: the stream, an unused name. ARGV: the consumer group. Reply: the number of entries
	// affected, 0 if the command was not run; if it deletes entries, also these with their ids and
	// fields.
	script string
}

// luaGroup is the beginning of Lua scripts: it reads the last delivered id of the consumer group,
// and defines pending, which counts the group's pending entries. Without the stream or the group,
// the script returns 0 there.
const luaGroup = `
local last
if redis.call('EXISTS', KEYS[1]) == 0 then return {0} end
for _, about in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  if about[2] == ARGV[1] then last = about[8] end
end
if not last then return {0} end
local function pending() return redis.call('XPENDING', KEYS[1], ARGV[1])[1] end
`

// luaAll is a part of Lua scripts: it reads all entries of the stream. If there are none, the
// script returns 0 there.
const luaAll = `
local all = redis.call('XRANGE', KEYS[1], '-', '+')
if #all == 0 then return {0} end
`

var (
	allStreams = []string{readyStream, resultStream, ingestStream}
	// jobStreams are the streams in which entries may be deleted in any way: the audit finds jobs
	// and results that vanish. It finds a vanished message to ingest only with receipts, so for the
	// ingest stream one command, XDEL, represents all that delete.
	jobStreams = []string{readyStream, resultStream}
)

var commands = map[string]command{
	delConsumer: {allStreams, luaGroup + `
local n = 0
for _, about in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  if about[4] > 0 then n = n + redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], about[2]) end
end
return {n}`},
	setID: {allStreams, luaGroup + `
local unread = #redis.call('XRANGE', KEYS[1], '(' .. last, '+')
if unread > 0 then redis.call('XGROUP', 'SETID', KEYS[1], ARGV[1], '$') end
return {unread}`},
	setIDBack: {allStreams, luaGroup + `
local n = pending()
if n > 0 then redis.call('XGROUP', 'SETID', KEYS[1], ARGV[1], '0') end
return {n}`},
	destroyGroup: {allStreams, luaGroup + `
local n = pending()
if n > 0 then redis.call('XGROUP', 'DESTROY', KEYS[1], ARGV[1]) end
return {n}`},
	deleteStream: {jobStreams, luaAll + `
redis.call('DEL', KEYS[1])
return {#all, all}`},
	renameStream: {jobStreams, luaAll + `
redis.call('RENAME', KEYS[1], KEYS[2])
return {#all, all}`},
	deleteEntries: {allStreams, luaGroup + `
local some = redis.call('XRANGE', KEYS[1], '(' .. last, '+') -- all unread entries
if #some == 0 then return {0} end
local delivered = redis.call('XRANGE', KEYS[1], '-', last)
for i = 1, #delivered, 2 do some[#some + 1] = delivered[i] end
for _, entry in ipairs(some) do redis.call('XDEL', KEYS[1], entry[1]) end
return {#some, some}`},
	futureID: {allStreams, `
if redis.call('EXISTS', KEYS[1]) == 0 then return {0} end
redis.call('XADD', KEYS[1], '18446744073709551615-18446744073709551615', 'garbage', 'of the future')
return {1}`},
}

// administrator acts as an administrator of Redis who runs harmful commands on the ingest stream
// and on streams of partition 0. It records the entries that the commands delete.
type administrator struct {
	rdb     *redis.Client
	fleet   *fleet
	space   keyspace.Space
	lease   time.Duration
	deleted *deletions
	renamed atomic.Int64           // number of the last stream that was renamed
	inUse   map[string]*sync.Mutex // by stream: one command at a time
}

func newAdministrator(w *world, lease time.Duration) *administrator {
	a := &administrator{
		rdb: w.breaker.rdb, fleet: w.fleet, space: w.oracle.space, lease: lease, deleted: w.oracle.deleted,
		inUse: map[string]*sync.Mutex{},
	}
	for _, in := range allStreams {
		a.inUse[in] = &sync.Mutex{}
	}
	return a
}

// errNoEffect means that a fault could not have an effect: for example, there were no entries to
// delete.
var errNoEffect = errors.New("it found nothing")

// key returns the key of a stream, the name of its consumer group, and the role that reads it.
func (a *administrator) key(in string) (key, group, role string) {
	p := a.space.Partition(0)
	switch in {
	case readyStream:
		return p.Ready("CHAOS"), keyspace.GroupWorkers, "worker"
	case resultStream:
		return p.ResultStream(), keyspace.GroupAggregator, "aggregator"
	}
	return a.space.Ingest(), keyspace.GroupIngest, "ingest"
}

// run runs an administrator's command when it has an effect. To get pending and unread entries, it
// suspends the processes that read the stream for about half a lease. If the command still has no
// effect, it continues the processes and tries again. After six tries it returns errNoEffect.
func (a *administrator) run(ctx context.Context, f fault) (what string, err error) {
	c := commands[f.kind]
	in := c.streams[f.n%len(c.streams)]
	a.inUse[in].Lock()
	defer a.inUse[in].Unlock()
	for range 6 {
		n, err := a.try(ctx, c, in, f.rng)
		if err != nil || n > 0 {
			return fmt.Sprintf("%s: %d entries", in, n), err
		}
		if err := redisx.Sleep(ctx, a.lease/4); err != nil {
			return in, err
		}
	}
	return in, errNoEffect
}

func (a *administrator) try(ctx context.Context, c command, in string, rng *rand.Rand) (n int64, err error) {
	key, group, role := a.key(in)
	resume, err := a.fleet.hold(role)
	defer func() { err = errors.Join(err, resume()) }()
	if err != nil {
		return 0, err
	}
	until := time.Now().Add(a.lease / 2)
	if err := redisx.Sleep(ctx, between(rng, 0, a.lease/10)); err != nil {
		return 0, err
	}
	for n == 0 && time.Now().Before(until) {
		if n, err = a.once(ctx, c, in, key, group); err != nil {
			return n, err
		}
		if err := redisx.Sleep(ctx, 5*time.Millisecond); err != nil {
			return n, err
		}
	}
	return n, nil
}

func (a *administrator) once(ctx context.Context, c command, in, key, group string) (n int64, err error) {
	at := time.Now()
	reply, err := a.rdb.Eval(ctx, c.script, []string{key, fmt.Sprint("renamed-", a.renamed.Add(1))}, group).Slice()
	if err != nil || len(reply) == 0 {
		return 0, err
	}
	n, _ = reply[0].(int64)
	if len(reply) == 1 {
		return n, nil
	}
	for _, fields := range entriesOf(reply[1]) {
		if err := a.deleted.note(in, fields, at); err != nil {
			return n, fmt.Errorf("entry deleted from %s: %w", key, err)
		}
	}
	return n, nil
}

func entriesOf(reply any) (all [][]string) {
	entries, _ := reply.([]any)
	for _, e := range entries {
		entry, _ := e.([]any)
		if len(entry) != 2 {
			continue
		}
		var fields []string
		values, _ := entry[1].([]any)
		for _, v := range values {
			text, _ := v.(string)
			fields = append(fields, text)
		}
		all = append(all, fields)
	}
	return all
}

// hold suspends all processes of a role with SIGSTOP. resume lets them continue.
func (f *fleet) hold(role string) (resume func() error, err error) {
	held := map[*slot]*process{}
	from := time.Now()
	resume = func() (err error) {
		for _, p := range held {
			f.note(span{process: p.name, from: from, until: time.Now()})
			err = errors.Join(err, ignoreGone(p.Signal(syscall.SIGCONT)))
		}
		return err
	}
	for _, s := range f.of(role) {
		s.mu.Lock()
		p := s.proc
		s.mu.Unlock()
		if p == nil || !p.Running() {
			continue // it is being replaced
		}
		held[s] = p
		if err := ignoreGone(p.Suspend()); err != nil {
			return resume, err
		}
	}
	return resume, nil
}

// adminFaults is the number of faults of each kind in the phase admin.
var adminFaults = counts{
	delConsumer: 9, setID: 9, setIDBack: 6, destroyGroup: 6, deleteStream: 6, renameStream: 6, deleteEntries: 9, futureID: 6,
	silentReaders: 3, stalledBodies: 3, endlessLine: 3, writeGarbage: 9, hostileIDs: 3, killProcess: 6,
}

// admin runs a phase in which administrators run harmful commands on the streams, clients misbehave
// and processes are killed. Only jobs whose entry was deleted may end as LOST, and only groups of
// which a message to ingest was deleted may miss jobs. The audit must name these groups, and they
// are submitted again.
func admin(t testing.TB, s scene, rng *rand.Rand, m mix, kinds counts) *phase {
	w := newWorld(t, s)
	defer func() {
		if t.Failed() || w.phase.red() {
			t.Logf("faults:\n%s\nanswers: %v", strings.Join(w.breaker.log, "\n"), w.breaker.clients.answers)
		}
	}()
	groups := plan(rng, "admin", m)
	produced := w.produce(t.Context(), groups)
	faults := schedule(rng, kinds, m.during*9/10) // jobs come until the end, so that the last faults hit some, too
	require.NoError(t, w.breaker.run(t.Context(), faults))
	healed := time.Now()
	require.NoError(t, produced())
	return w.settleAdmin(healed, groups)
}

// settleAdmin waits until the streams are empty and the audit finds only missing messages. Before
// that, it may find missing jobs that have not ended as LOST yet. Then settleAdmin continues as
// settleLosses does. healed is the time at which the last fault ended.
func (w *world) settleAdmin(healed time.Time, groups []*group) *phase {
	t := w.t
	t.Helper()
	w.awaitIngested()
	w.fleet.await(t, "all that was deleted is found", 2*endWithin, func(ctx context.Context) error {
		for _, in := range allStreams {
			key, _, _ := w.breaker.admin.key(in)
			if n, err := w.breaker.rdb.XLen(ctx, key).Result(); n > 0 || err != nil {
				return errors.Join(err, fmt.Errorf("%d entries are in %s", n, key))
			}
		}
		report, err := w.oracle.audit(ctx, w.receipts())
		if err != nil {
			return err
		}
		for _, v := range report.Violations {
			if v.Law != receiptLaw {
				return fmt.Errorf("audit: law %s, group %q: %s", v.Law, v.Group, v.Detail)
			}
		}
		return nil
	})
	w.judgeGarbage()
	w.breaker.clients.close()
	w.phase.Answers = w.breaker.clients.answers
	return w.settleLossesSince(healed, groups)
}

// judgeGarbage checks, if garbage was written into each of the three streams, that at least one
// message to ingest was rejected and at least one entry of another stream was quarantined.
func (w *world) judgeGarbage() {
	w.t.Helper()
	if w.breaker.done[writeGarbage] < len(allStreams) {
		return
	}
	ctx, space := w.t.Context(), w.breaker.admin.space
	rejected, err := w.breaker.rdb.XLen(ctx, space.Rejected()).Result()
	require.NoError(w.t, err)
	quarantined, err := w.breaker.rdb.LLen(ctx, space.Partition(0).Quarantine()).Result()
	require.NoError(w.t, err)
	if rejected == 0 || quarantined == 0 {
		w.phase.violate("%d garbage messages were rejected, and %d garbage entries were quarantined", rejected, quarantined)
	}
}

// deletions records what administrators' commands have deleted: only these jobs may end as LOST,
// and only these groups may miss messages.
type deletions struct {
	mu       sync.Mutex
	jobs     map[string]map[int64]deletion // by group and ordinal
	messages map[string]bool               // groups of which messages to ingest were deleted
}

// deletion records when an entry of a job was last deleted, from a ready stream or from the stream
// of results.
type deletion struct {
	n  int // the job's index in the plan
	at time.Time
}

// maxOrdinal is above the ordinal of each planned job, and below the ordinal 99999999 in the
// garbage that a fault writes.
const maxOrdinal = 1 << 20

func newDeletions() *deletions {
	return &deletions{jobs: map[string]map[int64]deletion{}, messages: map[string]bool{}}
}

// ofGroup returns the deleted jobs of a group by ordinal.
func (d *deletions) ofGroup(group string) map[int64]deletion {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.jobs[group]
}

// count returns the number of jobs with a deleted entry.
func (d *deletions) count() (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, jobs := range d.jobs {
		n += len(jobs)
	}
	return n
}

// note records that an entry was deleted from a stream. It ignores garbage that another fault has
// written there.
func (d *deletions) note(in string, fields []string, at time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch in {
	case readyStream:
		var job ledger.Job
		if job.Parse(ledger.EntryBlob(fields)) != nil || isGarbage(job.Group) {
			return nil
		}
		return d.noteJob(job.Group, job.Ordinal, []byte(job.Payload), at)
	case resultStream:
		return d.noteResults(fields, at)
	}
	return d.noteMessage(fields)
}

func (d *deletions) noteResults(fields []string, at time.Time) error {
	group, lines := field(fields, ledger.ResultsGroup), field(fields, ledger.ResultsLines)
	if group == "" || isGarbage(group) {
		return nil
	}
	for line := range strings.SplitSeq(lines, "\n") {
		var result api.Result
		if err := json.Unmarshal([]byte(line), &result); err != nil {
			if isGarbage(line) {
				continue
			}
			return fmt.Errorf("results of group %s: line %q: %w", group, line, err)
		}
		if result.Ordinal < 0 || result.Ordinal > maxOrdinal {
			continue // garbage
		}
		if err := d.noteJob(group, result.Ordinal, result.Data, at); err != nil {
			return err
		}
	}
	return nil
}

// noteJob records that the entry of a job was deleted. data is the job's payload or its result:
// both contain the job's index in the plan.
func (d *deletions) noteJob(group string, ordinal int64, data []byte, at time.Time) error {
	var job payload
	if err := json.Unmarshal(data, &job); err != nil {
		return fmt.Errorf("job %d of group %s has the data %q: %w", ordinal, group, data, err)
	}
	if d.jobs[group] == nil {
		d.jobs[group] = map[int64]deletion{}
	}
	d.jobs[group][ordinal] = deletion{n: job.N, at: at}
	return nil
}

func (d *deletions) noteMessage(fields []string) error {
	var message struct{ Group, ID string }
	if err := json.Unmarshal([]byte(field(fields, "data")), &message); err != nil {
		return nil // it is garbage: producers write JSON
	}
	for _, group := range []string{message.Group, message.ID} {
		if group != "" && !isGarbage(group) {
			d.messages[group] = true
		}
	}
	return nil
}

// field returns the value of a field in the fields and values of a stream entry; "" if it is not
// there.
func field(fields []string, name string) string {
	for i := 0; i+1 < len(fields); i += 2 {
		if fields[i] == name {
			return fields[i+1]
		}
	}
	return ""
}
