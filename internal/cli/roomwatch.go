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
	"github.com/spf13/pflag"

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

// roomFlags has the values of the flags of `room set`. The maps are by the flag's name.
type roomFlags struct {
	counts     map[string]*int64
	durations  map[string]*time.Duration
	texts      map[string]*string
	rate       float64
	noStock    bool
	noRate     bool
	clearUnset bool
}

func newRoomSet(r *Root) *cobra.Command {
	s := &roomFlags{counts: map[string]*int64{}, durations: map[string]*time.Duration{}, texts: map[string]*string{}}
	cmd := &cobra.Command{
		Use:   "set EVENT --capacity N [flags]",
		Short: "Create an event, or change its settings, effective at once",
		Long: "Create an event, or change its settings, effective at once, also while users wait. Settings without\n" +
			"a flag stay unchanged; with --clear they get their defaults, and only capacity and mode stay. If\n" +
			"somebody else changes the event at the same time, the command fails and changes nothing.",
		Example: "  bulkaction room set concert --capacity 200 --stock 12000 --return-url http://127.0.0.1:8081/buy\n" +
			"  bulkaction room set concert --rate 5 --grace 2m\n" +
			"  bulkaction room set concert --preset strict",
		Args: requireID("event"),
	}
	s.register(cmd.Flags())
	cmd.RunE = ask(r, func(ctx context.Context, a *client.API, args []string) (v api.RoomEvent, err error) {
		f := cmd.Flags()
		if err := s.check(f); err != nil {
			return v, err
		}
		var set api.EventSettings
		now, err := a.RoomEvent(ctx, args[0])
		switch {
		case err != nil && !isNotFound(err):
			return v, hintRoom(args[0], err)
		case err != nil: // a new event
		case s.clearUnset:
			set.Capacity = now.Capacity
		default:
			set = now.EventSettings
			set.Mode = "" // stays as it is
		}
		s.apply(f, &set)
		v, err = a.SetRoomEvent(ctx, args[0], set, now.Rev)
		if err != nil {
			return v, hintRoom(args[0], err)
		}
		r.noteOver(v)
		for _, warning := range v.Warnings {
			r.Notef("%s", printable(warning))
		}
		if v.ReturnURL == "" {
			r.Notef("The event has no return URL: the waiting page can't send admitted users to the shop. " +
				"Set it with --return-url.")
		}
		return v, nil
	}, roomRows)
	return cmd
}

// register adds the flags.
func (s *roomFlags) register(f *pflag.FlagSet) {
	for name, usage := range map[string]string{
		"capacity": "most slots in use at once, 0 to 10,000,000; required for a new event, unless a seat\n" +
			"service knows it",
		"stock":       "seats to sell in all; no promotion makes more users inside than seats are left",
		"burst":       "admissions that may come at once with --rate (default: those of one second)",
		"max-waiting": "the longest queue",
	} {
		s.counts[name] = f.Int64(name, 0, usage)
	}
	for name, d := range map[string]struct{ usage, values string }{
		"token-ttl":   {"life of a token", "1s to 24h"},
		"leeway":      {"how much longer than the token the slot is held", "0s to 5m"},
		"max-session": {"latest expiry that renewals reach, from the first token", "0s (no limit) to 720h"},
		"ready":       {"time to fetch the token after the promotion", "100ms to 24h"},
		"grace":       {"how long a user without a stream keeps the place", "0s (until the stream ends) to 24h"},
		"retention":   {"how long the event is kept after it is closed", "0s to 8760h"},
	} {
		s.durations[name] = f.Duration(name, 0, d.usage+", "+d.values)
		setValues(f, name, "a duration with its unit, such as 30s, from "+d.values)
	}
	for name, usage := range map[string]string{
		"on-close": "keep or release the slot when the stream of a user with a token ends",
		"no-show":  "wait for a promoted user who is not connected, or release the slot at once",
		"preset": "strict: whoever disconnects has left (--grace 0s --on-close release --no-show release);\n" +
			"standard: these three have their defaults again",
		"mode": "open, paused, closed or sold_out",
		"return-url": "where the page sends a user who has a token: an address on the host of\n" +
			"BULKACTION_BROKER_PUBLIC_URL",
	} {
		s.texts[name] = f.String(name, "", usage)
	}
	f.Float64Var(&s.rate, "rate", 0, "admissions a second, 0.001 to 1,000,000; sets --burst to its default")
	f.BoolVar(&s.noStock, "no-stock", false, "sell any number of seats")
	f.BoolVar(&s.noRate, "no-rate", false, "admit users as fast as slots become free")
	f.BoolVar(&s.clearUnset, "clear", false, "reset the settings without a flag to their\n"+
		"defaults, except capacity and mode")
}

// check refuses a call without flags, and flags that contradict each other. It leaves the check of
// values to the server, which knows their bounds.
func (s *roomFlags) check(f *pflag.FlagSet) error {
	given := 0
	f.Visit(func(flag *pflag.Flag) {
		if !isGlobal(flag.Name) {
			given++
		}
	})
	switch {
	case given == 0:
		return usagef("nothing to set: give --capacity or another setting; `bulkaction room set --help` lists them")
	case s.noStock && f.Changed("stock"):
		return usagef("--no-stock and --stock exclude each other")
	case s.noRate && (f.Changed("rate") || f.Changed("burst")):
		return usagef("--no-rate excludes --rate and --burst")
	}
	return nil
}

// apply changes set by the flags that were given.
func (s *roomFlags) apply(f *pflag.FlagSet, set *api.EventSettings) {
	if s.noStock {
		set.Stock = nil
	}
	if s.noRate {
		set.Rate, set.Burst = nil, 0
	}
	if f.Changed("preset") {
		set.Grace, set.OnClose, set.NoShow = nil, "", ""
	}
	if f.Changed("rate") {
		set.Rate, set.Burst = &s.rate, 0
	}
	if f.Changed("burst") {
		set.Burst = *s.counts["burst"]
	}
	for name, to := range map[string]**int64{
		"capacity": &set.Capacity, "stock": &set.Stock, "max-waiting": &set.MaxWaiting,
	} {
		if f.Changed(name) {
			*to = s.counts[name]
		}
	}
	for name, to := range map[string]**api.Duration{
		"token-ttl": &set.TokenTTL, "leeway": &set.Leeway, "max-session": &set.MaxSession, "ready": &set.Ready,
		"grace": &set.Grace, "retention": &set.Retention,
	} {
		if f.Changed(name) {
			d := api.Duration(*s.durations[name])
			*to = &d
		}
	}
	for name, to := range map[string]*string{
		"on-close": &set.OnClose, "no-show": &set.NoShow, "preset": &set.Preset, "mode": &set.Mode,
		"return-url": &set.ReturnURL,
	} {
		if f.Changed(name) {
			*to = *s.texts[name]
		}
	}
}
