// Package aggregator implements the aggregator role: it reduces the results of done jobs, and adds
// each of them to its group's aggregate exactly once, even when several processes read the same
// result. It hides that an aggregate consists of partial aggregates, which spare the processes from
// waiting for each other.
package aggregator

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jsonscan"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/reducer"
)

// Config holds the settings of the aggregator role.
type Config struct {
	Block time.Duration // longest blocking read of the results stream
	Lease time.Duration // another aggregator claims an entry that was not acknowledged for this time
}

const (
	// minRead and maxRead bound the number of entries of one read. Each entry holds the results of
	// up to 200 jobs. A read asks for more than minRead entries only if the read before was full
	// and all its entries together had less than lightRead bytes.
	minRead, maxRead = 50, 200
	lightRead        = 1 << 20 // bytes
	// After it has read all entries there are, the process waits pauseFactor times as long as it
	// took to reduce them, at most maxPause, so that the next entries collect: it is cheaper to
	// reduce them together. A wake token ends the wait: the last job of a group has ended.
	pauseFactor = 4
	maxPause    = 20 * time.Millisecond
)

// Aggregator is one aggregator process. It reduces the results of all partitions.
type Aggregator struct {
	stage.Process
	cfg      Config
	reducers *reducer.Registry
	partial  string // number of the partial aggregate that this process adds results to, chosen by its id
}

// New returns the aggregator of a process. It starts no goroutine.
func New(p stage.Process, cfg Config, reducers *reducer.Registry) *Aggregator {
	return &Aggregator{
		Process: p, cfg: cfg, reducers: reducers,
		partial: strconv.Itoa(int(crc32.ChecksumIEEE([]byte(p.ID)) % ledger.Partials)),
	}
}

// Run reduces results until ctx ends, including all entries that it has read by then, and for up to
// a second those that are in the stream, unless Redis fails. At the end it removes its consumers that hold no entries.
func (a *Aggregator) Run(ctx context.Context) error {
	r := a.Runner()
	var parts []*partitionReducer
	for _, p := range a.Space.All() {
		part := &partitionReducer{
			Aggregator: a,
			partition:  p,
			reader:     stream.NewReader(a.Conn, keyspace.GroupAggregator, a.ID),
			claimStart: stream.FirstID,
			readCount:  minRead,
			cache:      groupCache{groups: map[string]*cachedGroup{}},
		}
		parts = append(parts, part)
		r.Loop("reduce", p.Wake("aggregator"), part.step)
	}
	r.OnStop(func(ctx context.Context) {
		for _, part := range parts {
			part.drain(ctx)
		}
	})
	r.ReportAlive("aggregator", a.reducers.Ops())
	r.OnStop(func(ctx context.Context) {
		for _, p := range a.Space.All() {
			_, _ = ledger.DropConsumer(ctx, a.Conn.Cmd, p.ResultStream(), keyspace.GroupAggregator, a.ID, 0)
		}
	})
	return r.Run(ctx)
}

type partitionReducer struct {
	*Aggregator
	partition  keyspace.Partition
	reader     *stream.Reader
	claimedAt  time.Time      // time of the last claim
	takenAt    time.Time      // time of the last search for entries that others have left (see leave)
	claimStart string         // entry id at which the next claim begins
	readCount  int            // entries that the next read asks for
	unreduced  []stream.Entry // entries that were read, but not reduced, because Redis failed
	cache      groupCache
}

