// Package layout keeps the number of the layout of the data in Redis, so that a version never reads
// what it does not know, and migrates the data from one layout to the next ([ADR 51]).
//
// Jobs, rooms and guards have numbers of their own. A version reads the layouts Oldest to Newest of
// a part, which differ by one at most. What a process writes is the number in Redis:
//
//	1   layout 1 is written
//	1+  layout 1 is written, and layout 2 is announced: versions that can't read it stop
//	2-  layout 2 is written, data of layout 1 may remain: versions that can't read it don't start
//	2   all data has layout 2
//
// [ADR 51]: ../../../docs/adr/0051-a-number-of-the-layout.md
package layout

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

// Names of the parts.
const (
	Jobs   = "jobs"
	Rooms  = "rooms"
	Guards = "guards"
)

// Part is a part of the data that has a number of its own, and what this version can do with it.
type Part struct {
	Name           string
	Oldest, Newest int // layouts that this version reads
	// Steps convert data of the layout before Newest. They are idempotent.
	Steps []Step
}

// GuardPart is the layout of the guards (package guard, lua/guard/README.md).
var GuardPart = Part{Name: Guards, Oldest: 1, Newest: 1}

// Step converts data of one kind.
type Step struct {
	Name string // what it converts, for people
	// Convert converts a bounded number of items, beginning at a cursor; "" is the first. It returns
	// the next cursor, "" at the end, and how many items it has converted, or with count true would
	// have converted.
	Convert func(ctx context.Context, conn *redisx.Conn, space keyspace.Space, cursor string, count bool) (
		next string, n int, err error)
}

// Number is the number of a layout and the phase of its migration; see the package's documentation.
type Number struct {
	Layout int
	Phase  Phase
}

// Phase is a phase of a migration.
type Phase string

// The phases.
const (
	Steady    Phase = ""
	Announced Phase = "+" // Layout+1 is announced
	Raised    Phase = "-" // data of Layout-1 may remain
)

func (n Number) String() string { return strconv.Itoa(n.Layout) + string(n.Phase) }

// parse reads a number; a missing one is layout 1.
func parse(text string) (Number, error) {
	if text == "" {
		return Number{Layout: 1}, nil
	}
	digits := strings.TrimRight(text, string(Announced+Raised))
	n := Number{Phase: Phase(text[len(digits):])}
	var err error
	if n.Layout, err = strconv.Atoi(digits); err != nil || n.Layout < 1 || len(n.Phase) > 1 {
		return n, fmt.Errorf("%q is no number of a layout", text)
	}
	return n, nil
}

// ErrUnsupported is wrapped by errors that say that this version can't read the data in Redis.
var ErrUnsupported = errors.New("this version can't use the data in Redis")

// Check returns an error, which wraps ErrUnsupported, if this version can't read data of layout n,
// or data that n announces or leaves.
func (p Part) Check(n Number) error {
	from, to := n.Layout, n.Layout
	switch n.Phase {
	case Announced:
		to++
	case Raised:
		from--
	}
	reads := "layout " + strconv.Itoa(p.Newest)
	if p.Oldest != p.Newest {
		reads = fmt.Sprintf("layouts %d and %d", p.Oldest, p.Newest)
	}
	has := "has"
	if n.Phase == Announced {
		has = "is about to have"
	}
	switch {
	case to > p.Newest:
		return fmt.Errorf("%w: the data of %s %s layout %d, and this version reads %s: run a later version, which "+
			"reads layout %d, or restore a backup from before (docs/howto/upgrading.md)",
			ErrUnsupported, p.Name, has, to, reads, to)
	case from < p.Oldest:
		return fmt.Errorf("%w: data of %s has layout %d, and this version reads %s: run a version that reads "+
			"layouts %d and %d, and `bulkaction migrate` of it (docs/howto/upgrading.md)",
			ErrUnsupported, p.Name, from, reads, from, from+1)
	}
	return nil
}

// Read returns the numbers of the parts in the hash at key.
func Read(ctx context.Context, c redis.Cmdable, key string, parts ...Part) ([]Number, error) {
	all, err := c.HGetAll(ctx, key).Result()
	if err != nil {
		return nil, fmt.Errorf("read the numbers of the layouts: %w", err)
	}
	numbers := make([]Number, len(parts))
	for i, p := range parts {
		if numbers[i], err = parse(all[p.Name]); err != nil {
			return nil, fmt.Errorf("%w: key %s, field %s: %w", ErrUnsupported, key, p.Name, err)
		}
	}
	return numbers, nil
}

var change = call.NewScript("layout", lua.Source("processes/layout"))

// move changes a part's number from one value to another, unless another process was faster. It
// returns the number that there is then.
func move(ctx context.Context, c redis.Cmdable, key, part, from, to string) (Number, error) {
	r := change.Read(ctx, c, []string{key}, []any{part, from, to})
	text := r.Text()
	if err := r.Err(); err != nil {
		return Number{}, fmt.Errorf("write the number of the layout: %w", err)
	}
	return parse(text)
}

// Start reads the numbers of the parts, and returns an error, which wraps ErrUnsupported, if this
// version can't use one of them. A missing number it writes: Newest if there is no data, as empty
// says, and otherwise 1.
func Start(ctx context.Context, c redis.Cmdable, key string, empty func() (bool, error), parts ...Part) ([]Number, error) {
	all, err := c.HGetAll(ctx, key).Result()
	if err != nil {
		return nil, fmt.Errorf("read the numbers of the layouts: %w", err)
	}
	for _, p := range parts {
		if all[p.Name] != "" {
			continue
		}
		first := 1
		none, err := empty()
		if err != nil {
			return nil, err
		}
		if none {
			first = p.Newest
		}
		if _, err := move(ctx, c, key, p.Name, "", strconv.Itoa(first)); err != nil {
			return nil, err
		}
	}
	return ReadUsable(ctx, c, key, parts...)
}

// ReadUsable reads the numbers of the parts in the hash at key. It returns an error, which wraps
// ErrUnsupported, if this version can't use one of them.
func ReadUsable(ctx context.Context, c redis.Cmdable, key string, parts ...Part) ([]Number, error) {
	numbers, err := Read(ctx, c, key, parts...)
	if err != nil {
		return nil, err
	}
	for i, p := range parts {
		if err := p.Check(numbers[i]); err != nil {
			return nil, err
		}
	}
	return numbers, nil
}

// Interval is the time between two reads of the numbers in a running process.
const Interval = time.Second

// Watch reads the numbers of the parts once a second, until ctx ends or this version can't use one of
// them: then it calls refuse and returns. It calls use with the numbers that it has read. When Redis
// has lost them, it calls start, which writes them again.
func Watch(
	ctx context.Context, c redis.Cmdable, key string, log *slog.Logger,
	use func([]Number), refuse func(error), start func(context.Context) error, parts ...Part,
) {
	for redisx.Sleep(ctx, Interval) == nil {
		if n, err := c.Exists(ctx, key).Result(); err == nil && n == 0 {
			err = start(ctx)
			log.Warn("the numbers of the layouts are gone: Redis has lost data", "error", err)
			continue
		}
		numbers, err := ReadUsable(ctx, c, key, parts...)
		switch {
		case errors.Is(err, ErrUnsupported):
			refuse(err)
			return
		case err != nil:
			log.Debug("reading the numbers of the layouts failed", "error", err)
		default:
			use(numbers)
		}
	}
}
