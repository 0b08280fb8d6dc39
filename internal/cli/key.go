package cli

import (
	"context"
	"fmt"
	"os"
	"os/user"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// keyCommand has the flags that the subcommands of `bulkaction key` share.
type keyCommand struct {
	root   *Root
	redis  redisFlags
	pepper string
}

func newKey(r *Root) *cobra.Command {
	k := &keyCommand{root: r}
	cmd := parentCommand("key", "Create, list, revoke and rotate API keys, directly in Redis",
		k.newCreate(), k.newLs(), k.newRevoke(), k.newRotate())
	cmd.Long = "Create, list, revoke and rotate API keys, directly in Redis. Processes accept a new key within a\n" +
		"second, and refuse a revoked one within ten. Redis has only the hashes of keys: a lost key must be\n" +
		"a new one. docs/security.md describes keys and roles."
	k.redis.add(cmd.PersistentFlags())
	cmd.PersistentFlags().StringVar(&k.pepper, "pepper-file", os.Getenv("BULKACTION_AUTH_PEPPER_FILE"),
		"file with the pepper of the roles, if they have one; BULKACTION_AUTH_PEPPER_FILE sets the default")
	return cmd
}

// keyStore is the store of API keys in Redis, with the method change, which writes to the activity
// log.
type keyStore struct {
	*apikey.Store
	conn  *redisx.Conn
	space keyspace.Space
}

// change records a change of a key in the activity log, and then calls do, which carries it out
// (see record).
func (s keyStore) change(
	ctx context.Context, action, object string, after any, do func(context.Context) error,
) error {
	e := api.Activity{Action: "key." + action, Object: object, After: activity.JSON(after)}
	return record(ctx, s.conn, s.space, e, do)
}

// withStore returns the RunE of a command that reads or changes API keys in Redis.
func (k *keyCommand) withStore(
	run func(ctx context.Context, s keyStore, args []string) error,
) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		space, err := k.redis.space(1) // keys belong to no partition
		if err != nil {
			return err
		}
		hasher, err := auth.ReadHasher(k.pepper)
		if err != nil {
			return err
		}
		conn, err := k.redis.connect(cmd.Context())
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }() // no command is running any more
		store := apikey.NewStore(conn.Cmd, space, hasher, time.Now)
		return run(cmd.Context(), keyStore{store, conn, space}, args)
	}
}

// operatorName returns "cli:" and the name of the operating system's user; "cli" if it is unknown.
// Keys that this command creates, and entries of the activity log, show it.
func operatorName() string {
	if u, err := user.Current(); err == nil {
		return "cli:" + u.Username
	}
	return "cli"
}

func (k *keyCommand) newCreate() *cobra.Command {
	var request apikey.Request
	var role string
	var payloads, noPayloads, forFile bool
	cmd := &cobra.Command{
		Use:   "create --role ROLE",
		Short: "Create a key, and print it",
		Long: "Create a key, and print it on standard output. It is shown only this time.\n\n" +
			"Roles: admin (everything), operator (reads all, controls groups and tenants), reader (reads all, or\n" +
			"one tenant), producer (submits and controls the groups of its tenant), metrics (reads figures of the\n" +
			"system), service (a protected service of the waiting room).\n\n" +
			"With --for-file, Redis is not used: the key's line for BULKACTION_AUTH_KEYS_FILE is printed on\n" +
			"standard error. Its first field is --name, or an id made of the key.",
		Args: cobra.NoArgs,
	}
	flags := cmd.Flags()
	flags.StringVar(&role, "role", "", auth.RoleNames)
	flags.StringVar(&request.Tenant, "tenant", "",
		"tenant of a producer or reader; * is a producer that names the tenant of each submission")
	flags.StringVar(&request.Name, "name", "", "name for people, at most 128 characters")
	flags.DurationVar(&request.Lifetime, "expires", 0, "lifetime of the key, 1m to 87600h (default: no end)")
	setValues(flags, "expires", "a duration from 1m to 87600h, such as 720h; there are no days")
	flags.BoolVar(&payloads, "payloads", false, "a reader sees payloads, results' data and error texts")
	flags.BoolVar(&noPayloads, "no-payloads", false, "an operator or producer does not see them")
	flags.BoolVar(&forFile, "for-file", false, "make a key for BULKACTION_AUTH_KEYS_FILE, without Redis")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if role == "" {
			return usagef("key create needs --role: one of %s", auth.RoleNames)
		}
		if payloads && noPayloads {
			return usagef("--payloads and --no-payloads exclude each other")
		}
		request.Role, request.CreatedBy = auth.Role(role), operatorName()
		if payloads || noPayloads {
			request.Payloads = &payloads
		}
		if err := request.Check(); err != nil {
			return usagef("%v", err)
		}
		if forFile {
			return k.createForFile(request)
		}
		return k.withStore(func(ctx context.Context, s keyStore, _ []string) error {
			created, err := s.New(request)
			if err != nil {
				return err
			}
			create := func(ctx context.Context) error { return s.Add(ctx, created) }
			if err := s.change(ctx, "create", created.ID, request.Asked(), create); err != nil {
				return err
			}
			return k.showNew(created, fmt.Sprintf("Created key %s with role %s.", created.ID, created.Role))
		})(cmd, args)
	}
	return cmd
}

