// Package aggregator is the role that reduces the results of done jobs into their groups' aggregates,
// each job exactly once, whichever process does it and however often. It hides that aggregates are kept
// in parts: each process merges into a slot of its own, so that processes don't wait for each other.
package aggregator

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/groups"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/lua"
	"github.com/bulkaction/bulkaction/reducer"
)

// Config is what the role can be told.
type Config struct {
	Block time.Duration // the longest blocking read
	Lease time.Duration // entries of an aggregator that is silent for so long are taken over
}

const (
	readBatch = 50 // entries, each of up to 200 jobs
	slotCount = 16 // parts of an aggregate
	// What one script reduces at most: entries are taken together until they weigh this.
	reduceBytes = 1 << 20
	reduceLines = 2000
)

// Aggregator is one process's aggregator, for all partitions.
type Aggregator struct {
	cfg      Config
	conn     *redisx.Conn
	space    keyspace.Space
	tel      *telemetry.Telemetry
	id       string
	reducers *reducer.Registry
	slot     string
}

// New returns an aggregator named id, which must be unique to the process's start.
func New(cfg Config, conn *redisx.Conn, space keyspace.Space, tel *telemetry.Telemetry, id string, reducers *reducer.Registry) *Aggregator {
	return &Aggregator{
		cfg: cfg, conn: conn, space: space, tel: tel, id: id, reducers: reducers,
		slot: strconv.Itoa(int(crc32.ChecksumIEEE([]byte(id)) % slotCount)),
	}
}

// Run reduces until ctx ends.
func (a *Aggregator) Run(ctx context.Context) error {
	var runs []func(context.Context) error
	for _, p := range a.space.All() {
		part := &partition{Aggregator: a, p: p, reader: redisx.NewReader(a.conn, keyspace.GroupAggregator, a.id), known: map[string]*known{}}
		loop := stage.Loop{Name: "reduce", Conn: a.conn, Log: a.tel.Log}
		runs = append(runs, func(ctx context.Context) error { return loop.Run(ctx, part.step) })
	}
	err := stage.Group(ctx, runs...)
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	for _, p := range a.space.All() {
		_, _ = lua.DropConsumer(end, a.conn.Cmd, p.ResultStream(), keyspace.GroupAggregator, a.id, 0)
	}
	return err
}

// partition is the loop's state for one partition.
type partition struct {
	*Aggregator
	p         keyspace.Partition
	reader    *redisx.Reader
	claimedAt time.Time
	claimFrom string         // where the next claim looks on; "" is the beginning
	left      []redisx.Entry // read, but not reduced for an error
	known     map[string]*known
}

// known is what this process remembers of a group, so that it need not be read for each batch.
type known struct {
	plan    *reducer.Plan
	tenant  string
	version int64
	state   []byte // encoded, of this process's slot
	used    time.Time
}

// maxKnown bounds what is remembered.
const maxKnown = 1000

// step reduces one batch of entries.
func (p *partition) step(ctx context.Context) (time.Duration, error) {
	entries := p.left
	if len(entries) == 0 {
		var err error
		if entries, err = p.read(ctx); err != nil {
			return 0, err
		}
	}
	p.left = nil
	parts := portions(entries)
	for i, part := range parts {
		err := p.reduce(ctx, part.group, part.entries)
		if err == nil {
			continue
		}
		delete(p.known, part.group)
		if redisx.IsUnavailable(err) || ctx.Err() != nil {
			for _, rest := range parts[i:] {
				p.left = append(p.left, rest.entries...)
			}
			return 0, err
		}
		// One group must not hold up the others: its entries stay pending and are claimed again.
		p.tel.Log.Error("reduce failed, trying again later", "partition", p.p.Index(), "group", part.group, "error", err)
	}
	p.tidy()
	return 0, nil
}

// portion is what one script reduces: entries of one group.
type portion struct {
	group        string
	entries      []redisx.Entry
	bytes, lines int
}

// portions sorts entries by group, in the order in which they came.
func portions(entries []redisx.Entry) []*portion {
	var all []*portion
	open := map[string]*portion{}
	for _, e := range entries {
		group, lines := e.Get("g"), e.Get("l")
		part := open[group]
		if part == nil || part.bytes >= reduceBytes || part.lines >= reduceLines {
			part = &portion{group: group}
			open[group], all = part, append(all, part)
		}
		part.entries = append(part.entries, e)
		part.bytes += len(lines)
		part.lines += 1 + strings.Count(lines, "\n")
	}
	return all
}

