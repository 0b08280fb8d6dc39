package watcher

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// countRenewal adds one to the counter of renewals in Redis and checks that no earlier renewal was
// lost. The leader renews its lease about once a second, and the counter outlives a change of
// leader. If it is smaller than expected, Redis has lost writes that it had confirmed: its
// append-only file was cut, or a lagging replica became master. Each loss is a violation of the law
// durability, which is published until that succeeds.
func (p *partitionLoop) countRenewal(ctx context.Context) error {
	n, err := ledger.CountRenewal(ctx, p.Conn.Cmd, p.p)
	switch {
	case call.IsOOM(err):
		return nil // the next renewal is counted when Redis has memory again
	case err != nil:
		return err
	}
	if lost := p.renewals + 1 - n; p.renewals > 0 && lost > 0 {
		p.unannounced = append(p.unannounced, api.Violation{
			Law: audit.LawDurability, Partition: p.p.Index(),
			Detail: fmt.Sprintf("redis lost about %s of confirmed writes and is at renewal %d: "+
				"what was submitted in that time must be submitted again; bulkaction audit --receipts names it",
				time.Duration(lost)*leaderRenew, n),
		})
		p.open.addDurability()
	}
	p.renewals = n
	p.unannounced = slices.DeleteFunc(p.unannounced, func(v api.Violation) bool {
		err := p.announceViolation(ctx, violationID(v), v)
		if err != nil {
			p.log.Warn("publishing a violation failed, trying again", "law", v.Law, "error", err)
		}
		return err == nil
	})
	return nil
}

// publishLead tells the audit's goroutines since when this process leads, or that it doesn't lead.
func (p *partitionLoop) publishLead() {
	if p.fence == 0 {
		p.leadSinceNanos.Store(0)
	} else {
		p.leadSinceNanos.Store(p.ledSince.UnixNano())
	}
}

// leadership returns when the current leadership began; ok is false if another process leads. Other
// goroutines may call it.
func (p *partitionLoop) leadership() (since time.Time, ok bool) {
	at := p.leadSinceNanos.Load()
	return time.Unix(0, at), at != 0
}