// showNew prints a new API key: with --json as an object, otherwise only the key on Out, so that it
// can be redirected to a file.
func (k *keyCommand) showNew(created apikey.NewKey, note string) error {
	if k.root.JSON {
		return k.root.Print(created)
	}
	k.root.Notef("%s It is shown only this time:", note)
	_, err := fmt.Fprintln(k.root.Out, created.Token)
	return err
}

// createForFile makes a key for a file of keys, and prints the key and its line. It stores nothing.
func (k *keyCommand) createForFile(request apikey.Request) error {
	if request.Payloads != nil || request.Lifetime != 0 {
		return usagef("--payloads, --no-payloads and --expires are not for --for-file: a line has no place for them")
	}
	id := request.Name
	created, err := request.New(auth.SHA256, time.Now())
	if err != nil {
		return err
	}
	if id == "" {
		id = created.ID
	}
	line, err := apikey.FileLine(id, created)
	if err != nil {
		return usagef("--name: %v", err)
	}
	if k.root.JSON {
		return k.root.Print(struct {
			Token string `json:"key"`
			Line  string `json:"line"`
		}{created.Token, line})
	}
	k.root.Notef("The line for the file of keys:\n%s\nThe key, which is shown only this time:", line)
	_, err = fmt.Fprintln(k.root.Out, created.Token)
	return err
}

func (k *keyCommand) newLs() *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List the keys, the oldest first",
		Args:  cobra.NoArgs,
		RunE: k.withStore(func(ctx context.Context, s keyStore, _ []string) error {
			keys, unusable, err := s.List(ctx)
			if err != nil {
				return err
			}
			for _, err := range unusable {
				k.root.Notef("%s", printable(err.Error()))
			}
			if k.root.JSON {
				for _, r := range keys {
					if err := k.root.Print(r); err != nil {
						return err
					}
				}
				return nil
			}
			if len(keys) == 0 {
				k.root.Notef("No API keys in Redis.")
			}
			t := newTable(k.root.Out)
			t.row("ID", "ROLE", "TENANT", "PAYLOADS", "NAME", "CREATED", "BY", "EXPIRES", "LAST USED")
			for _, r := range keys {
				t.row(r.ID, r.Role, r.Tenant, yesNo(r.Payloads), r.Name, formatTime(r.CreatedAt), r.CreatedBy,
					expiryText(r), r.LastUsedDay)
			}
			return t.flush()
		}),
	}
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func expiryText(r apikey.Record) string {
	switch {
	case r.ExpiresAt.IsZero():
		return "never"
	case r.ReplacedBy != "":
		return formatTime(r.ExpiresAt) + ", replaced by " + r.ReplacedBy
	case time.Now().After(r.ExpiresAt):
		return "expired at " + formatTime(r.ExpiresAt)
	}
	return formatTime(r.ExpiresAt)
}

// oneKeyID checks the arguments of a command that takes one id of an API key.
func oneKeyID(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usagef("key %s needs the id of one key; `bulkaction key ls` lists the keys", cmd.Name())
	}
	if _, err := auth.ParseToken(args[0]); err == nil {
		return usagef("key %s needs the id of a key, not the key itself; `bulkaction key ls` lists the ids", cmd.Name())
	}
	return nil
}

func (k *keyCommand) newRevoke() *cobra.Command {
	return &cobra.Command{
		Use:   "revoke ID",
		Short: "Delete a key; processes refuse it within ten seconds",
		Args:  oneKeyID,
		RunE: k.withStore(func(ctx context.Context, s keyStore, args []string) error {
			revoke := func(ctx context.Context) error { return s.Revoke(ctx, args[0]) }
			err := s.change(ctx, "revoke", args[0], nil, revoke)
			if err != nil {
				return err
			}
			if k.root.JSON {
				return k.root.Print(struct {
					ID      string `json:"id"`
					Revoked bool   `json:"revoked"`
				}{args[0], true})
			}
			k.root.Notef("Revoked key %s. Processes refuse it within ten seconds.", args[0])
			return nil
		}),
	}
}

func (k *keyCommand) newRotate() *cobra.Command {
	return &cobra.Command{
		Use:   "rotate ID",
		Short: "Create a key in place of another one, which expires in 24 hours",
		Args:  oneKeyID,
		RunE: k.withStore(func(ctx context.Context, s keyStore, args []string) error {
			r, err := s.NewRotation(ctx, args[0], operatorName())
			if err != nil {
				return err
			}
			rotate := func(ctx context.Context) error { return s.Rotate(ctx, r) }
			if err := s.change(ctx, "rotate", args[0], map[string]any{"replaced_by": r.New.ID}, rotate); err != nil {
				return err
			}
			return k.showNew(r.New, fmt.Sprintf("Created key %s. Key %s expires at %s.",
				r.New.ID, r.Old.ID, formatTime(r.Old.ExpiresAt)))
		}),
	}
}
