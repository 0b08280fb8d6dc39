package guard

import (
	"cmp"
	"slices"
)

func (g *reference) position(call string) int {
	return 1 + slices.IndexFunc(g.queue, func(w *refWaiter) bool { return w.call == call })
}

func (g *reference) acquire(raw int64, a acquireArgs) []any {
	g.begin(raw)
	if a.validUntil != 0 && g.now > a.validUntil {
		return []any{"LATE", g.now}
	}
	if a.spec != "" && a.spec != g.spec {
		g.setSpec(g.rev+1, a.spec)
		m := g.members["1"]
		if m == nil {
			m = &refMember{id: "1", breaker: "C"}
			g.members["1"] = m
		}
		m.declared = g.rev
		g.configure(m)
		g.settle(m)
	}
	if !g.known || a.member != "" && g.members[a.member] == nil {
		return []any{"UNKNOWN", g.now}
	}
	leaseMS, waitMS := cmp.Or(a.lease.Milliseconds(), g.leaseMS), a.wait.Milliseconds()
	g.maintain()
	g.serve()
	lent := func(l *refLease) []any {
		return []any{"GRANTED", l.fence, l.member, l.generation, l.probe, leaseMS, g.free(), g.next(), g.now}
	}
	denied := func(after int64, reason string) []any {
		g.counts["denied"]++
		return []any{"DENIED", after, reason, g.free(), g.next(), g.now}
	}
	if l := g.leases[a.call]; l != nil {
		l.claimed, l.expiryMS = true, g.ms()+leaseMS
		return lent(l)
	}
	if p := g.position(a.call); p > 0 && waitMS > 0 {
		g.clients[a.client] = g.ms()
		return []any{"QUEUED", p, g.next(), g.now}
	}
	if len(g.queue) == 0 {
		if a.member != "" {
			m := g.members[a.member]
			if m == nil {
				return []any{"UNKNOWN", g.now} // it was retired, and its last lease has expired now
			}
			switch where, due := g.state(m); where {
			case "free":
				return lent(g.grant(m, a.call, a.client, leaseMS, true))
			case "cooling":
				return denied(g.until(due), g.why(m))
			case "busy":
				return denied(g.until(g.byExpiry()[0].expiryMS*1000), g.why(m))
			default:
				return denied(-1, g.why(m))
			}
		}
		if m := g.fit(); m != nil {
			return lent(g.grant(m, a.call, a.client, leaseMS, true))
		}
	}
	m, at := g.chance()
	after := int64(-1)
	if m != nil {
		after = g.until(at)
	}
	hopeless := m == nil || len(g.leases) == 0 && at > g.now+waitMS*1000
	if waitMS == 0 || hopeless {
		switch {
		case waitMS == 0 && len(g.queue) > 0:
			return denied(after, "queued")
		case m == nil:
			return denied(after, "disabled")
		}
		return denied(after, g.why(m))
	}
	if len(g.queue) >= a.bound {
		g.queue = slices.DeleteFunc(g.queue, g.dead)
		if len(g.queue) >= a.bound {
			return []any{"FULL", g.next(), g.now}
		}
	}
	g.counts["queued"]++
	g.seq++
	g.queue = append(g.queue, &refWaiter{a.call, a.client, g.seq, g.ms() + waitMS})
	g.clients[a.client] = g.ms()
	return []any{"QUEUED", len(g.queue), g.next(), g.now}
}

func (g *reference) wait(raw int64, client string, calls []string) []any {
	g.begin(raw)
	reply := []any{}
	if !g.known {
		for range calls {
			reply = append(reply, []any{"GONE"})
		}
		return append(reply, -1, g.now)
	}
	g.clients[client] = g.ms()
	g.maintain()
	g.serve()
	for _, call := range calls {
		if l := g.leases[call]; l != nil {
			l.claimed, l.expiryMS = true, g.ms()+g.leaseMS
			reply = append(reply, []any{"GRANTED", l.fence, l.member, l.generation, l.probe, g.leaseMS})
		} else if p := g.position(call); p > 0 {
			reply = append(reply, []any{"QUEUED", p})
		} else {
			reply = append(reply, []any{"GONE"})
		}
	}
	return append(reply, g.next(), g.now)
}

// refEnding is one lease of a call of release.
type refEnding struct {
	call    string
	fence   int64 // 0 = cancel
	outcome string
	delayMS int64
}

