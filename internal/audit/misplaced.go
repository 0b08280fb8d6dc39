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

// misplacedJobs are the places in which something was found that is no such job, or twice, by what
// Redis is asked for.
type misplacedJobs map[location]map[job]bool

// location is a key in which jobs lie: its place in a [ledger.Misplaced], and whose it is.
type location struct{ name, owner, typ string }

// unreadableJob is the job of what can't be read.
var unreadableJob = job{}

// misplacedRepair sets aside what lies at locations of a job and does not belong there.
func (ps *pass) misplacedRepair(j job, locations ...location) repairAction {
	if ps.misplaced == nil {
		ps.misplaced = misplacedJobs{}
	}
	for _, at := range locations {
		if ps.misplaced[at] == nil {
			ps.misplaced[at] = map[job]bool{}
		}
		ps.misplaced[at][j] = true
	}
	return repairAction{fmt.Sprint("misplaced ", j, locations), "what was there is quarantined",
		func(ctx context.Context) (bool, error) {
			some := false
			for _, at := range locations {
				n, err := ps.repairLocation(ctx, at)
				if err != nil {
					return some, fmt.Errorf("repair %s %s: %w", at.name, at.owner, err)
				}
				some = some || n[j]
			}
			return some, nil
		}}
}

// locationsOf are where something of a group's job can lie that is found in a place.
func (ps *pass) locationsOf(kind locationKind, group, tenant string, ordinal int64, types []string) (all []location) {
	switch kind {
	case atQueue:
		for _, typ := range types {
			all = append(all, location{"queue", group, typ})
		}
	case atNonReady:
		all = []location{{"non-ready", tenant, ""}, {"suspended", tenant, ""}}
	case atReady:
		for _, typ := range slices.Sorted(maps.Keys(ps.types)) {
			all = append(all, location{"ready", typ, ""})
		}
	case atResultsStream:
		all = []location{{"results", "", ""}}
	case atFailures:
		all = []location{{"failures", group, strconv.FormatInt(ordinal, 10)}}
	}
	return all
}

// locationOfKey is the one that a key of a shared place is.
func (ps *pass) locationOfKey(kind locationKind, key string) location {
	name := ps.shortKey(key)
	_, owner, _ := strings.Cut(name, ":")
	switch {
	case kind == atReady:
		return location{"ready", owner, ""}
	case kind == atResultsStream:
		return location{"results", "", ""}
	case strings.HasPrefix(name, "suspended:"):
		return location{"suspended", owner, ""}
	}
	return location{"non-ready", owner, ""}
}

// repairLocation goes over a location once and sets aside what is left over there. It says of which
// jobs there was something.
func (ps *pass) repairLocation(ctx context.Context, at location) (map[job]bool, error) {
	if known := ps.repairedLocations[at]; known != nil {
		return known, nil
	}
	if ps.repairedLocations == nil {
		ps.repairedLocations = map[location]map[job]bool{}
	}
	r := locationRepair{pass: ps, location: at, candidates: ps.misplaced[at], kept: map[job]string{},
		removed: map[job]bool{}}
	err := r.walk(ctx)
	ps.repairedLocations[at] = r.removed
	return r.removed, err
}

type locationRepair struct {
	*pass
	location
	candidates map[job]bool
	kept       map[job]string // the first of each
	removed    map[job]bool
}

func (r *locationRepair) walk(ctx context.Context) error {
	switch r.name {
	case "queue":
		n, err := r.cmd.LLen(ctx, r.p.Queue(r.owner, r.typ)).Result()
		if err != nil {
			return err
		}
		var elements []string
		if err := r.readQueue(ctx, r.p.Queue(r.owner, r.typ), n, func(blob string) {
			if ordinal, ok := ledger.QueuedOrdinal(blob); !ok || r.candidates[job{r.owner, ordinal}] {
				elements = append(elements, blob)
			}
		}); err != nil {
			return err
		}
		for _, blob := range elements {
			ordinal, ok := ledger.QueuedOrdinal(blob)
			if err := r.try(ctx, blob, jobOr(job{r.owner, ordinal}, ok)); err != nil {
				return err
			}
		}
		return nil
	case "non-ready", "suspended":
		key := r.p.NonReadyOf(r.owner)
		if r.name == "suspended" {
			key = r.p.SuspendedOf(r.owner)
		}
		return r.scanMembers(ctx, key, func(page []string) error { return r.tryBlobs(ctx, page) })
	case "ready":
		return r.readStream(ctx, r.p.Ready(r.owner), func(page []redis.XMessage) error {
			for _, e := range page {
				d, err := ledger.ParseJob(ledger.MessageBlob(e.Values))
				if err := r.try(ctx, e.ID, jobOr(job{d.Group, d.Ordinal}, err == nil)); err != nil {
					return err
				}
			}
			return nil
		})
	case "results":
		return r.readStream(ctx, r.p.ResultStream(), func(page []redis.XMessage) error {
			for _, e := range page {
				if err := r.tryResults(ctx, e); err != nil {
					return err
				}
			}
			return nil
		})
	}
	// Of a group's failures the record of one job, or all that can't be read.
	if r.typ != "" {
		ordinal, _ := strconv.ParseInt(r.typ, 10, 64) // it was written as a number
		return r.try(ctx, r.typ, job{r.owner, ordinal})
	}
	command := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
		return p.HScan(ctx, r.p.Failures(r.owner), cursor, "", pageSize)
	}
	return r.scan(ctx, command, func(page []string) error {
		for i := 0; i+1 < len(page); i += 2 {
			if _, _, ok := parseFailure(r.owner, page[i], page[i+1]); !ok {
				if err := r.try(ctx, page[i], unreadableJob); err != nil {
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
	return unreadableJob
}

func (r *locationRepair) tryBlobs(ctx context.Context, page []string) error {
	for _, blob := range page {
		d, err := ledger.ParseJob(blob)
		if err := r.try(ctx, blob, jobOr(job{d.Group, d.Ordinal}, err == nil)); err != nil {
			return err
		}
	}
	return nil
}

// tryResults tries an entry of results that names a suspect, or has a line that can't be read.
func (r *locationRepair) tryResults(ctx context.Context, e redis.XMessage) error {
	for line := range strings.SplitSeq(asText(e.Values["l"]), "\n") {
		ordinal, ok := parseResultLine(line)
		if err := r.try(ctx, e.ID, jobOr(job{asText(e.Values["g"]), ordinal}, ok)); err != nil {
			return err
		}
	}
	return nil
}

// try asks Redis to set something of a suspect aside. A place's own second element of a job is told
// of the first.
func (r *locationRepair) try(ctx context.Context, element string, j job) error {
	if !r.candidates[j] {
		return nil
	}
	misplaced := ledger.Misplaced{Location: r.name, Owner: r.owner, Item: element}
	if r.name == "queue" {
		misplaced.Type = r.typ
	}
	if j != unreadableJob && r.kept[j] != element {
		misplaced.Twin = r.kept[j]
	}
	gone, err := ledger.RepairMisplaced(ctx, r.cmd, r.p, misplaced)
	if err != nil {
		return err
	}
	if gone {
		r.removed[j] = true
	} else if r.kept[j] == "" {
		r.kept[j] = element
	}
	return nil
}

// errorCode reads the error code of a failure's record.
func errorCode(record string) string {
	head, _, _ := strings.Cut(record, "\n")
	var e struct{ Code string }
	if json.Unmarshal([]byte(head), &e) != nil {
		return ""
	}
	return e.Code
}
