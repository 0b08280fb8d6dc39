package audit

import (
	"context"
	"fmt"
	"slices"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Candidates are what deserves a closer look, of one partition.
type Candidates struct {
	Groups  []string
	Tenants []string // whose parked jobs are looked through, too
}

// RunGroups audits some groups of a partition: themselves, and their jobs in the places that groups
// share. It reads no more than it has to: a queue whose length is right is not read. What lies
// anywhere without being a job, and the laws of load, are left to [Partition].
func RunGroups(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, p keyspace.Partition, candidates Candidates,
	opts Options,
) (Report, error) {
	opts.only = &candidates
	return Partition(ctx, conn, space, p, opts)
}

// runGroups is a look at some groups only.
func (ps *pass) runGroups(ctx context.Context) error {
	if err := ps.checkGroups(ctx, ps.opts.only.Groups); err != nil {
		return fmt.Errorf("read groups: %w", err)
	}
	if err := ps.checkSharedLocations(ctx, true); err != nil {
		return fmt.Errorf("read what groups share: %w", err)
	}
	return nil
}

// judgedOwnKinds says which of a group's own places are read, and so can be judged.
func (ps *pass) judgedOwnKinds(g *group) (own [locationKinds]bool) {
	expired := g.hash["results_expired"] != ""
	own[atQueue], own[atFailures], own[atGroupResults] = true, true, !expired
	if ps.opts.only == nil {
		return own
	}
	waiting := int64(0)
	for _, n := range g.queues {
		waiting += n
	}
	own[atQueue] = waiting != g.counts[ledger.Waiting]
	own[atFailures] = g.failures != g.counts[ledger.Failed]
	own[atGroupResults] = false
	return own
}

// judgedSharedKinds says which of the places that groups share are read for the groups that are
// kept.
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

// readsNonReadyOf says whether what a tenant has parked is read.
func (ps *pass) readsNonReadyOf(tenant string) bool {
	return ps.opts.only == nil || slices.Contains(ps.opts.only.Tenants, tenant)
}
