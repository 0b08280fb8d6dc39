package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/mattn/go-runewidth"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"

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

// display measures texts as a terminal shows them, whatever the locale: a character of Chinese,
// Japanese or Korean takes two columns, a combining one none.
var display = runewidth.Condition{StrictEmojiNeutral: true}

// truncate shortens a text to the given number of columns. If it cuts, the last one is "…".
func truncate(s string, width int) string { return display.Truncate(s, width, "…") }

// wideTexts are texts whose width is not their number of characters, by which fmt and tabwriter
// align. Until the lines are aligned, characters for private use stand for each of them.
type wideTexts []string

func (w *wideTexts) hide(s string) string {
	width := display.StringWidth(s)
	if width == 0 || width == utf8.RuneCountInString(s) {
		return s
	}
	mark := strings.Repeat(string(rune(0xF0000+len(*w)/2)), width)
	*w = append(*w, mark, s)
	return mark
}

func (w *wideTexts) show(s string) string { return strings.NewReplacer(*w...).Replace(s) }

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
type table struct {
	out   io.Writer
	text  *bytes.Buffer
	w     *tabwriter.Writer
	wides *wideTexts
}

func newTable(out io.Writer) table {
	text := new(bytes.Buffer)
	return table{out, text, tabwriter.NewWriter(text, 0, 0, 3, ' ', 0), new(wideTexts)}
}

func (t table) row(cells ...any) {
	for i, c := range cells {
		sep := "\t"
		if i == len(cells)-1 {
			sep = "\n"
		}
		_, _ = fmt.Fprint(t.w, t.wides.hide(printable(fmt.Sprint(c))), sep) // a buffer has no errors
	}
}

// section begins a new block of rows, whose columns are aligned separately: it adds an empty line
// and a row of these cells.
func (t table) section(cells ...any) {
	_, _ = fmt.Fprintln(t.w)
	t.row(cells...)
}

func (t table) flush() error {
	_ = t.w.Flush() // a buffer has no errors
	_, err := io.WriteString(t.out, t.wides.show(t.text.String()))
	return err
}

