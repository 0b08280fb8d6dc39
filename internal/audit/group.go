package audit

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// scope is what the parts of one pass share: the Redis and partition that they read, what they
// know, and their findings.
type scope struct {
	read.Reader
	space keyspace.Space
	p     keyspace.Partition
	opts  Options
	found findings
	// tenants and types are the tenants and types that this pass has seen so far. It reads the
	// ready streams of these types.
	tenants, types map[string]bool
}

// full reports whether the pass reads the whole partition, not only candidates.
func (s *scope) full() bool { return s.opts.only == nil }

// pass is one reading of a partition, or of the candidates in it. It checks each group by
// [groupLaws] and [ownLocations]. [sharedLocations] tracks the groups that have jobs in locations
// that groups share, and checks them by these locations. At the end, [counters] checks tenants and
// types.
type pass struct {
	*scope
	shared       *sharedLocations
	groups, jobs int64           // how many groups and accepted jobs were read
	unlisted     map[string]bool // the groups that were read although they are not on the list of groups
}

// newPass returns a pass that has read and found nothing yet.
func newPass(s scope) *pass {
	s.WrongTypes, s.found = map[string]string{}, newFindings()
	s.tenants, s.types = map[string]bool{}, map[string]bool{}
	shared := &sharedLocations{
		scope: &s, tracked: map[string]*trackedGroup{}, wasRead: map[read.Location]bool{},
	}
	return &pass{scope: &s, shared: shared, unlisted: map[string]bool{}}
}

// run makes the pass: groups first, then the lists that name them, then the locations that groups
// share, then the counters of tenants and types, then the deliveries of streams. A pass over
// candidates reads neither lists, counters nor deliveries.
func (ps *pass) run(ctx context.Context) error {
	defer func() { ps.found.addWrongTypes(ps.WrongTypes, ps.p.Base()) }()
	check := func(ids []string) error { return ps.checkGroups(ctx, ids) }
	err := error(nil)
	if ps.full() {
		if err = ps.ReadByScore(ctx, ps.p.Groups(), check); err == nil {
			err = ps.checkLists(ctx)
		}
	} else {
		err = check(ps.opts.only.Groups)
	}
	if err != nil {
		return fmt.Errorf("read groups: %w", err)
	}
	if err := ps.shared.check(ctx, true); err != nil {
		return fmt.Errorf("read what groups share: %w", err)
	}
	if !ps.full() {
		return nil
	}
	if err := ps.checkTags(ctx); err != nil {
		return fmt.Errorf("read tags: %w", err)
	}
	if err := (counters{ps.scope}).check(ctx); err != nil {
		return fmt.Errorf("read counters: %w", err)
	}
	if err := ps.checkOperations(ctx); err != nil {
		return fmt.Errorf("read operations: %w", err)
	}
	if err := ps.checkCallbacks(ctx); err != nil {
		return fmt.Errorf("read callbacks: %w", err)
	}
	return ps.checkDeliveries(ctx)
}

// checkGroups reads groups by id and checks each one by itself. A group that doesn't exist is left
// out, and reported if it is on the list of groups.
func (ps *pass) checkGroups(ctx context.Context, ids []string) error {
	headers, err := ps.Headers(ctx, ps.p, ids)
	if err != nil {
		return err
	}
	return ps.checkByHeader(ctx, headers)
}

