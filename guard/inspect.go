package guard

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

var counterNames = []string{"granted", "denied", "queued", "expired", "stale", "lost"}

var breakerNames = map[string]string{"C": "closed", "O": "open", "H": "half_open"}

// Inspect reads the pool and all of its members.
func (p *Pool) Inspect(ctx context.Context) (api.Guard, error) {
	if _, _, err := p.g.settings(); err != nil {
		return api.Guard{}, err
	}
	return p.g.inspect(ctx)
}

// Inspect returns what Redis stores of one guard. name is KIND/NAME, or the NAME of a pool. The
// error is ErrUnknownGuard when Redis knows no such guard.
func (o operations) Inspect(ctx context.Context, name string) (api.Guard, error) {
	g, err := o.named(name)
	if err != nil {
		return api.Guard{}, err
	}
	return g.inspect(ctx)
}

func (g *shared) inspect(ctx context.Context) (api.Guard, error) {
	view := api.Guard{Name: g.kind + "/" + g.name, Members: []api.GuardMember{}, Counters: map[string]int64{}}
	for from := 0; ; from += rowsPerPage {
		reply, err := g.send(ctx, inspectScript, []any{from, rowsPerPage})
		if err != nil {
			return api.Guard{}, err
		}
		if reply == nil {
			return api.Guard{}, fmt.Errorf("guard %s: %w", g.name, ErrUnknownGuard)
		}
		n, err := readPage(&view, reply, from == 0)
		if err != nil {
			return api.Guard{}, fmt.Errorf("guard %s: %w", g.name, err)
		}
		if n < rowsPerPage {
			return view, nil
		}
	}
}

// readPage adds one page, a reply of the script inspect, to v, and returns how many members it has.
// first says that it is the first page, from which the state of the queue is read.
func readPage(v *api.Guard, reply any, first bool) (int, error) {
	r := inspectScript.Reply(reply)
	head, sizes, members, leases, waiters := readHead(r.List()), r.List(), r.List(), r.List(), r.List()
	at := r.Number()
	v.Rev, v.Spec, v.Counters = head.rev, head.spec, head.counters
	wall := func(micros int64) *time.Time {
		if micros == 0 {
			return nil
		}
		t := time.UnixMicro(micros - head.offset)
		return &t
	}
	if first {
		for range 4 {
			_ = sizes.Number()
		}
		v.Queue.Length = sizes.Number()
		if waiters.More() {
			row := waiters.List()
			_, _ = row.Text(), row.Text()
			_, deadline, _ := strings.Cut(row.Text(), "|")
			ends, _ := strconv.ParseInt(deadline, 10, 64) // 0 for damaged text
			v.Queue.OldestMS = max(0, v.Spec.MaxWaitMS-max(0, ends-at/1000))
		}
	}
	n := 0
	for _, list := range []*call.Reply{sizes, leases, waiters} {
		list.Skip()
	}
	for members.More() {
		row := members.List()
		m := api.GuardMember{
			ID: row.Text(), State: row.Text(), Breaker: breakerNames[row.Text()], Failures: row.Number(),
		}
		openUntil := row.Number()
		if m.Breaker == "open" {
			m.OpenUntil = wall(openUntil)
		}
		m.Held = row.Number()
		if left := row.Number(); left >= 0 {
			m.Left = &left
		}
		m.NextAt, m.LastUsedAt, m.Uses = wall(row.Number()), wall(row.Number()), row.Number()
		row.Skip() // what the script needs of a breaker and a limit
		v.Members = append(v.Members, m)
		n++
	}
	return n, r.Err()
}

// guardHead has those fields of a guard's hash that Inspect and List use.
type guardHead struct {
	rev, offset int64
	spec        api.GuardSpec
	counters    map[string]int64
}

func readHead(fields *call.Reply) guardHead {
	head := guardHead{counters: map[string]int64{}}
	for _, name := range counterNames {
		head.counters[name] = 0
	}
	for fields.More() {
		name, value := fields.Text(), fields.Text()
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

func readSpec(text string) api.GuardSpec {
	parts := strings.Split(text, "|")
	n := func(i int) int64 {
		if i >= len(parts) {
			return 0
		}
		v, _ := strconv.ParseInt(parts[i], 10, 64) // 0 for an empty field
		return v
	}
	return api.GuardSpec{
		Limiter: parts[0], Permits: n(1), WindowMS: n(2), Burst: n(3), Failures: n(4), OpenForMS: n(5), Successes: n(6),
		Concurrency: n(7), LeaseMS: n(8), MaxWaitMS: n(9), MaxQueue: n(10),
	}
}