func (p *partition) read(ctx context.Context) ([]redisx.Entry, error) {
	if time.Since(p.claimedAt) > max(p.cfg.Lease/2, 10*time.Millisecond) {
		p.claimedAt = time.Now()
		claimed, err := p.claim(ctx)
		if err != nil || len(claimed) > 0 {
			return claimed, err
		}
	}
	batches, err := p.reader.Read(ctx, []string{p.p.ResultStream()}, readBatch, p.cfg.Block)
	if err != nil || len(batches) == 0 {
		return nil, err
	}
	return batches[0].Entries, nil
}

// claim takes over entries that an aggregator has left. An entry in work elsewhere may be claimed too: the
// jobs' states let only one of both reduce it.
func (p *partition) claim(ctx context.Context) ([]redisx.Entry, error) {
	msgs, next, err := p.conn.Cmd.XAutoClaim(ctx, &redis.XAutoClaimArgs{
		Stream: p.p.ResultStream(), Group: keyspace.GroupAggregator, Consumer: p.id, MinIdle: p.cfg.Lease, Start: cmp.Or(p.claimFrom, "0-0"), Count: readBatch,
	}).Result()
	if redisx.IsNoGroup(err) {
		return nil, nil // the read creates it
	}
	if err != nil {
		return nil, fmt.Errorf("claim results: %w", err)
	}
	p.claimFrom = next // entries that can't be reduced must not hide those behind them
	entries := make([]redisx.Entry, 0, len(msgs))
	for _, m := range msgs {
		e := redisx.Entry{ID: m.ID}
		for k, v := range m.Values {
			s, _ := v.(string)
			e.Fields = append(e.Fields, k, s)
		}
		entries = append(entries, e)
	}
	if len(entries) > 0 {
		p.tel.Log.Warn("took results over from a lost aggregator", "partition", p.p.Index(), "entries", len(entries))
	}
	return entries, nil
}

// done is one job's result with its line.
type done struct {
	reducer.Result
	line  string
	trace string
}

// reduce merges a group's entries into this process's slot.
func (p *partition) reduce(ctx context.Context, group string, entries []redisx.Entry) error {
	began := time.Now()
	jobs, err := parseEntries(entries)
	if err != nil {
		return p.setAside(ctx, group, entries, err)
	}
	ids := make([]string, len(entries))
	for i, e := range entries {
		ids[i] = e.ID
	}
	for {
		k, err := p.know(ctx, group)
		if err != nil {
			return err
		}
		args := lua.ReduceArgs{Group: group, Slot: p.slot, Entries: ids}
		if k != nil {
			if err := p.merge(k, jobs, &args); err != nil {
				return err
			}
		}
		r, err := lua.Reduce(ctx, p.conn.Cmd, p.p, args)
		if err != nil {
			return err
		}
		switch r.State {
		case lua.ReduceOK:
			if k != nil {
				k.version, k.used = r.Version, time.Now()
				if len(jobs) > 0 {
					k.state = args.State
				}
				p.trace(ctx, k.tenant, group, jobs, began)
			}
			return nil
		case lua.ReduceGone:
			delete(p.known, group)
			return nil
		case lua.ReduceVersion:
			delete(p.known, group)
		case lua.ReduceBad:
			p.tel.Log.Warn("left out results that are not to be reduced", "group", group, "ordinals", r.Bad)
			jobs = slices.DeleteFunc(jobs, func(d done) bool { return slices.Contains(r.Bad, d.Ordinal) })
		}
	}
}

// merge computes the slot's next state.
func (p *partition) merge(k *known, jobs []done, args *lua.ReduceArgs) error {
	state := k.plan.New()
	if len(k.state) > 0 {
		var err error
		if state, err = k.plan.Decode(k.state); err != nil {
			return err
		}
	}
	lines, leftOut, reason := make([]string, len(jobs)), 0, error(nil)
	for i := range jobs {
		if err := state.Add(jobs[i].Result); err != nil {
			leftOut, reason = leftOut+1, err
		}
		lines[i] = jobs[i].line
		args.Ordinals = append(args.Ordinals, jobs[i].Ordinal)
	}
	if leftOut > 0 {
		p.tel.Log.Warn("a reducer left results out", "group", args.Group, "results", leftOut, "last_error", reason)
	}
	encoded, err := state.Encode()
	if err != nil {
		return err
	}
	args.State, args.Lines, args.Version = encoded, []byte(strings.Join(lines, "\n")), k.version
	return nil
}

