package guard

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// View is what Redis knows of a guard.
type View struct {
	Name     string           `json:"name"` // KIND/NAME
	Rev      int64            `json:"rev"`
	Spec     SpecView         `json:"spec"`
	Members  []MemberView     `json:"members"`
	Queue    QueueView        `json:"queue"`
	Counters map[string]int64 `json:"counters"` // granted, denied, queued, expired, stale, lost
}

// SpecView is a stored spec. Permits 0 means that there is no limit, Failures 0 that there is no
// breaker, and Concurrency 0 that the number of leases is unbounded.
type SpecView struct {
	Limiter     string `json:"limiter"` // none, sliding or token
	Permits     int64  `json:"permits"`
	WindowMS    int64  `json:"window_ms"`
	Burst       int64  `json:"burst"`
	Failures    int64  `json:"failures"`
	OpenForMS   int64  `json:"open_for_ms"`
	Successes   int64  `json:"successes"`
	Concurrency int64  `json:"concurrency"`
	LeaseMS     int64  `json:"lease_ms,omitempty"`
	MaxWaitMS   int64  `json:"max_wait_ms,omitempty"`
	MaxQueue    int64  `json:"max_queue,omitempty"`
}

// MemberView is the state of a member.
type MemberView struct {
	ID         string     `json:"id"`
	State      string     `json:"state"`   // free, cooling, busy or off
	Breaker    string     `json:"breaker"` // closed, open or half_open
	Failures   int64      `json:"failures"`
	OpenUntil  *time.Time `json:"open_until,omitempty"`
	Held       int64      `json:"held"`           // leases
	Left       *int64     `json:"left,omitempty"` // permits; absent without a limit
	NextAt     *time.Time `json:"next_at,omitempty"`
	LastUsedAt *time.Time `json:"last_used_at,omitempty"`
	Uses       int64      `json:"uses"`
}

// QueueView is the queue of a guard.
type QueueView struct {
	Length   int64 `json:"length"`
	OldestMS int64 `json:"oldest_ms"` // for how long the first call has waited, if it waits for MaxWait
}

var counterNames = []string{"granted", "denied", "queued", "expired", "stale", "lost"}

var breakerNames = map[string]string{"C": "closed", "O": "open", "H": "half_open"}

// Inspect reads the pool and all of its members.
func (p *Pool) Inspect(ctx context.Context) (View, error) {
	if _, _, err := p.g.settings(); err != nil {
		return View{}, err
	}
	return p.g.inspect(ctx)
}

// Inspect reads a guard by its name: KIND/NAME, or the NAME of a pool. The error is ErrUnknownGuard
// when Redis knows no such guard.
func (o operations) Inspect(ctx context.Context, name string) (View, error) {
	g, err := o.named(name)
	if err != nil {
		return View{}, err
	}
	return g.inspect(ctx)
}

func (g *shared) inspect(ctx context.Context) (View, error) {
	view := View{Name: g.kind + "/" + g.name, Members: []MemberView{}, Counters: map[string]int64{}}
	for from := 0; ; from += rowsPerPage {
		reply, err := g.send(ctx, inspectScript, []any{from, rowsPerPage})
		if err != nil {
			return View{}, err
		}
		if reply == nil {
			return View{}, fmt.Errorf("guard %s: %w", g.name, ErrUnknownGuard)
		}
		n, err := view.read(reply, from == 0)
		if err != nil {
			return View{}, fmt.Errorf("guard %s: %w", g.name, err)
		}
		if n < rowsPerPage {
			return view, nil
		}
	}
}

// read adds a page to the view, and returns the number of its members.
func (v *View) read(reply any, first bool) (int, error) {
	s := scan(reply)
	fields, sizes, members, _, waiters := s.list(), s.list(), s.list(), s.list(), s.list()
	at := s.number()
	head := readHead(fields)
	v.Rev, v.Spec, v.Counters = head.rev, head.spec, head.counters
	wall := func(micros int64) *time.Time {
		if micros == 0 {
			return nil
		}
		t := time.UnixMicro(micros - head.offset)
		return &t
	}
	if first {
		sizes.values = sizes.values[min(4, len(sizes.values)):]
		v.Queue.Length = sizes.number()
		if waiters.more() {
			row := waiters.list()
			_, _ = row.text(), row.text()
			_, deadline, _ := strings.Cut(row.text(), "|")
			ends, _ := strconv.ParseInt(deadline, 10, 64) // 0 for damaged text
			v.Queue.OldestMS = max(0, v.Spec.MaxWaitMS-max(0, ends-at/1000))
		}
	}
	n := 0
	for members.more() {
		row := members.list()
		m := MemberView{ID: row.text(), State: row.text(), Breaker: breakerNames[row.text()], Failures: row.number()}
		openUntil := row.number()
		if m.Breaker == "open" {
			m.OpenUntil = wall(openUntil)
		}
		m.Held = row.number()
		if left := row.number(); left >= 0 {
			m.Left = &left
		}
		m.NextAt, m.LastUsedAt, m.Uses = wall(row.number()), wall(row.number()), row.number()
		if row.failed != nil {
			return n, row.failed
		}
		v.Members = append(v.Members, m)
		n++
	}
	return n, s.failed
}

// guardHead are the fields of a guard's hash.
type guardHead struct {
	rev, offset int64
	spec        SpecView
	counters    map[string]int64
}

func readHead(fields *scanner) guardHead {
	head := guardHead{counters: map[string]int64{}}
	for _, name := range counterNames {
		head.counters[name] = 0
	}
	for fields.more() {
		name, value := fields.text(), fields.text()
		n, _ := strconv.ParseInt(value, 10, 64) // 0 for text
		switch {
		case name == "rev":
			head.rev = n
		case name == "spec":
			head.spec = readSpec(value)
		case name == "offset":
			head.offset = n
		case slices.Contains(counterNames, name):
			head.counters[name] = n
		}
	}
	return head
}

func readSpec(text string) SpecView {
	parts := strings.Split(text, "|")
	n := func(i int) int64 {
		if i >= len(parts) {
			return 0
		}
		v, _ := strconv.ParseInt(parts[i], 10, 64) // 0 for an empty field
		return v
	}
	return SpecView{
		Limiter: parts[0], Permits: n(1), WindowMS: n(2), Burst: n(3), Failures: n(4), OpenForMS: n(5), Successes: n(6),
		Concurrency: n(7), LeaseMS: n(8), MaxWaitMS: n(9), MaxQueue: n(10),
	}
}