// step reads and reduces one batch of entries. If Redis is away, it returns the error and keeps the
// entries that are not reduced, for the next step. It returns how long to wait while the next
// entries collect; 0 means: read at once.
func (p *partitionReducer) step(ctx context.Context) (time.Duration, error) {
	entries, more := p.unreduced, false
	if len(entries) == 0 {
		var err error
		if entries, more, err = p.readEntries(ctx); err != nil || len(entries) == 0 {
			return 0, err
		}
	}
	p.unreduced = nil
	// Reduce the entries that were read even if the process stops: other processes would claim them
	// only after a lease.
	ctx = context.WithoutCancel(ctx)
	began := time.Now()
	batches := groupBatches(entries)
	p.cacheGroups(ctx, batches)
	for len(batches) > 0 {
		n := oneCall(batches)
		if err := p.reduceTogether(ctx, batches[:n]); err != nil {
			for _, b := range batches {
				if !b.done {
					p.unreduced = append(p.unreduced, b.entries...)
				}
			}
			return 0, err
		}
		batches = batches[n:]
	}
	if more {
		return 0, nil
	}
	return min(pauseFactor*time.Since(began), maxPause), nil
}

// drain reduces what is in the stream, until it is empty, ctx ends or Redis fails: when a whole
// installation stops, a group whose jobs have ended can end.
func (p *partitionReducer) drain(ctx context.Context) {
	for ctx.Err() == nil {
		if len(p.unreduced) == 0 {
			batches, err := p.reader.Read(ctx, []string{p.partition.ResultStream()}, minRead, 0)
			if err != nil || len(batches) == 0 {
				return
			}
			p.unreduced = batches[0].Entries
		}
		if _, err := p.step(ctx); err != nil {
			return
		}
	}
}

// readEntries returns the next entries of the results stream, and whether there may be more. From
// time to time it first takes entries that another aggregator has left (see leave), and claims those
// of dead aggregators; if there are any, it returns only these. Otherwise it waits up to
// Config.Block for new entries, and sets readCount for the next read.
func (p *partitionReducer) readEntries(ctx context.Context) (entries []stream.Entry, more bool, err error) {
	if time.Since(p.takenAt) > takeEvery {
		if entries, err = p.takeLeft(ctx); err != nil || len(entries) > 0 {
			return entries, true, err
		}
		p.takenAt = time.Now()
	}
	if time.Since(p.claimedAt) > max(p.cfg.Lease/2, 10*time.Millisecond) {
		p.claimedAt = time.Now()
		claimed, err := p.claimEntries(ctx)
		if err != nil || len(claimed) > 0 {
			return claimed, true, err
		}
	}
	batches, err := p.reader.Read(ctx, []string{p.partition.ResultStream()}, p.readCount, p.cfg.Block)
	if err != nil || len(batches) == 0 {
		return nil, false, err
	}
	entries = batches[0].Entries
	more = len(entries) == p.readCount
	bytes := 0
	for _, e := range entries {
		bytes += len(e.Get(ledger.ResultsLines))
	}
	if p.readCount = minRead; more && bytes < lightRead {
		p.readCount = min(2*len(entries), maxRead)
	}
	return entries, more, nil
}

// claimEntries takes over up to minRead entries that an aggregator (perhaps this one) has read but
// not acknowledged for a lease, or that no consumer owns. If another aggregator is still alive and
// reduces them as well, the job states in Redis let each result count once. The next call continues
// where this one ended.
func (p *partitionReducer) claimEntries(ctx context.Context) ([]stream.Entry, error) {
	entries, err := p.reader.ClaimNext(
		ctx, p.partition.ResultStream(), p.cfg.Lease, &p.claimStart, minRead, p.Tel.Log)
	if err != nil {
		return nil, err
	}
	if len(entries) > 0 {
		p.Tel.Log.Warn("claimed results that no aggregator had reduced for a lease",
			"partition", p.partition.Index(), "entries", len(entries))
	}
	return entries, nil
}

const (
	// leftFor begins the names of the consumers that hold entries for aggregators with certain
	// reducers: the names of the reducers follow, divided by commas. No process runs under such a
	// name.
	leftFor = "reducers:"
	// takeEvery is the time between two searches for left entries.
	takeEvery = time.Second
)

