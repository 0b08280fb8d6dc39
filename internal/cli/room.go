package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
)

func newRoom(r *Root) *cobra.Command {
	all := []*cobra.Command{newRoomLs(r), newRoomShow(r), newRoomSet(r), newRoomWatch(r)}
	for _, action := range []struct {
		name, short, more string
		do                func(*client.API, context.Context, string) (api.RoomEvent, error)
	}{
		{"pause", "Stop promotions; users still enter the queue", "", (*client.API).PauseRoomEvent},
		{
			"resume", "Promote users again, also in an event that was closed",
			"An event that would be deleted when its last user has gone is kept. Its retention stays 0s, so the\n" +
				"next `close` deletes it, unless `bulkaction room set EVENT --retention` changes that.",
			(*client.API).ResumeRoomEvent,
		},
		{
			"close", "Dissolve the queue; nobody can enter, users inside keep their slots", "",
			(*client.API).CloseRoomEvent,
		},
	} {
		all = append(all, &cobra.Command{
			Use:   action.name + " EVENT",
			Short: action.short,
			Long:  strings.TrimSpace(action.short + ".\n" + action.more),
			Args:  requireID("event"),
			RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.RoomEvent, error) {
				v, err := action.do(a, ctx, args[0])
				return v, hintRoom(args[0], err)
			}, func(t table, v api.RoomEvent) { t.row(v.Event, v.Mode) }),
		})
	}
	all = append(all, newRoomRecalibrate(r), newRoomKick(r), newRoomDelete(r), newRoomNewKey(r))
	cmd := parentCommand("room", "List, show, watch and change events of the waiting room", all...)
	cmd.Long = "List, show, watch and change events of the waiting room.\n" +
		"Without API keys (BULKACTION_AUTH=keys) the API answers these commands on its own host only."
	return cmd
}

func newRoomLs(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List the events",
		Args:  cobra.NoArgs,
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			return printLines(r, a.RoomEvents(ctx), &columns[api.RoomEvent]{
				none:   "No events.",
				format: "%-24v %-8v %10v %10v %10v %10v %10v %10v %10v",
				head: []any{
					"EVENT", "MODE", "CAPACITY", "USED", "FREE", "SEATS", "WAITING", "AWAY", "COMPLETED",
				},
				cells: func(v api.RoomEvent) []any {
					seats := "-"
					if v.Slots.Stock != nil {
						seats = thousands(*v.Slots.Stock)
					}
					return []any{
						v.Event, v.Mode, capacityText(v), thousands(v.Slots.Used), thousands(v.Slots.Free), seats,
						thousands(v.Waiting), thousands(v.Away), thousands(v.Counters["completed"]),
					}
				},
			})
		}),
	}
}

func newRoomShow(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "show EVENT",
		Short: "Show an event: its slots, its queue, its settings and its counters",
		Args:  requireID("event"),
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.RoomEvent, error) {
			v, err := a.RoomEvent(ctx, args[0])
			return v, hintRoom(args[0], err)
		}, roomRows),
	}
}

func newRoomRecalibrate(r *Root) *cobra.Command {
	var capacity, stock int64
	var fromSeats bool
	cmd := &cobra.Command{
		Use:   "recalibrate EVENT [--capacity N | --from-seats] [--stock N]",
		Short: "Set the capacity, or the seats that are left, while users wait",
		Long: "Set the capacity, or the seats that are left, while users wait. Other settings stay as they are, and\n" +
			"nobody loses a slot: below the slots in use, nobody is promoted until enough users have gone.",
		Example: "  bulkaction room recalibrate concert --capacity 500\n" +
			"  bulkaction room recalibrate concert --from-seats",
		Args: requireID("event"),
	}
	cmd.RunE = ask(r, func(ctx context.Context, a *client.API, args []string) (v api.RoomEvent, err error) {
		to := api.Recalibration{FromSeats: fromSeats}
		if cmd.Flags().Changed("capacity") {
			to.Capacity = &capacity
		}
		if cmd.Flags().Changed("stock") {
			to.Stock = &stock
		}
		switch {
		case to.Capacity == nil && to.Stock == nil && !fromSeats:
			return v, usagef("nothing to change: give --capacity, --stock or --from-seats")
		case to.Capacity != nil && fromSeats:
			return v, usagef("--from-seats asks the seat service for the capacity: leave out --capacity")
		}
		v, err = a.Recalibrate(ctx, args[0], to)
		r.noteOver(v)
		return v, hintRoom(args[0], err)
	}, func(t table, v api.RoomEvent) { t.row(v.Event, slotsText(v)) })
	f := cmd.Flags()
	f.Int64Var(&capacity, "capacity", 0, "most slots in use at once, 0 to 10,000,000")
	f.Int64Var(&stock, "stock", 0, "seats that are left, 0 to 10,000,000")
	f.BoolVar(&fromSeats, "from-seats", false, "ask the seat service (BULKACTION_BROKER_SEATS_URL) for the capacity")
	return cmd
}

