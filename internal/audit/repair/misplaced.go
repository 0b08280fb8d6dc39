package repair

import (
	"context"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

// repairLocation reads a location once and quarantines what does not belong there. It returns the
// jobs of which it removed something. If the location was repaired before, it returns the same jobs
// again.
func (r *partitionRepair) repairLocation(ctx context.Context, at audit.Location) (map[audit.Job]bool, error) {
	if known := r.removed[at]; known != nil {
		return known, nil
	}
	l := locationRepair{
		partitionRepair: r,
		at:              at,
		candidates:      r.found.Misplaced[at],
		kept:            map[audit.Job]string{},
		removed:         map[audit.Job]bool{},
	}
	err := l.walk(ctx)
	r.removed[at] = l.removed
	return l.removed, err
}

// locationRepair is the repair of one location.
type locationRepair struct {
	*partitionRepair
	at         audit.Location
	candidates map[audit.Job]bool   // the jobs that may be misplaced or duplicated here
	kept       map[audit.Job]string // the first element of each candidate that stays here
	removed    map[audit.Job]bool   // the candidates of which something was quarantined
}

// walk reads the location and quarantines what does not belong there.
func (l *locationRepair) walk(ctx context.Context) error {
	switch l.at.Name {
	case "queue":
		n, err := l.Cmd.LLen(ctx, l.p.Queue(l.at.Owner, l.at.Type)).Result()
		if err != nil {
			return err
		}
		var elements []string
		if err := l.ReadQueue(ctx, l.p.Queue(l.at.Owner, l.at.Type), n, func(blob string) {
			if ordinal, ok := ledger.QueuedOrdinal(blob); l.candidates[jobOf(l.at.Owner, ordinal, ok)] {
				elements = append(elements, blob)
			}
		}); err != nil {
			return err
		}
		for _, blob := range elements {
			ordinal, ok := ledger.QueuedOrdinal(blob)
			if err := l.try(ctx, blob, jobOf(l.at.Owner, ordinal, ok)); err != nil {
				return err
			}
		}
		return nil
	case "non-ready", "suspended":
		key := l.p.NonReadyOf(l.at.Owner)
		if l.at.Name == "suspended" {
			key = l.p.SuspendedOf(l.at.Owner)
		}
		return l.ScanMembers(ctx, key, func(page []string) error { return l.tryBlobs(ctx, page) })
	case "ready":
		return l.ReadStream(ctx, l.p.Ready(l.at.Owner), func(page []redis.XMessage) error {
			for _, e := range page {
				d, err := ledger.ParseJob(ledger.MessageBlob(e.Values))
				if err := l.try(ctx, e.ID, jobOf(d.Group, d.Ordinal, err == nil)); err != nil {
					return err
				}
			}
			return nil
		})
	case "results":
		return l.ReadStream(ctx, l.p.ResultStream(), func(page []redis.XMessage) error {
			for _, e := range page {
				if err := l.tryResults(ctx, e); err != nil {
					return err
				}
			}
			return nil
		})
	}
	// Failures of a group: the record of one job, or all unreadable records.
	if l.at.Type != "" {
		ordinal, _ := strconv.ParseInt(l.at.Type, 10, 64) // it was formatted from a number
		return l.try(ctx, l.at.Type, audit.Job{Group: l.at.Owner, Ordinal: ordinal})
	}
	command := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
		return p.HScan(ctx, l.p.Failures(l.at.Owner), cursor, "", read.PageSize)
	}
	return l.Scan(ctx, command, func(page []string) error {
		for i := 0; i+1 < len(page); i += 2 {
			if _, _, ok := read.ParseFailure(l.at.Owner, page[i], page[i+1]); !ok {
				if err := l.try(ctx, page[i], audit.Job{}); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// jobOf returns a job, or the zero Job if the element was not readable.
func jobOf(group string, ordinal int64, readable bool) audit.Job {
	if !readable {
		return audit.Job{}
	}
	return audit.Job{Group: group, Ordinal: ordinal}
}

// tryBlobs calls try for each of these members of a sorted set.
func (l *locationRepair) tryBlobs(ctx context.Context, page []string) error {
	for _, blob := range page {
		d, err := ledger.ParseJob(blob)
		if err := l.try(ctx, blob, jobOf(d.Group, d.Ordinal, err == nil)); err != nil {
			return err
		}
	}
	return nil
}

// tryResults calls try for each line of an entry of the results stream.
func (l *locationRepair) tryResults(ctx context.Context, e redis.XMessage) error {
	for line := range strings.SplitSeq(read.Text(e.Values["l"]), "\n") {
		ordinal, ok := read.ParseResultLine(line)
		if err := l.try(ctx, e.ID, jobOf(read.Text(e.Values["g"]), ordinal, ok)); err != nil {
			return err
		}
	}
	return nil
}

// try quarantines an element of a candidate j if Redis confirms that it does not belong here. The
// element of any other job is left alone. Redis is told the element of the same job that stays
// here, so that it can recognize a duplicate.
func (l *locationRepair) try(ctx context.Context, element string, j audit.Job) error {
	if !l.candidates[j] {
		return nil
	}
	misplaced := ledger.Misplaced{Location: l.at.Name, Owner: l.at.Owner, Item: element}
	if l.at.Name == "queue" {
		misplaced.Type = l.at.Type
	}
	if j != (audit.Job{}) && l.kept[j] != element {
		misplaced.Twin = l.kept[j]
	}
	gone, err := ledger.RepairMisplaced(ctx, l.Cmd, l.p, misplaced)
	if err != nil {
		return err
	}
	if gone {
		l.removed[j] = true
	} else if l.kept[j] == "" {
		l.kept[j] = element
	}
	return nil
}
