package push

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/bulkaction/bulkaction/processor/credential"
)

// reloadInterval is the time between two looks at the accounts file and the secrets that it names.
const reloadInterval = 10 * time.Second

// Watch reads the accounts file again until ctx ends, and uses the new accounts when it or a secret
// has changed. A change with a mistake is logged, and the old accounts stay in use.
func (p *Processor) Watch(ctx context.Context, log *slog.Logger) {
	ticker := time.NewTicker(reloadInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		changed, err := p.reload()
		switch {
		case err != nil:
			log.Error("the changed push accounts have mistakes, the old accounts stay in use", "error", err)
		case changed:
			log.Info("push accounts changed", "accounts", p.accounts.Load().count())
		}
	}
}

func (a accounts) count() map[string]int {
	n := map[string]int{}
	for platform, pool := range a {
		n[platform] = len(pool.members)
	}
	return n
}

// reload reads the accounts file and the secrets, and uses the accounts if they have no mistake. It
// does nothing if the files are as they were in the last call, so that a mistake is returned once.
// Two calls must not overlap.
func (p *Processor) reload() (changed bool, err error) {
	var before accounts
	if current := p.accounts.Load(); current != nil {
		before = *current
	}
	l := &loader{path: p.config.AccountsFile, parts: p.parts, before: before}
	loaded, err := l.load()
	digest := [digestBytes]byte(l.digest.Sum(nil))
	if before != nil && digest == p.seen {
		return false, nil
	}
	p.seen = digest
	if err != nil {
		return false, err
	}
	after := accounts{}
	for platform, members := range loaded {
		if after[platform], err = p.newPool(platform, members); err != nil {
			p.seen = [digestBytes]byte{} // the files are not at fault: the next call tries again
			return false, err
		}
	}
	p.accounts.Store(&after)
	before.closeAllBut(after)
	return true, nil
}

func (p *Processor) newPool(platform string, members []member) (*pool, error) {
	all := &pool{members: map[string]member{}}
	choices := make([]credential.Account, len(members))
	for i, m := range members {
		all.members[m.account.ID] = m
		choices[i] = m.account
	}
	var err error
	if all.source, err = p.choose(platform, choices); err != nil {
		return nil, fmt.Errorf("choose among the push accounts of %s: %w", platform, err)
	}
	return all, nil
}

// closeAllBut closes the idle connections of accounts that are not part of after. A job may still
// use such an account; its connection then ends by its idle timeout.
func (a accounts) closeAllBut(after accounts) {
	used := map[sender]bool{}
	for _, pool := range after {
		for _, m := range pool.members {
			used[m.sender] = true
		}
	}
	for _, pool := range a {
		for _, m := range pool.members {
			if !used[m.sender] {
				m.sender.close()
			}
		}
	}
}
