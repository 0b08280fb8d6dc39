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

// beat counts the renewals of the lead in Redis, one a second, whoever leads. When the count goes
// back, Redis has forgotten what it had confirmed: its append-only file was cut, or a replica took
// over that lagged behind.
func (p *partition) beat(ctx context.Context) error {
	n, err := p.conn.Cmd.HIncrBy(ctx, p.p.Watch(), "beat", 1).Result()
	switch {
	case call.IsOOM(err):
		return nil // counted when there is room again
	case err != nil:
		return fmt.Errorf("count renewals of the lead: %w", err)
	}
	if lost := p.beats + 1 - n; p.beats > 0 && lost > 0 {
		p.forgotten = append(p.forgotten, api.Violation{
			Law: audit.LawDurability, Partition: p.p.Index(),
			Detail: fmt.Sprintf("redis went back about %s, to beat %d: what it confirmed since then is lost, "+
				"and is to be submitted again; bulkaction audit --receipts names it",
				time.Duration(lost)*leaderRenew, n),
		})
		p.open.addDurability()
	}
	p.beats = n
	p.forgotten = slices.DeleteFunc(p.forgotten, func(v api.Violation) bool {
		err := p.announceViolation(ctx, violationID(v), v)
		if err != nil {
			p.log.Warn("a violation could not be announced, trying again", "law", v.Law, "error", err)
		}
		return err == nil
	})
	return nil
}

// tellLead tells the audit, which runs beside the steps, since when this process leads.
func (p *partition) tellLead() {
	if p.fence == 0 {
		p.leading.Store(0)
	} else {
		p.leading.Store(p.ledSince.UnixNano())
	}
}

func (p *partition) leads() (since time.Time, ok bool) {
	at := p.leading.Load()
	return time.Unix(0, at), at != 0
}
