package audit

import (
	"context"
	"fmt"
	"slices"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Candidates name groups and tenants of one partition in which something looks wrong.
type Candidates struct {
	Groups  []string
	Tenants []string // the non-ready and suspended jobs of these tenants are read too
}

// RunGroups audits some groups of a partition. It reads their own keys, and their jobs in the
// locations that groups share, but only where one of them may be missing or misplaced: a queue with
// the right length is not read. Only a full audit ([Partition]) finds jobs of groups that don't
// exist, unreadable entries, and wrong counters of tenants and types.
func RunGroups(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, p keyspace.Partition, candidates Candidates,
	opts Options,
) (Report, error) {
	opts.only = &candidates
	return Partition(ctx, conn, space, p, opts)
}

// runGroups makes a pass over the candidates only.
func (ps *pass) runGroups(ctx context.Context) error {
	if err := ps.checkGroups(ctx, ps.opts.only.Groups); err != nil {
		return fmt.Errorf("read groups: %w", err)
	}
	if err := ps.checkSharedLocations(ctx, true); err != nil {
		return fmt.Errorf("read what groups share: %w", err)
	}
	return nil
}

// judgedOwnKinds returns which of the group's own locations this pass reads and judges. A pass over
// candidates reads the queues and failures only if their length is wrong.
func (ps *pass) judgedOwnKinds(g *group) (own [locationKinds]bool) {
	expired := g.hash["results_expired"] != ""
	own[atQueue], own[atFailures], own[atGroupResults] = true, true, !expired
	if ps.opts.only == nil {
		return own
	}
	queued := int64(0)
	for _, n := range g.queues {
		queued += n
	}
	own[atQueue] = queued != g.counts[ledger.Waiting]
	own[atFailures] = g.failures != g.counts[ledger.Failed]
	own[atGroupResults] = false
	return own
}

// judgedSharedKinds returns which of the locations that groups share this pass reads and judges. A
// pass over candidates reads the ready streams and the results stream only if a tracked group has a
// job there, and the non-ready sets only if the candidates name tenants.
func (ps *pass) judgedSharedKinds() (shared [locationKinds]bool) {
	if ps.opts.only == nil {
		return [locationKinds]bool{atNonReady: true, atReady: true, atResultsStream: true}
	}
	for _, g := range ps.tracked {
		for i := range g.index.size() {
			switch ledger.StateAt(g.index.states, i).Letter() {
			case ledger.Ready, ledger.InFlight:
				shared[atReady] = true
			case ledger.Done:
				shared[atResultsStream] = true
			}
		}
	}
	shared[atNonReady] = len(ps.opts.only.Tenants) > 0
	return shared
}

// readsNonReadyOf reports whether this pass reads the non-ready and suspended jobs of a tenant.
func (ps *pass) readsNonReadyOf(tenant string) bool {
	return ps.opts.only == nil || slices.Contains(ps.opts.only.Tenants, tenant)
}
