// Command figures writes the table of docs/reliability.md from a report of `make chaos`. It
// replaces what is between two marks of the page. Usage: figures REPORT.json PAGE.md.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
)

// report has the fields of the JSON report of `make chaos` that the table shows.
type report struct {
	Seed uint64 `json:"seed"`
	phase
	Versions map[string]string `json:"versions"`
	Phases   []phase           `json:"phases"`
}

type phase struct {
	Name                string         `json:"name"`
	Jobs                int            `json:"jobs"`
	Faults              map[string]int `json:"faults"`
	Lost                int            `json:"lost"`
	DuplicateExecutions int            `json:"duplicate_executions"`
	DuplicateEffects    int            `json:"duplicate_effects"`
	StaleRefused        int            `json:"stale_refused"`
	RecoveryP99         float64        `json:"recovery_p99_seconds"`
	RedisLost           int            `json:"redis_lost"`
	RedisLostNamed      int            `json:"redis_lost_named"`
	DeletedJobs         int            `json:"deleted_jobs"`
	EndedAsLost         int            `json:"ended_as_lost"`
	LostWithin          float64        `json:"lost_within_seconds"`
	EndedWithin         float64        `json:"ended_within_seconds"`
	Executions          int            `json:"executions"`
	Seconds             float64        `json:"seconds"`
	SlowestStop         float64        `json:"slowest_stop_seconds"`
	Violations          []string       `json:"violations"`
}

const (
	begin = "<!-- figures -->"
	end   = "<!-- end of figures -->"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: figures REPORT.json PAGE.md")
		os.Exit(2)
	}
	if err := write(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "write figures:", err)
		os.Exit(1)
	}
}

func write(from, to string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	var r report
	if err := json.Unmarshal(text, &r); err != nil {
		return fmt.Errorf("read %s: %w", from, err)
	}
	page, err := os.ReadFile(to)
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(page), begin)
	_, after, ended := strings.Cut(rest, end)
	if !ok || !ended {
		return errors.New(to + " has no place for them: " + begin + " … " + end)
	}
	return os.WriteFile(to, []byte(before+begin+"\n"+table(r)+end+after), 0o644) // #nosec G306: the page is public
}

func table(r report) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Seed %d, Redis %s, Go %s, %d jobs, %d executions, %.0f minutes.\n\n",
		r.Seed, r.Versions["redis"], r.Versions["go"], r.Jobs, r.Executions, r.Seconds/60)
	all := append(slices.Clone(r.Phases), r.phase)
	all[len(all)-1].Name = "**all**"
	row := func(what string, cell func(p phase) string) {
		b.WriteString("| " + what + " |")
		for _, p := range all {
			b.WriteString(" " + cell(p) + " |")
		}
		b.WriteString("\n")
	}
	number := func(n func(p phase) int) func(p phase) string {
		return func(p phase) string { return fmt.Sprint(n(p)) }
	}
	seconds := func(s func(p phase) float64) func(p phase) string {
		return func(p phase) string { return fmt.Sprintf("%.1f s", s(p)) }
	}
	row("phase", func(p phase) string { return p.Name })
	b.WriteString("|---|" + strings.Repeat("---:|", len(all)) + "\n")
	row("jobs", number(func(p phase) int { return p.Jobs }))
	for _, kind := range slices.Sorted(maps.Keys(r.Faults)) {
		row("`"+kind+"`", number(func(p phase) int { return p.Faults[kind] }))
	}
	row("**lost**", number(func(p phase) int { return p.Lost }))
	row("**duplicate effects**", number(func(p phase) int { return p.DuplicateEffects }))
	row("violations of any kind", number(func(p phase) int { return len(p.Violations) }))
	row("duplicate executions", number(func(p phase) int { return p.DuplicateExecutions }))
	row("stale reports refused", number(func(p phase) int { return p.StaleRefused }))
	row("lost by Redis / named by the audit", func(p phase) string {
		return fmt.Sprintf("%d / %d", p.RedisLost, p.RedisLostNamed)
	})
	row("jobs with a deleted entry / ended as `LOST`", func(p phase) string {
		return fmt.Sprintf("%d / %d", p.DeletedJobs, p.EndedAsLost)
	})
	row("deletion → ended as `LOST`, longest", seconds(func(p phase) float64 { return p.LostWithin }))
	row("loss of a worker → next start, p99", seconds(func(p phase) float64 { return p.RecoveryP99 }))
	row("healed → all ended", seconds(func(p phase) float64 { return p.EndedWithin }))
	row("slowest graceful stop", seconds(func(p phase) float64 { return p.SlowestStop }))
	return b.String()
}