// leave gives the entries of a batch to a consumer without a process, from which an aggregator that
// has the group's reducers takes them (see takeLeft).
func (p *partitionReducer) leave(ctx context.Context, b *batch, lacks *ledger.MissingReducerError) error {
	ids := make([]string, len(b.entries))
	for i, e := range b.entries {
		ids[i] = e.ID
	}
	to := leftFor + strings.Join(lacks.Ops, ",")
	if err := p.reader.GiveTo(ctx, p.partition.ResultStream(), to, ids); err != nil {
		return fmt.Errorf("leave results of group %s to others: %w", b.group, err)
	}
	p.Tel.Log.Debug("left results to an aggregator that has the reducer", "group", b.group, "reducers", lacks.Missing)
	return nil
}

// takeLeft takes up to minRead entries that were left for aggregators with reducers that this
// process has. It deletes a consumer that holds none any more.
func (p *partitionReducer) takeLeft(ctx context.Context) ([]stream.Entry, error) {
	key := p.partition.ResultStream()
	consumers, err := p.Conn.Cmd.XInfoConsumers(ctx, key, keyspace.GroupAggregator).Result()
	if err != nil {
		if call.IsUnavailable(err) {
			return nil, fmt.Errorf("find left results: %w", err)
		}
		return nil, nil // the next read creates the stream and the group
	}
	for _, c := range consumers {
		ops, left := strings.CutPrefix(c.Name, leftFor)
		if !left || slices.ContainsFunc(strings.Split(ops, ","), func(op string) bool {
			return !slices.Contains(p.reducers.Ops(), op)
		}) {
			continue
		}
		entries, err := p.reader.TakeFrom(ctx, key, c.Name, minRead)
		if err != nil || len(entries) > 0 {
			return entries, err
		}
		if _, err := ledger.DropConsumer(ctx, p.Conn.Cmd, key, keyspace.GroupAggregator, c.Name, 0); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// oneCall returns how many of the batches one script call takes, at least 1. A group occurs once in a
// call, because each batch of a group needs the version that the one before has written.
func oneCall(batches []*batch) int {
	lines, bytes, groups := 0, 0, map[string]bool{}
	for i, b := range batches {
		lines, bytes = lines+b.lines, bytes+b.bytes
		if i > 0 && (lines > ledger.MaxReduceJobs || bytes > ledger.MaxReduceBytes || groups[b.group] || i == ledger.MaxReduceGroups) {
			return i
		}
		groups[b.group] = true
	}
	return len(batches)
}

// reduceTogether reduces batches of different groups with one script call, and repeats it for those
// that are refused: because another process has changed the same partial aggregate, or because some
// jobs are not done or already reduced. The entries of a group that can't be reduced stay pending and
// are claimed later. The returned error says that Redis is away.
func (p *partitionReducer) reduceTogether(ctx context.Context, batches []*batch) error {
	began := time.Now()
	for len(batches) > 0 {
		left, args := batches[:0:0], make([]ledger.ReduceArgs, 0, len(batches))
		for _, b := range batches {
			a, err := p.prepare(ctx, b)
			if err == nil && a == nil {
				continue
			}
			if err == nil {
				left, args = append(left, b), append(args, *a)
			} else if err = p.failed(ctx, b, err); err != nil {
				return err
			}
		}
		batches = batches[:0:0]
		if len(left) == 0 {
			return nil
		}
		replies, err := ledger.Reduce(ctx, p.Conn.Cmd, p.partition, args...)
		if err != nil && len(left) > 1 && !call.IsUnavailable(err) { // one of the groups may be to blame
			for i := range left {
				if err := p.reduceTogether(ctx, left[i:i+1]); err != nil {
					return err
				}
			}
			return nil
		}
		for i, b := range left {
			var r ledger.ReduceReply
			each := err
			if err == nil {
				r = replies[i]
				each = r.Err
			}
			if each != nil {
				if each = p.failed(ctx, b, each); each != nil {
					return each
				}
				continue
			}
			switch b.done = true; r.State {
			case ledger.ReduceOK:
				if b.cached != nil {
					if b.cached.state != nil {
						b.cached.version, b.cached.size = r.Version, len(args[i].State)
						p.cache.put(b.group, b.cached)
					}
					p.recordSpans(ctx, b.cached.tenant, b.group, b.jobs, began)
				}
			case ledger.ReduceVersion: // another process with the same partial aggregate was faster: load it again
				b.done, b.plain, batches = false, "", append(batches, b)
			case ledger.ReduceBad:
				p.Tel.Log.Warn("left out results of jobs that are not done or already reduced",
					"group", b.group, "ordinals", r.Bad)
				b.jobs = slices.DeleteFunc(b.jobs, func(d jobResult) bool { return slices.Contains(r.Bad, d.Ordinal) })
				b.done, batches = false, append(batches, b)
			}
		}
	}
	return nil
}

// failed handles the error of a batch. It returns it if Redis is away.
func (p *partitionReducer) failed(ctx context.Context, b *batch, err error) error {
	if lacks, ok := errors.AsType[*ledger.MissingReducerError](err); ok {
		if err = p.leave(ctx, b, lacks); err == nil {
			b.done = true
			return nil
		}
	}
	if call.IsUnavailable(err) {
		return err
	}
	b.done = true
	p.Tel.Log.Error("reduce failed, trying again later",
		"partition", p.partition.Index(), "group", b.group, "error", err)
	return nil
}

// prepare adds the results of a batch to this process's partial aggregate of the group, and returns
// the arguments that store it. It returns nil if there is nothing left to do: it quarantines entries
// that can't be read.
func (p *partitionReducer) prepare(ctx context.Context, b *batch) (*ledger.ReduceArgs, error) {
	var err error
	if b.jobs == nil {
		if b.jobs, err = parseEntries(b.entries); err != nil {
			return nil, p.quarantine(ctx, b, err)
		}
	}
	args := &ledger.ReduceArgs{Group: b.group, Partial: p.partial, Entries: make([]string, len(b.entries))}
	for i, e := range b.entries {
		args.Entries[i] = e.ID
	}
	if b.plain != "" {
		b.cached = &cachedGroup{tenant: b.plain}
		return args, p.addResults(b.cached, b.jobs, args)
	}
	if b.cached, err = p.loadGroup(ctx, b.group); err != nil || b.cached == nil {
		return args, err
	}
	// addResults changes the state, so the group is not cached until Redis has stored it.
	p.cache.remove(b.group)
	return args, p.addResults(b.cached, b.jobs, args)
}

// addResults adds the results of jobs to the cached partial aggregate, and puts its encoded state,
// its version, the result lines and the ordinals into args. If a reducer refuses a result, only
// that reducer's aggregate lacks it: the line and the ordinal are in args all the same. The error
// says that the state can't be encoded.
func (p *partitionReducer) addResults(cached *cachedGroup, jobs []jobResult, args *ledger.ReduceArgs) error {
	size, leftOut, reason := 0, 0, error(nil)
	args.Ordinals = make([]int64, len(jobs))
	for i := range jobs {
		if cached.state != nil {
			if err := cached.state.Add(jobs[i].Result); err != nil {
				leftOut, reason = leftOut+1, err
			}
		}
		args.Ordinals[i] = jobs[i].Ordinal
		size += len(jobs[i].line) + 1
	}
	if leftOut > 0 {
		p.Tel.Log.Warn("a reducer refused results", "group", args.Group, "results", leftOut, "last_error", reason)
	}
	args.Lines = make([]byte, 0, size)
	for i := range jobs {
		if i > 0 {
			args.Lines = append(args.Lines, '\n')
		}
		args.Lines = append(args.Lines, jobs[i].line...)
	}
	if cached.state == nil {
		return nil
	}
	args.Version = cached.version
	encoded, err := cached.state.Encode()
	args.State = encoded
	return err
}

// quarantine moves an entry that holds no results from the results stream to the partition's list
// of quarantined entries, with the reason, for an operator. If there are several entries, it
// reduces each of them alone, so that it quarantines only unreadable ones.
func (p *partitionReducer) quarantine(ctx context.Context, b *batch, reason error) error {
	b.done = true
	if len(b.entries) > 1 {
		for i := range b.entries {
			one := &batch{group: b.group, entries: b.entries[i : i+1]}
			if err := p.reduceTogether(ctx, []*batch{one}); err != nil {
				b.done, b.entries = false, b.entries[i:]
				return err
			}
		}
		return nil
	}
	e := b.entries[0]
	p.Tel.Log.Warn("quarantined an unreadable results entry",
		"partition", p.partition.Index(), "entry", e.ID, "reason", reason)
	to := stream.Quarantine{Key: p.partition.Quarantine(), Source: "results"}
	err := p.reader.Quarantine(ctx, p.partition.ResultStream(), to, e, reason)
	b.done = err == nil
	return err
}

// cachedGroup is what this process keeps in memory of a group: this process's partial aggregate, so
// that it need not be read from Redis for each batch.
type cachedGroup struct {
	tenant  string
	version int64          // version of the partial aggregate that state belongs to
	state   *reducer.State // content of the partial aggregate; nil: the group has no aggregates
	size    int            // bytes of the encoded state
}

// maxCachedGroups and maxCachedBytes bound the cache of one partition; one larger group is cached
// alone. The bytes are those of encoded states; in memory, a state takes a few times as many.
const (
	maxCachedGroups = 2000
	maxCachedBytes  = 16 << 20
)

// groupCache holds the cached groups of one partition.
type groupCache struct {
	groups map[string]*cachedGroup
	bytes  int // sum of the groups' sizes
}

// put adds a group to the cache. If the cache is full, it removes other groups at random; a removed
// group is read from Redis again with its next batch.
func (m *groupCache) put(group string, cached *cachedGroup) {
	for other := range m.groups {
		if len(m.groups) < maxCachedGroups && m.bytes+cached.size <= maxCachedBytes {
			break
		}
		m.remove(other)
	}
	m.remove(group)
	m.groups[group] = cached
	m.bytes += cached.size
}

func (m *groupCache) remove(group string) {
	if cached := m.groups[group]; cached != nil {
		m.bytes -= cached.size
		delete(m.groups, group)
	}
}

// loadGroup returns a group with its tenant and its partial aggregate, from the cache or from
// Redis. It does not add the group to the cache. It returns nil when the group no longer exists.
func (p *partitionReducer) loadGroup(ctx context.Context, group string) (*cachedGroup, error) {
	if cached := p.cache.groups[group]; cached != nil {
		return cached, nil
	}
	read := ledger.ReadPartials(ctx, p.Conn.Cmd, p.partition, p.partial, []string{group})
	return p.decodeGroup(group, read[0])
}

// cacheGroups reads from Redis, in one round trip, those groups of batches that are not in the
// cache, and adds them to it. If there is only one such group, it does nothing. It ignores errors:
// loadGroup reads such a group again and returns the error.
func (p *partitionReducer) cacheGroups(ctx context.Context, batches []*batch) {
	var missing []string
	for _, b := range batches {
		if b.plain == "" && p.cache.groups[b.group] == nil && !slices.Contains(missing, b.group) {
			missing = append(missing, b.group)
		}
	}
	if len(missing) < 2 {
		return
	}
	for i, read := range ledger.ReadPartials(ctx, p.Conn.Cmd, p.partition, p.partial, missing) {
		if cached, err := p.decodeGroup(missing[i], read); err == nil && cached != nil {
			p.cache.put(missing[i], cached)
		}
	}
}

// decodeGroup makes a cachedGroup from read: the tenant, the aggregates and one partial aggregate
// of the group in Redis. It returns nil when the group no longer exists. The error says that it
// could not be read or decoded, or that this process does not know one of its reducers.
func (p *partitionReducer) decodeGroup(group string, read ledger.PartialAggregate) (*cachedGroup, error) {
	if read.Err != nil || !read.Exists {
		return nil, read.Err
	}
	plan, err := ledger.WorkPlan(p.reducers, read.Aggregates)
	if err != nil {
		return nil, fmt.Errorf("group %s: %w", group, err)
	}
	cached := &cachedGroup{tenant: read.Tenant, version: read.Version, size: len(read.State)}
	if read.Aggregates == "" {
		return cached, nil
	}
	if read.State == "" {
		cached.state = plan.New()
	} else if cached.state, err = plan.Decode([]byte(read.State)); err != nil {
		return nil, fmt.Errorf("group %s: %w", group, err)
	}
	return cached, nil
}

// reduceBytes and reduceLines bound the results of one script call: when the entries of a group
// reach one of them, the group's next entry begins a new batch.
const (
	reduceBytes = 1 << 20
	reduceLines = 2000
)

// batch holds the entries of one group that one script call reduces.
type batch struct {
	group        string
	entries      []stream.Entry
	bytes, lines int    // size and number of all results in entries
	plain        string // the group's tenant, if the entries say that it asks for no aggregates

	jobs   []jobResult  // in entries, without those that were refused; nil: not read yet
	cached *cachedGroup // nil: the group does not exist
	done   bool         // reduced, set aside, or left pending
}

// groupBatches divides entries into batches, ordered by their first entries. The entries of a batch
// keep their order.
func groupBatches(entries []stream.Entry) []*batch {
	var all []*batch
	open := map[string]*batch{}
	for _, e := range entries {
		group, lines := e.Get(ledger.ResultsGroup), e.Get(ledger.ResultsLines)
		b := open[group]
		if b == nil || b.bytes >= reduceBytes || b.lines >= reduceLines {
			b = &batch{group: group, plain: e.Get(ledger.ResultsPlain)}
			open[group], all = b, append(all, b)
		}
		if e.Get(ledger.ResultsPlain) == "" { // an earlier version has written it
			b.plain = ""
		}
		b.entries = append(b.entries, e)
		b.bytes += len(lines)
		b.lines += 1 + strings.Count(lines, "\n")
	}
	return all
}

// jobResult is the result of one job, as it was read from an entry of the results stream.
type jobResult struct {
	reducer.Result
	line  string // the result's JSON, as it was read
	trace string // trace context that the reduce span follows; "" when the job is not sampled
}

// parseEntries returns the results in entries, which belong to one group, ordered by ordinal. It
// returns each job once. The error names an entry that holds something else.
func parseEntries(entries []stream.Entry) ([]jobResult, error) {
	n := 0
	for _, e := range entries {
		n += 1 + strings.Count(e.Get(ledger.ResultsLines), "\n")
	}
	jobs := make([]jobResult, 0, n)
	for _, e := range entries {
		traces := parseTraces(e.Get(ledger.ResultsTraces))
		text := e.Get(ledger.ResultsLines)
		raw := []byte(text) // one copy of the text, shared by all its results
		for at := 0; at <= len(text); {
			end := len(text)
			if i := strings.IndexByte(text[at:], '\n'); i >= 0 {
				end = at + i
			}
			r, ok := parseLine(raw[at:end:end])
			if !ok {
				return nil, fmt.Errorf("entry %s holds no result: a line of JSON with an ordinal is expected", e.ID)
			}
			jobs = append(jobs, jobResult{Result: r, line: text[at:end], trace: traces[r.Ordinal]})
			at = end + 1
		}
	}
	for i := 1; i < len(jobs); i++ {
		if jobs[i].Ordinal <= jobs[i-1].Ordinal {
			slices.SortStableFunc(jobs, func(a, b jobResult) int { return cmp.Compare(a.Ordinal, b.Ordinal) })
			return slices.CompactFunc(jobs, func(a, b jobResult) bool { return a.Ordinal == b.Ordinal }), nil
		}
	}
	return jobs, nil
}

// parseTraces returns the trace contexts of sampled jobs by ordinal. text has one line "ordinal
// traceparent" for each.
func parseTraces(text string) map[int64]string {
	if text == "" {
		return nil
	}
	traces := map[int64]string{}
	for line := range strings.SplitSeq(text, "\n") {
		if ordinal, parent, ok := strings.Cut(line, " "); ok {
			n, _ := strconv.ParseInt(ordinal, 10, 64)
			traces[n] = parent
		}
	}
	return traces
}

// parseLine returns the result in a line. scanLine, which is faster, reads a line as workers write
// it for a job without a key; encoding/json reads any other, and so the lines of jobs with a key.
func parseLine(line []byte) (reducer.Result, bool) {
	if r, ok := scanLine(line); ok {
		return r, true
	}
	return decodeLine(line)
}

// decodeLine reads a result with encoding/json. It refuses a line that is not JSON, or that has no
// ordinal or a negative one.
func decodeLine(line []byte) (reducer.Result, bool) {
	var r struct {
		Ordinal    *int64          `json:"ordinal"`
		DurationMS float64         `json:"duration_ms"`
		Attempts   int             `json:"attempts"`
		Data       json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(line, &r); err != nil || r.Ordinal == nil || *r.Ordinal < 0 {
		return reducer.Result{}, false
	}
	return reducer.Result{Ordinal: *r.Ordinal, Attempts: r.Attempts, DurationMS: r.DurationMS, Data: r.Data}, true
}

// scanLine reads a result of exactly the form {"ordinal":N,"duration_ms":F,"attempts":N,
// "started_ms":N,"worker":S,"data":…}, with or without the fourth and fifth field. For any other form it returns false; decodeLine may still accept the line. BenchmarkParseEntries
// measures it, and FuzzScanLine compares it with encoding/json.
func scanLine(line []byte) (r reducer.Result, ok bool) {
	const maxDepth = 100 // of arrays and objects in the data
	ordinal, i := numberAfter(line, 0, `{"ordinal":`)
	duration, i := numberAfter(line, i, `,"duration_ms":`)
	attempts, i := numberAfter(line, i, `,"attempts":`)
	if _, next := numberAfter(line, i, `,"started_ms":`); next >= 0 {
		i = jsonscan.Value(line, jsonscan.Literal(line, next, `,"worker":`), 1)
	}
	start := jsonscan.Literal(line, i, `,"data":`)
	end := jsonscan.Value(line, start, maxDepth)
	if end < 0 || string(line[end:]) != "}" {
		return r, false
	}
	r.Data = line[start:end:end]
	var errs [3]error
	r.Ordinal, errs[0] = strconv.ParseInt(string(ordinal), 10, 64)
	r.DurationMS, errs[1] = strconv.ParseFloat(string(duration), 64)
	r.Attempts, errs[2] = strconv.Atoi(string(attempts))
	return r, errs == [3]error{} && r.Ordinal >= 0
}

// numberAfter skips prefix and the number behind it, and returns the number. end is -1 when one of
// both is missing.
func numberAfter(line []byte, i int, prefix string) (number []byte, end int) {
	start := jsonscan.Literal(line, i, prefix)
	if end = jsonscan.Number(line, start); end < 0 {
		return nil, -1
	}
	return line[start:end], end
}

// recordSpans records, for each sampled job, the span "reduce", which ends the job's trace, and a
// span of the batch that links to these. began is when the batch began.
func (p *partitionReducer) recordSpans(ctx context.Context, tenant, group string, jobs []jobResult, began time.Time) {
	batch := p.Tel.NewBatch("reduce", p.partition.ResultStream(), began)
	for i := range jobs {
		j := &jobs[i]
		span := telemetry.JobSpan{Parent: j.trace, Kind: trace.SpanKindConsumer, Start: began}
		batch.Job(ctx, span, func() []attribute.KeyValue {
			return telemetry.JobAttributes(tenant, group, j.Ordinal, j.Attempts)
		})
	}
	batch.End(ctx, len(jobs))
}
