package layout

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Migration brings one part of the data to the newest layout of this version.
type Migration struct {
	Part
	Key   string // of the hash with the part's number
	Conn  *redisx.Conn
	Space keyspace.Space
	// Older names the live processes that can't read the layout Newest.
	Older func(context.Context) ([]string, error)
	// Say tells people what happens now.
	Say func(format string, args ...any)
}

// settle is how long after a change of the number every live process has seen it: several reads.
const settle = 4 * Interval

// Count returns how many items each step would convert now, by the step's name.
func (m Migration) Count(ctx context.Context) (map[string]int, error) {
	counts := map[string]int{}
	for _, s := range m.Steps {
		n, err := m.each(ctx, s, true)
		if err != nil {
			return nil, err
		}
		counts[s.Name] = n
	}
	return counts, nil
}

// Run brings the part to the layout Newest. It may be interrupted at any time and run again, also by
// several processes at once. Before the number is raised, an end of ctx takes the announcement back.
func (m Migration) Run(ctx context.Context) error {
	n, err := Start(ctx, m.Conn.Cmd, m.Key, func() (bool, error) { return false, nil }, m.Part)
	if err != nil {
		return err
	}
	at := n[0]
	if at.Layout < m.Newest && at.Phase == Steady {
		if err := m.refuseOlder(ctx); err != nil {
			return err
		}
		if at, err = m.move(ctx, at, Number{at.Layout, Announced}); err != nil {
			return err
		}
	}
	if at.Phase == Announced {
		if at, err = m.raise(ctx, at); err != nil {
			return err
		}
	}
	if at.Phase == Raised {
		return m.convert(ctx, at)
	}
	if at.Layout < m.Newest {
		return fmt.Errorf("%s: another process has taken back the announcement of layout %d: run the command again",
			m.Name, m.Newest)
	}
	return nil
}

func (m Migration) move(ctx context.Context, from, to Number) (Number, error) {
	return move(ctx, m.Conn.Cmd, m.Key, m.Name, from.String(), to.String())
}

func (m Migration) refuseOlder(ctx context.Context) error {
	older, err := m.Older(ctx)
	if err == nil && len(older) > 0 {
		err = fmt.Errorf("live processes can't read layout %d of %s: upgrade or stop them first (a killed one counts "+
			"as alive for some seconds): %s", m.Newest, m.Name, strings.Join(older, ", "))
	}
	return err
}

// raise waits until no process is alive that can't read the announced layout, and raises the number.
// A process that starts meanwhile sees the announcement.
func (m Migration) raise(ctx context.Context, at Number) (Number, error) {
	m.Say("%s: layout %d is announced; waiting until every process knows", m.Name, m.Newest)
	err := redisx.Sleep(ctx, settle)
	for said := ""; err == nil; err = redisx.Sleep(ctx, Interval) {
		older, failed := m.Older(ctx)
		if failed != nil {
			err = failed
			break
		}
		if len(older) == 0 {
			m.Say("%s: layout %d is written from now on", m.Name, m.Newest)
			return m.move(ctx, at, Number{m.Newest, Raised})
		}
		if names := strings.Join(older, ", "); names != said {
			said = names
			m.Say("%s: waiting for the end of older processes: %s", m.Name, names)
		}
	}
	back, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_, failed := m.move(back, at, Number{at.Layout, Steady})
	return at, errors.Join(fmt.Errorf("layout %d of %s is not announced any more: %w", m.Newest, m.Name, err), failed)
}

// convert converts the data until a pass finds nothing more.
func (m Migration) convert(ctx context.Context, at Number) error {
	if err := redisx.Sleep(ctx, settle); err != nil { // until nobody writes the old layout
		return err
	}
	for {
		converted := 0
		for _, s := range m.Steps {
			n, err := m.each(ctx, s, false)
			if err != nil {
				return fmt.Errorf("%s: %s: %w; run the command again", m.Name, s.Name, err)
			}
			if n > 0 {
				m.Say("%s: %s: %d converted", m.Name, s.Name, n)
			}
			converted += n
		}
		if converted == 0 {
			_, err := m.move(ctx, at, Number{Layout: m.Newest})
			return err
		}
	}
}

// each calls a step from its first cursor to its last one.
func (m Migration) each(ctx context.Context, s Step, count bool) (total int, err error) {
	for cursor := ""; ; {
		next, n, err := s.Convert(ctx, m.Conn, m.Space, cursor, count)
		if total += n; err != nil || next == "" {
			return total, err
		}
		cursor = next
	}
}