func (g *reference) release(raw int64, endings []refEnding) []any {
	g.begin(raw)
	reply := []any{}
	if g.known {
		g.maintain()
	}
	for _, e := range endings {
		l := g.leases[e.call]
		switch {
		case e.fence == 0 && g.position(e.call) > 0:
			i := g.position(e.call) - 1
			g.queue = slices.Delete(g.queue, i, i+1)
			reply = append(reply, []any{"LEFT"})
		case l == nil || e.fence != 0 && e.fence != l.fence:
			reply = append(reply, []any{"GONE"})
		default:
			outcome := e.outcome
			if e.fence == 0 {
				outcome = "u"
			}
			breaker, changed, stale := g.end(l, outcome, e.delayMS)
			if stale {
				g.counts["stale"]++
			}
			if e.fence == 0 {
				reply = append(reply, []any{"GIVEN"})
			} else if changed {
				reply = append(reply, []any{"OK", breaker, 1})
			} else {
				reply = append(reply, []any{"OK", breaker, 0})
			}
		}
	}
	if !g.known {
		return append(reply, -1, g.now)
	}
	g.serve()
	return append(reply, g.next(), g.now)
}

func (g *reference) renew(raw, leaseMS int64, leases []*refLease) []any {
	g.begin(raw)
	reply := []any{}
	if g.known {
		g.maintain()
	}
	for _, l := range leases {
		own := g.leases[l.call]
		if own == nil || own.fence != l.fence {
			reply = append(reply, "LOST")
			continue
		}
		own.claimed, own.expiryMS = true, g.ms()+cmp.Or(leaseMS, g.leaseMS)
		reply = append(reply, "OK")
	}
	if g.known {
		g.serve()
	}
	return append(reply, g.now)
}

func (g *reference) declare(raw, rev int64, spec string, last bool, members [][2]string) []any {
	g.begin(raw)
	if g.known && rev > 0 && (rev < g.rev || rev == g.rev && spec != g.spec) {
		return []any{g.rev, "OLDER", 0}
	}
	same := g.known && spec == g.spec && (rev == 0 || rev == g.rev) && last && len(members) == len(g.members)
	for _, named := range members {
		m := g.members[named[0]]
		same = same && m != nil && m.override == named[1] && m.off != "R"
	}
	if same {
		return []any{g.rev, "SAME", 0}
	}
	if rev == 0 {
		rev = g.rev + 1
	}
	g.setSpec(rev, spec)
	for _, named := range members {
		m := g.members[named[0]]
		if m == nil {
			m = &refMember{id: named[0], breaker: "C"}
			g.members[m.id] = m
		}
		m.override, m.declared = named[1], rev
		if m.off == "R" {
			m.off = ""
		}
		g.configure(m)
		g.settle(m)
	}
	if last {
		for _, m := range g.members {
			switch {
			case m.declared == rev:
			case m.held > 0:
				g.configure(m)
				m.off, m.declared = "R", rev
				g.settle(m)
			default:
				delete(g.members, m.id)
			}
		}
		g.maintain()
		g.serve()
	}
	return []any{rev, "CHANGED", 0}
}

func (g *reference) control(raw int64, id, action string) []any {
	g.begin(raw)
	if !g.known || g.members[id] == nil {
		return []any{"UNKNOWN", -1}
	}
	g.maintain()
	result := "OK"
	m := g.members[id]
	if m != nil {
		g.dropPolicy(m)
	}
	switch {
	case m == nil:
		result = "UNKNOWN" // it was retired, and its last lease has expired now
	case action == "disable" && m.off == "":
		m.off = "D"
	case action == "enable" && m.off == "D":
		m.off = ""
	case action == "open" && m.rules.failures == 0, action == "close" && m.rules.failures == 0 && m.breaker == "C":
		result = "REFUSED"
	case action == "open":
		g.turn(m, "O")
	case action == "close" && m.breaker != "C":
		g.turn(m, "C")
	}
	if m != nil {
		g.settle(m)
	}
	if action == "take-back" && m != nil {
		for _, l := range g.byExpiry() {
			if l.member == id {
				g.counts["lost"]++
				g.end(l, "l", 0)
			}
		}
	}
	g.serve()
	return []any{result, -1}
}
