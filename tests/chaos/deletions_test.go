package chaos

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// deletions records what administrators' commands have deleted: only these jobs may end as LOST,
// and only these groups may miss messages.
type deletions struct {
	mu       sync.Mutex
	jobs     map[string]map[int64]deletion // by group and ordinal
	messages map[string]bool               // groups of which messages to ingest were deleted
}

// deletion records when an entry of a job was last deleted, from a ready stream or from the stream
// of results.
type deletion struct {
	n  int // the job's index in the plan
	at time.Time
}

// maxOrdinal is above the ordinal of each planned job, and below the ordinal 99999999 in the
// garbage that a fault writes.
const maxOrdinal = 1 << 20

func newDeletions() *deletions {
	return &deletions{jobs: map[string]map[int64]deletion{}, messages: map[string]bool{}}
}

// ofGroup returns the deleted jobs of a group by ordinal.
func (d *deletions) ofGroup(group string) map[int64]deletion {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.jobs[group]
}

// count returns the number of jobs with a deleted entry.
func (d *deletions) count() (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, jobs := range d.jobs {
		n += len(jobs)
	}
	return n
}

// note records that an entry was deleted from a stream. It ignores garbage that another fault has
// written there.
func (d *deletions) note(in string, fields []string, at time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch in {
	case readyStream:
		var job ledger.Job
		if job.Parse(ledger.EntryBlob(fields)) != nil || isGarbage(job.Group) {
			return nil
		}
		return d.noteJob(job.Group, job.Ordinal, []byte(job.Payload), at)
	case resultStream:
		return d.noteResults(fields, at)
	}
	return d.noteMessage(fields)
}

func (d *deletions) noteResults(fields []string, at time.Time) error {
	group, lines := field(fields, ledger.ResultsGroup), field(fields, ledger.ResultsLines)
	if group == "" || isGarbage(group) {
		return nil
	}
	for line := range strings.SplitSeq(lines, "\n") {
		var result api.Result
		if err := json.Unmarshal([]byte(line), &result); err != nil {
			if isGarbage(line) {
				continue
			}
			return fmt.Errorf("results of group %s: line %q: %w", group, line, err)
		}
		if result.Ordinal < 0 || result.Ordinal > maxOrdinal {
			continue // garbage
		}
		if err := d.noteJob(group, result.Ordinal, result.Data, at); err != nil {
			return err
		}
	}
	return nil
}

// noteJob records that the entry of a job was deleted. data is the job's payload or its result:
// both contain the job's index in the plan.
func (d *deletions) noteJob(group string, ordinal int64, data []byte, at time.Time) error {
	var job payload
	if err := json.Unmarshal(data, &job); err != nil {
		return fmt.Errorf("job %d of group %s has the data %q: %w", ordinal, group, data, err)
	}
	if d.jobs[group] == nil {
		d.jobs[group] = map[int64]deletion{}
	}
	d.jobs[group][ordinal] = deletion{n: job.N, at: at}
	return nil
}

func (d *deletions) noteMessage(fields []string) error {
	var message struct{ Group, ID string }
	if err := json.Unmarshal([]byte(field(fields, "data")), &message); err != nil {
		return nil // it is garbage: producers write JSON
	}
	for _, group := range []string{message.Group, message.ID} {
		if group != "" && !isGarbage(group) {
			d.messages[group] = true
		}
	}
	return nil
}

// field returns the value of a field in the fields and values of a stream entry; "" if it is not
// there.
func field(fields []string, name string) string {
	for i := 0; i+1 < len(fields); i += 2 {
		if fields[i] == name {
			return fields[i+1]
		}
	}
	return ""
}
