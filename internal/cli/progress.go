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

// bar is a progress bar on Err. Off a terminal it is nil, and its methods do nothing. Bars that are
// shown at the same time stand below each other. All but set and say belong to the goroutine that
// runs the command.
type bar struct {
	root    *Root
	name    string
	bar     *mpb.Bar
	label   atomic.Pointer[string]
	note    atomic.Pointer[string]
	stopped bool
}

// barArea is the part of Err that bars share. It exists while one of them does.
type barArea struct {
	container *mpb.Progress
	bars      int
}

// newBar shows a bar at once. Until all bars are stopped nothing else may write to Err.
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

// barOutput is where bars are drawn. A terminal that does not know its size would get none: there
// they are drawn as on one of 80 columns.
func barOutput(out io.Writer, size func(fd int) (width, height int, err error)) io.Writer {
	f, ok := out.(*os.File)
	if !ok {
		return out
	}
	if width, height, err := size(int(f.Fd())); err == nil && (width <= 0 || height <= 0) {
		return struct{ io.Writer }{out} // what is no file has 80 columns
	}
	return out
}

// setText changes the texts behind the bar's name and behind the bar.
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

// setProgress moves the bar.
func (b *bar) setProgress(current, total int64) {
	if b == nil {
		return
	}
	b.bar.SetTotal(total, false)
	b.bar.SetCurrent(current)
}

// showGroup moves the bar to where a group is.
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

// stop leaves the bar as it is. With the last bar, Err is free again. It may be called again.
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
