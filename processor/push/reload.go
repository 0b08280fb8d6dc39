package push

import (
	"fmt"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// Reload reads the accounts file and the secrets again, and uses the accounts if they have no
// mistake. If the files have not changed since the last call, it does nothing, so a mistake is
// returned once; but after an error of the Choice it tries again.
func (p *Processor) Reload() (changed bool, err error) { return p.file.Reload() }

// load reads the accounts file. It returns the function that lets jobs use its accounts.
func (p *Processor) load(r *accountsfile.Reader) (use func() error) {
	before := *p.accounts.Load()
	l := &loader{Reader: r, parts: p.parts, before: before}
	l.load()
	return func() error {
		after := accounts{}
		for platform, members := range l.members {
			var err error
			if after[platform], err = p.newPool(platform, members); err != nil {
				return err
			}
		}
		p.accounts.Store(&after)
		before.closeAllBut(after)
		return nil
	}
}

func (p *Processor) newPool(platform string, members []member) (*pool, error) {
	all := &pool{members: map[string]member{}}
	choices := make([]credential.Account, len(members))
	for i, m := range members {
		all.members[m.account.ID] = m
		choices[i] = m.account
	}
	var err error
	if all.source, err = p.choose("push."+platform, choices); err != nil {
		return nil, fmt.Errorf("choose among the push accounts of %s: %w", platform, err)
	}
	return all, nil
}

// closeAllBut closes the idle connections of those accounts in a whose sender is not used in after.
// A job may still use such an account; a connection that it opens then ends by its idle timeout.
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