// checkByHeader reads the groups with these headers, as many in one transaction as make a page, and
// checks them. If a group has other types, tags or another tenant than its header, it is read again. A
// group with a key of the wrong Redis type is not judged, and neither are the counters that it adds
// to.
func (ps *pass) checkByHeader(ctx context.Context, headers []read.Header) error {
	cost := func(h read.Header) (int, int64) { return read.Whole.Commands(h), ledger.StateBytes * h.Accepted }
	for batch := range read.Batches(headers, cost) {
		replies, err := read.Ask(ctx, ps.Transaction, len(batch), batch,
			func(p redis.Pipeliner, h read.Header) func() *read.Group { return read.Whole.Queue(ctx, p, ps.p, h) })
		if err != nil {
			return err
		}
		var groups []*group
		var changed []read.Header
		for _, reply := range replies {
			g := newGroup(reply())
			now := read.Header{
				ID: g.ID, Tenant: g.Fields["tenant"], Types: g.Fields["types"], Accepted: g.size(), Lane: g.Lane,
				Tags: g.Fields["tags"],
			}
			switch {
			case len(g.WrongTypes) > 0:
				for _, key := range g.WrongTypes {
					ps.WrongTypes[key] = g.ID
				}
				ps.found.markUncertain(LawLocation, g.Tenant, g.TypeList()...)
			case g.status() == "" && g.Listed:
				ps.found.add(newFinding(LawRegistry, g.ID, g.Tenant, "unknown",
					"it is on the list of groups, but there is no such group").repairedBy(Repair{Kind: RepairDeleted}))
			case g.status() == "":
			case now.Types != g.Types || now.Tenant != g.Tenant || now.Tags != g.Tags:
				changed = append(changed, now)
			default:
				groups = append(groups, g)
			}
		}
		for _, g := range groups {
			if err := ps.Pacer.Wait(ctx, 20, len(g.States)); err != nil {
				return err
			}
			if err := ps.checkGroup(ctx, g); err != nil {
				return fmt.Errorf("group %s: %w", g.ID, err)
			}
		}
		if err := ps.checkOwners(ctx, groups); err != nil {
			return err
		}
		if err := ps.checkByHeader(ctx, changed); err != nil {
			return err
		}
	}
	return nil
}

// checkGroup checks one group against the laws, and tracks it if it has jobs in locations that
// groups share.
func (ps *pass) checkGroup(ctx context.Context, g *group) error {
	ps.groups++
	ps.jobs += g.Int("accepted")
	ps.tenants[g.Tenant] = true
	for _, typ := range g.TypeList() {
		ps.types[typ] = true
	}
	laws := groupLaws{group: g, found: &ps.found, counts: g.repair()}
	laws.checkCounts()
	laws.checkCodes()
	laws.checkLifecycle()
	laws.checkTurns()
	laws.checkAggregate(ps.opts.Reducers)
	if err := newOwnLocations(ps.scope, g).check(ctx); err != nil {
		return err
	}
	return ps.shared.track(ctx, g)
}

// checkOwners checks groups against the law registry. Owner keys are in the partition of the group
// id, which may be another one.
func (ps *pass) checkOwners(ctx context.Context, groups []*group) error {
	owners, err := read.Ask(ctx, ps.Pipeline, read.PageSize, groups,
		func(p redis.Pipeliner, g *group) *redis.StringCmd {
			return p.Get(ctx, ps.space.OfGroup(g.ID).Owner(g.ID))
		})
	if err != nil {
		return err
	}
	for i, g := range groups {
		report := func(r Repair, key, format string, args ...any) {
			ps.found.add(newFinding(LawRegistry, g.ID, g.Tenant, key, format, args...).repairedBy(r))
		}
		if !g.ListedForTenant {
			report(g.relist(), "list", "it is missing on its tenant's list of groups")
			ps.found.markUncertain(LawLocation, g.Tenant, g.TypeList()...)
		}
		if !g.Listed {
			ps.found.add(unlisted(g.ID, g.Tenant).repairedBy(g.relist()))
		}
		if !g.TenantListed {
			report(g.relist(), "tenants", "its tenant is missing on the list of tenants")
		}
		for _, tag := range g.Untagged {
			report(g.relist(), "tag "+tag, "it is missing on its tenant's list of groups with the tag %s", tag)
		}
		if at := ps.space.OfTenant(g.Tenant).Index(); at != ps.p.Index() {
			report(Repair{}, "partition", "its tenant %s belongs to partition %d", g.Tenant, at)
		}
		if id := g.Fields["id"]; id != g.ID {
			report(Repair{}, "id", "it says that its id is %q", id)
		}
		owner := owners[i].Val()
		if owner == g.Tenant {
			continue
		}
		var now *redis.StringCmd // a group is deleted before its owner key: it must still be there
		if err := ps.Pipeline(ctx, func(p redis.Pipeliner) {
			now = p.HGet(ctx, ps.p.Group(g.ID), "tenant")
		}); err != nil {
			return err
		}
		if now.Val() == g.Tenant {
			report(Repair{Kind: RepairOwner, Owner: owner}, "owner "+owner,
				"it is a group of tenant %s, but its owner key says %q", g.Tenant, owner)
		}
	}
	return nil
}

