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

// postings are the violations that stay. Each is logged and announced once, by whichever look
// found it first.
type postings struct {
	metrics *telemetry.WatcherMetrics
	mu      sync.Mutex
	found   map[string]map[string]api.Violation // by look and partition; then by id
	sent    map[string]bool                     // ids that were announced
	past    int                                 // of the law durability
}

func newPostings(metrics *telemetry.WatcherMetrics) *postings {
	o := &postings{metrics: metrics, found: map[string]map[string]api.Violation{}, sent: map[string]bool{}}
	o.count()
	return o
}

func look(name string, partition int) string { return fmt.Sprint(partition, " ", name) }

// post replaces what a look at a partition found, and forgets what an earlier look at everything
// found of groups that this one has looked at. It announces what is new without the lock: whoever
// keeps the lead asks for it, too.
func (o *postings) post(
	ctx context.Context, p *partition, name string, looked []string, violations []api.Violation,
) error {
	found := make(map[string]api.Violation, len(violations))
	for _, v := range violations {
		found[violationID(v)] = v
	}
	o.mu.Lock()
	o.found[look(name, p.p.Index())] = found
	maps.DeleteFunc(o.found[look("everything", p.p.Index())], func(id string, v api.Violation) bool {
		_, stays := found[id]
		return !stays && v.Group != "" && slices.Contains(looked, v.Group)
	})
	o.forget()
	o.count()
	fresh := slices.DeleteFunc(slices.Clone(violations), func(v api.Violation) bool { return o.sent[violationID(v)] })
	o.mu.Unlock()
	var errs error
	for _, v := range fresh {
		id := violationID(v)
		if err := p.announceViolation(ctx, id, v); err != nil {
			errs = errors.Join(errs, err)
			continue
		}
		o.mu.Lock()
		o.sent[id] = true
		o.mu.Unlock()
	}
	return errs
}

// forget drops the ids of what no look finds any more, so that it is announced when it comes again.
func (o *postings) forget() {
	maps.DeleteFunc(o.sent, func(id string, _ bool) bool {
		for _, found := range o.found {
			if _, stays := found[id]; stays {
				return false
			}
		}
		return true
	})
}

// leave forgets a partition that another leads.
func (o *postings) leave(partition int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, name := range []string{"round", "everything"} {
		delete(o.found, look(name, partition))
	}
	o.forget()
	o.count()
}

// forgot counts a breach of the law durability: it has happened, and does not stay.
func (o *postings) forgot() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.past++
	o.count()
}

// groups are those with violations: they are looked at again until they are well.
func (o *postings) groups(partition int) []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var ids []string
	for _, name := range []string{"round", "everything"} {
		for _, v := range o.found[look(name, partition)] {
			if v.Group != "" {
				ids = append(ids, v.Group)
			}
		}
	}
	return ids
}

// count shows what stays, by law.
func (o *postings) count() {
	byLaw, seen := map[string]int{}, map[string]bool{}
	for _, law := range audit.Laws {
		byLaw[law] = 0
	}
	for _, found := range o.found {
		for id, v := range found {
			if !seen[id] {
				byLaw[v.Law] += max(1, int(v.Count))
			}
			seen[id] = true
		}
	}
	byLaw[audit.LawDurability] += o.past
	o.metrics.SetViolations(byLaw)
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
func (p *partition) announceViolation(ctx context.Context, id string, v api.Violation) error {
	e := api.AuditEvent{Event: api.Event{ID: id, Type: "audit.violation", At: time.Now().UTC()}, Violation: v}
	if v.Group != "" {
		g, err := p.store.Group(ctx, v.Group)
		switch {
		case err == nil:
			e.Group = &g
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
