package cli

import (
	"io"
	"os"
	"sync"
	"sync/atomic"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"

	"github.com/bulkaction/bulkaction/api"
)

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
