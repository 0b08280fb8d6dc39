package chaos

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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

// print writes the report to the file that CHAOS_OUT names, its table into the page that CHAOS_PAGE
// names, and the report to stdout.
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
	if path := os.Getenv("CHAOS_PAGE"); path != "" {
		if err := r.renew(path); err != nil {
			return err
		}
	}
	_, err = os.Stdout.Write(b)
	return err
}

const (
	begin = "<!-- figures -->"
	end   = "<!-- end of figures -->"
)

// renew replaces what is between the two marks of a page by the table of the report.
func (r *report) renew(path string) error {
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(page), begin)
	_, after, ended := strings.Cut(rest, end)
	if !ok || !ended {
		return errors.New(path + " has no place for them: " + begin + " … " + end)
	}
	return os.WriteFile(path, []byte(before+begin+"\n"+r.table()+end+after), 0o644) // #nosec G306: the page is public
}

// table returns the table of docs/reliability.md.
func (r *report) table() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Seed %d, Redis %s, Go %s, %d jobs, %d executions, %.0f minutes.\n\n",
		r.Seed, r.Versions["redis"], r.Versions["go"], r.Jobs, r.Executions, r.Seconds/60)
	total := r.phase
	total.Name = "**all**"
	all := append(slices.Clone(r.Phases), &total)
	row := func(what string, cell func(p *phase) string) {
		b.WriteString("| " + what + " |")
		for _, p := range all {
			b.WriteString(" " + cell(p) + " |")
		}
		b.WriteString("\n")
	}
	number := func(n func(p *phase) int) func(p *phase) string {
		return func(p *phase) string { return fmt.Sprint(n(p)) }
	}
	seconds := func(s func(p *phase) float64) func(p *phase) string {
		return func(p *phase) string { return fmt.Sprintf("%.1f s", s(p)) }
	}
	row("phase", func(p *phase) string { return p.Name })
	b.WriteString("|---|" + strings.Repeat("---:|", len(all)) + "\n")
	row("jobs", number(func(p *phase) int { return p.Jobs }))
	for _, kind := range slices.Sorted(maps.Keys(r.Faults)) {
		row("`"+kind+"`", number(func(p *phase) int { return p.Faults[kind] }))
	}
	row("**lost**", number(func(p *phase) int { return p.Lost }))
	row("**duplicate effects**", number(func(p *phase) int { return p.DuplicateEffects }))
	row("violations of any kind", number(func(p *phase) int { return len(p.Violations) }))
	row("duplicate executions", number(func(p *phase) int { return p.DuplicateExecutions }))
	row("stale reports refused", number(func(p *phase) int { return p.StaleRefused }))
	row("lost by Redis / named by the audit", func(p *phase) string {
		return fmt.Sprintf("%d / %d", p.RedisLost, p.RedisLostNamed)
	})
	row("jobs with a deleted entry / ended as `LOST`", func(p *phase) string {
		return fmt.Sprintf("%d / %d", p.DeletedJobs, p.EndedAsLost)
	})
	row("deletion → ended as `LOST`, longest", seconds(func(p *phase) float64 { return p.LostWithin }))
	row("loss of a worker → next start, p99", seconds(func(p *phase) float64 { return p.RecoveryP99 }))
	row("healed → all ended", seconds(func(p *phase) float64 { return p.EndedWithin }))
	row("slowest graceful stop", seconds(func(p *phase) float64 { return p.SlowestStop }))
	return b.String()
}

func TestRenewWritesTheTableBetweenItsMarks(t *testing.T) {
	page := filepath.Join(t.TempDir(), "page.md")
	require.NoError(t, os.WriteFile(page, []byte("before\n"+begin+"\nold\n"+end+"\nafter\n"), 0o600))
	r := report{Seed: 7, phase: *newPhase(""), Versions: map[string]string{"redis": "7.0.15", "go": "1.26"}}
	r.add(&phase{Name: "single", Jobs: 30, Faults: counts{killProcess: 2}, Lost: 1, DeletedJobs: 9, EndedAsLost: 4, recoveries: []time.Duration{2540 * time.Millisecond}})
	require.NoError(t, r.renew(page))
	got, err := os.ReadFile(page)
	require.NoError(t, err)
	for _, want := range []string{
		"before\n" + begin + "\nSeed 7, Redis 7.0.15, Go 1.26, 30 jobs", "| phase | single | **all** |\n", "| `kill_9` | 2 | 2 |\n",
		"| jobs with a deleted entry / ended as `LOST` | 9 / 4 | 9 / 4 |\n", "| loss of a worker → next start, p99 | 0.0 s | 2.5 s |\n", end + "\nafter\n",
	} {
		require.Contains(t, string(got), want)
	}
	require.NotContains(t, string(got), "old")

	require.NoError(t, os.WriteFile(page, []byte("no marks"), 0o600))
	require.ErrorContains(t, r.renew(page), "no place")
}

// counts is the number of faults of each kind.
type counts map[string]int

func (c counts) total() (n int) {
	for v := range maps.Values(c) {
		n += v
	}
	return n
}
