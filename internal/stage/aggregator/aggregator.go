// Package aggregator is the role that reduces the results of done jobs into their groups'
// aggregates, each job exactly once, whichever process does it and however often. It hides that
// aggregates are kept in parts: each process merges into a slot of its own, so that processes don't
// wait for each other.
package aggregator

import (
	"cmp"
	"context"
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/reducer"
)

// Config is what the role can be told.
type Config struct {
	Block time.Duration // the longest blocking read
	Lease time.Duration // entries of an aggregator that is silent for so long are taken over
}

const (
	partialCount = 16 // parts of an aggregate
	// Entries that are read at once, each of up to 200 jobs: more of them where one is behind and
	// they are light.
	minRead, maxRead = 50, 200
	lightRead        = 1 << 20 // bytes
	// What came is reduced at once; then more is left to gather for so many times as long as that
	// took, since what comes together costs less.
	pauseFactor = 4
	maxPause    = 20 * time.Millisecond
)

// Aggregator is one process's aggregator, for all partitions.
type Aggregator struct {
	cfg      Config
	conn     *redisx.Conn
	space    keyspace.Space
	tel      *telemetry.Telemetry
	id       string
	reducers *reducer.Registry
	partial  string
}

// New returns an aggregator named id, which must be unique to the process's start.
func New(
	cfg Config, conn *redisx.Conn, space keyspace.Space,
	tel *telemetry.Telemetry, id string, reducers *reducer.Registry,
) *Aggregator {
	return &Aggregator{
		cfg: cfg, conn: conn, space: space, tel: tel, id: id, reducers: reducers,
		partial: strconv.Itoa(int(crc32.ChecksumIEEE([]byte(id)) % partialCount)),
	}
}

// Run reduces until ctx ends.
func (a *Aggregator) Run(ctx context.Context) error {
	var runs []func(context.Context) error
	for _, p := range a.space.All() {
		part := &partitionReducer{
			Aggregator: a,
			partition:  p,
			reader:     stream.NewReader(a.conn, keyspace.GroupAggregator, a.id),
			readCount:  minRead,
			cache:      groupCache{groups: map[string]*cachedGroup{}},
		}
		loop := stage.Loop{Name: "reduce", Conn: a.conn, Log: a.tel.Log}
		runs = append(runs, func(ctx context.Context) error { return loop.Run(ctx, part.step) })
	}
	err := stage.Group(ctx, runs...)
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	for _, p := range a.space.All() {
		_, _ = ledger.DropConsumer(end, a.conn.Cmd, p.ResultStream(), keyspace.GroupAggregator, a.id, 0)
	}
	return err
}

// partition is the loop's state for one partition.
type partitionReducer struct {
	*Aggregator
	partition  keyspace.Partition
	reader     *stream.Reader
	claimedAt  time.Time
	claimStart string         // where the next claim looks on; "" is the beginning
	readCount  int            // entries that the next read asks for
	unreduced  []stream.Entry // read, but not reduced for an error
	cache      groupCache
}

// step reduces one batch of entries and says how long others may gather.
func (p *partitionReducer) step(ctx context.Context) (time.Duration, error) {
	entries, more := p.unreduced, false
	if len(entries) == 0 {
		var err error
		if entries, more, err = p.readEntries(ctx); err != nil || len(entries) == 0 {
			return 0, err
		}
	}
	p.unreduced = nil
	began := time.Now()
	batches := groupBatches(entries)
	p.prefetchGroups(ctx, batches)
	for i, b := range batches {
		err := p.reduceGroup(ctx, b.group, b.entries)
		if err == nil {
			continue
		}
		if call.IsUnavailable(err) || ctx.Err() != nil {
			for _, rest := range batches[i:] {
				p.unreduced = append(p.unreduced, rest.entries...)
			}
			return 0, err
		}
		// One group must not hold up the others: its entries stay pending and are claimed again.
		p.tel.Log.Error("reduce failed, trying again later",
			"partition", p.partition.Index(), "group", b.group, "error", err)
	}
	if more {
		return 0, nil
	}
	return min(pauseFactor*time.Since(began), maxPause), nil
}

// read delivers entries and says whether there are more.
func (p *partitionReducer) readEntries(ctx context.Context) (entries []stream.Entry, more bool, err error) {
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
		bytes += len(e.Get("l"))
	}
	if p.readCount = minRead; more && bytes < lightRead {
		p.readCount = min(2*len(entries), maxRead)
	}
	return entries, more, nil
}

