package repair

import (
	"context"
	"strconv"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// repairLocation reads a location once and quarantines the elements that do not belong there. It
// returns the jobs of which it removed an element. If the location was repaired before, it only
// returns the same jobs again.
func (r *partitionRepair) repairLocation(ctx context.Context, at read.Location) (map[read.Job]bool, error) {
	if known := r.removed[at]; known != nil {
		return known, nil
	}
	l := locationRepair{
		partitionRepair: r,
		at:              at,
		candidates:      r.found.Misplaced[at],
		kept:            map[read.Job]string{},
		removed:         map[read.Job]bool{},
	}
	err := l.run(ctx)
	r.removed[at] = l.removed
	return l.removed, err
}

// locationRepair is the repair of one location.
type locationRepair struct {
	*partitionRepair
	at         read.Location
	candidates map[read.Job]bool   // the jobs that may be misplaced or duplicated here
	kept       map[read.Job]string // the first element of each candidate that stays here
	removed    map[read.Job]bool   // the candidates of which something was quarantined
}

// run reads the location and then quarantines those elements of the candidate jobs that do not
// belong there.
func (l *locationRepair) run(ctx context.Context) error {
	if l.at.Name == read.Failures && l.at.Type != "" { // the record of one job
		ordinal, _ := strconv.ParseInt(l.at.Type, 10, 64) // it was formatted from a number
		return l.try(ctx, read.Element{ID: l.at.Type, Job: read.Job{Group: l.at.Owner, Ordinal: ordinal}})
	}
	length := int64(0)
	if l.at.Name == read.Queue {
		var err error
		if length, err = l.Cmd.LLen(ctx, l.at.Key(l.p)).Result(); err != nil {
			return err
		}
	}
	var elements []read.Element
	err := l.Elements(ctx, l.p, l.at, length, func(e read.Element) error {
		if l.candidates[e.Job] {
			elements = append(elements, e)
		}
		return nil
	})
	for _, e := range elements {
		if err == nil {
			err = l.try(ctx, e)
		}
	}
	return err
}

// try quarantines an element of a candidate job if a script confirms in Redis that it does not
// belong at this location. The script is also given the element of the same job that stays, so that
// it can recognize a duplicate.
func (l *locationRepair) try(ctx context.Context, e read.Element) error {
	item := ledger.Misplaced{Location: l.at.Name, Owner: l.at.Owner, Item: e.ID}
	if l.at.Name == read.Queue {
		item.Type = l.at.Type
	}
	if e.Job != (read.Job{}) && l.kept[e.Job] != e.ID {
		item.Twin = l.kept[e.Job]
	}
	gone, err := ledger.RepairMisplaced(ctx, l.Cmd, l.p, item)
	switch {
	case err != nil:
		return err
	case gone:
		l.removed[e.Job] = true
	case l.kept[e.Job] == "":
		l.kept[e.Job] = e.ID
	}
	return nil
}
