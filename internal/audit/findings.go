package audit

import (
	"cmp"
	"fmt"
)

// noOrdinal is the ordinal of a finding that is not about one job.
const noOrdinal = int64(-1)

// finding is what identifies a violation from one look to the next. Same holds what must not have
// changed meanwhile: a job's state and attempt, or by how much a counter is wrong.
type finding struct {
	law, group string
	ordinal    int64
	same       string
}

func compareFindings(a, b finding) int {
	return cmp.Or(cmp.Compare(a.group, b.group), cmp.Compare(a.ordinal, b.ordinal), cmp.Compare(a.law, b.law),
		cmp.Compare(a.same, b.same))
}

func (f finding) violation(partition int, detail string) Violation {
	v := Violation{Law: f.law, Partition: partition, Group: f.group, Detail: detail, Key: f.same}
	if f.ordinal != noOrdinal {
		v.Ordinal = &f.ordinal
	}
	return v
}

// Bounds of a report, of one partition.
const (
	maxAlike    = 100 // of one group and law
	maxFindings = 10_000
)

type lawAndGroup struct{ law, group string }

// findings gathers a look's findings and bounds them. The zero value is ready for use.
type findings struct {
	details map[finding]string
	counts  map[lawAndGroup]int
	surplus int               // beyond maxFindings
	rest    map[finding]int64 // what those stand for that tell of others
}

func (fs *findings) add(f finding, format string, args ...any) {
	if fs.details == nil {
		fs.details, fs.counts = map[finding]string{}, map[lawAndGroup]int{}
	}
	if _, ok := fs.details[f]; ok {
		return
	}
	key := lawAndGroup{f.law, f.group}
	switch {
	case fs.counts[key] == 0 && len(fs.details) >= maxFindings:
		fs.surplus++
		return
	case fs.counts[key] < maxAlike:
		fs.details[f] = fmt.Sprintf(format, args...)
	}
	fs.counts[key]++
}

// all is what was found, with a line for what is left out.
func (fs *findings) all() map[finding]string {
	for key, n := range fs.counts {
		if n > maxAlike {
			fs.sum(finding{key.law, key.group, noOrdinal, "more"}, n-maxAlike, "and %d more like these")
		}
	}
	if fs.surplus > 0 {
		fs.sum(finding{LawLocation, "", noOrdinal, "surplus"}, fs.surplus, "and %d findings about more groups")
	}
	return fs.details
}

func (fs *findings) sum(f finding, n int, format string) {
	if fs.rest == nil {
		fs.rest = map[finding]int64{}
	}
	fs.details[f], fs.rest[f] = fmt.Sprintf(format, n), int64(n)
}