func newRoomKick(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "kick EVENT USER",
		Short: "Remove a user: the place, or the slot and the token, are gone; the user may enter again",
		Long: "Remove a user: the place, or the slot and the token, are gone; the user may enter again.\n" +
			"USER is the field sub of the entry token (Claims.User in package entry), and the part of the visitor's\n" +
			"cookie before the dot. With BULKACTION_BROKER_IDENTITY=header it is the value of that header.",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 {
				return usagef("kick needs an event and a user, got %s", argumentsText(args))
			}
			return errors.Join(checkID("event", args[0]), checkID("user", args[1]))
		},
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.UserRemoval, error) {
			removed, err := a.RemoveUser(ctx, args[0], args[1])
			if id, _, isCookie := strings.Cut(args[1], "."); err == nil && !removed.Removed && isCookie {
				r.Notef("If this is the value of a visitor's cookie, give only the part before the dot: %s", id)
			}
			return removed, hintKnownRoom(args[0], err)
		}, func(t table, u api.UserRemoval) {
			state := "not in the event"
			if u.Removed {
				state = "removed"
			}
			t.row(u.Event, u.User, state)
		}),
	}
}

func newRoomDelete(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "delete EVENT",
		Short: "Close an event, and delete it when the last user inside has gone",
		Args:  requireID("event"),
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.EventRemoval, error) {
			removed, err := a.DeleteRoomEvent(ctx, args[0])
			return removed, hintKnownRoom(args[0], err)
		}, func(t table, e api.EventRemoval) {
			state := "deleted"
			if e.Remaining > 0 {
				state = fmt.Sprintf("closed, deleted when %s users have gone", thousands(e.Remaining))
			}
			t.row(e.Event, state)
		}),
	}
}

// noteOver prints a note if more slots are in use than the event's limit allows.
func (r *Root) noteOver(v api.RoomEvent) {
	if v.Over > 0 {
		r.Notef("%s more slots are in use than the limit allows. Nobody loses one; the next user is promoted when so "+
			"many have gone.", thousands(v.Over))
	}
}

// hintKnownRoom is like hintRoom, for commands that need an existing event: it does not suggest to
// create one.
func hintKnownRoom(event string, err error) error {
	if isUnknownID(err) {
		return withHint(err, "`bulkaction room ls` lists the events.")
	}
	return hintRoom(event, err)
}

// hintRoom adds to an error about an event what to do next.
func hintRoom(event string, err error) error {
	refused, ok := errors.AsType[*client.Error](err)
	if !ok || isOtherServer(err) {
		return err
	}
	switch refused.Status {
	case http.StatusNotFound:
		return withHint(err, "`bulkaction room ls` lists the events; `bulkaction room set %s --capacity N` creates "+
			"this one.", event)
	case http.StatusConflict:
		return withHint(err, "`bulkaction room show %s` shows its mode.", event)
	case http.StatusPreconditionFailed:
		return withHint(err, "Somebody else has changed the event just now. Look at it with `bulkaction room show "+
			"%s`, and run the command again.", event)
	case http.StatusBadGateway:
		return withHint(err, "Nothing has changed. Give the number yourself: `bulkaction room recalibrate %s "+
			"--capacity N`.", event)
	}
	return err
}

