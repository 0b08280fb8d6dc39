package cli

import (
	"io"
	"os"
	"sync/atomic"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"

	"github.com/bulkaction/bulkaction/api"
)

// bar is a progress bar on Err. If Err is no terminal, the bar is nil and its methods do nothing.
// Several bars can be shown at the same time, each on a line of its own. setText and setProgress
// may be called by any goroutine, the other methods only by the one that runs the command.
type bar struct {
	root    *Root
	name    string
	bar     *mpb.Bar
	label   atomic.Pointer[string]
	note    atomic.Pointer[string]
	stopped bool
}

// barArea is the part of Err in which bars are drawn. It exists as long as there is a bar.
type barArea struct {
	container *mpb.Progress
	bars      int
}

// newBar shows a new bar. Nothing else may write to Err until all bars are stopped.
func (r *Root) newBar(name string, total int64) *bar {
	if !r.IsTerminal {
		return nil
	}
	if r.area == nil {
		r.area = &barArea{container: mpb.New(mpb.WithOutput(barOutput(r.Err, term.GetSize)), mpb.WithAutoRefresh())}
	}
	r.area.bars++
	b := &bar{root: r, name: name}
	b.setText("", "")
	b.bar = r.area.container.AddBar(total,
		mpb.BarWidth(24),
		mpb.PrependDecorators(decor.Any(func(decor.Statistics) string { return *b.label.Load() }, decor.WCSyncSpaceR)),
		mpb.AppendDecorators(decor.Any(func(decor.Statistics) string { return *b.note.Load() })),
	)
	return b
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

// setText sets the text between the bar's name and the bar, and the text behind the bar.
func (b *bar) setText(state, note string) {
	if b == nil {
		return
	}
	label := b.name
	if label != "" && state != "" {
		label += " "
	}
	label, note = label+state+" ", "  "+note
	b.label.Store(&label)
	b.note.Store(&note)
}

// setProgress sets how full the bar is.
func (b *bar) setProgress(current, total int64) {
	if b == nil {
		return
	}
	b.bar.SetTotal(total, false)
	b.bar.SetCurrent(current)
}

// showGroup shows the state and the progress of a group.
func (b *bar) showGroup(g api.Group) {
	if b == nil {
		return
	}
	note := progressText(g)
	if g.Counts.Failed > 0 {
		note += ", " + thousands(g.Counts.Failed) + " failed"
	}
	b.setText(groupState(g), note)
	b.setProgress(g.Counts.Ended(), max(g.Counts.Accepted, deref(g.Total)))
}

// stop stops updating this bar; its last state stays on the terminal. After the last bar has
// stopped, other code may write to Err again. A second call does nothing.
func (b *bar) stop() {
	if b == nil || b.stopped {
		return
	}
	b.stopped = true
	b.bar.Abort(false)
	area := b.root.area
	if area.bars--; area.bars == 0 {
		area.container.Wait()
		b.root.area = nil
	}
}
