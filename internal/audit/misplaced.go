package audit

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

// misplacedJobs holds, by location, the jobs that are misplaced or duplicated there.
type misplacedJobs map[location]map[job]bool

// location identifies a key that holds jobs, as [ledger.Misplaced] does.
type location struct {
	name  string // queue, non-ready, suspended, ready, results or failures
	owner string // the group of a queue or of failures, the tenant of a sorted set, the type of a stream
	typ   string // the type of a queue; for failures the ordinal, "" for all unreadable ones
}

// unreadableJob stands for elements that can't be read as a job.
var unreadableJob = job{}

// misplacedRepair returns the repair that quarantines what these locations hold of a job and should
// not hold.
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

// locationsOf returns the locations of this kind at which a job of the group can be.
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

// locationOfKey returns the location that is stored under the key of a shared location.
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

// repairLocation reads a location once and quarantines what does not belong there. It returns the
// jobs of which it removed something. If the location was repaired before, it returns the same jobs
// again.
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

// locationRepair is the repair of one location.
type locationRepair struct {
	*pass
	location
	candidates map[job]bool   // the jobs that may be misplaced or duplicated here
	kept       map[job]string // the first element of each candidate that stays here
	removed    map[job]bool   // the candidates of which something was quarantined
}

// walk reads the location and quarantines what does not belong there.
func (r *locationRepair) walk(ctx context.Context) error {
	switch r.name {
	case "queue":
		n, err := r.Cmd.LLen(ctx, r.p.Queue(r.owner, r.typ)).Result()
		if err != nil {
			return err
		}
		var elements []string
		if err := r.ReadQueue(ctx, r.p.Queue(r.owner, r.typ), n, func(blob string) {
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
		return r.ScanMembers(ctx, key, func(page []string) error { return r.tryBlobs(ctx, page) })
	case "ready":
		return r.ReadStream(ctx, r.p.Ready(r.owner), func(page []redis.XMessage) error {
			for _, e := range page {
				d, err := ledger.ParseJob(ledger.MessageBlob(e.Values))
				if err := r.try(ctx, e.ID, jobOr(job{d.Group, d.Ordinal}, err == nil)); err != nil {
					return err
				}
			}
			return nil
		})
	case "results":
		return r.ReadStream(ctx, r.p.ResultStream(), func(page []redis.XMessage) error {
			for _, e := range page {
				if err := r.tryResults(ctx, e); err != nil {
					return err
				}
			}
			return nil
		})
	}
	// Failures of a group: the record of one job, or all unreadable records.
	if r.typ != "" {
		ordinal, _ := strconv.ParseInt(r.typ, 10, 64) // it was formatted from a number
		return r.try(ctx, r.typ, job{r.owner, ordinal})
	}
	command := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
		return p.HScan(ctx, r.p.Failures(r.owner), cursor, "", read.PageSize)
	}
	return r.Scan(ctx, command, func(page []string) error {
		for i := 0; i+1 < len(page); i += 2 {
			if _, _, ok := read.ParseFailure(r.owner, page[i], page[i+1]); !ok {
				if err := r.try(ctx, page[i], unreadableJob); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// jobOr returns j, or unreadableJob if ok is false.
func jobOr(j job, ok bool) job {
	if ok {
		return j
	}
	return unreadableJob
}

// tryBlobs calls try for each of these members of a sorted set.
func (r *locationRepair) tryBlobs(ctx context.Context, page []string) error {
	for _, blob := range page {
		d, err := ledger.ParseJob(blob)
		if err := r.try(ctx, blob, jobOr(job{d.Group, d.Ordinal}, err == nil)); err != nil {
			return err
		}
	}
	return nil
}

// tryResults calls try for each line of an entry of the results stream.
func (r *locationRepair) tryResults(ctx context.Context, e redis.XMessage) error {
	for line := range strings.SplitSeq(read.Text(e.Values["l"]), "\n") {
		ordinal, ok := read.ParseResultLine(line)
		if err := r.try(ctx, e.ID, jobOr(job{read.Text(e.Values["g"]), ordinal}, ok)); err != nil {
			return err
		}
	}
	return nil
}

// try quarantines an element of a candidate j if Redis confirms that it does not belong here. The
// element of any other job is left alone. Redis is told the element of the same job that stays
// here, so that it can recognize a duplicate.
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
	gone, err := ledger.RepairMisplaced(ctx, r.Cmd, r.p, misplaced)
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
