package audit

import (
	"context"
	"maps"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit/read"
)

// checkTags compares the tags of each tenant and the lists of groups with them with the groups. The
// check of a group finds those on whose list it is missing.
func (ps *pass) checkTags(ctx context.Context) error {
	tenants := slices.Sorted(maps.Keys(ps.tenants))
	counts, err := read.Ask(ctx, ps.Pipeline, read.PageSize, tenants, func(p redis.Pipeliner, tenant string) *redis.IntCmd {
		return p.SCard(ctx, ps.p.Tags(tenant))
	})
	if err != nil {
		return err
	}
	for i, tenant := range tenants {
		if counts[i].Val() == 0 {
			continue
		}
		err := ps.ScanSet(ctx, ps.p.Tags(tenant), func(tag string) error { return ps.checkTag(ctx, tenant, tag) })
		if err != nil {
			return err
		}
	}
	return nil
}

// checkTag checks that the groups on the list of a tag have it.
func (ps *pass) checkTag(ctx context.Context, tenant, tag string) error {
	listed := 0
	err := ps.ReadByScore(ctx, ps.p.Tagged(tenant, tag), func(ids []string) error {
		listed += len(ids)
		hashes, err := read.Ask(ctx, ps.Pipeline, read.PageSize, ids, func(p redis.Pipeliner, id string) *redis.SliceCmd {
			return p.HMGet(ctx, ps.p.Group(id), "tenant", "tags", "repaired")
		})
		for i, hash := range hashes {
			v := hash.Val()
			of, has := read.Text(v[0]), read.Header{Tags: read.Text(v[1])}
			switch {
			case of == "":
				ps.found.add(unknownOn(ids[i], tenant, "groups with the tag "+tag))
			case of != tenant || !slices.Contains(has.TagList(), tag):
				ps.found.add(newFinding(LawRegistry, ids[i], tenant, "tagged "+tag,
					"it is on the list of groups of tenant %s with the tag %s, which it does not have", tenant, tag).
					repairedBy(Repair{Kind: RepairGroup, Version: read.Int(v[2])}))
			}
		}
		return err
	})
	if err == nil && listed == 0 {
		ps.found.add(newFinding(LawRegistry, "", tenant, "tag "+tenant+" "+tag,
			"tenant %s has the tag %s, but none of its groups", tenant, tag).repairedBy(Repair{Kind: RepairDeleted}))
	}
	return err
}
