package chaos

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"time"
)

// report is what `make chaos` prints.
type report struct {
	Seed uint64 `json:"seed"`
	phase
	Versions map[string]string `json:"versions"`
	Phases   []*phase          `json:"phases"`
}

// phase is the result of one phase, which is the part of the run on one Redis set-up; or the sum of
// all phases.
type phase struct {
	Name                string         `json:"name,omitempty"`
	Jobs                int            `json:"jobs"`
	Faults              map[string]int `json:"faults"`
	Lost                int            `json:"lost"`                 // planned jobs without a result or a failure in the end
	DuplicateExecutions int            `json:"duplicate_executions"` // runs beyond the planned ones, without jobs that crash workers
	DuplicateEffects    int            `json:"duplicate_effects"`    // results, failures and counts beyond the planned ones
	StaleRefused        int            `json:"stale_refused"`        // outcomes of stale attempts
	RecoveryP99         float64        `json:"recovery_p99_seconds"` // from the loss of a job's process to the job's next start
	RedisLost           int            `json:"redis_lost"`           // acknowledged jobs that Redis lost, or that vanished with a message, before they were submitted again
	RedisLostNamed      int            `json:"redis_lost_named"`     // how many of these `bulkaction audit --receipts` reported
	DeletedJobs         int            `json:"deleted_jobs"`         // jobs of which an administrator's command deleted an entry
	EndedAsLost         int            `json:"ended_as_lost"`        // how many of these ended as LOST
	LostWithin          float64        `json:"lost_within_seconds"`  // longest time from the deletion until the job had ended as LOST
	EndedWithin         float64        `json:"ended_within_seconds"` // time from the end of the faults until all groups had ended
	SlowestStop         float64        `json:"slowest_stop_seconds,omitempty"`
	Executions          int            `json:"executions"` // runs of jobs, by the workers' files
	Seconds             float64        `json:"seconds"`
	Violations          []string       `json:"violations"`

	// Answers counts the answers that misbehaving clients got, by the kind of the fault and the
	// HTTP status.
	Answers map[string]int `json:"answers,omitempty"`

	recoveries []time.Duration
}

func newPhase(name string) *phase {
	return &phase{Name: name, Faults: map[string]int{}, Violations: []string{}}
}

// maxViolations is the number of violations of a phase, and of the total, to which violate adds no
// more, so that the report stays short when many checks fail.
const maxViolations = 200

func (p *phase) violate(format string, args ...any) {
	if len(p.Violations) < maxViolations {
		p.Violations = append(p.Violations, fmt.Sprintf(format, args...))
	}
}

// red returns true if a job was lost, or there is a duplicate effect or a violation.
func (p *phase) red() bool { return p.Lost > 0 || p.DuplicateEffects > 0 || len(p.Violations) > 0 }

// add adds a phase to the report: to the list of phases, and to the totals of all phases. The total
// of a longest time is the maximum, and RecoveryP99 is computed again from all recoveries. Answers
// has no total.
func (r *report) add(p *phase) {
	r.Phases = append(r.Phases, p)
	r.Jobs += p.Jobs
	for kind, n := range p.Faults {
		r.Faults[kind] += n
	}
	r.Lost += p.Lost
	r.DuplicateExecutions += p.DuplicateExecutions
	r.DuplicateEffects += p.DuplicateEffects
	r.StaleRefused += p.StaleRefused
	r.recoveries = append(r.recoveries, p.recoveries...)
	r.RecoveryP99 = percentile(r.recoveries, 0.99).Seconds()
	r.RedisLost += p.RedisLost
	r.RedisLostNamed += p.RedisLostNamed
	r.DeletedJobs += p.DeletedJobs
	r.EndedAsLost += p.EndedAsLost
	r.LostWithin = math.Max(r.LostWithin, p.LostWithin)
	r.EndedWithin = math.Max(r.EndedWithin, p.EndedWithin)
	r.SlowestStop = math.Max(r.SlowestStop, p.SlowestStop)
	r.Executions += p.Executions
	r.Seconds += p.Seconds
	for _, v := range p.Violations {
		r.violate("%s: %s", p.Name, v)
	}
}

// print writes the report to the file that CHAOS_OUT names, and to stdout.
func (r *report) print() error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	b = append(b, '\n')
	if path := os.Getenv("CHAOS_OUT"); path != "" {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			return err
		}
	}
	_, err = os.Stdout.Write(b)
	return err
}

// counts is the number of faults of each kind.
type counts map[string]int

func (c counts) total() (n int) {
	for v := range maps.Values(c) {
		n += v
	}
	return n
}
