package cli

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
	"github.com/bulkaction/bulkaction/bench/roomload"
)

func newBenchRoom(r *Root, set *variables) *cobra.Command {
	var o bench.RoomOptions
	parts := bench.RoomParts()
	cmd := benchmark{
		use:     "room",
		short:   "The waiting room: streams, entries, promotions, killed brokers; each frame and token is checked",
		options: &o.Options,
		check: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("capacity") {
				o.Capacity = max(1, o.Users/4)
			}
			return errors.Join(checkRoom(o), checkParts(o.Only, parts), checkLeast(
				atLeast{"users", o.Users, 10}, atLeast{"brokers", o.Brokers, 1}, atLeast{"events", o.Events, 1},
				atLeast{"capacity", o.Capacity, 1}, atLeast{"kill", o.Kill, 1}))
		},
		run: func(ctx context.Context) (any, error) { return bench.RunRoom(ctx, o) },
	}.command(r, set)
	f := cmd.Flags()
	f.IntVar(&o.Users, "users", 3000, "users with a stream each")
	f.IntVar(&o.Brokers, "brokers", 2, "broker processes")
	f.IntVar(&o.Events, "events", 100, "events of the part events, among which the users are divided")
	f.IntVar(&o.Capacity, "capacity", 0, "slots of the parts kill and abandon; default: a quarter of the users")
	f.Float64Var(&o.Rate, "rate", 1000, "admissions a second of the part promotion")
	f.DurationVar(&o.Session, "session", 2*time.Second, "time that a user of the part abandon is inside")
	f.Float64Var(&o.Churn, "churn", 0.1, "part of the users who reload the page while they wait, in the part abandon")
	f.IntVar(&o.Kill, "kill", 1, "brokers that the part kill kills")
	f.StringSliceVar(&o.Only, "only", nil, "parts to run: "+strings.Join(parts, ","))
	return cmd
}

const (
	mostRoomUsers    = 20_000
	mostRoomBrokers  = 64
	mostRoomEvents   = 10_000
	mostRoomRate     = 100_000
	shortestSession  = 10 * time.Millisecond
	longestSession   = time.Minute
	mostChurningPart = 1
)

// checkRoom refuses flag values of `bench room` that are too large or contradict each other, and
// values of --rate, --session and --churn that are too small.
func checkRoom(o bench.RoomOptions) error {
	kills := len(o.Only) == 0 || slices.Contains(o.Only, "kill")
	switch {
	case o.Users > mostRoomUsers:
		return usagef("--users %d: must be at most %d", o.Users, mostRoomUsers)
	case o.Brokers > mostRoomBrokers:
		return usagef("--brokers %d: must be at most %d", o.Brokers, mostRoomBrokers)
	case o.Events > mostRoomEvents || o.Events > o.Users:
		return usagef("--events %d: must be at most %d, and at most --users %d", o.Events, mostRoomEvents, o.Users)
	case kills && o.Kill >= o.Brokers:
		return usagef("--kill %d: must be less than --brokers %d", o.Kill, o.Brokers)
	case o.Capacity > o.Users:
		return usagef("--capacity %d: must be at most --users %d", o.Capacity, o.Users)
	case o.Rate < 1 || o.Rate > mostRoomRate:
		return usagef("--rate %g: must be from 1 to %d", o.Rate, mostRoomRate)
	case o.Session < shortestSession || o.Session > longestSession:
		return usagef("--session %s: must be from %s to %s", o.Session, shortestSession, longestSession)
	case o.Churn < 0 || o.Churn > mostChurningPart:
		return usagef("--churn %g: must be from 0 to %d", o.Churn, mostChurningPart)
	}
	return nil
}

// newRoomLoad returns the hidden command of the load processes of `bench room`. They act as users
// of the waiting room.
func newRoomLoad(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:    roomload.Command,
		Short:  "Be users of the waiting room, for bench room",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(cmd *cobra.Command, _ []string) error { return roomload.Serve(cmd.Context(), r.In, r.Out) },
	}
}
