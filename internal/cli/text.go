package cli

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/bulkaction/bulkaction/api"
)

// printable replaces characters that could control the terminal by spaces. Texts from outside, such
// as the error message of a downstream API, may contain them.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, s)
}

// truncate shortens a text to the given number of characters. If it cuts, the last one is "…".
func truncate(s string, runes int) string {
	r := []rune(s)
	if len(r) <= runes {
		return s
	}
	return string(r[:runes-1]) + "…"
}

// thousands formats 1234567 as 1,234,567.
func thousands(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// counted returns a number with its noun, such as "1 job" or "1,234 jobs".
func counted(n int64, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return thousands(n) + " " + noun
}

// plainNumber formats a number without an exponent.
func plainNumber(x float64) string { return strconv.FormatFloat(x, 'f', -1, 64) }

func argumentsText(args []string) string { return counted(int64(len(args)), "argument") }

func formatTime(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

// table prints rows with aligned columns.
type table struct{ w *tabwriter.Writer }

func newTable(out io.Writer) table { return table{tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)} }

func (t table) row(cells ...any) {
	for i, c := range cells {
		sep := "\t"
		if i == len(cells)-1 {
			sep = "\n"
		}
		_, _ = fmt.Fprint(t.w, printable(fmt.Sprint(c)), sep) // Flush returns its error
	}
}

// section begins a new block of rows, whose columns are aligned separately: it adds an empty line
// and a row of these cells.
func (t table) section(cells ...any) {
	_, _ = fmt.Fprintln(t.w)
	t.row(cells...)
}

func (t table) flush() error { return t.w.Flush() }

// groupRows adds all data of a group to the table.
func groupRows(t table, g api.Group) {
	t.row("Group", g.ID)
	if g.Name != "" {
		t.row("Name", g.Name)
	}
	t.row("Tenant", g.Tenant)
	t.row("Type", g.Type)
	t.row("Priority", g.Priority)
	t.row("Status", groupState(g))
	t.row("Progress", progressText(g))

	c := g.Counts
	t.section("JOBS", "COUNT")
	for _, n := range []struct {
		name  string
		count int64
	}{
		{"waiting", c.Waiting}, {"non-ready", c.NonReady}, {"ready", c.Ready}, {"in flight", c.InFlight},
		{"done", c.Done}, {"failed", c.Failed}, {"cancelled", c.Cancelled}, {"accepted", c.Accepted},
	} {
		t.row(n.name, thousands(n.count))
	}
	t.row("throttles", thousands(g.Throttles))
	t.row("retries", thousands(g.Retries))

	if len(g.FailuresByCode) > 0 {
		t.section("FAILED WITH", "JOBS")
		for _, code := range slices.Sorted(maps.Keys(g.FailuresByCode)) {
			t.row(code, thousands(g.FailuresByCode[code]))
		}
	}
	if len(g.Aggregate) > 0 {
		t.section("AGGREGATE", "VALUE")
		for _, name := range slices.Sorted(maps.Keys(g.Aggregate)) {
			t.row(name, truncate(string(g.Aggregate[name]), 200))
		}
	}
	if len(g.Timestamps) > 0 {
		t.section("STATE", "SINCE")
		states := slices.SortedFunc(maps.Keys(g.Timestamps), func(a, b string) int {
			return cmp.Or(g.Timestamps[a].Compare(g.Timestamps[b]),
				slices.Index(lifecycle, a)-slices.Index(lifecycle, b))
		})
		for _, s := range states {
			t.row(s, formatTime(g.Timestamps[s]))
		}
	}
}

// lifecycle is the order of a group's states, named as in Group.Timestamps. It orders states that
// the group reached in the same millisecond, and tells past states (isPast).
var lifecycle = []string{"created", "dispatched", "running", "aggregating", "completed", "failed", "cancelled"}

func groupState(g api.Group) string {
	s := string(g.Status)
	if g.Paused {
		s += ", paused"
	}
	if !g.Sealed && !g.Status.Ended() {
		s += ", not sealed"
	}
	if g.Round > 1 {
		s += fmt.Sprintf(", round %d", g.Round)
	}
	return s
}

// progressText returns how many of the group's jobs have ended, of how many, and the estimated time
// until all have.
func progressText(g api.Group) string {
	of := max(g.Counts.Accepted, deref(g.Total))
	s := fmt.Sprintf("%s of %s ended", thousands(g.Counts.Ended()), thousands(of))
	if of > 0 {
		s += fmt.Sprintf(" (%d%%)", 100*g.Counts.Ended()/of)
	}
	if g.ETASeconds != nil && !g.Status.Ended() {
		s += fmt.Sprintf(", about %s left", formatDuration(*g.ETASeconds))
	}
	return s
}

func deref(n *int64) int64 {
	if n == nil {
		return 0
	}
	return *n
}
