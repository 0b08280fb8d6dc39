package audit

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// leftovers are the places in which something was found that is no such job, or twice, by what
// Redis is asked for.
type leftovers map[shelf]map[job]bool

// shelf is a key in which jobs lie: its place in a [ledger.Leftover], and whose it is.
type shelf struct{ place, whose, typ string }

// strayJob is the job of what can't be read.
var strayJob = job{}

// cureLeftover sets aside what lies on shelves of a job and does not belong there.
func (ps *pass) cureLeftover(j job, shelves ...shelf) cure {
	if ps.left == nil {
		ps.left = leftovers{}
	}
	for _, s := range shelves {
		if ps.left[s] == nil {
			ps.left[s] = map[job]bool{}
		}
		ps.left[s][j] = true
	}
	return cure{fmt.Sprint("leftovers ", j, shelves), "what was there is quarantined",
		func(ctx context.Context) (bool, error) {
			some := false
			for _, s := range shelves {
				n, err := ps.tidy(ctx, s)
				if err != nil {
					return some, fmt.Errorf("tidy up %s %s: %w", s.place, s.whose, err)
				}
				some = some || n[j]
			}
			return some, nil
		}}
}

// shelves are where something of a group's job can lie that is found in a place.
func (ps *pass) shelves(pl locationKind, group, tenant string, ordinal int64, types []string) (all []shelf) {
	switch pl {
	case atQueue:
		for _, typ := range types {
			all = append(all, shelf{"queue", group, typ})
		}
	case atNonReady:
		all = []shelf{{"parked", tenant, ""}, {"suspended", tenant, ""}}
	case atReady:
		for _, typ := range slices.Sorted(maps.Keys(ps.types)) {
			all = append(all, shelf{"ready", typ, ""})
		}
	case atResultsStream:
		all = []shelf{{"results", "", ""}}
	case atFailures:
		all = []shelf{{"failures", group, strconv.FormatInt(ordinal, 10)}}
	}
	return all
}

// shelf is the one that a key of a shared place is.
func (ps *pass) shelf(pl locationKind, key string) shelf {
	name := ps.shortKey(key)
	_, whose, _ := strings.Cut(name, ":")
	switch {
	case pl == atReady:
		return shelf{"ready", whose, ""}
	case pl == atResultsStream:
		return shelf{"results", "", ""}
	case strings.HasPrefix(name, "suspended:"):
		return shelf{"suspended", whose, ""}
	}
	return shelf{"parked", whose, ""}
}

// tidy goes over a shelf once and sets aside what is left over there. It says of which jobs there
// was something.
func (ps *pass) tidy(ctx context.Context, s shelf) (map[job]bool, error) {
	if done := ps.tidied[s]; done != nil {
		return done, nil
	}
	if ps.tidied == nil {
		ps.tidied = map[shelf]map[job]bool{}
	}
	t := tidying{pass: ps, shelf: s, suspects: ps.left[s], met: map[job]string{}, done: map[job]bool{}}
	err := t.walk(ctx)
	ps.tidied[s] = t.done
	return t.done, err
}

type tidying struct {
	*pass
	shelf
	suspects map[job]bool
	met      map[job]string // the first of each
	done     map[job]bool
}

func (t *tidying) walk(ctx context.Context) error {
	switch t.place {
	case "queue":
		n, err := t.cmd.LLen(ctx, t.p.Queue(t.whose, t.typ)).Result()
		if err != nil {
			return err
		}
		var items []string
		if err := t.queue(ctx, t.p.Queue(t.whose, t.typ), n, func(blob string) {
			if ordinal, ok := ledger.QueuedOrdinal(blob); !ok || t.suspects[job{t.whose, ordinal}] {
				items = append(items, blob)
			}
		}); err != nil {
			return err
		}
		for _, blob := range items {
			ordinal, ok := ledger.QueuedOrdinal(blob)
			if err := t.try(ctx, blob, jobOr(job{t.whose, ordinal}, ok)); err != nil {
				return err
			}
		}
		return nil
	case "parked", "suspended":
		key := t.p.NonReadyOf(t.whose)
		if t.place == "suspended" {
			key = t.p.SuspendedOf(t.whose)
		}
		return t.members(ctx, key, func(page []string) error { return t.blobs(ctx, page) })
	case "ready":
		return t.stream(ctx, t.p.Ready(t.whose), func(page []redis.XMessage) error {
			for _, e := range page {
				d, err := ledger.ParseJob(ledger.MessageBlob(e.Values))
				if err := t.try(ctx, e.ID, jobOr(job{d.Group, d.Ordinal}, err == nil)); err != nil {
					return err
				}
			}
			return nil
		})
	case "results":
		return t.stream(ctx, t.p.ResultStream(), func(page []redis.XMessage) error {
			for _, e := range page {
				if err := t.entry(ctx, e); err != nil {
					return err
				}
			}
			return nil
		})
	}
	// Of a group's failures the record of one job, or all that can't be read.
	if t.typ != "" {
		ordinal, _ := strconv.ParseInt(t.typ, 10, 64) // it was written as a number
		return t.try(ctx, t.typ, job{t.whose, ordinal})
	}
	command := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
		return p.HScan(ctx, t.p.Failures(t.whose), cursor, "", pageSize)
	}
	return t.scan(ctx, command, func(page []string) error {
		for i := 0; i+1 < len(page); i += 2 {
			if _, _, ok := failed(t.whose, page[i], page[i+1]); !ok {
				if err := t.try(ctx, page[i], strayJob); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func jobOr(j job, ok bool) job {
	if ok {
		return j
	}
	return strayJob
}

func (t *tidying) blobs(ctx context.Context, page []string) error {
	for _, blob := range page {
		d, err := ledger.ParseJob(blob)
		if err := t.try(ctx, blob, jobOr(job{d.Group, d.Ordinal}, err == nil)); err != nil {
			return err
		}
	}
	return nil
}

// entry tries an entry of results that names a suspect, or has a line that can't be read.
func (t *tidying) entry(ctx context.Context, e redis.XMessage) error {
	for line := range strings.SplitSeq(text(e.Values["l"]), "\n") {
		ordinal, ok := result(line)
		if err := t.try(ctx, e.ID, jobOr(job{text(e.Values["g"]), ordinal}, ok)); err != nil {
			return err
		}
	}
	return nil
}

// try asks Redis to set something of a suspect aside. A place's own second element of a job is told
// of the first.
func (t *tidying) try(ctx context.Context, item string, j job) error {
	if !t.suspects[j] {
		return nil
	}
	leftover := ledger.Leftover{Place: t.place, Whose: t.whose, Item: item}
	if t.place == "queue" {
		leftover.Type = t.typ
	}
	if j != strayJob && t.met[j] != item {
		leftover.Twin = t.met[j]
	}
	gone, err := ledger.RepairLeftover(ctx, t.cmd, t.p, leftover)
	if err != nil {
		return err
	}
	if gone {
		t.done[j] = true
	} else if t.met[j] == "" {
		t.met[j] = item
	}
	return nil
}

// codeOf reads the error code of a failure's record.
func codeOf(record string) string {
	head, _, _ := strings.Cut(record, "\n")
	var e struct{ Code string }
	if json.Unmarshal([]byte(head), &e) != nil {
		return ""
	}
	return e.Code
}