// know reads what a group asked for and where this process's slot stands; nil when the group is gone.
func (p *partition) know(ctx context.Context, group string) (*known, error) {
	if k := p.known[group]; k != nil {
		return k, nil
	}
	var meta, slot *redis.SliceCmd
	_, err := p.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		meta = pipe.HMGet(ctx, p.p.Group(group), "status", "tenant", "aggregate")
		slot = pipe.HMGet(ctx, p.p.Aggregate(group), "version:"+p.slot, "slot:"+p.slot)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read group %s: %w", group, err)
	}
	text := func(v any) string { s, _ := v.(string); return s }
	if text(meta.Val()[0]) == "" {
		return nil, nil
	}
	plan, err := groups.Plan(p.reducers, text(meta.Val()[2]))
	if err != nil {
		return nil, fmt.Errorf("group %s: %w: run an aggregator that has this reducer", group, err)
	}
	k := &known{plan: plan, tenant: text(meta.Val()[1]), state: []byte(text(slot.Val()[1])), used: time.Now()}
	k.version, _ = strconv.ParseInt(text(slot.Val()[0]), 10, 64)
	p.known[group] = k
	return k, nil
}

// tidy forgets the groups that were not used for longest.
func (p *partition) tidy() {
	if len(p.known) <= maxKnown {
		return
	}
	cutoff := time.Now().Add(-10 * time.Second)
	for g, k := range p.known {
		if k.used.Before(cutoff) || len(p.known) > 2*maxKnown {
			delete(p.known, g)
		}
	}
}

// parseEntries reads the results of one group's entries, by ascending ordinal.
func parseEntries(entries []redisx.Entry) ([]done, error) {
	var jobs []done
	for _, e := range entries {
		traces := map[int64]string{}
		for line := range strings.SplitSeq(e.Get("t"), "\n") {
			if ordinal, parent, ok := strings.Cut(line, " "); ok {
				n, _ := strconv.ParseInt(ordinal, 10, 64)
				traces[n] = parent
			}
		}
		for line := range strings.SplitSeq(e.Get("l"), "\n") {
			var r struct {
				Ordinal    *int64          `json:"ordinal"`
				DurationMS float64         `json:"duration_ms"`
				Attempts   int             `json:"attempts"`
				Data       json.RawMessage `json:"data"`
			}
			if err := json.Unmarshal([]byte(line), &r); err != nil || r.Ordinal == nil || *r.Ordinal < 0 {
				return nil, fmt.Errorf("entry %s holds no result: a line of JSON with an ordinal is expected", e.ID)
			}
			jobs = append(jobs, done{
				Result: reducer.Result{Ordinal: *r.Ordinal, Attempts: r.Attempts, DurationMS: r.DurationMS, Data: r.Data},
				line:   line, trace: traces[*r.Ordinal],
			})
		}
	}
	slices.SortFunc(jobs, func(a, b done) int { return cmp.Compare(a.Ordinal, b.Ordinal) })
	return slices.CompactFunc(jobs, func(a, b done) bool { return a.Ordinal == b.Ordinal }), nil
}

// setAside keeps entries that are no results for a person to look at, one by one, so that a good one among
// them is reduced.
func (p *partition) setAside(ctx context.Context, group string, entries []redisx.Entry, reason error) error {
	if len(entries) > 1 {
		for _, e := range entries {
			if err := p.reduce(ctx, group, []redisx.Entry{e}); err != nil {
				return err
			}
		}
		return nil
	}
	e := entries[0]
	p.tel.Log.Warn("set an unreadable entry of results aside", "partition", p.p.Index(), "entry", e.ID, "reason", reason)
	_, err := p.conn.Cmd.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
		pipe.LPush(ctx, p.p.Garbage(), fmt.Sprintf("results %s: %v: %.1024q", e.ID, reason, fmt.Sprint(e.Fields)))
		pipe.LTrim(ctx, p.p.Garbage(), 0, 999)
		pipe.XAck(ctx, p.p.ResultStream(), keyspace.GroupAggregator, e.ID)
		pipe.XDel(ctx, p.p.ResultStream(), e.ID)
		return nil
	})
	if err != nil {
		return fmt.Errorf("set entry %s aside: %w", e.ID, err)
	}
	return nil
}
