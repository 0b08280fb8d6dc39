package email

import (
	"cmp"
	"fmt"
	"strings"
	"sync"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// file is the accounts file.
type file struct {
	Accounts []entry `yaml:"accounts"`
}

type entry struct {
	accountsfile.Entry `yaml:",inline"`
	Host               string `yaml:"host"`
	Port               *int   `yaml:"port"`
	Username           string `yaml:"username"`
	Password           string `yaml:"password"`
	PasswordFile       string `yaml:"password_file"`
	From               string `yaml:"from"`
	TLS                string `yaml:"tls"`
	Auth               string `yaml:"auth"`
}

// Reload reads the accounts file and the passwords again, and uses the accounts if they have no
// mistake. If the files have not changed since the last call, it does nothing, so a mistake is
// returned once; but after an error of the Choice it tries again. It waits until the idle
// connections of changed or removed accounts are closed; their other connections are closed when
// their mail is sent.
func (a *Accounts) Reload() (changed bool, err error) { return a.file.Reload() }

// load reads the accounts file. It returns the function that lets jobs use its accounts.
func (a *Accounts) load(r *accountsfile.Reader) (use func() error) {
	var f file
	if r.Decode(&f) && len(f.Accounts) == 0 {
		r.Mistake("the file lists no account under accounts")
	}
	list := make([]member, len(f.Accounts))
	for i, e := range f.Accounts {
		c, account := r.Account("", i, e.Entry)
		list[i] = member{account: account, config: a.configOf(c, e)}
	}
	return func() error {
		before := a.current.Load()
		after, err := a.use(list, before.members)
		if err != nil {
			return err
		}
		a.current.Store(after)
		closeRemoved(before.members, after.members)
		return nil
	}
}

// configOf returns the configuration of one account in the file: the values of its entry, and those
// of a.config for the others, but never its host, user name or password. It reports mistakes to c.
func (a *Accounts) configOf(c *accountsfile.Checker, e entry) Config {
	config := a.config
	config.AccountsFile = ""
	config.Host, config.Username, config.Password = e.Host, e.Username, e.Password
	if e.Port != nil {
		config.Port = *e.Port
	}
	config.From, config.TLS = cmp.Or(e.From, config.From), cmp.Or(e.TLS, config.TLS)
	config.Auth = cmp.Or(e.Auth, config.Auth)

	given := e.Password != "" || e.PasswordFile != ""
	c.Check(e.Password == "" || e.PasswordFile == "", "password: set either it or password_file, not both")
	c.Check(given || e.Username == "" || config.Auth == AuthNone, "password or password_file is missing")
	c.Check(!given || e.Username != "", "username is missing")
	if e.PasswordFile != "" {
		content := c.Secret("password_file", e.PasswordFile)
		config.Password = strings.TrimRight(string(content), "\r\n")
		c.Check(content == nil || config.Password != "", "password_file: has no password")
	}
	for _, m := range config.mistakes() {
		c.Check(false, "%s: %w", strings.ToLower(m.field), m.err)
	}
	return config
}

// use returns the accounts of a list, with a source that lends them. An account whose configuration
// is the same as in before keeps its processor.
func (a *Accounts) use(list []member, before map[string]member) (*accounts, error) {
	after := &accounts{members: map[string]member{}}
	choices := make([]credential.Account, len(list))
	for i, m := range list {
		choices[i] = m.account
		if old := before[m.account.ID]; old.config == m.config {
			m.processor = old.processor
		} else {
			p, err := New(m.config)
			if err != nil {
				return nil, fmt.Errorf("account %s: %w", m.account.ID, err)
			}
			p.idSender = a.idSender
			m.processor = p
		}
		after.members[m.account.ID] = m
	}
	var err error
	if after.source, err = a.choose(poolName, choices); err != nil {
		return nil, fmt.Errorf("choose among the e-mail accounts: %w", err)
	}
	return after, nil
}

// closeRemoved closes the connections of the accounts in before whose processor is not used in
// after.
func closeRemoved(before, after map[string]member) {
	var closing sync.WaitGroup
	for id, m := range before {
		if after[id].processor != m.processor {
			closing.Go(func() { _ = m.processor.Close() }) // never fails
		}
	}
	closing.Wait()
}
