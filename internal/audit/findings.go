package audit

import (
	"cmp"
	"fmt"
)

// noOrdinal is the ordinal of a finding that is not about a single job.
const noOrdinal = int64(-1)

// finding identifies something that breaks a law, so that it can be recognized in the next pass. If
// its job moves or its counter changes, it is another finding.
type finding struct {
	law, group string // group is "" if the finding is not about a group
	ordinal    int64
	key        string // what is wrong, with the job's state and attempt or the size of the error
}

// compareFindings orders findings by group and ordinal.
func compareFindings(a, b finding) int {
	return cmp.Or(cmp.Compare(a.group, b.group), cmp.Compare(a.ordinal, b.ordinal), cmp.Compare(a.law, b.law),
		cmp.Compare(a.key, b.key))
}

// violation returns the finding as a violation.
func (f finding) violation(partition int, detail string) Violation {
	v := Violation{Law: f.law, Partition: partition, Group: f.group, Detail: detail, Key: f.key}
	if f.ordinal != noOrdinal {
		v.Ordinal = &f.ordinal
	}
	return v
}

// The bounds of what is reported of one partition. What is left out is summarized.
const (
	maxPerGroupAndLaw = 100    // findings that break the same law in the same group
	maxFindings       = 10_000 // findings in all; a group that has some already may exceed it
)

// lawAndGroup identifies the findings that break one law in one group.
type lawAndGroup struct{ law, group string }

// findings collects the findings of one pass, up to the bounds. The zero value is ready for use.
type findings struct {
	details    map[finding]string  // a sentence about each finding
	counts     map[lawAndGroup]int // how many were added, including those over maxPerGroupAndLaw
	omitted    int                 // how many were left out because of maxFindings
	summarized map[finding]int64   // by summary: how many findings it stands for
}

// add adds a finding with a sentence about it. It does nothing if the finding is there already, and
// only counts one that exceeds the bounds.
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
		fs.omitted++
		return
	case fs.counts[key] < maxPerGroupAndLaw:
		fs.details[f] = fmt.Sprintf(format, args...)
	}
	fs.counts[key]++
}

// withSummaries returns the findings, each with its sentence, and adds a summary of those that were
// left out because of the bounds.
func (fs *findings) withSummaries() map[finding]string {
	for key, n := range fs.counts {
		if n > maxPerGroupAndLaw {
			fs.summarize(finding{key.law, key.group, noOrdinal, "more"}, n-maxPerGroupAndLaw, "and %d more like these")
		}
	}
	if fs.omitted > 0 {
		fs.summarize(finding{LawLocation, "", noOrdinal, "omitted"}, fs.omitted, "and %d findings about more groups")
	}
	return fs.details
}

// summarize adds a summary that stands for n findings.
func (fs *findings) summarize(f finding, n int, format string) {
	if fs.summarized == nil {
		fs.summarized = map[finding]int64{}
	}
	fs.details[f], fs.summarized[f] = fmt.Sprintf(format, n), int64(n)
}
