package guard

import (
	"fmt"
	"strconv"
	"strings"
)

// refLimit is a rate limit of the reference. Times are in µs.
type refLimit struct {
	kind                   string // sliding, token or none
	permits, window, burst int64
}

// refEntry is an entry of the log of a sliding limiter in the reference model: n permits that were
// spent in one 64th of the window, and when the latest of them was.
type refEntry struct{ at, n int64 }

// refPermits is the state of one limiter.
type refPermits struct {
	limit refLimit
	log   []*refEntry // sliding
	due   int64       // token: the theoretical arrival time
}

func (p *refPermits) each() int64 { return p.limit.window / p.limit.permits }

// inWindow returns the log's entries inside the window. It does not remove the others: that happens
// when the log is written next, so a limit with a longer window may count them again.
func (p *refPermits) inWindow(now int64) []*refEntry {
	log := p.log
	for len(log) > 0 && log[0].at <= now-p.limit.window {
		log = log[1:]
	}
	return log
}

func (p *refPermits) left(now int64) int64 {
	if p.limit.kind == "sliding" {
		left := p.limit.permits
		for _, e := range p.inWindow(now) {
			left -= e.n
		}
		return left
	}
	early := p.each() / 1_000_000 // the scripts round up a permit that lacks a millionth
	return (now + p.limit.burst*p.each() - max(p.due, now) + early) / p.each()
}

// when returns the first time at which n permits are left in the reference model, if none is spent
// before.
func (p *refPermits) when(now, n int64) int64 {
	if p.limit.kind == "sliding" {
		left, at := p.left(now), now
		for _, e := range p.inWindow(now) {
			if left >= n {
				break
			}
			left, at = left+e.n, e.at+p.limit.window
		}
		return at
	}
	return max(p.due, now) + n*p.each() - p.limit.burst*p.each()
}

// spend spends n permits in the reference model and returns the log entry that counts them; nil for
// a token bucket. As the script does, it removes entries that had left the window at the time read.
func (p *refPermits) spend(read, now, n int64) *refEntry {
	if p.limit.kind == "token" {
		p.due = max(p.due, now) + n*p.each()
		return nil
	}
	p.log = p.inWindow(read)
	slot := p.limit.window / 64
	if k := len(p.log); k > 0 && p.log[k-1].at/slot == now/slot {
		p.log[k-1].at = now
		p.log[k-1].n += n
		return p.log[k-1]
	}
	e := &refEntry{now, n}
	p.log = append(p.log, e)
	return e
}

// takeOut gives one permit back in the reference model: it takes it out of its log entry, unless
// the entry has left the window.
func (p *refPermits) takeOut(now int64, e *refEntry) {
	for i, other := range p.inWindow(now) {
		if other == e {
			p.log = p.inWindow(now)
			if e.n--; e.n == 0 {
				p.log = append(p.log[:i:i], p.log[i+1:]...)
			}
			return
		}
	}
}

// change replaces the limit in the reference model. It returns whether permits that were spent
// before can still be moved or given back.
func (p *refPermits) change(now int64, to refLimit) (same bool) {
	from := p.limit
	switch {
	case from == to:
		return true
	case from.kind == to.kind:
		p.limit = to
		if to.kind == "token" { // a bucket is never emptier than empty
			p.due = min(p.due, now+to.burst*p.each())
		}
		return to.kind == "sliding" && from.window == to.window
	}
	left, limited := int64(0), from.kind == "sliding" || from.kind == "token"
	if limited {
		left = max(0, p.left(now))
	}
	*p = refPermits{limit: to}
	if limited && to.kind != "none" && p.left(now) > left {
		p.spend(now, now, p.left(now)-left)
	}
	return false
}

// at returns a text of the permits that count at the time now.
func (p *refPermits) at(now int64) string {
	switch p.limit.kind {
	case "sliding":
		text := "sliding"
		for _, e := range p.inWindow(now) {
			text += fmt.Sprintf(" %d:%d", e.at, e.n)
		}
		return text
	case "token":
		return fmt.Sprintf("token %d", max(p.due, now))
	}
	return "none"
}

// storedPermits reads the state of a limiter from its hash in Redis, and checks that the stored sum
// equals that of its log.
func storedPermits(t check, kind string, window int64, h map[string]string) refPermits {
	p := refPermits{limit: refLimit{kind: kind, window: window}}
	if kind == "token" && h["t"] != "" {
		due, err := strconv.ParseFloat(h["t"], 64)
		t.no(err)
		p.due = int64(due)
		t.equal(due, float64(p.due), "a whole number of µs")
	}
	sum := int64(0)
	for text := range strings.SplitSeq(strings.TrimSuffix(h["s"], ";"), ";") {
		if at, n, ok := strings.Cut(text, ":"); ok && kind == "sliding" {
			p.log = append(p.log, &refEntry{t.number(at), t.number(n)})
			sum += t.number(n)
		}
	}
	if kind == "sliding" && h["n"] != "" {
		t.equal(sum, t.number(h["n"]), "the sum of the log")
	}
	return p
}

// refTake is a Limiter of the reference.
type refTake struct {
	refPermits
	clk, offset int64
}

// take is the script take in the reference model: it returns the script's reply, and the time to
// live of the key in ms; 0 = the script does not set it.
func (l *refTake) take(raw, n int64) (reply string, ttl int64) {
	now, offset := raw+l.offset, l.offset
	stepped := now < l.clk
	if stepped {
		now = l.clk + 1
		offset = now - raw
	}
	allowed := l.left(now) >= n
	retry := int64(0)
	if allowed {
		l.spend(now, now, n)
	} else {
		retry = l.when(now, n) - now
	}
	reset := int64(0)
	if l.limit.kind == "token" {
		reset = max(0, l.due-now)
	} else if k := len(l.log); k > 0 {
		reset = l.log[k-1].at + l.limit.window - now
	}
	if allowed || stepped {
		l.clk, l.offset = now, offset
		ttl = 60_000 + (reset+999)/1000
	}
	ok := 0
	if allowed {
		ok = 1
	}
	return fmt.Sprint([]any{ok, max(0, l.left(now)), retry, reset, now}), ttl
}
