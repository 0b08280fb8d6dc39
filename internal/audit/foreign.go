package audit

import (
	"context"
	"fmt"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// item is something of a job in a place that groups share.
type item struct {
	place       locationKind
	key, id     string // where: the entry, or the blob in a sorted set
	group       string
	ordinal     int64
	attempt     int
	typ, tenant string // "" where the place does not tell
	wrong       string // what is wrong with it whatever its group says
}

// foreign asks about items of groups that are not kept, and of jobs beyond what is kept. First all
// are asked about, then those that disagree once more together with whether they still lie there:
// then they are wrong at one instant.
func (ps *pass) foreign(ctx context.Context, items []item) error {
	if ps.opts.only != nil {
		return nil // it is of other groups
	}
	var suspects []item
	for page := range slices.Chunk(items, pageSize/2) {
		about := make([]answers, len(page))
		err := ps.inTurn(ctx, func(p redis.Pipeliner) {
			for i, it := range page {
				about[i] = ps.ask(ctx, p, it)
			}
		})
		if err != nil {
			return err
		}
		for i, it := range page {
			if it.verdict(about[i]) != "" {
				suspects = append(suspects, it)
			}
		}
	}
	for page := range slices.Chunk(suspects, 50) {
		about, there := make([]answers, len(page)), make([]func() bool, len(page))
		err := ps.atOnce(ctx, func(p redis.Pipeliner) {
			for i, it := range page {
				about[i] = ps.ask(ctx, p, it)
				if it.place == atNonReady {
					score := p.ZScore(ctx, it.key, it.id)
					there[i] = func() bool { return score.Err() == nil }
				} else {
					entry := p.XRange(ctx, it.key, it.id, it.id)
					there[i] = func() bool { return len(entry.Val()) > 0 }
				}
			}
		})
		if err != nil {
			return err
		}
		for i, it := range page {
			if verdict := it.verdict(about[i]); verdict != "" && there[i]() {
				ps.strange(it, verdict)
			}
		}
	}
	return nil
}

// answers are what Redis says of an item's job.
type answers struct {
	group *redis.SliceCmd
	state *redis.StringCmd
}

func (ps *pass) ask(ctx context.Context, p redis.Pipeliner, it item) answers {
	at := 2 * min(it.ordinal, messages.MaxTotal)
	return answers{
		group: p.HMGet(ctx, ps.p.Group(it.group), "tenant", "status", "sweep"),
		state: p.GetRange(ctx, ps.p.States(it.group), at, at+1),
	}
}

// verdict says what is wrong with an item, "" when nothing is.
func (it item) verdict(a answers) string {
	if isAlien(a.group.Err()) || isAlien(a.state.Err()) {
		return "" // its group can't be judged
	}
	v, state := a.group.Val(), ledger.State(a.state.Val())
	tenant, status, sweeping := text(v[0]), text(v[1]), text(v[2]) != ""
	switch {
	case status == "":
		return "there is no such group"
	case len(state) != ledger.StateBytes:
		return "the group has no such job"
	case it.wrong != "":
		return it.wrong
	case it.tenant != "" && it.tenant != tenant:
		return "its tenant is " + tenant
	case fits(it.place, state, it.attempt):
		return ""
	case status == string(api.StatusCancelled) && it.leftBehind(state.Letter(), sweeping):
		return ""
	}
	return "it is " + describeState(state)
}

// leftBehind says whether a cancelled group may have left an item: parked ones until it is settled,
// ready ones until a worker or the dispatcher meets them.
func (it item) leftBehind(letter ledger.Letter, sweeping bool) bool {
	switch it.place {
	case atNonReady:
		return letter == ledger.Cancelled && sweeping
	case atReady:
		return letter == ledger.Cancelled
	}
	return false
}

func (ps *pass) strange(it item, verdict string) {
	where := ps.shortKey(it.key)
	if it.place != atNonReady { // what lies there holds its payload
		where += " under " + it.id
	}
	f := finding{it.place.law(), it.group, it.ordinal, fmt.Sprint("foreign ", it.key, it.id, verdict)}
	ps.found.add(f, "something of it lies in %s, but %s", where, verdict)
	ps.mend(f, ps.cureMisplaced(job{it.group, it.ordinal}, ps.locationOfKey(it.place, it.key)))
	ps.markUncertain(it.place.law(), it.tenant, it.typ)
}
