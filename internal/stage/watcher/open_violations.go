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
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// openViolations are the violations that stay. Each is logged and announced once, by whichever look
// found it first.
type openViolations struct {
	metrics    *telemetry.WatcherMetrics
	mu         sync.Mutex
	bySource   map[string]map[string]api.Violation // by look and partition; then by id
	announced  map[string]bool                     // ids that were announced
	durability int                                 // of the law durability
}

func newOpenViolations(metrics *telemetry.WatcherMetrics) *openViolations {
	v := &openViolations{metrics: metrics, bySource: map[string]map[string]api.Violation{},
		announced: map[string]bool{}}
	v.updateMetrics()
	return v
}

func sourceKey(source string, partition int) string { return fmt.Sprint(partition, " ", source) }

// replace replaces what a look at a partition found, and forgets what an earlier look at everything
// found of groups that this one has looked at. It announces what is new without the lock: whoever
// keeps the lead asks for it, too.
func (v *openViolations) replace(
	ctx context.Context, p *partitionLoop, source string, groups []string, violations []api.Violation,
) error {
	found := make(map[string]api.Violation, len(violations))
	for _, one := range violations {
		found[violationID(one)] = one
	}
	v.mu.Lock()
	v.bySource[sourceKey(source, p.p.Index())] = found
	maps.DeleteFunc(v.bySource[sourceKey("full", p.p.Index())], func(id string, one api.Violation) bool {
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
		if err := p.announceViolation(ctx, id, one); err != nil {
			errs = errors.Join(errs, err)
			continue
		}
		v.mu.Lock()
		v.announced[id] = true
		v.mu.Unlock()
	}
	return errs
}

// dropClosed drops the ids of what no look finds any more, so that it is announced when it comes
// again.
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

// removePartition forgets a partition that another leads.
func (v *openViolations) removePartition(partition int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, source := range []string{"incremental", "full"} {
		delete(v.bySource, sourceKey(source, partition))
	}
	v.dropClosed()
	v.updateMetrics()
}

// addDurability counts a breach of the law durability: it has happened, and does not stay.
func (v *openViolations) addDurability() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.durability++
	v.updateMetrics()
}

// groups are those with violations: they are looked at again until they are well.
func (v *openViolations) groups(partition int) []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	var ids []string
	for _, source := range []string{"incremental", "full"} {
		for _, one := range v.bySource[sourceKey(source, partition)] {
			if one.Group != "" {
				ids = append(ids, one.Group)
			}
		}
	}
	return ids
}

// updateMetrics shows what stays, by law.
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
	byLaw[audit.LawDurability] += v.durability
	v.metrics.SetViolations(byLaw)
}

// violationID stays the same for as long as the violation does, also when its group moves and the
// detail counts something else.
func violationID(v api.Violation) string {
	ordinal := int64(-1)
	if v.Ordinal != nil {
		ordinal = *v.Ordinal
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\n%d\n%s\n%d\n%s", v.Law, v.Partition, v.Group,
		ordinal, cmp.Or(v.Key, v.Detail)))
	return "audit." + hex.EncodeToString(sum[:12])
}

// announceViolation logs and publishes a violation, with the group as it is, if it is.
func (p *partitionLoop) announceViolation(ctx context.Context, id string, v api.Violation) error {
	e := api.AuditEvent{Event: api.Event{ID: id, Type: "audit.violation", At: time.Now().UTC()}, Violation: v}
	if v.Group != "" {
		shown, err := p.store.Group(ctx, v.Group)
		switch {
		case err == nil:
			e.Group = &shown
		case call.IsUnavailable(err) || ctx.Err() != nil:
			return err
		} // or it can't be shown, which may be what is wrong with it
	}
	if err := p.publish(e.Event, e); err != nil {
		return err
	}
	log := p.log
	if v.Group != "" {
		log = log.With("group", v.Group)
	}
	if v.Ordinal != nil {
		log = log.With("ordinal", *v.Ordinal)
	}
	log.Error("the data in redis breaks a law", "law", v.Law, "detail", v.Detail, "event", id)
	return nil
}
