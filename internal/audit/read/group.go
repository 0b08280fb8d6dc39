package read

import (
	"context"
	"encoding/binary"
	"hash/maphash"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Header is what must be known of a group before the rest can be read in one transaction.
type Header struct {
	ID, Tenant string
	Types      string // the field types of its hash: its types with "|" between them
	Accepted   int64  // how many jobs it has
	Lane       string // "" if it has ended: then it has no jobs that wait for their turn
	Tags       string // the field tags of its hash: KEY=VALUE on a line each
}

// TypeList returns the group's types.
func (h Header) TypeList() []string {
	if h.Types == "" {
		return nil
	}
	return strings.Split(h.Types, "|")
}

// TagList returns the group's tags.
func (h Header) TagList() []string {
	if h.Tags == "" {
		return nil
	}
	return strings.Split(h.Tags, "\n")
}

// Headers reads the headers of groups. Of a group that doesn't exist only the ID is set.
func (r Reader) Headers(ctx context.Context, p keyspace.Partition, ids []string) ([]Header, error) {
	replies, err := Ask(ctx, r.Pipeline, PageSize, ids, func(pipe redis.Pipeliner, id string) *redis.SliceCmd {
		return pipe.HMGet(ctx, p.Group(id), "tenant", "types", "accepted", "lane", "status", "tags")
	})
	headers := make([]Header, len(replies))
	for i, reply := range replies {
		v := reply.Val()
		headers[i] = Header{ID: ids[i], Tenant: Text(v[0]), Types: Text(v[1]), Accepted: Int(v[2]), Lane: Text(v[3]), Tags: Text(v[5])}
		if api.Status(Text(v[4])).Ended() {
			headers[i].Lane = ""
		}
	}
	return headers, err
}

// Detail says how much is read of a group, besides the lengths of its queues.
type Detail int

const (
	// Numbers reads the group's counts and status, and the lengths of its states and failures.
	Numbers Detail = iota
	// Unfinished reads the counts of the group's unfinished jobs, and whether the group is
	// scheduled or paused.
	Unfinished
	// Whole reads the group's hash, states, error codes and partial aggregates, the numbers of its
	// failures and result chunks, and on which lists it is. Of a group that has a Lane, it also reads
	// whether its jobs can get their turn.
	Whole
)

// details lists, for each Detail, how many commands it needs besides one for each queue, and which
// fields of the group's hash it reads; nil: all.
var details = [...]struct {
	commands int
	fields   []string
}{
	Numbers: {3, []string{
		"accepted", "waiting", "non_ready", "ready", "in_flight", "done", "failed", "cancelled", "reduced",
		"status", "types", "tenant",
	}},
	Unfinished: {2, []string{
		"types", "waiting", "non_ready", "ready", "in_flight", "accepted", "failed", "at:created", "paused",
	}},
	Whole: {15, nil},
}

// Commands returns how many commands read this much of a group.
func (d Detail) Commands(h Header) int {
	ofType, ofTag := 1, 0
	if d == Whole && h.Lane != "" {
		ofType = 5
	}
	if d == Whole {
		ofTag = 2
	}
	return details[d].commands + ofType*len(h.TypeList()) + ofTag*len(h.TagList())
}

// Group is what was read of one group: no jobs, but for example its counts and states. Fields
// outside the Detail that was read are empty.
type Group struct {
	Header
	Detail
	Fields map[string]string // of its hash; Types and Tenant in it may differ from the header's
	Queues []int64           // the lengths of its queues, in the order of the header's types

	States           string
	StateBytes       int64 // the length of its states
	Failures         int64 // how many failures it has
	ResultChunks     int64 // how many chunks its result lines are stored in
	Codes            map[string]string
	Partials         map[string]string // the hash of its partial aggregates
	Scheduled, Dirty bool              // on the partition's lists of scheduled and of dirty groups
	Open, Ended      bool              // on the partition's lists of open and of ended groups
	OnFailed         bool              // on the partition's list of failed groups
	Listed           bool              // on the partition's list of all groups
	ListedForTenant  bool              // on its tenant's list of groups
	TenantListed     bool              // its tenant is on the list of tenants
	TenantPaused     bool
	Untagged         []string // those of its tags whose list lacks it, or that its tenant's tags lack
	// InOrder says, for each type, whether its tenant's order of groups in the fair queue has it, and
	// InLane whether the tenant is in the lane or rate-limited; nil: not read.
	InOrder, InLane []bool

	WrongTypes []string // those of its own keys that were read and have the wrong Redis type
}

// Queue adds the commands that read a group to a pipeline. After the pipeline was executed, the
// returned function returns the group. If the pipeline is a transaction, all of it is as of one
// instant.
func (d Detail) Queue(
	ctx context.Context, pipe redis.Pipeliner, p keyspace.Partition, h Header,
) func() *Group {
	g := &Group{Header: h, Detail: d, Queues: make([]int64, len(h.TypeList()))}
	var own []redis.Cmder // the replies about its own keys
	var fill []func()     // fill g from the replies
	add := func(c redis.Cmder, f func()) { own, fill = append(own, c), append(fill, f) }
	length := func(c *redis.IntCmd, to *int64) { add(c, func() { *to = c.Val() }) }
	hash := func(c *redis.MapStringStringCmd, to *map[string]string) { add(c, func() { *to = c.Val() }) }
	has := func(c *redis.FloatCmd, to *bool) { fill = append(fill, func() { *to = *to || c.Err() == nil }) }

	if names := details[d].fields; names != nil {
		c := pipe.HMGet(ctx, p.Group(h.ID), names...)
		add(c, func() {
			g.Fields = make(map[string]string, len(names))
			for i, name := range names {
				g.Fields[name] = Text(c.Val()[i])
			}
		})
	}
	switch d {
	case Numbers:
		length(pipe.StrLen(ctx, p.States(h.ID)), &g.StateBytes)
		length(pipe.HLen(ctx, p.Failures(h.ID)), &g.Failures)
	case Unfinished:
		has(pipe.ZScore(ctx, p.Scheduled(), h.ID), &g.Scheduled)
	case Whole:
		hash(pipe.HGetAll(ctx, p.Group(h.ID)), &g.Fields)
		states := pipe.Get(ctx, p.States(h.ID))
		add(states, func() { g.States, g.StateBytes = states.Val(), int64(len(states.Val())) })
		length(pipe.HLen(ctx, p.Failures(h.ID)), &g.Failures)
		hash(pipe.HGetAll(ctx, p.Codes(h.ID)), &g.Codes)
		length(pipe.LLen(ctx, p.Results(h.ID)), &g.ResultChunks)
		hash(pipe.HGetAll(ctx, p.Aggregate(h.ID)), &g.Partials)
		has(pipe.ZScore(ctx, p.Groups(), h.ID), &g.Listed)
		has(pipe.ZScore(ctx, p.GroupsOf(h.Tenant), h.ID), &g.ListedForTenant)
		has(pipe.ZScore(ctx, p.Open(), h.ID), &g.Open)
		has(pipe.ZScore(ctx, p.Ended(), h.ID), &g.Ended)
		has(pipe.ZScore(ctx, p.Failed(), h.ID), &g.OnFailed)
		has(pipe.ZScore(ctx, p.Scheduled(), h.ID), &g.Scheduled)
		has(pipe.ZScore(ctx, p.Tenants(), h.Tenant), &g.TenantListed)
		dirty, paused := pipe.SIsMember(ctx, p.Dirty(), h.ID), pipe.HExists(ctx, p.Tenant(h.Tenant), "paused")
		fill = append(fill, func() { g.Dirty, g.TenantPaused = dirty.Val(), paused.Val() })
		for _, tag := range h.TagList() {
			known, listed := pipe.SIsMember(ctx, p.Tags(h.Tenant), tag), false
			has(pipe.ZScore(ctx, p.Tagged(h.Tenant, tag), h.ID), &listed)
			fill = append(fill, func() {
				if !listed || !known.Val() {
					g.Untagged = append(g.Untagged, tag)
				}
			})
		}
		if h.Lane == "" {
			break
		}
		g.InOrder, g.InLane = make([]bool, len(h.TypeList())), make([]bool, len(h.TypeList()))
		for i, typ := range h.TypeList() {
			has(pipe.ZScore(ctx, p.FairTenant(typ, h.Lane, h.Tenant), h.ID), &g.InOrder[i])
			for _, key := range []string{p.FairLane(typ, h.Lane), p.FairOver(typ, h.Lane), p.RateLimited(typ)} {
				has(pipe.ZScore(ctx, key, h.Tenant), &g.InLane[i])
			}
		}
	}
	for i, typ := range h.TypeList() {
		length(pipe.LLen(ctx, p.Queue(h.ID, typ)), &g.Queues[i])
	}
	return func() *Group {
		for _, f := range fill {
			f()
		}
		for _, c := range own {
			if IsWrongType(c.Err()) {
				g.WrongTypes = append(g.WrongTypes, c.Args()[1].(string))
			}
		}
		return g
	}
}

// Int returns a field of the group's hash as a number; 0 if it is missing.
func (g *Group) Int(field string) int64 { return Int(g.Fields[field]) }

// Queued returns the number of jobs in its queues.
func (g *Group) Queued() (n int64) {
	for _, length := range g.Queues {
		n += length
	}
	return n
}

// fingerprintSeed is the random seed of the fingerprints' hash: they can be compared only within
// one process.
var fingerprintSeed = maphash.MakeSeed()

// Fingerprint returns a number that changes whenever a field of the hash that the Detail lists
// changes, the length of a queue changes, or the group becomes scheduled or stops being so. It is
// for Numbers and Unfinished: Whole lists no fields.
func (g *Group) Fingerprint() uint64 {
	var h maphash.Hash
	h.SetSeed(fingerprintSeed)
	for _, name := range details[g.Detail].fields {
		_, _ = h.WriteString(g.Fields[name]) // never fails
		_ = h.WriteByte('|')
	}
	for _, n := range g.Queues {
		_, _ = h.Write(binary.AppendVarint(nil, n))
	}
	if g.Scheduled {
		_ = h.WriteByte('s')
	}
	return h.Sum64()
}

// QueueNonReady adds to a pipeline the commands that read the lengths of a tenant's non-ready and
// suspended sets. After the pipeline was executed, the returned function returns them in this
// order.
func QueueNonReady(
	ctx context.Context, pipe redis.Pipeliner, p keyspace.Partition, tenant string,
) func() [2]int64 {
	nonReady, suspended := pipe.ZCard(ctx, p.NonReadyOf(tenant)), pipe.ZCard(ctx, p.SuspendedOf(tenant))
	return func() [2]int64 { return [2]int64{nonReady.Val(), suspended.Val()} }
}