// groupRows adds all data of a group to the table.
func groupRows(t table, g api.Group) {
	t.row("Group", g.ID)
	if g.Name != "" {
		t.row("Name", g.Name)
	}
	for _, tag := range g.Tags.Pairs() {
		t.row("Tag", tag)
	}
	if g.CallbackURL != "" {
		t.row("Callback URL", g.CallbackURL)
	}
	if g.SubmittedBy != "" {
		t.row("Submitted by", g.SubmittedBy)
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
			t.row(name, truncate(cmp.Or(g.AggregateErrors[name], string(g.Aggregate[name])), 200))
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

// columns describes a table that is printed row by row. Its columns have fixed widths, because
// later rows are not known when the first one is printed.
type columns[T any] struct {
	format string // of a row
	head   []any
	cells  func(T) []any
	none   string // said of an empty list, unless --json is set
}

// printLines prints items while they are read: as rows of a table, or with --json as lines of JSON.
// It prints at once only on a terminal, otherwise whenever 64 KiB are full and at the end.
func printLines[T any](r *Root, items iter.Seq2[T, error], c *columns[T]) error {
	out := bufio.NewWriterSize(r.Out, 64<<10)
	e := json.NewEncoder(out)
	e.SetEscapeHTML(false)
	write := func(item T) error { return e.Encode(item) }
	head := func() {}
	if !r.JSON {
		// Print the header row with the first item, so that nothing is printed before an error.
		head = sync.OnceFunc(func() { _, _ = fmt.Fprintf(out, c.format+"\n", c.head...) }) // Flush returns its error
		write = func(item T) error {
			head()
			var wides wideTexts
			cells := c.cells(item)
			for i, cell := range cells {
				if text, ok := cell.(string); ok {
					cells[i] = wides.hide(printable(text))
				}
			}
			_, err := out.WriteString(printable(wides.show(fmt.Sprintf(c.format, cells...))) + "\n")
			return err
		}
	}
	listed := false
	for item, err := range items {
		listed = true
		if err == nil {
			err = write(item)
		}
		if err == nil && r.OutIsTerminal {
			err = out.Flush()
		}
		if err != nil {
			return errors.Join(err, out.Flush()) // the lines before the error are complete
		}
	}
	head() // of an empty list
	if err := out.Flush(); err != nil || listed || r.JSON || c.none == "" {
		return err
	}
	r.Notef("%s", c.none)
	return nil
}

// listFlags say how many items of a long list are printed.
type listFlags struct {
	limit int
	all   bool
	order string // which items come first; "": the newest
}

func (l *listFlags) add(cmd *cobra.Command, what string) {
	cmd.Flags().IntVar(&l.limit, "limit", 100, "number of "+what+" to print; 0: all")
	cmd.Flags().BoolVar(&l.all, "all", false, "print all "+what)
	cmd.PreRunE = func(*cobra.Command, []string) error { return l.check() }
}

// check refuses a negative limit. With --all it sets the limit to 0.
func (l *listFlags) check() error {
	if l.limit < 0 {
		return usagef("--limit %d: must be 0 (all) or more", l.limit)
	}
	if l.all {
		l.limit = 0
	}
	return nil
}

// printList prints the first limit items of a list (0: all), and a note if there are more.
func printList[T any](r *Root, list listFlags, items iter.Seq2[T, error], c *columns[T]) error {
	more := false
	err := printLines(r, func(yield func(T, error) bool) {
		seen := 0
		for item, err := range items {
			if list.limit > 0 && seen == list.limit {
				more = err == nil
				return
			}
			if seen++; !yield(item, err) {
				return
			}
		}
	}, c)
	if more {
		r.Notef("Only the %s %d are printed; --all prints all.", cmp.Or(list.order, "newest"), list.limit)
	}
	return err
}

// addSince adds the flag --since, which sets at: a time, or an age before now. only is the
// beginning of its description.
func addSince(flags *pflag.FlagSet, at *time.Time, only string) {
	flags.Var((*sinceValue)(at), "since",
		only+" since then: a time such as 2026-01-02T15:04:05Z, or an age such as 24h")
}

type sinceValue time.Time

func (v *sinceValue) Set(text string) error {
	at, err := parseSince(text, time.Now())
	*v = sinceValue(at)
	return err
}

func (v *sinceValue) Type() string   { return "string" }
func (v *sinceValue) String() string { return "" } // the default in the help: none

// parseSince parses the value of --since: a time, or an age (not negative) before now.
func parseSince(text string, now time.Time) (time.Time, error) {
	if age, err := time.ParseDuration(text); err == nil && age >= 0 {
		return now.Add(-age), nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return at, usagef("--since %s: must be a time such as 2026-01-02T15:04:05Z, or an age such as 24h", text)
	}
	return at, nil
}

// everyPage iterates over the items of a list. read returns the page at a cursor, and the cursor of
// the next page; the cursor of the first page, and that behind the last, is "".
func everyPage[T any](read func(cursor string) (items []T, next string, err error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for cursor := ""; ; {
			items, next, err := read(cursor)
			if err != nil {
				var none T
				yield(none, err)
				return
			}
			for _, item := range items {
				if !yield(item, nil) {
					return
				}
			}
			if cursor = next; cursor == "" {
				return
			}
		}
	}
}

// progress shows progress bars on Err, each with a name and on a line of its own. If Err is no
// terminal, it is nil and its methods do nothing. Any goroutine may call its methods.
type progress struct {
	out io.Writer

	mu      sync.Mutex
	area    *mpb.Progress // nil until the first bar is shown: errors come without a bar
	bars    map[string]*bar
	stopped bool
}

type bar struct {
	*mpb.Bar
	label, note atomic.Pointer[string]
}

// newProgress returns a progress without bars; nil if Err is no terminal. From the first call of
// show until stop returns, no other code may write to Err.
func (r *Root) newProgress() *progress {
	if !r.IsTerminal {
		return nil
	}
	r.shown = &progress{out: barOutput(r.Err, term.GetSize), bars: map[string]*bar{}}
	return r.shown
}

// printAbove writes a line to Err, above the bars. If no bar is shown, it writes nothing and
// returns false.
func (p *progress) printAbove(line string) bool {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.area == nil {
		return false
	}
	_, err := io.WriteString(p.area, line+"\n")
	return err == nil
}

// barOutput returns the writer for bars. The library draws nothing on a terminal that reports a
// size of 0. On such a terminal, barOutput hides that the writer is a file, and the library assumes
// 80 columns.
func barOutput(out io.Writer, size func(fd int) (width, height int, err error)) io.Writer {
	f, ok := out.(*os.File)
	if !ok {
		return out
	}
	if width, height, err := size(int(f.Fd())); err == nil && (width <= 0 || height <= 0) {
		return struct{ io.Writer }{out} // not a file, so the library assumes 80 columns
	}
	return out
}

// show creates or updates the bar with this name: the text before the bar, the text behind it, and
// how full the bar is. It does nothing after stop.
func (p *progress) show(name, state, note string, current, total int64) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return
	}
	label := name
	if label != "" && state != "" {
		label += " "
	}
	label, note = label+state+" ", "  "+note
	b := p.bars[name]
	if b == nil {
		b = &bar{}
		p.bars[name] = b
	}
	b.label.Store(&label)
	b.note.Store(&note)
	if b.Bar == nil {
		b.Bar = p.add(b, total)
	}
	b.SetTotal(total, false)
	b.SetCurrent(current)
}

func (p *progress) add(b *bar, total int64) *mpb.Bar {
	if p.area == nil {
		p.area = mpb.New(mpb.WithOutput(p.out), mpb.WithAutoRefresh())
	}
	return p.area.AddBar(total,
		mpb.BarWidth(24),
		mpb.PrependDecorators(decor.Any(func(decor.Statistics) string { return *b.label.Load() }, decor.WCSyncSpaceR)),
		mpb.AppendDecorators(decor.Any(func(decor.Statistics) string { return *b.note.Load() })),
	)
}

// showGroup shows the state and the progress of a group on the bar with this name.
func (p *progress) showGroup(name string, g api.Group) {
	note := progressText(g)
	if g.Counts.Failed > 0 {
		note += ", " + thousands(g.Counts.Failed) + " failed"
	}
	p.show(name, groupState(g), note, g.Counts.Ended(), max(g.Counts.Accepted, deref(g.Total)))
}

// stop leaves the bars on the terminal as they are. Afterwards other code may write to Err. A
// second call does nothing.
func (p *progress) stop() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped = true; p.area == nil {
		return
	}
	for _, b := range p.bars {
		b.Abort(false)
	}
	p.area.Wait()
	p.area = nil
}
