package guard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Query selects a page of guards.
type Query struct {
	Kind   string // pool, breaker, lock, semaphore or key; "" = all kinds but key
	Cursor string // of the page before; "" = the first page
	Limit  int    // the most guards on the page; 0 = 50, at most 1,000
}

// The bounds of one page. It takes at most scanSteps calls of SCAN over scanCount keys each.
// Without Query.Limit it has at most fewListed guards; mostListed is the largest limit. It reads
// readAtOnce guards together.
const (
	readAtOnce = 100
	scanSteps  = 100
	scanCount  = 1000
	mostListed = 1000
	fewListed  = 50
)

// List returns a page of the guards that Redis knows, in no order; those of a PerKey only if Kind
// is key. A page may have fewer guards than Limit, or none, although more pages follow (its Cursor
// is not ""): one page searches at most 100,000 keys of Redis. A guard that is made, or that
// expires, while pages are read may be missing, and a guard may be on two pages.
func (o operations) List(ctx context.Context, q Query) (api.GuardList, error) {
	if q.Kind != "" && !slices.Contains(Kinds, q.Kind) {
		return api.GuardList{}, invalid("kind %.40q: must be pool, breaker, lock, semaphore or key", q.Kind)
	}
	q.Limit = min(cmp.Or(max(q.Limit, 0), fewListed), mostListed)
	names, next, err := o.names(ctx, q)
	if err != nil {
		return api.GuardList{}, err
	}
	l := api.GuardList{Guards: make([]api.GuardSummary, 0, len(names)), Cursor: next}
	for some := range slices.Chunk(names, readAtOnce) {
		// The calls of one chunk go to Redis together: see Client.pipelined.
		sums, errs := make([]api.GuardSummary, len(some)), make([]error, len(some))
		var reads sync.WaitGroup
		for i, name := range some {
			reads.Go(func() { sums[i], errs[i] = o.summary(ctx, name) })
		}
		reads.Wait()
		for i, err := range errs {
			switch {
			case err == nil:
				l.Guards = append(l.Guards, sums[i])
			case !errors.Is(err, ErrUnknownGuard): // else it has expired since
				return api.GuardList{}, err
			}
		}
	}
	return l, nil
}

// Guards returns the names (KIND/NAME) of all guards of this prefix, sorted. Those of a PerKey, one
// for each key, are left out unless keys is set. It goes over the names of all keys in Redis.
func (o operations) Guards(ctx context.Context, keys bool) ([]string, error) {
	var all []string
	for _, q := range []Query{{}, {Kind: kindKey}} {
		if q.Kind == kindKey && !keys {
			break
		}
		q.Limit = mostListed
		for {
			names, next, err := o.names(ctx, q)
			if err != nil {
				return nil, err
			}
			all = append(all, names...)
			if q.Cursor = next; next == "" {
				break
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// position is where a page of List begins: the server, the cursor of SCAN on it, and the last name
// that earlier pages have returned of this SCAN call's names; "" if none.
type position struct {
	server int
	cursor uint64
	after  string
}

func (p position) String() string { return fmt.Sprintf("%d.%d.%s", p.server, p.cursor, p.after) }

func parsePosition(text string) (p position, ok bool) {
	if text == "" {
		return p, true
	}
	parts := strings.SplitN(text, ".", 3)
	if len(parts) != 3 {
		return p, false
	}
	server, err := strconv.ParseUint(parts[0], 10, 16)
	if err != nil {
		return p, false
	}
	cursor, err := strconv.ParseUint(parts[1], 10, 64)
	return position{int(server), cursor, parts[2]}, err == nil
}

// names returns the names of one page of guards, and the cursor of the next page; "" after the last
// one. The error is ErrInvalid for a text that has not the form of a cursor.
func (o operations) names(ctx context.Context, q Query) (names []string, next string, err error) {
	at, ok := parsePosition(q.Cursor)
	if !ok {
		return nil, "", invalid("cursor %.40q: must be the cursor of an earlier page", q.Cursor)
	}
	servers, err := masters(ctx, o.c.rdb)
	for step := 0; err == nil && at.server < len(servers); step++ {
		if step == scanSteps {
			return names, at.String(), nil
		}
		var found []string
		var cursor uint64
		found, cursor, err = o.scanOnce(ctx, servers[at.server], q.Kind, at)
		if room := q.Limit - len(names); len(found) > room {
			names = append(names, found[:room]...)
			if room > 0 {
				at.after = found[room-1]
			}
			return names, at.String(), nil
		}
		names = append(names, found...)
		at = position{server: at.server, cursor: cursor}
		if cursor == 0 {
			at.server++
		}
	}
	if err != nil {
		if unavailable, _ := outage(err); unavailable {
			err = fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		return nil, "", fmt.Errorf("list guards: %w", err)
	}
	return names, "", nil
}

// scanOnce calls SCAN once, at a position. It returns the names of guards that sort behind
// at.after, sorted, and the cursor of the next SCAN call; 0 after the last one.
func (o operations) scanOnce(
	ctx context.Context, server redis.Cmdable, kind string, at position,
) (names []string, next uint64, err error) {
	prefix := o.c.cfg.prefix
	keys, next, err := server.Scan(ctx, at.cursor, keyspace.GuardPattern(prefix, kind), scanCount).Result()
	for _, key := range keys {
		name := strings.TrimSuffix(strings.TrimPrefix(key, prefix+"guard:{"), "}:guard")
		found, _, ok := ParseName(name)
		if ok && name > at.after && (found != kindKey || kind == kindKey) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), next, err
}

// summary reads the counters and sizes of a guard, and none of its members.
func (o operations) summary(ctx context.Context, name string) (api.GuardSummary, error) {
	g, err := o.named(name)
	if err != nil {
		return api.GuardSummary{}, err
	}
	reply, err := g.send(ctx, inspectScript, []any{0, 0})
	if err != nil {
		return api.GuardSummary{}, err
	}
	if reply == nil {
		return api.GuardSummary{}, fmt.Errorf("guard %s: %w", name, ErrUnknownGuard)
	}
	r := inspectScript.Reply(reply)
	head, sizes := readHead(r.List()), r.List()
	sum := api.GuardSummary{Name: name, Rev: head.rev, Counters: head.counters}
	sum.Members, sum.Free, sum.Cooling = sizes.Number(), sizes.Number(), sizes.Number()
	sum.Leases, sum.Queue = sizes.Number(), sizes.Number()
	sizes.Skip()
	r.Skip()
	return call.Done(r, sum)
}