// checkLists compares the lists of groups, and the groups that have a key, with the list of all
// groups. Those of tenants are compared when they are recounted.
func (ps *pass) checkLists(ctx context.Context) error {
	if err := ps.checkListed(ctx, "", ps.opts.unlisted[ps.p.Index()]); err != nil {
		return err
	}
	for list, key := range map[string]string{
		"open": ps.p.Open(), "ended": ps.p.Ended(), "failed": ps.p.Failed(), "scheduled": ps.p.Scheduled(),
	} {
		check := func(ids []string) error { return ps.checkListed(ctx, list, ids) }
		if err := ps.ReadByScore(ctx, key, check); err != nil {
			return err
		}
	}
	return nil
}

// checkListed checks those groups of a list ("": those with a key) that are not on the list of all
// groups. It reports the ones that don't exist.
func (ps *pass) checkListed(ctx context.Context, list string, ids []string) error {
	scores, err := read.Ask(ctx, ps.Pipeline, read.PageSize, ids, func(p redis.Pipeliner, id string) *redis.FloatCmd {
		return p.ZScore(ctx, ps.p.Groups(), id)
	})
	var unlisted []string
	for i, score := range scores {
		if errors.Is(score.Err(), redis.Nil) && !ps.unlisted[ids[i]] {
			unlisted = append(unlisted, ids[i])
		}
	}
	if err != nil || len(unlisted) == 0 {
		return err
	}
	headers, err := ps.Headers(ctx, ps.p, unlisted)
	if err != nil {
		return err
	}
	for _, h := range headers {
		ps.unlisted[h.ID] = true
		if h.Tenant == "" && list != "" {
			ps.found.add(unknownOn(h.ID, "", list+" groups"))
		}
	}
	return ps.checkByHeader(ctx, headers)
}

// unlisted reports a group that exists, but is not on the list of all groups.
func unlisted(id, tenant string) Finding {
	return newFinding(LawRegistry, id, tenant, "unlisted", "it is missing on the list of all groups")
}

// unknownOn reports a group that does not exist, but is on a list, as of the groups of a tenant.
func unknownOn(id, tenant, list string) Finding {
	return newFinding(LawRegistry, id, tenant, "on "+list, "it is on the list of %s, but there is no such group", list).
		repairedBy(Repair{Kind: RepairDeleted})
}

// placed is an id of something in a partition. With set it belongs in this sorted set.
type placed struct {
	p       keyspace.Partition
	id, set string
}

// unlistedGroups returns the groups that are not on the list of all groups.
func unlistedGroups(ctx context.Context, r read.Reader, all []placed) (unlisted []placed, err error) {
	scores, err := read.Ask(ctx, r.Pipeline, read.PageSize, all, func(p redis.Pipeliner, of placed) *redis.FloatCmd {
		return p.ZScore(ctx, of.p.Groups(), of.id)
	})
	for i, score := range scores {
		if errors.Is(score.Err(), redis.Nil) {
			unlisted = append(unlisted, all[i])
		}
	}
	return unlisted, err
}