// roomRows adds all data of an event to the table.
func roomRows(t table, v api.RoomEvent) {
	t.row("Event", v.Event)
	t.row("Mode", v.Mode)
	roomState(t, v)
	t.row("Last number", thousands(v.Tail))
	t.row("Rev", v.Rev)

	t.section("SETTING", "VALUE")
	t.row("capacity", capacityText(v))
	if v.Stock != nil {
		t.row("stock", thousands(*v.Stock))
	}
	if v.Rate != nil {
		t.row("rate", fmt.Sprintf("%v a second, bursts of %s", *v.Rate, thousands(v.Burst)))
	}
	t.row("max-waiting", thousands(deref(v.MaxWaiting)))
	for _, s := range []struct {
		name string
		d    *api.Duration
	}{
		{"token-ttl", v.TokenTTL}, {"leeway", v.Leeway}, {"max-session", v.MaxSession}, {"ready", v.Ready},
		{"grace", v.Grace}, {"retention", v.Retention},
	} {
		if s.d != nil {
			t.row(s.name, time.Duration(*s.d))
		}
	}
	t.row("on-close", v.OnClose)
	t.row("no-show", v.NoShow)
	if v.ReturnURL != "" {
		t.row("return-url", v.ReturnURL)
	}

	t.section("USERS", "COUNT")
	for _, name := range slices.Sorted(maps.Keys(v.Counters)) {
		t.row(name, thousands(v.Counters[name]))
	}
}

// roomState adds the slots, the seats left and the queue of an event to the table.
func roomState(t table, v api.RoomEvent) {
	t.row("Slots", slotsText(v))
	if v.Slots.Stock != nil {
		t.row("Seats left", thousands(*v.Slots.Stock))
	}
	t.row("Queue", fmt.Sprintf("%s waiting, %s away", thousands(v.Waiting), thousands(v.Away)))
}

func slotsText(v api.RoomEvent) string {
	s := fmt.Sprintf("%s of %s in use, %s free", thousands(v.Slots.Used), capacityText(v), thousands(v.Slots.Free))
	if v.Over > 0 {
		s += fmt.Sprintf(", %s above the limit", thousands(v.Over))
	}
	return s
}

// capacityText returns the capacity of an event as text; "unknown" while the seat service has not
// answered.
func capacityText(v api.RoomEvent) string {
	if v.Capacity == nil {
		return "unknown"
	}
	return thousands(*v.Capacity)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// keyFile is the output of room new-key and callback new-key with --json.
type keyFile struct {
	File    string `json:"file"`
	Created bool   `json:"created"`
}

// showKeyFile prints what was done with a file of keys: f with --json, otherwise the file's
// name and text.
func (r *Root) showKeyFile(f keyFile, text string) error {
	if r.JSON {
		return r.Print(f)
	}
	r.Notef("%s %s.", f.File, text)
	return nil
}

func requireKeyFile(_ *cobra.Command, args []string) error {
	if len(args) != 1 || args[0] == "" {
		return usagef("new-key needs the name of one file")
	}
	return nil
}

// newRoomNewKey returns a command that writes a file with a new token key, for hosts without
// openssl, such as containers. It does not change an existing file, so it can run before each
// start.
func newRoomNewKey(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "new-key FILE",
		Short: "Write a file with a new token key, unless the file exists",
		Long: "Write a file with a new token key, for BULKACTION_BROKER_TOKEN_KEYS_FILE. It is what\n" +
			"`openssl genpkey -algorithm ed25519 -out FILE` writes. A file that exists is checked and stays as it is.",
		Args: requireKeyFile,
		RunE: func(_ *cobra.Command, args []string) error {
			path := args[0]
			_, err := os.Stat(path)
			switch {
			case err == nil:
				if _, err := entrytoken.Read(path, slog.New(slog.DiscardHandler)); err != nil {
					return err
				}
				return r.showKeyFile(keyFile{File: path}, "has token keys, and stays as it is")
			case !errors.Is(err, fs.ErrNotExist):
				return fmt.Errorf("write a token key: %w", err)
			}
			if folder := filepath.Dir(path); !exists(folder) {
				return fmt.Errorf("write a token key: the directory %s does not exist: create it first", folder)
			}
			key, err := entrytoken.GenerateKeys(1)
			if err == nil {
				err = entrytoken.WriteKeys(path, key)
			}
			if err != nil {
				return err
			}
			return r.showKeyFile(keyFile{File: path, Created: true}, "has a new token key")
		},
	}
}
