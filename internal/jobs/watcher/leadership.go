package watcher

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// keepLead renews the leader lease, or asks for it if this process does not lead. A leader sends no
// command if its last renewal is at most leaderRenew ago. Afterwards fence says whether this
// process leads. Each renewal is also counted in Redis (see countRenewal).
func (p *partition) keepLead(ctx context.Context) error {
	if p.fence != 0 && time.Since(p.renewedAt) <= leaderRenew {
		return nil
	}
	fence, err := ledger.Lead(ctx, p.Conn.Cmd, p.Partition, p.ID, leaderLease)
	if err != nil {
		return err
	}
	p.renewedAt = time.Now()
	p.setFence(fence)
	if fence == 0 {
		return nil
	}
	return p.countRenewal(ctx)
}

// setFence stores the fencing number of this process's leader lease; 0: this process does not lead.
// A new number also stores now as the begin of the leadership; 0 deletes the begin.
func (p *partition) setFence(fence int64) {
	switch {
	case fence == 0:
		p.ledSince.Store(0)
	case fence != p.fence:
		p.ledSince.Store(time.Now().UnixNano())
	}
	p.fence = fence
}

// leadership returns when the current leadership began; ok is false if this process does not lead.
// Any goroutine may call it.
func (p *partition) leadership() (since time.Time, ok bool) {
	at := p.ledSince.Load()
	return time.Unix(0, at), at != 0
}

// countRenewal adds one to the counter of leader-lease renewals in Redis and checks that no earlier
// renewal was lost. The leader renews its lease about once a second, and the counter outlives a
// change of leader. If it is smaller than expected, Redis has lost writes that it had confirmed:
// its append-only file was cut, or a lagging replica became master. Each such loss is a violation
// of the law durability; if it can't be published, later calls try again.
func (p *partition) countRenewal(ctx context.Context) error {
	n, err := ledger.CountRenewal(ctx, p.Conn.Cmd, p.Partition)
	switch {
	case call.IsOOM(err):
		return nil // the next renewal is counted when Redis has memory again
	case err != nil:
		return err
	}
	if lost := p.renewals + 1 - n; p.renewals > 0 && lost > 0 {
		found := api.Violation{
			Law: audit.LawDurability, Partition: p.Index(),
			Detail: fmt.Sprintf("redis lost about %s of confirmed writes and is at renewal %d: "+
				"what was submitted in that time must be submitted again; bulkaction audit --receipts names it",
				time.Duration(lost)*leaderRenew, n),
		}
		p.unannounced = append(p.unannounced, found)
		p.open.addDurability(found)
	}
	p.renewals = n
	p.unannounced = slices.DeleteFunc(p.unannounced, func(v api.Violation) bool {
		err := p.publishViolation(ctx, violationID(v), v)
		if err != nil {
			p.log.Warn("publishing a violation failed, trying again", "law", v.Law, "error", err)
		}
		return err == nil
	})
	return nil
}
