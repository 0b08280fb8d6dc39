package cli

import (
	"sync/atomic"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/bulkaction/bulkaction/api"
)

// bar is a progress bar on Err. Off a terminal it is nil, and its methods do nothing.
type bar struct {
	container *mpb.Progress
	bar       *mpb.Bar
	label     atomic.Pointer[string]
	note      atomic.Pointer[string]
}

// newBar shows a bar at once. Until it is stopped nothing else may write to Err.
func (r *Root) newBar(label string, total int64) *bar {
	if !r.IsTerminal {
		return nil
	}
	b := &bar{container: mpb.New(mpb.WithOutput(r.Err), mpb.WithWidth(40), mpb.WithAutoRefresh())}
	b.say(label, "")
	b.bar = b.container.AddBar(total,
		mpb.PrependDecorators(decor.Any(func(decor.Statistics) string { return *b.label.Load() })),
		mpb.AppendDecorators(decor.Percentage(decor.WCSyncSpace), decor.Any(func(decor.Statistics) string { return *b.note.Load() })),
	)
	return b
}

// say changes the texts before and behind the bar.
func (b *bar) say(label, note string) {
	if b == nil {
		return
	}
	label, note = label+" ", "  "+note
	b.label.Store(&label)
	b.note.Store(&note)
}

// set moves the bar.
func (b *bar) set(current, total int64) {
	if b == nil {
		return
	}
	b.bar.SetTotal(total, false)
	b.bar.SetCurrent(current)
}

// show moves the bar to where a group is.
func (b *bar) show(g api.Group) {
	if b == nil {
		return
	}
	note := progressText(g)
	if g.Counts.Failed > 0 {
		note += ", " + thousands(g.Counts.Failed) + " failed"
	}
	b.say(groupState(g), note)
	b.set(g.Counts.Ended(), max(g.Counts.Accepted, deref(g.Total)))
}

// stop leaves the bar as it is and gives Err back. It may be called again.
func (b *bar) stop() {
	if b == nil {
		return
	}
	b.bar.Abort(false)
	b.container.Wait()
}
