package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

const (
	watchInterval    = time.Second
	minWatchInterval = 10 * time.Millisecond
)

func newRoomWatch(r *Root) *cobra.Command {
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "watch EVENT",
		Short: "Follow an event: its slots, its queue, and how many users a second enter and leave",
		Long: "Follow an event until it is deleted. On a terminal the figures are refreshed in place; otherwise a\n" +
			"line comes with each change. With --json, each look at the event is a line.",
		Args: requireID("event"),
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			if interval < minWatchInterval {
				return usagef("--interval %s: must be at least %s", interval, minWatchInterval)
			}
			w := &roomWatch{Root: r}
			return w.follow(ctx, a, args[0], interval)
		}),
	}
	cmd.Flags().DurationVar(&interval, "interval", watchInterval, "time between two looks at the event")
	return cmd
}

// roomWatch shows an event again and again.
type roomWatch struct {
	*Root
	last   api.RoomEvent
	at     time.Time // of last; zero: nothing was shown yet
	lines  int       // lines on the terminal that the next figures replace
	silent bool      // the API does not answer, and the user knows
}

// follow reads the event at intervals and shows it, until ctx ends or the event is deleted. The
// first read must succeed. If the API later does not answer, or answers with a status from 500,
// follow tries again; it returns any other error.
func (w *roomWatch) follow(ctx context.Context, a *client.API, event string, interval time.Duration) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		v, err := a.RoomEvent(ctx, event)
		refused, isAnswer := errors.AsType[*client.Error](err)
		switch {
		case ctx.Err() != nil:
			return nil // the user has seen enough
		case err == nil:
			w.silent = false
			if err := w.update(v, time.Now()); err != nil {
				return err
			}
		case isNotFound(err) && !w.at.IsZero():
			w.Notef("Event %s is deleted.", event)
			return nil
		case w.at.IsZero(), isAnswer && refused.Status < 500:
			return hintRoom(event, err)
		case !w.silent:
			w.silent, w.lines = true, 0
			w.Notef("%s: trying again.", printable(err.Error()))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// update shows the event as it is at the time at.
func (w *roomWatch) update(v api.RoomEvent, at time.Time) (err error) {
	switch {
	case w.JSON:
		err = w.Print(v)
	case w.OutIsTerminal:
		err = w.redraw(v, at)
	case w.at.IsZero() || !reflect.DeepEqual(v, w.last):
		_, err = fmt.Fprintf(w.Out, "%s %-8s %s; %s waiting, %s away\n", formatTime(at), v.Mode, slotsText(v),
			thousands(v.Waiting), thousands(v.Away))
	}
	w.last, w.at = v, at
	return err
}

// watched are the counters that `room watch` shows on a terminal, in the order in which a user
// passes through the event.
var watched = []string{"entered", "promoted", "admitted", "completed", "left", "no_shows", "expired", "refused"}

// redraw replaces the figures on the terminal.
func (w *roomWatch) redraw(v api.RoomEvent, at time.Time) error {
	var text bytes.Buffer
	if w.lines > 0 {
		_, _ = fmt.Fprintf(&text, "\x1b[%dA\x1b[J", w.lines) // back to the first line, and clear the rest
	}
	begin := text.Len()
	t := newTable(&text)
	t.row("Event", truncate(v.Event, 60))
	t.row("Mode", v.Mode)
	t.row("At", formatTime(at))
	roomState(t, v)
	t.section("USERS", "TOTAL", "A SECOND")
	for _, name := range watched {
		t.row(name, thousands(v.Counters[name]), w.perSecond(v, name, at))
	}
	if err := t.flush(); err != nil {
		return err
	}
	w.lines = bytes.Count(text.Bytes()[begin:], []byte{'\n'})
	_, err := io.Copy(w.Out, &text)
	return err
}

// perSecond returns as text the growth of a counter per second since the last read of the event;
// "-" if it is unknown.
func (w *roomWatch) perSecond(v api.RoomEvent, counter string, at time.Time) string {
	grown, took := v.Counters[counter]-w.last.Counters[counter], at.Sub(w.at).Seconds()
	if w.at.IsZero() || took <= 0 || grown < 0 {
		return "-"
	}
	return strconv.FormatFloat(float64(grown)/took, 'f', 1, 64)
}
