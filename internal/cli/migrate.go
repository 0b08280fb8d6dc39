package cli

import (
	"context"
	"maps"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/internal/process/roles"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/layout"
)

func newMigrate(r *Root) *cobra.Command {
	var redis redisFlags
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Bring the data in Redis to the newest layout of this version, after an upgrade",
		Long: "Bring the data in Redis to the newest layout of this version, after all processes were upgraded.\n" +
			"It refuses while a process is alive that can't read the new layout. Then it raises the number of\n" +
			"the layout, which can't be taken back, and converts the old data in small steps, while all roles\n" +
			"go on. It may be interrupted, and run again. If there is nothing to do, it says so.\n\n" +
			"docs/howto/upgrading.md describes an upgrade.",
		Args: cobra.NoArgs,
	}
	redis.add(cmd.Flags())
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only count what there is to convert")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := redis.check(); err != nil {
			return err
		}
		conn, err := redis.connect(cmd.Context())
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }() // no command is running any more
		space, err := redis.installation(cmd.Context(), conn)
		if err != nil {
			return err
		}
		return migrate(cmd.Context(), r, conn, space, dryRun)
	}
	return cmd
}

// migration is what the command prints of a part of the data.
type migration struct {
	Part   string         `json:"part"`
	Layout string         `json:"layout"`           // the number when the command ends
	Newest int            `json:"newest"`           // the newest layout of this version
	Counts map[string]int `json:"counts,omitempty"` // with --dry-run: what there is to convert, by kind
}

// migrate migrates all parts of the data, or with dryRun only counts what there is to convert.
func migrate(ctx context.Context, r *Root, conn *redisx.Conn, space keyspace.Space, dryRun bool) error {
	var all []migration
	for _, m := range roles.Migrations(conn, space, r.Notef) {
		done := migration{Part: m.Name, Newest: m.Newest}
		var err error
		if dryRun {
			done.Counts, err = m.Count(ctx)
		} else {
			err = m.Run(ctx)
		}
		if err != nil {
			return err
		}
		numbers, err := layout.Read(ctx, conn.Cmd, m.Key, m.Part)
		if err != nil {
			return err
		}
		done.Layout = numbers[0].String()
		all = append(all, done)
	}
	return r.show(map[string]any{"parts": all}, func(t table) {
		if !slices.ContainsFunc(all, func(d migration) bool { return d.Layout != strconv.Itoa(d.Newest) }) {
			t.row("All data has the newest layout of this version: there is nothing more to migrate.")
		}
		t.section("DATA", "LAYOUT", "NEWEST", "TO CONVERT")
		for _, d := range all {
			t.row(d.Part, d.Layout, d.Newest, "")
			for _, kind := range slices.Sorted(maps.Keys(d.Counts)) {
				t.row("", "", "", thousands(int64(d.Counts[kind]))+" "+kind)
			}
		}
	})
}
