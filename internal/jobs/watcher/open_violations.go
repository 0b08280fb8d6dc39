package watcher

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// openViolations holds the violations that were found and are still there. Each is logged and
// published once, by the audit that found it first; it is published again if it was gone in
// between, or if another process leads. The metric audit_violations counts them by law.
type openViolations struct {
	metrics *telemetry.WatcherMetrics
	mu      sync.Mutex
	// bySource holds what the last audit of each source has found, by violation id.
	bySource   map[source]map[string]api.Violation
	announced  map[string]bool // ids of the open violations that are published
	durability []api.Violation // losses that were found; they are past events and stay counted
}

func newOpenViolations(metrics *telemetry.WatcherMetrics) *openViolations {
	v := &openViolations{
		metrics: metrics, bySource: map[source]map[string]api.Violation{}, announced: map[string]bool{},
	}
	v.updateMetrics()
	return v
}

// source is one kind of audit of one partition.
type source struct {
	partition int
	full      bool // a full audit; otherwise an incremental check
}

// replace replaces the violations that an audit found in a partition and publishes new ones. A
// violation that can't be published stays open, and the next audit that finds it publishes it.
// groups names the groups that the audit has read job by job: violations of them that an earlier
// full audit found and this audit did not are closed. Publishing happens without the lock, because
// the goroutine that renews the leader lease takes this lock too.
func (v *openViolations) replace(
	ctx context.Context, p *partition, full bool, groups []string, violations []api.Violation,
) error {
	found := make(map[string]api.Violation, len(violations))
	for _, one := range violations {
		found[violationID(one)] = one
	}
	v.mu.Lock()
	v.bySource[source{p.Index(), full}] = found
	maps.DeleteFunc(v.bySource[source{p.Index(), true}], func(id string, one api.Violation) bool {
		_, stays := found[id]
		return !stays && one.Group != "" && slices.Contains(groups, one.Group)
	})
	v.dropClosed()
	v.updateMetrics()
	fresh := slices.DeleteFunc(slices.Clone(violations),
		func(one api.Violation) bool { return v.announced[violationID(one)] })
	v.mu.Unlock()
	var errs error
	for _, one := range fresh {
		id := violationID(one)
		if err := p.publishViolation(ctx, id, one); err != nil {
			errs = errors.Join(errs, err)
			continue
		}
		v.mu.Lock()
		v.announced[id] = true
		v.mu.Unlock()
	}
	return errs
}

// dropClosed forgets the ids of violations that no audit finds any more, so that they are published
// if they come back. The caller holds mu.
func (v *openViolations) dropClosed() {
	maps.DeleteFunc(v.announced, func(id string, _ bool) bool {
		for _, found := range v.bySource {
			if _, stays := found[id]; stays {
				return false
			}
		}
		return true
	})
}

// removePartition forgets the violations of a partition that another process leads now, except
// those of the law durability.
func (v *openViolations) removePartition(partition int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	maps.DeleteFunc(v.bySource, func(s source, _ map[string]api.Violation) bool { return s.partition == partition })
	v.dropClosed()
	v.updateMetrics()
}

// restore adds the violations that the full audits of an earlier leader have found in a partition.
func (v *openViolations) restore(partition int, stored []ledger.AuditedViolation) {
	found := map[string]api.Violation{}
	for _, one := range stored {
		if one.Deep {
			found[violationID(one.Violation)] = one.Violation
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.bySource[source{partition, true}] = found
	v.updateMetrics()
}

// maxStored is how many open violations of a partition are stored in Redis at most, for GET
// /v1/audit.
const maxStored = 100

// state returns what is stored in Redis: up to maxStored open violations of a partition, ordered by
// group, and the number of all, by law.
func (v *openViolations) state(partition int) (some []ledger.AuditedViolation, byLaw map[string]int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	byLaw = map[string]int64{}
	for _, law := range audit.Laws {
		byLaw[law] = 0
	}
	seen := map[string]bool{}
	add := func(one api.Violation, deep bool) {
		byLaw[one.Law] += max(1, one.Count)
		some = append(some, ledger.AuditedViolation{Violation: one, Key: one.Key, Deep: deep})
	}
	for _, deep := range []bool{true, false} {
		for id, one := range v.bySource[source{partition, deep}] {
			if !seen[id] {
				add(one, deep)
			}
			seen[id] = true
		}
	}
	for _, one := range v.durability {
		if one.Partition == partition {
			add(one, false)
		}
	}
	slices.SortFunc(some, func(a, b ledger.AuditedViolation) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Law, b.Law), cmp.Compare(a.Detail, b.Detail))
	})
	return some[:min(len(some), maxStored)], byLaw
}

// addDurability adds a violation of the law durability: Redis has lost confirmed writes. That is a
// past event, so it stays among the open violations as long as this process runs.
func (v *openViolations) addDurability(one api.Violation) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.durability = append(v.durability, one)
	v.updateMetrics()
}

// groups returns the ids of groups with open violations in a partition, some of them repeatedly.
// The audit reads them in each check until nothing is wrong with them.
func (v *openViolations) groups(partition int) []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	var ids []string
	for s, found := range v.bySource {
		for _, one := range found {
			if s.partition == partition && one.Group != "" {
				ids = append(ids, one.Group)
			}
		}
	}
	return ids
}

// updateMetrics sets the gauge of violations, by law. The caller holds mu, or has just created v.
func (v *openViolations) updateMetrics() {
	byLaw, seen := map[string]int{}, map[string]bool{}
	for _, law := range audit.Laws {
		byLaw[law] = 0
	}
	for _, found := range v.bySource {
		for id, one := range found {
			if !seen[id] {
				byLaw[one.Law] += max(1, int(one.Count))
			}
			seen[id] = true
		}
	}
	byLaw[audit.LawDurability] += len(v.durability)
	v.metrics.SetViolations(byLaw)
}

// violationID returns an id that stays the same while the violation exists, also when its group
// moves. Of a violation with a Key, the detail may change, too: its counts do.
func violationID(v api.Violation) string {
	ordinal := int64(-1)
	if v.Ordinal != nil {
		ordinal = *v.Ordinal
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\n%d\n%s\n%d\n%s", v.Law, v.Partition, v.Group,
		ordinal, cmp.Or(v.Key, v.Detail)))
	return "audit." + hex.EncodeToString(sum[:12])
}