// unlistedIDs scans the names of all keys for those that key returns, and returns by partition the ids of
// those of which only chooses some. An id has no colon.
func unlistedIDs(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, key func(keyspace.Partition, string) string,
	only func(context.Context, read.Reader, []placed) ([]placed, error),
) (map[int][]string, error) {
	all, partitions := map[int][]string{}, map[string]keyspace.Partition{}
	for _, p := range space.All() {
		partitions[key(p, "")] = p
	}
	pattern := read.AnyPartition(key(space.Partition(0), "*"))
	err := read.ScanKeys(ctx, conn, pattern, func(keys []string) error {
		var page []placed
		for _, k := range keys {
			at := strings.LastIndexByte(k, ':') + 1
			if p, known := partitions[k[:at]]; known {
				page = append(page, placed{p: p, id: k[at:]})
			}
		}
		found, err := only(ctx, read.Reader{Cmd: conn.Cmd}, page)
		for _, of := range found {
			all[of.p.Index()] = append(all[of.p.Index()], of.id)
		}
		return err
	})
	return all, err
}

// group is a group as of one instant, with the number of its jobs by state letter, counted in its
// states.
type group struct {
	*read.Group
	jobs [256]int64
}

func newGroup(g *read.Group) *group {
	counted := &group{Group: g}
	for i := range counted.size() {
		counted.jobs[ledger.StateAt(g.States, i).Letter()]++
	}
	return counted
}

// size returns the number of jobs that have a state.
func (g *group) size() int64 { return int64(len(g.States) / ledger.StateBytes) }

// status returns the group's status; "" if the group does not exist.
func (g *group) status() string { return g.Fields["status"] }

// jobsIn returns the number of jobs with one of these state letters.
func (g *group) jobsIn(letters string) (n int64) {
	for _, letter := range []byte(letters) {
		n += g.jobs[letter]
	}
	return n
}

// repair returns what makes the group's counts and lists right: by count, the difference between
// the states and the stored count. The repair is empty if the states themselves may be wrong.
func (g *group) repair() Repair {
	differences, sum, counted := map[string]int64{}, int64(0), int64(0)
	add := func(name string, n int64) {
		if n != 0 {
			differences[name] = n
		}
	}
	for _, f := range countFields {
		stored, jobs := g.Int(f.name), g.jobsIn(f.letters)
		sum, counted = sum+stored, counted+jobs
		add(f.name, jobs-stored)
	}
	add("reduced", g.jobs[ledger.Reduced]-g.Int("reduced"))
	accepted, jobs := g.Int("accepted"), g.size()
	// The states are trusted on two conditions: each state has a known letter, and the number of
	// states is the count accepted or the sum of the other counts.
	if counted != jobs || accepted != jobs && sum != jobs {
		return Repair{}
	}
	add("accepted", jobs-accepted)
	return Repair{Kind: RepairGroup, Differences: differences, Version: g.Int("repaired")}
}

// relist returns what puts the group on its lists, even if its states may be wrong.
func (g *group) relist() Repair {
	if r := g.repair(); r.Kind != NoRepair {
		return r
	}
	return Repair{Kind: RepairGroup, Version: g.Int("repaired")}
}

// reading is a second reading of a group. It shows whether the group is still the one that was read
// first, and which of its jobs have moved.
type reading struct {
	created            string // the field at:created, which identifies the group and its round
	cancelled, expired bool   // expired: its result lines were deleted, past their retention
	states             string
}

// queueReading adds the commands that read a group again, with the states of its jobs from one
// ordinal to another (-1: the last one).
func (s *scope) queueReading(ctx context.Context, p redis.Pipeliner, id string, from, to int64) func() reading {
	hash := p.HMGet(ctx, s.p.Group(id), "at:created", "status", "results_expired")
	last := int64(-1)
	if to >= 0 {
		last = ledger.StateBytes*(to+1) - 1
	}
	states := p.GetRange(ctx, s.p.States(id), ledger.StateBytes*from, last)
	return func() reading {
		v := hash.Val()
		return reading{read.Text(v[0]), read.Text(v[1]) == string(api.StatusCancelled), read.Text(v[2]) != "",
			states.Val()}
	}
}
