package watcher

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// countRenewal counts the renewals of the lead in Redis, one a second, whoever leads. When the
// count goes back, Redis has forgotten what it had confirmed: its append-only file was cut, or a
// replica took over that lagged behind.
func (p *partitionLoop) countRenewal(ctx context.Context) error {
	n, err := p.conn.Cmd.HIncrBy(ctx, p.p.Watch(), "beat", 1).Result()
	switch {
	case call.IsOOM(err):
		return nil // counted when there is room again
	case err != nil:
		return fmt.Errorf("count renewals of the lead: %w", err)
	}
	if lost := p.renewals + 1 - n; p.renewals > 0 && lost > 0 {
		p.unannounced = append(p.unannounced, api.Violation{
			Law: audit.LawDurability, Partition: p.p.Index(),
			Detail: fmt.Sprintf("redis went back about %s, to beat %d: what it confirmed since then is lost, "+
				"and is to be submitted again; bulkaction audit --receipts names it",
				time.Duration(lost)*leaderRenew, n),
		})
		p.open.addDurability()
	}
	p.renewals = n
	p.unannounced = slices.DeleteFunc(p.unannounced, func(v api.Violation) bool {
		err := p.announceViolation(ctx, violationID(v), v)
		if err != nil {
			p.log.Warn("a violation could not be announced, trying again", "law", v.Law, "error", err)
		}
		return err == nil
	})
	return nil
}

// publishLead tells the audit, which runs beside the steps, since when this process leads.
func (p *partitionLoop) publishLead() {
	if p.fence == 0 {
		p.leadSinceNanos.Store(0)
	} else {
		p.leadSinceNanos.Store(p.ledSince.UnixNano())
	}
}

func (p *partitionLoop) leadsSince() (since time.Time, ok bool) {
	at := p.leadSinceNanos.Load()
	return time.Unix(0, at), at != 0
}