// claim takes over entries that an aggregator has left. An entry in work elsewhere may be claimed
// too: the jobs' states let only one of both reduce it.
func (p *partitionReducer) claimEntries(ctx context.Context) ([]stream.Entry, error) {
	msgs, next, err := p.conn.Cmd.XAutoClaim(ctx, &redis.XAutoClaimArgs{
		Stream:   p.partition.ResultStream(),
		Group:    keyspace.GroupAggregator,
		Consumer: p.id,
		MinIdle:  p.cfg.Lease,
		Start:    cmp.Or(p.claimStart, "0-0"),
		Count:    minRead,
	}).Result()
	if call.IsNoGroup(err) {
		return nil, nil // the read creates it
	}
	if err != nil {
		return nil, fmt.Errorf("claim results: %w", err)
	}
	p.claimStart = next // entries that can't be reduced must not hide those behind them
	entries := make([]stream.Entry, 0, len(msgs))
	for _, m := range msgs {
		e := stream.Entry{ID: m.ID}
		for k, v := range m.Values {
			s, _ := v.(string)
			e.Fields = append(e.Fields, k, s)
		}
		entries = append(entries, e)
	}
	if len(entries) > 0 {
		p.tel.Log.Warn("took results over from a lost aggregator", "partition", p.partition.Index(), "entries", len(entries))
	}
	return entries, nil
}

// reduce merges a group's entries into this process's slot.
func (p *partitionReducer) reduceGroup(ctx context.Context, group string, entries []stream.Entry) error {
	began := time.Now()
	jobs, err := parseEntries(entries)
	if err != nil {
		return p.quarantine(ctx, group, entries, err)
	}
	ids := make([]string, len(entries))
	for i, e := range entries {
		ids[i] = e.ID
	}
	for {
		cached, err := p.loadGroup(ctx, group)
		if err != nil {
			return err
		}
		args := ledger.ReduceArgs{Group: group, Slot: p.partial, Entries: ids}
		if cached != nil {
			// Its state is changed from here on: it is only known again once that is stored.
			p.cache.remove(group)
			if err := p.addResults(cached, jobs, &args); err != nil {
				return err
			}
		}
		r, err := ledger.Reduce(ctx, p.conn.Cmd, p.partition, args)
		if err != nil {
			return err
		}
		switch r.State {
		case ledger.ReduceOK:
			if cached != nil {
				cached.version, cached.size = r.Version, len(args.State)
				p.cache.put(group, cached)
				p.recordSpans(ctx, cached.tenant, group, jobs, began)
			}
			return nil
		case ledger.ReduceGone:
			return nil
		case ledger.ReduceVersion: // and again
		case ledger.ReduceBad:
			p.tel.Log.Warn("left out results that are not to be reduced", "group", group, "ordinals", r.Bad)
			jobs = slices.DeleteFunc(jobs, func(d jobResult) bool { return slices.Contains(r.Bad, d.Ordinal) })
		}
	}
}

// merge computes the slot's next state.
func (p *partitionReducer) addResults(cached *cachedGroup, jobs []jobResult, args *ledger.ReduceArgs) error {
	size, leftOut, reason := 0, 0, error(nil)
	args.Ordinals = make([]int64, len(jobs))
	for i := range jobs {
		if err := cached.state.Add(jobs[i].Result); err != nil {
			leftOut, reason = leftOut+1, err
		}
		args.Ordinals[i] = jobs[i].Ordinal
		size += len(jobs[i].line) + 1
	}
	if leftOut > 0 {
		p.tel.Log.Warn("a reducer left results out", "group", args.Group, "results", leftOut, "last_error", reason)
	}
	args.Lines = make([]byte, 0, size)
	for i := range jobs {
		if i > 0 {
			args.Lines = append(args.Lines, '\n')
		}
		args.Lines = append(args.Lines, jobs[i].line...)
	}
	encoded, err := cached.state.Encode()
	args.State, args.Version = encoded, cached.version
	return err
}

// setAside keeps entries that are no results for a person to look at, one by one, so that a good
// one among them is reduced.
func (p *partitionReducer) quarantine(ctx context.Context, group string, entries []stream.Entry, reason error) error {
	if len(entries) > 1 {
		for _, e := range entries {
			if err := p.reduceGroup(ctx, group, []stream.Entry{e}); err != nil {
				return err
			}
		}
		return nil
	}
	e := entries[0]
	p.tel.Log.Warn("set an unreadable entry of results aside",
		"partition", p.partition.Index(), "entry", e.ID, "reason", reason)
	_, err := p.conn.Cmd.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
		pipe.LPush(ctx, p.partition.Garbage(), fmt.Sprintf("results %s: %v: %.1024q", e.ID, reason, fmt.Sprint(e.Fields)))
		pipe.LTrim(ctx, p.partition.Garbage(), 0, 999)
		pipe.XAck(ctx, p.partition.ResultStream(), keyspace.GroupAggregator, e.ID)
		pipe.XDel(ctx, p.partition.ResultStream(), e.ID)
		return nil
	})
	if err != nil {
		return fmt.Errorf("set entry %s aside: %w", e.ID, err)
	}
	return nil
}
